"""Equations of `torch.einsum` that multiply rows by the matrices of a stack, or by one matrix."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StackProduct:
    """What the letters of an equation stand for, as of "bti,eio->beto".

    Attributes:
        letters: of the rows.
        stack: the letter that counts the matrices.
        inputs: the letter of the features that are summed over.
        outputs: the letter of those that come out.
        result: the letters of the result.
        multiplies_rows: whether a matrix is (I, O).
    """

    letters: str
    stack: str
    inputs: str
    outputs: str
    result: str
    multiplies_rows: bool


def read_product(equation: str) -> StackProduct | None:
    """The letters of an equation of rows and a stack of matrices, in this order; None if it is another."""
    sides = _sides(equation)
    if sides is None or not _are_letters(sides) or len(sides[1]) != 3:
        return None
    rows, matrices, result = sides
    stack, features = matrices[0], matrices[1:]
    found = _features(features, rows, result)
    return None if found is None else StackProduct(rows, stack, *found, result, features[0] == found[0])


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """What the letters of an equation stand for, as of "...ti,io->...to".

    Attributes:
        letters: of the rows, three dots among them for any others.
        inputs: the letter of the features that are summed over.
        outputs: the letter of those that come out.
        result: the letters of the result.
        multiplies_rows: whether the matrix is (I, O).
    """

    letters: str
    inputs: str
    outputs: str
    result: str
    multiplies_rows: bool

    @property
    def place(self) -> int:
        """The axis of the rows that is summed over, counted from the end if it is behind the dots."""
        sides = self.letters.split("...")
        found = sides[0].find(self.inputs)
        return found if found >= 0 else sides[-1].index(self.inputs) - len(sides[-1])

    @property
    def made(self) -> str:
        """The letters of what a linear layer makes of the rows, their features behind all others."""
        return self.letters.replace(self.inputs, "") + self.outputs


def read_matrix_product(equation: str) -> MatrixProduct | None:
    """The letters of an equation of rows and one matrix, in this order; None if it is another."""
    sides = _sides(equation)
    if sides is None or len(sides[1]) != 2 or ("..." in sides[0]) != ("..." in sides[2]):
        return None
    rows, matrix, result = sides
    if not _are_letters((rows.replace("...", "", 1), matrix, result.replace("...", "", 1))):
        return None
    found = _features(matrix, rows, result)
    return None if found is None else MatrixProduct(rows, *found, result, matrix[0] == found[0])


def _sides(equation: str) -> tuple[str, str, str] | None:
    """The letters of both operands and of the result."""
    sides = equation.replace(" ", "").split("->")
    operands = sides[0].split(",")
    return (*operands, sides[1]) if len(sides) == 2 and len(operands) == 2 else None  # type: ignore[return-value]


def _are_letters(sides: Iterable[str]) -> bool:
    """Whether each is letters alone, none of them twice."""
    return all(side.isalpha() and len(set(side)) == len(side) for side in sides)


def _features(of_matrix: str, rows: str, result: str) -> tuple[str, str] | None:
    """The letter of a matrix that is summed over, and that which comes out."""
    inputs = [one for one in of_matrix if one in rows and one not in result]
    outputs = [one for one in of_matrix if one in result and one not in rows]
    return (inputs[0], outputs[0]) if len(inputs) == len(outputs) == 1 else None
