"""The options of `heal`, checked once, where they enter."""

import math
from dataclasses import dataclass

from panther_compile.config import OUTPUTS, check_type, is_keys, read_integer, read_number
from panther_compile.errors import ConfigError

METHODS = ("kl", "block")


@dataclass(frozen=True, kw_only=True)
class HealOptions:
    """What `heal` may be told; it says what each of them is.

    Raises:
        ConfigError: an option is out of range.
        ConfigTypeError: an option has the wrong type.
    """

    steps: int = 200
    method: str = "kl"
    lr: float | None = None
    output: str | frozenset[str] = "auto"
    held_out: float = 0.125
    inplace: bool = False
    seed: int = 0
    progress: bool | None = None
    cache_bytes: int = 2 << 30

    def __post_init__(self) -> None:
        """Check every option."""
        for name in ("steps", "seed", "cache_bytes"):
            object.__setattr__(self, name, read_integer(name, getattr(self, name)))
        for name in ("held_out", *([] if self.lr is None else ["lr"])):
            object.__setattr__(self, name, read_number(name, getattr(self, name)))
        for name in ("inplace", *([] if self.progress is None else ["progress"])):
            check_type(name, getattr(self, name), bool)
        for name, fits, wanted in (
            ("steps", self.steps >= 1, "1 or more"),
            ("cache_bytes", self.cache_bytes >= 0, "0 or more"),
            ("lr", self.lr is None or 0 < self.lr < math.inf, "a number above 0, or None"),
            ("held_out", 0 < self.held_out < 1, "a share between 0 and 1"),
            ("method", self.method in METHODS, f"one of {METHODS}"),
            ("output", is_keys(self.output) or self.output in OUTPUTS, f"one of {tuple(OUTPUTS)}"),
        ):
            if not fits:
                raise ConfigError(f"{name}={getattr(self, name)!r}, wanted {wanted}")
