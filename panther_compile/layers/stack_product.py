"""Equations of `torch.einsum` that multiply rows by the matrices of a stack, or by one matrix."""

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
    sides = equation.replace(" ", "").split("->")
    operands = sides[0].split(",")
    if len(sides) != 2 or len(operands) != 2:
        return None
    (rows, matrices), result = operands, sides[1]
    plain = all(side.isalpha() and len(set(side)) == len(side) for side in (rows, matrices, result))
    if not plain or len(matrices) != 3:
        return None
    stack, features = matrices[0], matrices[1:]
    inputs = [one for one in features if one in rows and one not in result]
    outputs = [one for one in features if one in result and one not in rows]
    if len(inputs) != 1 or len(outputs) != 1:
        return None
    return StackProduct(rows, stack, inputs[0], outputs[0], result, features[0] == inputs[0])


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
    sides = equation.replace(" ", "").split("->")
    operands = sides[0].split(",")
    if len(sides) != 2 or len(operands) != 2:
        return None
    (rows, matrix), result = operands, sides[1]
    named = [rows.replace("...", "", 1), matrix, result.replace("...", "", 1)]
    if not all(side.isalpha() and len(set(side)) == len(side) for side in named) or len(matrix) != 2:
        return None
    inputs = [one for one in matrix if one in rows and one not in result]
    outputs = [one for one in matrix if one in result and one not in rows]
    if len(inputs) != 1 or len(outputs) != 1 or ("..." in rows) != ("..." in result):
        return None
    return MatrixProduct(rows, inputs[0], outputs[0], result, matrix[0] == inputs[0])
