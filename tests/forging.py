"""Edits of what a file's JSON says, for tests of forged files."""


def put(*keys, value):
    """An edit that sets what stands at the end of a path of keys."""

    def edit(record):
        for key in keys[:-1]:
            record = record[key]
        record[keys[-1]] = value

    return edit


def drop(key):
    """An edit that takes a field away."""
    return lambda record: record.pop(key)
