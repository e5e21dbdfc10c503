"""Whether weights hold values that can be fitted to."""

from torch import Tensor

from panther_compile.errors import WeightError


def check_loaded(tensor: Tensor, what: str) -> None:
    """Raise WeightError if a parameter or buffer is on the meta device; `what` names it."""
    if tensor.is_meta:
        raise WeightError(f"{what} is on the meta device: load the weights first")


def check_values(weight: Tensor, what: str) -> None:
    """Raise WeightError unless a weight holds finite numbers; `what` names it in the error."""
    check_loaded(weight, what)
    one_byte = weight.is_floating_point() and weight.element_size() == 1  # float8 has no isfinite
    finite = (weight.float() if one_byte else weight).isfinite()
    if not bool(finite.all()):
        raise WeightError(
            f"{what} holds {int((~finite).sum()):,} NaN or Inf among {weight.numel():,} numbers"
        )
