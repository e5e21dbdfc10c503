"""The wheel holds the library, all of it, under its one name."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER_OF_PACKAGE = {"panther_compile.passes": "passes", "panther_compile.kernels": "kernels"}
SOURCES = ["panther_compile", "passes", "kernels"]


def run(*command, cwd, **environment):
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )


def find_packages(root):
    """Every folder with an __init__.py, by the name it is imported under."""
    name_of = {folder: package for package, folder in FOLDER_OF_PACKAGE.items()}
    packages = set()
    for source in SOURCES:
        for init in (root / source).rglob("__init__.py"):
            first, *rest = init.parent.relative_to(root).parts
            packages.add(".".join([name_of.get(first, first), *rest]))
    return packages


def read_setuptools_table():
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["tool"]["setuptools"]


def test_every_package_is_listed():
    # An unlisted one works in the editable install and is silently missing from the wheel.
    assert find_packages(ROOT) == set(read_setuptools_table()["packages"])


def test_every_folder_of_modules_is_a_package():
    for source in SOURCES:
        for module in (ROOT / source).rglob("*.py"):
            assert (module.parent / "__init__.py").exists(), module


def test_mapped_folders_are_those_of_this_test():
    assert read_setuptools_table()["package-dir"] == FOLDER_OF_PACKAGE


def test_passes_refuses_its_other_name():
    done = run("-c", "import passes", cwd=ROOT)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1] == (
        "ImportError: this folder is panther_compile.passes, not 'passes': import it by that name"
    )


def test_kernels_has_no_modules_under_its_other_name():
    done = run("-c", "import kernels.reference", cwd=ROOT)
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'kernels.reference'"


@pytest.mark.slow
def test_transformers_takes_the_kernels_folder_for_absent():
    code = "from transformers.utils import is_kernels_available; print(is_kernels_available())"
    done = run("-c", code, cwd=ROOT)
    assert done.stdout.strip() == "False", done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    # From a copy: setuptools would otherwise build into the tree, and pick up what it left there.
    source = tmp_path_factory.mktemp("source")
    out = tmp_path_factory.mktemp("dist")
    for folder in SOURCES:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ["pyproject.toml", "README.md", "LICENSE"]:
        shutil.copy(ROOT / file, source)
    done = run("-m", "build", "--wheel", "--no-isolation", "--outdir", out, cwd=source)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


def test_wheel_holds_the_library_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    metadata = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    expected = {"panther_compile/py.typed"}
    for package in find_packages(ROOT):
        folder = FOLDER_OF_PACKAGE.get(package, package.replace(".", "/"))
        expected |= {f"{package.replace('.', '/')}/{module.name}" for module in (ROOT / folder).glob("*.py")}
    assert names - metadata == expected
    assert any(name.endswith("licenses/LICENSE") for name in metadata)


def test_wheel_is_of_the_version_and_has_the_command(wheel):
    with (ROOT / "pyproject.toml").open("rb") as file:
        version = tomllib.load(file)["project"]["version"]
    assert wheel.name == f"panther_compile-{version}-py3-none-any.whl"
    archive = zipfile.ZipFile(wheel)
    entry_points = archive.read(f"panther_compile-{version}.dist-info/entry_points.txt").decode()
    assert "panther-compile = panther_compile.cli:main" in entry_points


@pytest.mark.slow
def test_installed_wheel_imports_from_another_directory(wheel, tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = run(
        *("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"),
        *("--target", site, wheel),
        cwd=elsewhere,
    )
    assert done.returncode == 0, done.stderr

    code = (
        "import panther_compile, panther_compile.passes as p, panther_compile.kernels as k\n"
        "for name in panther_compile.__all__: getattr(panther_compile, name)\n"
        "print(panther_compile.__file__, p.__file__, k.__file__, sep='\\n')"
    )
    done = run("-c", code, cwd=elsewhere, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    package = site / "panther_compile"
    assert done.stdout.split() == [
        str(package / "__init__.py"),
        str(package / "passes" / "__init__.py"),
        str(package / "kernels" / "__init__.py"),
    ]


@pytest.mark.slow
def test_tests_run_from_the_source_distribution(tmp_path):
    skipped = shutil.ignore_patterns("__pycache__", ".*", "build", "dist", "out", "*.egg-info")
    source = shutil.copytree(ROOT, tmp_path / "source", ignore=skipped)
    done = run("-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, cwd=source)
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (folder,) = (tmp_path / "unpacked").iterdir()
    left_out = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and not (folder / path.relative_to(source)).exists()
    }
    assert left_out == set()
    # The unpacked library is the one that is tested: it stands before any that is installed.
    package = tmp_path / "path" / "panther_compile"
    package.mkdir(parents=True)
    for part in (*(folder / "panther_compile").iterdir(), folder / "passes", folder / "kernels"):
        (package / part.name).symlink_to(part)
    names = ("test_config.py", "test_layering.py", "test_api.py", "layers/test_linear.py")
    tests = [f"tests/{name}" for name in names]
    assert all((folder / test).exists() for test in tests)
    done = run(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not integrations", *tests),
        cwd=folder,
        PYTHONPATH=str(package.parent),
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
