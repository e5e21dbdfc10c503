"""What every rank of a test would make again, made once, before the ranks are forked.

A test says what it will ask for by `@prepares`; the server of the processes makes that for the tests that
are to run, and a rank that asks for it by `made` finds it in its memory.
"""

import importlib
import json
import os

_VARIABLE = "PREPARED_FOR_RANKS"
_MADE = {}  # by module, name and options of the function, one for each test that asks


def prepares(function, options):
    """Mark a test whose ranks call `made(function, **options(**parameters of the test))`; once or more."""

    def mark(test):
        def call(**parameters):
            return function.__module__, function.__name__, options(**parameters)

        test.prepares = [*getattr(test, "prepares", ()), call]
        return test

    return mark


def announce(items):
    """Tell the server, which is started with this environment, what the tests among these ask for."""
    calls = [
        call(**(item.callspec.params if hasattr(item, "callspec") else {}))
        for item in items
        if "slow" not in item.keywords
        for call in getattr(getattr(item, "function", None), "prepares", ())
    ]
    os.environ[_VARIABLE] = json.dumps(calls)


def prepare():
    """Make what was announced; nothing here may run a backward, whose threads cannot be forked."""
    for module, name, options in json.loads(os.environ.get(_VARIABLE, "[]")):
        function = getattr(importlib.import_module(module), name)
        _MADE.setdefault(_key(module, name, options), []).append(function(**options))


def made(function, **options):
    """What the function gives, ready or not; it is the caller's own."""
    key = _key(function.__module__, function.__name__, options)
    return _MADE[key].pop() if _MADE.get(key) else function(**options)


def _key(module, name, options):
    return json.dumps([module, name, options], sort_keys=True)
