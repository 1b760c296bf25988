"""The rules of the house, kept by a test: who may import whom, and how long things may get."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "jaxrun"
ROOMS = ("data", "guard", "checkpoint", "telemetry", "launch", "models", "interop")
# What a room may import besides itself: the leaves, and nothing of what is above it.
LEAVES = {"config", "journal", "sharding"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """jaxrun/data/tokens.py -> data.tokens; jaxrun/data/__init__.py -> data."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


def jaxrun_imports(path: Path) -> set[str]:
    """The modules of jaxrun that a file imports, anywhere in it, without the package's own name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            base = node.module or ""
            found |= {f"{base}.{alias.name}" for alias in node.names} if base == "jaxrun" else {base}
    inside = {name.removeprefix("jaxrun.") for name in found if name.startswith("jaxrun.")}
    return {name for name in inside if not name.startswith("__")}


@pytest.mark.parametrize("path", MODULES, ids=[name_of(p) or "jaxrun" for p in MODULES])
def test_imports_point_downward(path: Path) -> None:
    name = name_of(path)
    room = name.split(".")[0]
    imported = {module.split(".")[0] for module in jaxrun_imports(path)}
    if name != "cli":
        assert "train" not in imported
    assert "cli" not in imported
    if room in ROOMS:
        allowed = LEAVES | {room}
        assert imported <= allowed, f"{room} imports {sorted(imported - allowed)}"


@pytest.mark.parametrize("name", ["config", "journal", "sharding"])
def test_what_all_may_import_imports_no_room(name: str) -> None:
    imported = {module.split(".")[0] for module in jaxrun_imports(PACKAGE / f"{name}.py")}
    assert not imported & {*ROOMS, "train", "step", "cli"}


def test_the_guard_knows_no_jax() -> None:
    for path in (PACKAGE / "guard").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"jax", "flax", "optax"}, path


@pytest.mark.parametrize("path", MODULES, ids=[name_of(p) or "jaxrun" for p in MODULES])
def test_a_module_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= (500 if name_of(path) == "train" else 600)


def test_the_training_step_fits_on_a_screen() -> None:
    [function] = [
        node
        for node in ast.walk(ast.parse((PACKAGE / "step.py").read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "train_step"
    ]
    assert function.end_lineno is not None
    assert function.end_lineno - function.lineno + 1 <= 80


@pytest.mark.parametrize("module", ["jaxrun.config, jaxrun.journal, jaxrun.guard", "jaxrun.cli"])
def test_what_needs_no_device_does_not_load_jax(module: str) -> None:
    """`jaxrun --help`, `watch`, `backtest` and the like answer at once."""
    code = f"import sys, {module}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_nothing_loads_tensorflow_before_metrics_are_written() -> None:
    """It takes seconds, which would be added to every start."""
    code = "import sys, jaxrun.train, jaxrun.inference; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
