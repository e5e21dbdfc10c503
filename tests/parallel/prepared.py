"""What every rank of a test would make again, made once, before the ranks are forked.

A test says what it will ask for by `@prepares`; the server of the processes makes that for the tests that
are to run, and a rank that asks for it by `made` finds it in its memory.
"""

import importlib
import json
import os

_VARIABLE = "PREPARED_FOR_RANKS"
_MADE = {}  # by module, name and options of the function


def prepares(function, options):
    """Mark a test whose ranks call `made(function, **options(**parameters of the test))`."""

    def mark(test):
        test.prepares = lambda **parameters: (function.__module__, function.__name__, options(**parameters))
        return test

    return mark


def announce(items):
    """Tell the server, which is started with this environment, what the tests among these ask for."""
    calls = [
        item.function.prepares(**(item.callspec.params if hasattr(item, "callspec") else {}))
        for item in items
        if hasattr(item.function, "prepares") and "slow" not in item.keywords
    ]
    os.environ[_VARIABLE] = json.dumps(calls)


def prepare():
    """Make what was announced; nothing here may run a backward, whose threads cannot be forked."""
    for module, name, options in json.loads(os.environ.get(_VARIABLE, "[]")):
        function = getattr(importlib.import_module(module), name)
        _MADE[_key(module, name, options)] = function(**options)


def made(function, **options):
    """What the function gives, ready or not; it is the caller's own."""
    key = _key(function.__module__, function.__name__, options)
    return _MADE.pop(key) if key in _MADE else function(**options)


def _key(module, name, options):
    return json.dumps([module, name, options], sort_keys=True)
