"""Choices among several labels of least cost, by moves that are minimum cuts. No torch in here.

The cost is a sum over clauses of one or two statements "variable v has the label a", or has not; it is paid
where all of them hold. With two labels to a variable that is an `Energy`, which one cut often minimises. With
more, each move offers some variables another label, and the best set of them to take it is again an Energy of
yes-or-no choices:

    labels now      whole   sharded   whole      A move to `sequence` offers it to all who may have it: as
    offered         seq     seq       -          many as like change at once, in the best way there is
    after the move  seq     sharded   whole

Offers of one label to all (alpha-expansion: Boykov, Veksler and Zabih 2001) are made in turns until none
lowers the cost. A move never raises it, whether or not its cut is exact.
"""

from collections.abc import Mapping, Sequence

from panther_compile.partition.shards.energy import Energy, Literal, Minimum, negate

YES, NO = "yes", "no"
# Variable, label, and whether it must have the label or must not.
Statement = tuple[int, str, bool]


def deny(statement: Statement) -> Statement:
    """What holds where a statement does not."""
    variable, label, wanted = statement
    return variable, label, not wanted


class Labels:
    """Variables, the labels that each may have, and what they cost.

    Attributes:
        options: labels of each variable; it starts with the first.
        clauses: cost of each set of one or two statements.
        constant: paid whatever is chosen.
        followers: variables that are YES where any of some statements holds, and NO elsewhere.
        forbidden: statements that never all hold.
    """

    def __init__(self) -> None:
        self.options: list[tuple[str, ...]] = []
        self.clauses: dict[tuple[Statement, ...], int] = {}
        self.constant = 0
        self.followers: dict[int, tuple[Statement, ...]] = {}
        self.forbidden: dict[tuple[Statement, ...], None] = {}

    def __len__(self) -> int:
        return len(self.options)

    def variable(self, *options: str) -> int:
        """A new variable."""
        self.options.append(options)
        return len(self.options) - 1

    def follower(self, leaders: Sequence[Statement]) -> Statement:
        """A statement that holds wherever one of others does; it pays once what they share."""
        unique = tuple(dict.fromkeys(leaders))
        if len(unique) == 1:
            return unique[0]
        follower = self.variable(NO, YES)
        self.followers[follower] = unique
        return follower, YES, True

    def pay(self, cost: int, *statements: Statement) -> None:
        """Pay where all of at most two statements hold."""
        assert cost >= 0, cost
        assert len(statements) <= 2, statements
        key = tuple(sorted(set(statements)))
        if not key:
            self.constant += cost
        elif cost:
            self.clauses[key] = self.clauses.get(key, 0) + cost

    def forbid(self, *statements: Statement) -> None:
        """Never let all of at most two statements hold."""
        self.forbidden[tuple(sorted(set(statements)))] = None

    def first(self) -> list[str]:
        """The first label of every variable."""
        return [options[0] for options in self.options]

    def complete(self, labels: Sequence[str]) -> list[str]:
        """The same, where followers follow."""
        full = list(labels)
        for follower, leaders in self.followers.items():
            full[follower] = YES if any(_holds(full, leader) for leader in leaders) else NO
        return full

    def allows(self, labels: Sequence[str]) -> bool:
        """Whether nothing forbidden holds."""
        return not any(all(_holds(labels, one) for one in key) for key in self.forbidden)

    def cost(self, labels: Sequence[str]) -> int:
        """The cost of labels that are allowed."""
        return self.constant + sum(
            cost for key, cost in self.clauses.items() if all(_holds(labels, one) for one in key)
        )

    def move(
        self, labels: Sequence[str], offers: Sequence[Mapping[int, str]], limit: int
    ) -> tuple[list[str], Minimum]:
        """The best labels where each offer is taken or not.

        Args:
            labels: of all variables, allowed.
            offers: other labels; variables of one offer take them together.
            limit: on the number of cuts.
        """
        assert self.allows(labels)
        move = _Move(self, labels, offers)
        for key, cost in self.clauses.items():
            move.pay(cost, key)
        for key in self.forbidden:
            move.pay(None, key)
        move.energy.pay(self.constant)
        minimum = move.energy.minimize(limit)
        return self.complete(move.take(minimum.values)), minimum


class _Move:
    """Offers as yes-or-no choices of an energy: the statements of some labels in its literals.

    Attributes:
        energy: of the choices.
    """

    def __init__(self, of: Labels, labels: Sequence[str], offers: Sequence[Mapping[int, str]]) -> None:
        self.energy = Energy()
        self._labels, self._offers = labels, offers
        self._choices = [self.energy.choice() for _ in offers]
        self._offered = {
            variable: (choice, label)
            for choice, offer in zip(self._choices, offers, strict=True)
            for variable, label in offer.items()
        }
        self._following: dict[int, Literal | bool] = {}
        for follower, leaders in of.followers.items():
            self._following[follower] = self._follow(leaders)

    def pay(self, cost: int | None, statements: Sequence[Statement]) -> None:
        """Pay where all statements hold after the move; never let them, if the cost is None."""
        found = [self._translate(one) for one in statements]
        if False in found:
            return
        literals = [one for one in found if not isinstance(one, bool)]
        if cost is None:
            self.energy.forbid(*literals)
        else:
            self.energy.pay(cost, *literals)

    def take(self, values: Sequence[bool]) -> list[str]:
        """The labels after the offers that were taken."""
        moved = list(self._labels)
        for (number, _), offer in zip(self._choices, self._offers, strict=True):
            if values[number]:
                for variable, label in offer.items():
                    moved[variable] = label
        return moved

    def _follow(self, leaders: Sequence[Statement]) -> Literal | bool:
        found = [self._translate(leader) for leader in leaders]
        if True in found:
            return True
        literals = [one for one in found if not isinstance(one, bool)]
        return self.energy.follower(literals) if literals else False

    def _translate(self, statement: Statement) -> Literal | bool:
        """The literal that says whether a statement holds after the move; a bool if it does or not anyway."""
        variable, label, wanted = statement
        if variable in self._following:
            follower = self._following[variable]
            yes = (label == YES) == wanted
            if isinstance(follower, bool):
                return follower == yes
            return follower if yes else negate(follower)
        now = (self._labels[variable] == label) == wanted
        if variable not in self._offered:
            return now
        choice, other = self._offered[variable]
        then = (other == label) == wanted
        return now if now == then else choice if then else negate(choice)


def _holds(labels: Sequence[str], statement: Statement) -> bool:
    variable, label, wanted = statement
    return (labels[variable] == label) == wanted
