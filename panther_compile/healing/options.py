"""The options of `heal`, checked once, where they enter."""

import math
from dataclasses import dataclass

from panther_compile.config import OUTPUTS
from panther_compile.errors import ConfigError, ConfigTypeError

METHODS = ("kl", "block")


@dataclass(frozen=True, kw_only=True)
class HealOptions:
    """What `heal` may be told; it says what each of them is. Those that `refine` cannot be told are last.

    Raises:
        ConfigError: an option is out of range.
        ConfigTypeError: an option has the wrong type.
    """

    steps: int
    method: str
    output: str
    seed: int
    progress: bool | None
    lr: float | None = None
    held_out: float = 0.125
    inplace: bool = False
    cache_bytes: int = 2 << 30

    def __post_init__(self) -> None:
        """Check every option."""
        for name in ("steps", "seed", "cache_bytes"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int):
                raise ConfigTypeError(f"{name}={number!r} is a {type(number).__name__}, wanted an int")
        for name in ("held_out", *([] if self.lr is None else ["lr"])):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise ConfigTypeError(f"{name}={number!r} is a {type(number).__name__}, wanted a number")
        for name in ("inplace", *([] if self.progress is None else ["progress"])):
            flag = getattr(self, name)
            if not isinstance(flag, bool):
                raise ConfigTypeError(f"{name}={flag!r} is a {type(flag).__name__}, wanted a bool")
        for name, fits, wanted in (
            ("steps", self.steps >= 1, "1 or more"),
            ("cache_bytes", self.cache_bytes >= 0, "0 or more"),
            ("lr", self.lr is None or 0 < self.lr < math.inf, "a number above 0, or None"),
            ("held_out", 0 < self.held_out < 1, "a share between 0 and 1"),
            ("method", self.method in METHODS, f"one of {METHODS}"),
            ("output", self.output in OUTPUTS, f"one of {tuple(OUTPUTS)}"),
        ):
            if not fits:
                raise ConfigError(f"{name}={getattr(self, name)!r}, wanted {wanted}")
