"""The slowest stage by mixed-integer programming: a bound that depends on nothing of ours."""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from panther_compile.partition.graph.flow import SINK, SOURCE


def milp_bound(flow, request, reached, seconds=60.0):
    """A lower bound on the slowest stage, by HiGHS within a time limit; 0.0 if it finds none.

    x[v, b]: whether v is before cut b. y[u, b]: whether value u crosses it. z[b], w[b]: whether anything
    crosses forward, backward. The time of the slowest stage is the last variable.
    """
    names = list(flow.work)
    cuts, count, values = request.count - 1, len(names), flow.values
    index = {name: number for number, name in enumerate(names)}
    scale = 1 / reached

    def x(vertex, cut):
        return cut * count + index[vertex]

    def y(value, cut):
        return cuts * count + cut * len(values) + value

    flags = cuts * (count + len(values))
    slowest = flags + 2 * cuts
    entries, lower, upper = [], [], []

    def add(terms, low, high):
        entries.append(terms)
        lower.append(low)
        upper.append(high)

    for cut in range(cuts):
        if cut:
            for name in names:
                add({x(name, cut): 1, x(name, cut - 1): -1}, 0, 1)
        for number, value in enumerate(values):
            for consumer in value.consumers:
                terms = {y(number, cut): 1}
                bound = 0.0
                if value.producer != SOURCE:
                    terms[x(value.producer, cut)] = -1
                else:
                    bound += 1.0
                if consumer != SINK:
                    terms[x(consumer, cut)] = terms.get(x(consumer, cut), 0) + 1
                    if value.producer != SOURCE:
                        add({x(consumer, cut): 1, x(value.producer, cut): -1}, -1, 0)
                add(terms, bound, np.inf)
            for way, size in ((0, value.bytes), (1, value.gradient_bytes)):
                if size:
                    add({flags + 2 * cut + way: 1, y(number, cut): -1}, 0, np.inf)

    def transfer(cut):
        link = request.links[cut]
        terms = {flags + 2 * cut + way: link.latency_seconds * scale for way in (0, 1)}
        for number, value in enumerate(values):
            moved = (value.bytes + value.gradient_bytes) / link.bytes_per_second
            terms[y(number, cut)] = moved * scale
        return terms

    total = 0.0
    for stage in range(request.count):
        terms = {slowest: 1.0}
        constant = 0.0
        for name, work in flow.work.items():
            spent = (work.forward_seconds + work.backward_seconds) * scale
            if stage == cuts:
                constant += spent
            else:
                terms[x(name, stage)] = terms.get(x(name, stage), 0) - spent
            if stage:
                terms[x(name, stage - 1)] = terms.get(x(name, stage - 1), 0) + spent
        for cut in (stage - 1, stage):
            if 0 <= cut < cuts:
                for variable, seconds_ in transfer(cut).items():
                    terms[variable] = terms.get(variable, 0) - seconds_
        add(terms, constant, np.inf)
        total += constant
    row = np.repeat(np.arange(len(entries)), [len(terms) for terms in entries])
    column = np.concatenate([list(terms) for terms in entries])
    data = np.concatenate([list(terms.values()) for terms in entries])
    matrix = csr_matrix((data, (row, column)), shape=(len(entries), slowest + 1))
    objective = np.zeros(slowest + 1)
    objective[slowest] = 1
    top = np.ones(slowest + 1)
    integral = np.zeros(slowest + 1)
    integral[: cuts * count] = 1
    result = milp(
        objective,
        constraints=LinearConstraint(matrix, lower, upper),
        bounds=Bounds(np.zeros(slowest + 1), top),
        integrality=integral,
        options={"time_limit": seconds},
    )
    bound = result.mip_dual_bound
    return 0.0 if bound is None else float(bound) * reached
