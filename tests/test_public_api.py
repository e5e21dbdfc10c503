"""The index of the package: sorted, complete, documented, and each name from the home it names."""

import inspect
import sys
import tomllib
from pathlib import Path

import pytest

import panther_compile
from panther_compile.errors import MissingExtraError

ROOT = Path(__file__).resolve().parents[1]


def test_all_is_sorted_and_is_the_table():
    assert panther_compile.__all__ == sorted(panther_compile.__all__)
    assert panther_compile.__all__ == list(panther_compile._HOME_OF)


@pytest.mark.parametrize("name", panther_compile.__all__)
def test_name_comes_documented_from_its_home(name):
    value = getattr(panther_compile, name)
    assert value.__name__ == name
    assert f"{value.__module__}.".startswith(f"{panther_compile._HOME_OF[name]}.")
    # Not inspect.getdoc: a docstring inherited from nn.Module says nothing.
    assert value.__doc__
    assert not value.__doc__.startswith(f"{name}(")  # what @dataclass writes by itself


@pytest.mark.parametrize("name", panther_compile.__all__)
def test_public_methods_are_documented(name):
    value = getattr(panther_compile, name)
    if not inspect.isclass(value):
        return
    methods = [
        method
        for attribute, method in vars(value).items()
        if not attribute.startswith("_") and inspect.isfunction(method)
    ]
    undocumented = [method.__name__ for method in methods if not inspect.getdoc(method)]
    assert undocumented == []


def test_no_public_name_is_a_module():
    # Importing the module would put it in the place of the name.
    folders = [ROOT / "panther_compile", ROOT / "passes", ROOT / "kernels"]
    modules = {path.stem for path in folders[0].iterdir()} | {path.name for path in folders}
    assert modules & set(panther_compile.__all__) == set()


def test_dir_lists_every_name():
    assert set(panther_compile.__all__) <= set(dir(panther_compile))
    assert "__version__" in dir(panther_compile)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"'panther_compile' has no attribute 'sketchifi'"):
        panther_compile.sketchifi  # noqa: B018


@pytest.mark.parametrize(
    ("name", "library"), [("PantherAccelerator", "accelerate"), ("PantherStrategy", "lightning")]
)
def test_a_library_that_is_not_there_is_named(monkeypatch, name, library):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, panther_compile._HOME_OF_TRAINERS[name], raising=False)
    monkeypatch.delitem(vars(panther_compile), name, raising=False)
    # Modules that were imported before are not looked for below None.
    monkeypatch.setitem(sys.modules, f"{library}.pytorch", None)
    with pytest.raises(MissingExtraError, match=rf"{name} needs {library}.*panther-compile\[integrations\]"):
        getattr(panther_compile, name)


def test_star_import_gives_the_public_names():
    namespace = {}
    exec("from panther_compile import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(panther_compile.__all__)


def test_version_is_that_of_the_project():
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert panther_compile.__version__ == tomllib.load(file)["project"]["version"]
