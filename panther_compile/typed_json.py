"""JSON read back into the dataclasses it was written from, checked against what they declare.

A file that was changed, or written by hand, is refused here, before anything is made of it.
"""

import inspect
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from panther_compile.errors import CheckpointCorruptError, CheckpointVersionError

Record = TypeVar("Record")
_PLAIN = (str, int, float, bool, type(None))


def read_record(declared: type[Record], given: object, where: str) -> Record:
    """A dataclass from the JSON object that `dataclasses.asdict` gave.

    Args:
        declared: a dataclass of plain values, tuples, lists, mappings and other such dataclasses.
        given: what `json.loads` gave.
        where: what it is, for the messages.

    Raises:
        CheckpointCorruptError: a field is missing, or of another type than is declared.
        CheckpointVersionError: it has a field that is not declared.
    """
    given = _checked(given, dict, where)
    needed = {
        one.name
        for one in fields(declared)  # type: ignore[arg-type]
        if one.default is MISSING and one.default_factory is MISSING
    }
    return declared(**_members(get_type_hints(declared), needed, given, where))


def read_arguments(made: type[Any], given: object, where: str) -> dict[str, Any]:
    """The keyword arguments of a class from a JSON object; "device" and "dtype" are none.

    Raises:
        CheckpointCorruptError, CheckpointVersionError: as `read_record`.
    """
    given = _checked(given, dict, where)
    parameters = inspect.signature(made).parameters
    hints = {
        name: hint
        for name, hint in get_type_hints(made.__init__).items()  # type: ignore[misc]
        if name in parameters and name not in ("device", "dtype")
    }
    needed = {name for name in hints if parameters[name].default is inspect.Parameter.empty}
    return _members(hints, needed, given, where)


def _members(hints: Mapping[str, Any], needed: set[str], given: Any, where: str) -> dict[str, Any]:
    missing, unknown = sorted(needed - set(given)), sorted(set(given) - set(hints))
    if missing:
        raise CheckpointCorruptError(f"{where} lacks {', '.join(missing)}")
    if unknown:
        names = ", ".join(map(ascii, unknown))[:200]
        raise CheckpointVersionError(
            f"{where} has {names}, which this panther_compile does not know: upgrade it"
        )
    return {name: _read(hints[name], value, f"{where}, {name}") for name, value in given.items()}


def _read(declared: Any, given: Any, where: str) -> Any:
    """A JSON value as what is declared: lists become tuples, objects dataclasses."""
    origin, arguments = get_origin(declared), get_args(declared)
    if declared is Any:
        return given
    if is_dataclass(declared):
        return read_record(declared, given, where)  # type: ignore[arg-type]
    if origin in (Union, types.UnionType):
        return _read_one_of(arguments, given, where)
    if origin is Literal:
        if given not in arguments:
            raise CheckpointCorruptError(f"{where} is {_shown(given)}, wanted one of {arguments}")
        return given
    if origin in (tuple, list):
        items = _checked(given, list, where)
        if origin is list or arguments[-1] is Ellipsis:
            arguments = (arguments[0],) * len(items)
        if len(items) != len(arguments):
            raise CheckpointCorruptError(f"{where} has {len(items)} entries, wanted {len(arguments)}")
        return origin(_read(one, item, where) for one, item in zip(arguments, items, strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        entries = _checked(given, dict, where)
        return {name: _read(arguments[1], value, f"{where}, {name!r}") for name, value in entries.items()}
    assert declared in _PLAIN, f"{where}: {declared} is not read from JSON"
    return _checked(given, declared, where)


def _read_one_of(declared: tuple[Any, ...], given: Any, where: str) -> Any:
    """Read as the first type that it is of; None is tried first: the error is about what else was wanted."""
    for one in sorted(declared, key=lambda one: one is not type(None)):
        try:
            return _read(one, given, where)
        except CheckpointCorruptError as error:
            last = error
    raise last


def _checked(given: Any, wanted: type, where: str) -> Any:
    """The value, if it is of a type; an integer is a float too, a boolean no number."""
    if wanted is float and type(given) is int:
        try:
            return float(given)
        except OverflowError as error:
            raise CheckpointCorruptError(f"{where} is a number of {len(str(given))} digits") from error
    if type(given) is not wanted:
        raise CheckpointCorruptError(
            f"{where} is {_shown(given)}, wanted {'nothing' if wanted is type(None) else wanted.__name__}"
        )
    return given


def _shown(given: object) -> str:
    return f"{given!r}"[:60] if isinstance(given, str | int | float | None) else f"a {type(given).__name__}"
