"""What an import brings along, measured in a fresh interpreter: the static contracts see arrows, this sees what is loaded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def loaded_by(code: str, *, without: tuple[str, ...] = ()) -> set[str]:
    """Top-level names of all modules in a fresh interpreter after `code`; those in `without` cannot be imported there."""
    script = f"""
import importlib, json, pkgutil, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {without!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
sys.path.insert(0, {str(ROOT)!r})
def everything_in(package):
    for found in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        importlib.import_module(found.name)
before = set(sys.modules)
{code}
print(json.dumps(sorted({{name.partition(".")[0] for name in set(sys.modules) - before}})))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_core_is_the_standard_library_and_itself():
    third_party = loaded_by("everything_in('sim.core')") - set(sys.stdlib_module_names) - {"sim"}
    assert third_party == set()


def test_importing_sim_loads_nothing_heavy():
    heavy = {"torch", "triton", "scipy", "pandas", "plotly", "simpy", "numpy", "pydantic", "typer", "rich"}
    assert loaded_by("import sim") & heavy == set()


def test_the_core_and_the_real_pool_import_on_a_machine_without_the_simulator_s_libraries():
    absent = ("simpy", "plotly", "pandas", "scipy", "pydantic", "typer", "rich")
    loaded_by("everything_in('sim.core'); everything_in('gpu')", without=absent)


@pytest.mark.parametrize("package", ["sim", "experiments"])
def test_everything_but_the_real_pool_imports_without_torch(package):
    loaded_by(f"everything_in({package!r})", without=("torch", "triton", "pytest", "hypothesis"))
