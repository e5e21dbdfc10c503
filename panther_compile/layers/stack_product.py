"""Equations of `torch.einsum` that multiply rows by the matrices of a stack."""

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
