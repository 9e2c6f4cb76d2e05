"""What is on disk is what is installed, and the two commands of the README are there for CI to run."""

import fnmatch
import importlib
import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP_LEVEL = ("sim", "gpu", "calibration", "experiments")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
PROJECT = PYPROJECT["project"]


def files_of_the_packages():
    """Every file below the top-level packages that an installation could need."""
    for top in TOP_LEVEL:
        for path in sorted((ROOT / top).rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                yield path


def test_every_folder_with_python_in_it_is_a_listed_package():
    on_disk = {
        ".".join(path.parent.relative_to(ROOT).parts) for path in files_of_the_packages() if path.suffix == ".py"
    }
    assert on_disk == set(SETUPTOOLS["packages"])


def test_every_listed_package_has_an_init_with_a_docstring():
    for package in SETUPTOOLS["packages"]:
        init = ROOT.joinpath(*package.split("."), "__init__.py")
        assert init.is_file(), f"{package} has no __init__.py"
        assert re.match(r'\s*r?"""\S', init.read_text(encoding="utf-8")), f"{package} does not say what it is"


def test_every_data_file_of_a_package_is_installed():
    patterns = SETUPTOOLS["package-data"]["*"]
    packages = set(SETUPTOOLS["packages"])
    for path in files_of_the_packages():
        if path.suffix == ".py":
            continue
        name = path.relative_to(ROOT)
        assert any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns), (
            f"{name} matches no package-data pattern"
        )
        assert ".".join(name.parent.parts) in packages, f"{name} lies outside every package"


def test_no_test_folder_shadows_a_package():
    assert not list((ROOT / "tests").rglob("__init__.py"))
    assert not [path for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name in TOP_LEVEL]


def test_the_version_has_one_source():
    version = importlib.import_module("sim._version").__version__
    assert "version" in PROJECT["dynamic"]
    assert SETUPTOOLS["dynamic"]["version"] == {"attr": "sim._version.__version__"}
    assert importlib.import_module("sim").__version__ == version
    assert re.search(
        rf"^## \[{re.escape(version)}\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    try:
        installed = importlib.metadata.version("kvtwin")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("kvtwin is tested from a bare checkout, not installed")
    assert installed == version


def test_the_command_exists():
    module, _, function = PROJECT["scripts"]["kvtwin"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_the_main_job_needs_neither_torch_nor_a_test_tool():
    names = {re.split(r"[<>=\[; ]", requirement)[0] for requirement in PROJECT["dependencies"]}
    assert names == {"simpy", "numpy", "scipy", "pandas", "plotly", "pydantic", "typer", "rich"}


def test_the_tests_pin_the_torch_that_has_a_cpu_build():
    assert "torch==2.13.0" in PROJECT["optional-dependencies"]["test"]


def test_the_readme_has_exactly_the_two_set_up_commands_that_ci_runs():
    commands = re.findall(r"^python3 -m venv .*$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(commands) == 2, commands
    first, second = commands
    assert "pip install -e ." in first
    assert "kvtwin run" in first
    assert "pip install -e '.[test]'" in second
    assert re.search(r"&& \S*pytest\b[^&]*$", second), "the last thing the second command does is to run the tests"
