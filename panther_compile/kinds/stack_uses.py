"""How a module's own code uses its 3-D parameters: as stacks of matrices that rows are multiplied by, or not.

And its 2-D parameters, each a matrix.

    gate = torch.bmm(x, self.w1)              w1 (n, I, O)
    h = F.linear(x[rows], self.w2[expert])    w2 (n, O, I)
    y = torch.einsum("ebo,ero->ebr", h, self.w3)
    z = F.linear(x, self.w4)                  w4 (O, I)
    z = torch.einsum("...i,io->...o", x, self.w5)
    z = F.linear(x, self.w4 * self.gain)      by a number
    self.w1.shape, self.w1.dtype              either

The text of the forward is read, and that of the methods that it calls; nothing is run.
"""

import ast
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from torch import nn

from panther_compile.layers.matrix_stacks import is_stack
from panther_compile.layers.stack_product import read_matrix_product, read_product
from panther_compile.models.source import in_order, is_question, is_self, own_functions

_KEEPING = ("to", "contiguous", "type_as")
_PRODUCTS = ("matmul", "bmm", "mm")
_WHOLE = ("parameters", "named_parameters", "state_dict", "_parameters")
_SUMS = ("baddbmm", "addmm")
_CHOICES = ("topk", "argmax", "argsort", "sort", "multinomial", "gumbel_softmax")  # routers are left alone
_PLACES = (ast.Name, ast.Constant, ast.UnaryOp, ast.BinOp, ast.Call, ast.Subscript, ast.Attribute)


@dataclass(frozen=True, slots=True)
class _Stack:
    """A 3-D parameter or, of it, one matrix."""

    name: str
    turned: bool = False
    is_one: bool = False


class _UnknownUseError(Exception):
    """A parameter is used in a way that is no product, or in two."""


@dataclass(frozen=True, slots=True)
class StackUses:
    """What the forward of a class does with 3-D parameters.

    Attributes:
        stacks: names of those that rows are multiplied by, and whether each is (n, I, O), as `x @ P` takes
            it, not (n, O, I).
        reasons: why the others are not.
        biases: what calls that multiply by them add, by name, if that is an attribute used for nothing else.
    """

    stacks: dict[str, bool]
    reasons: dict[str, str]
    biases: dict[str, str | None] = field(default_factory=dict)


def stacks_of(module: nn.Module) -> dict[str, bool]:
    """The 3-D parameters by whose matrices a module multiplies, and whether each is (n, I, O)."""
    return _uses_in(module).stacks


def matrices_of(module: nn.Module) -> dict[str, tuple[bool, str | None]]:
    """The 2-D parameters by which a module multiplies, whether each is (I, O), and the bias added to it.

    The bias is the name of a parameter that the same call adds, and that the forward uses for nothing else.
    None of a module that chooses by what comes out, as a router does.
    """
    uses = _uses_in(module, dim=2)
    found: dict[str, tuple[bool, str | None]] = {}
    for name, turned in uses.stacks.items():
        matrix, bias = module._parameters[name], module._parameters.get(uses.biases[name] or "")
        assert matrix is not None
        fits = bias is not None and bias.shape == matrix.shape[1 if turned else 0 :][:1]
        found[name] = turned, uses.biases[name] if fits else None
    return found


def why_no_stacks(module: nn.Module) -> str | None:
    """Why the first of a module's 3-D parameters is no stack of matrices that it multiplies by, if so."""
    return next(iter(_uses_in(module).reasons.values()), None)


def _uses_in(module: nn.Module, dim: int = 3) -> "StackUses":
    names = tuple(name for name, one in module._parameters.items() if is_stack(one, dim))
    if not names or type(module).__module__.startswith("torch."):
        return StackUses({}, {})
    held = vars(module).items()
    equations = tuple((name, one) for name, one in held if isinstance(one, str) and "->" in one)
    numbers = frozenset(name for name, one in held if isinstance(one, int | float))
    return read_uses(type(module), names, dim, equations, numbers)  # type: ignore[arg-type]


@cache
def read_uses(
    cls: type[Any],
    names: tuple[str, ...],
    dim: int = 3,
    equations: tuple[tuple[str, str], ...] = (),
    numbers: frozenset[str] = frozenset(),
) -> StackUses:
    """What the forward of a class, and the methods that it calls, do with 3-D parameters.

    Args:
        cls: of a module.
        names: of its 3-D parameters.
        dim: 2 for parameters that are one matrix each.
        equations: attributes of the module, as einops' EinMix keeps one, with their names.
        numbers: names of attributes that are numbers.
    """
    what = f"the forward of {cls.__name__}"
    functions = own_functions(cls)
    if functions is None:
        return StackUses({}, dict.fromkeys(names, f"{what} uses 3-D parameters, and cannot be read"))
    nodes = [node for function in functions for node in ast.walk(function)]
    if any(isinstance(node, ast.Attribute) and node.attr in _WHOLE and is_self(node.value) for node in nodes):
        return StackUses({}, dict.fromkeys(names, f"{what} reads all of its parameters"))
    if dim == 2 and (any(_name_called(node) in _CHOICES for node in nodes) or _is_handed_on(nodes)):
        return StackUses({}, {})
    stacks: dict[str, bool] = {}
    reasons: dict[str, str] = {}
    biases: dict[str, str | None] = {}
    for name in names:
        whole = _Stack(name, is_one=dim == 2)
        readers = [_Reader(whole, function, dict(equations), numbers) for function in functions]
        try:
            uses = set().union(*(reader.uses() for reader in readers))
        except _UnknownUseError as error:
            reasons[name] = f"{what} uses its 3-D parameter {name} itself: {error}"
            continue
        if len(uses) == 1:
            stacks[name] = uses.pop()
            added = [one for reader in readers for one in reader.added]
            biases[name] = None if any(one.scales for one in readers) else _bias_of(nodes, added)
        else:
            by = f"by {name} and by its transpose" if uses else f"nothing by its 3-D parameter {name}"
            reasons[name] = f"{what} multiplies {by}"
    return StackUses(stacks, reasons, biases)


def _bias_of(nodes: Sequence[ast.AST], added: Sequence[ast.expr | None]) -> str | None:
    """The attribute that is all that is ever added to a product, and is used for nothing else."""
    names = {one.attr if isinstance(one, ast.Attribute) and is_self(one.value) else None for one in added}
    name = names.pop() if len(names) == 1 else None
    if name is None:
        return None
    known: set[ast.AST | None] = set(added)
    for node in nodes:
        if is_question(node):
            known.add(node.value)  # type: ignore[attr-defined]
        elif isinstance(node, ast.Compare) and _is_of_identity(node):
            known |= {node.left, *node.comparators}
    read = (node for node in nodes if isinstance(node, ast.Attribute) and node.attr == name)
    return name if known.issuperset(read) else None


def _is_of_identity(node: ast.Compare) -> bool:
    return all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops)


def _is_handed_on(nodes: Sequence[ast.AST]) -> bool:
    """Whether the module itself is given to something, which may use what it holds."""
    known: set[ast.AST] = {node.value for node in nodes if isinstance(node, ast.Attribute)}
    known |= {one for node in nodes if _name_called(node) == "super" for one in getattr(node, "args", ())}
    return any(is_self(node) and node not in known for node in nodes)


def _name_called(node: ast.AST) -> str:
    """The name of the function or method that a call is of; empty if it is no call, or of no name."""
    called = getattr(node, "func", None)
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


class _Reader:
    """One parameter in one function.

    Attributes:
        whole: the parameter.
        function: its text.
        equations: attributes of the module.
        numbers: names of others.
        added: what each product adds in the same call; None for nothing.
        scales: whether a multiple of the parameter is made first, to which a bias is added as it is.
    """

    def __init__(
        self,
        whole: _Stack,
        function: ast.FunctionDef,
        equations: Mapping[str, str],
        numbers: Container[str],
    ) -> None:
        self.whole, self.function, self.equations, self.numbers = whole, function, equations, numbers
        self.added: list[ast.expr | None] = []
        self.scales = False
        self._held: dict[str, _Stack] = {}  # by local name
        self._found: set[bool] = set()
        self._known: set[ast.AST] = set()  # expressions of the stack, in a place that is known

    def uses(self) -> set[bool]:
        """Whether rows are multiplied by (n, I, O), for each product.

        Raises:
            _UnknownUseError: anything else is done with it.
        """
        for node in in_order(self.function):
            if isinstance(node, ast.Assign):
                self._assign(node)
            self._use(node)
        for node in ast.walk(self.function):
            if self._stack(node) is not None and node not in self._known:
                raise _UnknownUseError(f"{ast.unparse(node)} is in no product that is known")
        return self._found

    def _assign(self, node: ast.Assign) -> None:
        if len(node.targets) != 1:
            return
        pairs = [(node.targets[0], node.value)]
        if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(node.targets[0].elts, node.value.elts, strict=False))
        for target, value in pairs:
            stack = self._stack(value)
            if not isinstance(target, ast.Name):
                continue
            if target.id in self._held and self._held[target.id] != stack:
                raise _UnknownUseError(f"{target.id} stands for two things")
            if stack is not None:
                if self._writes(target.id) > self._writes_of(stack, target.id):
                    raise _UnknownUseError(f"{target.id} stands for two things")
                self._held[target.id] = stack
                self._known |= {value, target}

    def _writes(self, name: str) -> int:
        """How often a local name is written."""
        nodes = ast.walk(self.function)
        arguments = any(one.arg == name for one in ast.walk(self.function.args) if isinstance(one, ast.arg))
        stores = (n for n in nodes if isinstance(n, ast.Name) and n.id == name)
        return arguments + sum(not isinstance(one.ctx, ast.Load) for one in stores)

    def _writes_of(self, stack: _Stack, name: str) -> int:
        """How often it is written as a stack alone, as in both branches of an `if`; else once, in a tuple."""
        writes = (node for node in ast.walk(self.function) if isinstance(node, ast.Assign))
        return (
            sum(
                len(one.targets) == 1
                and isinstance(one.targets[0], ast.Name)
                and one.targets[0].id == name
                and self._stack(one.value) == stack
                for one in writes
            )
            or 1
        )

    def _use(self, node: ast.AST) -> None:
        if isinstance(node, ast.Attribute | ast.Subscript):
            self._passes_on(node)
        elif isinstance(node, ast.Compare):
            if _is_of_identity(node):
                self._known |= {node.left, *node.comparators}
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            self._product(node.left, node.right, matrix_only=False)
        elif isinstance(node, ast.BinOp) and self._stack(node) is not None:
            self._known |= {node.left, node.right}
            self.scales = True
        elif isinstance(node, ast.Call):
            self._call(node)

    def _passes_on(self, node: ast.Attribute | ast.Subscript) -> None:
        """A part or a view of the stack, or a question about it."""
        if self._stack(node.value) is None:
            return
        if is_question(node) or self._stack(node) is not None:
            self._known.add(node.value)

    def _call(self, node: ast.Call) -> None:
        function, args = node.func, node.args
        if isinstance(function, ast.Attribute) and self._stack(node) is not None:
            self._known |= {function, function.value}  # a view
            return
        name = _name_called(node)
        if isinstance(function, ast.Name) and name == "len" and len(args) == 1:
            self._known.add(args[0])
        elif name in _PRODUCTS and len(args) == 2 and not node.keywords:
            self._product(*args, matrix_only=name == "mm")
        elif name in _PRODUCTS and len(args) == 1 and isinstance(function, ast.Attribute):
            self._product(function.value, args[0], matrix_only=name == "mm")
        elif name in _SUMS and len(args) == 3 and not node.keywords:
            self._product(args[1], args[2], matrix_only=name == "addmm", added=args[0])
        elif name in _SUMS and len(args) == 2 and isinstance(function, ast.Attribute) and not node.keywords:
            self._product(args[0], args[1], matrix_only=name == "addmm")
        elif name == "linear":
            self._linear(args, node.keywords)
        elif name == "einsum" and len(args) == 3:
            self._einsum(self._equation(args[0]), args[1], args[2])

    def _product(
        self, left: ast.expr, right: ast.expr, *, matrix_only: bool, added: ast.expr | None = None
    ) -> None:
        stack = self._stack(right)
        if stack is not None and self._stack(left) is None and (stack.is_one or not matrix_only):
            self._known.add(right)
            self._found.add(not stack.turned)
            self.added.append(added)

    def _linear(self, args: Sequence[ast.expr], keywords: Sequence[ast.keyword]) -> None:
        given = dict(zip(("input", "weight", "bias"), args, strict=False))
        given |= {one.arg: one.value for one in keywords if one.arg is not None}
        weight = given.get("weight")
        stack = None if weight is None else self._stack(weight)
        if stack is not None and stack.is_one:
            assert weight is not None
            self._known.add(weight)
            self._found.add(stack.turned)
            self.added.append(given.get("bias"))

    def _einsum(self, equation: str, rows: ast.expr, matrices: ast.expr) -> None:
        stack = self._stack(matrices)
        if stack is None or self._stack(rows) is not None:
            return
        read = read_matrix_product(equation) if stack.is_one else read_product(equation)
        if read is not None:
            self._known.add(matrices)
            self._found.add(read.multiplies_rows != stack.turned)
            self.added.append(None)

    def _equation(self, node: ast.expr) -> str:
        """What an expression says; empty if that is not known."""
        if isinstance(node, ast.Attribute) and is_self(node.value):
            return self.equations.get(node.attr, "")
        return str(node.value) if isinstance(node, ast.Constant) else ""

    def _stack(self, node: ast.AST) -> _Stack | None:
        """What of the parameter an expression is."""
        if isinstance(node, ast.Name):
            return self._held.get(node.id)
        if isinstance(node, ast.Attribute):
            if is_self(node.value):
                return self.whole if node.attr == self.whole.name else None
            held = self._stack(node.value)
            turns = node.attr == "mT" or (node.attr == "T" and held is not None and held.is_one)
            return replace(held, turned=not held.turned) if held is not None and turns else None
        if isinstance(node, ast.Subscript):
            held = self._stack(node.value)
            one = isinstance(node.slice, _PLACES) and held is not None and not held.is_one
            return replace(held, is_one=True) if held is not None and one else None
        if isinstance(node, ast.BinOp) and self.whole.is_one:
            return self._scaled(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return self._viewed(node.func, node.args)
        return None

    def _scaled(self, node: ast.BinOp) -> _Stack | None:
        """A multiple of a matrix, by a number."""
        left, right = self._stack(node.left), self._stack(node.right)
        if isinstance(node.op, ast.Mult | ast.Div) and left is not None and self._is_number(node.right):
            return left
        return right if isinstance(node.op, ast.Mult) and self._is_number(node.left) else None

    def _is_number(self, node: ast.expr) -> bool:
        if isinstance(node, ast.BinOp):
            return self._is_number(node.left) and self._is_number(node.right)
        if isinstance(node, ast.Attribute):
            return is_self(node.value) and node.attr in self.numbers
        return isinstance(node, ast.Constant) and isinstance(node.value, int | float)

    def _viewed(self, method: ast.Attribute, args: Sequence[ast.expr]) -> _Stack | None:
        held = self._stack(method.value)
        if held is None:
            return None
        if method.attr in _KEEPING:
            return held
        if method.attr == "t" and held.is_one:
            return replace(held, turned=not held.turned)
        if method.attr == "transpose":
            sizes = {ast.unparse(one) for one in args}
            ways: tuple[set[str], ...] = ({"-1", "-2"}, {"0", "1"} if held.is_one else {"1", "2"})
            return replace(held, turned=not held.turned) if sizes in ways else None
        return None
