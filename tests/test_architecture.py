"""The layers hold: imports go down only, and each layer knows no more than it should.

Read from the source (``ast``), except for what a process really loads: that is asked of a process.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.truth import EXAMPLE, ROOT

PACKAGE = ROOT / "src" / "reshard"

LAYERS = (
    "errors",
    "first_use",
    "geometry",
    "layouts",
    "formats",
    "names",
    "planning",
    "execution",
    "live",
    "api",
    "cli",
)
"""From the bottom up. A layer may import itself and those before it."""

FACES = {"__init__": "cli", "__main__": "cli"}
"""The package's own front doors stand on top."""

CONCRETE_FORMATS = {"dcp", "deepspeed", "safetensors", "universal"}
"""Formats proper; each is read and written without the others."""

FORMAT_TOOLS = {"torch_archive"}
"""Packages inside ``formats`` that serve several formats."""

HEAVY = {"torch", "deepspeed", "transformers"}
FILE_MODULES = {"os", "io", "pathlib", "mmap", "shutil", "tempfile", "zipfile", "fcntl"}

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 100
MAX_NESTING = 5
MAX_METHODS = 30


@dataclass(frozen=True, slots=True)
class Module:
    """One file of the package."""

    name: str
    """Without ``reshard.``: ``geometry.piece``."""
    tree: ast.Module
    lines: int

    @property
    def layer(self) -> str:
        """The layer it belongs to."""
        first = self.name.split(".")[0]
        return FACES.get(first, first)

    def imports(self) -> Iterator[tuple[str, bool]]:
        """Yield every module imported anywhere in it, and whether for type checkers only."""
        hints = {id(node) for block in self._typing_blocks() for node in ast.walk(block)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, id(node) in hints
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    if whole == "reshard.__version__":
                        continue  # a constant of the package's front page, not a way up
                    yield (whole if is_module(whole) else node.module), id(node) in hints

    def _typing_blocks(self) -> Iterator[ast.If]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                yield node


def is_module(dotted: str) -> bool:
    """Whether the name is a module of the package."""
    base = PACKAGE.parent / dotted.replace(".", "/")
    return base.with_suffix(".py").is_file() or (base / "__init__.py").is_file()


@functools.cache
def modules() -> tuple[Module, ...]:
    """Return all modules of the package."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        text = file.read_text()
        found.append(Module(name, ast.parse(text), len(text.splitlines())))
    return tuple(found)


def own_imports(module: Module, *, at_run_time: bool = False) -> set[str]:
    """Return the modules of the package that it imports, without ``reshard.``."""
    names = {
        name
        for name, for_types in module.imports()
        if name.split(".")[0] == "reshard" and not (at_run_time and for_types)
    }
    return {name.removeprefix("reshard").removeprefix(".") or "__init__" for name in names}


def packages(module: Module) -> set[str]:
    """Return the top-level packages that it imports."""
    return {name.split(".")[0] for name, _ in module.imports()}


def below_formats() -> list[Module]:
    """Return the modules of the layers that know no files."""
    return [module for module in modules() if module.layer in ("geometry", "layouts")]


# --------------------------------------------------------------------------------------- layers


def test_every_module_belongs_to_a_layer() -> None:
    assert [module.name for module in modules() if module.layer not in LAYERS] == []


def test_imports_go_down_only() -> None:
    upward = [
        f"{module.name} imports {name}"
        for module in modules()
        for name in own_imports(module)
        if rank(name) > rank(module.name)
    ]
    assert upward == []


def rank(name: str) -> int:
    """Return how high a module stands."""
    first, *_ = name.split(".")
    return LAYERS.index(FACES.get(first, first))


def test_formats_do_not_know_each_other() -> None:
    acquainted = [
        f"{module.name} imports {name}"
        for module in modules()
        for name in own_imports(module)
        if module.name.startswith("formats.") and not may_know(module.name, name)
    ]
    assert acquainted == []


def may_know(module: str, imported: str) -> bool:
    """Whether a module of ``formats`` may import another one."""
    if not imported.startswith("formats."):
        return True
    own, other = module.split(".")[1], imported.split(".")[1]
    if own in CONCRETE_FORMATS:
        return other == own or other not in CONCRETE_FORMATS | {"registry"}
    return own == "registry" or other not in CONCRETE_FORMATS


def test_every_package_of_formats_is_a_format_or_a_tool_for_them() -> None:
    found = {folder.parent.name for folder in (PACKAGE / "formats").glob("*/__init__.py")}
    assert found == CONCRETE_FORMATS | FORMAT_TOOLS


def test_there_is_no_import_cycle() -> None:
    names = {module.name for module in modules()}
    graph = {module.name: own_imports(module, at_run_time=True) & names for module in modules()}
    done: set[str] = set()
    while ready := {name for name in graph.keys() - done if graph[name] - {name} <= done}:
        done |= ready
    assert sorted(graph.keys() - done) == []


# -------------------------------------------------------------------------- what a layer may use


def test_below_formats_there_is_only_numpy() -> None:
    allowed = sys.stdlib_module_names | {"reshard", "numpy"}
    assert {m.name: packages(m) - allowed for m in below_formats() if packages(m) - allowed} == {}


def test_below_formats_nothing_opens_a_file() -> None:
    calls = {"open", "exec", "eval", "compile", "__import__"}
    for module in below_formats():
        assert packages(module).isdisjoint(FILE_MODULES), module.name
        for node in ast.walk(module.tree):
            assert not (isinstance(node, ast.Call) and ast.unparse(node.func) in calls), module.name


def test_only_the_command_line_draws_and_parses_options() -> None:
    drawing = {"rich", "typer", "click"}
    others = [module for module in modules() if module.layer != "cli"]
    assert [module.name for module in others if packages(module) & drawing] == []


def test_heavy_packages_are_imported_by_live_only() -> None:
    """A torch tensor that a caller hands in is met by what it can do, not by importing torch."""
    importing = [
        f"{module.name} imports {name}"
        for module in modules()
        for name, for_types in module.imports()
        if name.split(".")[0] in HEAVY and not for_types
    ]
    assert [one for one in importing if not re.match(r"live\S* imports torch\b", one)] == []


def test_live_knows_no_files() -> None:
    """Processes for files: what it moves is memory, save where a checkpoint is the source."""
    alive = [m for m in modules() if m.layer == "live" and m.name != "live.checkpoints"]
    knowing = [
        f"{module.name} imports {name}"
        for module in alive
        for name in own_imports(module)
        if name.split(".")[0] in ("formats", "planning", "execution")
    ]
    assert knowing == []
    assert [module.name for module in alive if packages(module) & FILE_MODULES] == []


def test_nothing_executes_pickles() -> None:
    """No module may unpickle: what a checkpoint says is parsed, never run."""
    unpicklers = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    importing = [module for module in modules() if packages(module) & unpicklers]
    assert [module.name for module in importing] == ["formats.torch_archive.pickler"]
    # That one writes, with the pickler alone.
    uses = (node for node in ast.walk(importing[0].tree) if isinstance(node, ast.Attribute))
    names = {
        use.attr for use in uses if isinstance(use.value, ast.Name) and use.value.id == "pickle"
    }
    assert names == {"_Pickler"}


# ------------------------------------------------------------------------- what a process loads


def loaded_after(code: str) -> set[str]:
    """Return the top-level packages that a new process has loaded after running the code."""
    report = "import json, sys; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_geometry_loads_no_more_than_numpy() -> None:
    """Only what is loaded on top of NumPy alone counts: an interpreter's site may load things."""
    more = loaded_after("import reshard.geometry") - loaded_after("import numpy")
    assert sorted(more - set(sys.stdlib_module_names) - {"reshard"}) == []


def test_importing_reshard_loads_no_third_party_package() -> None:
    more = loaded_after("import reshard") - loaded_after("")
    assert sorted(more - set(sys.stdlib_module_names) - {"reshard"}) == []


@pytest.mark.parametrize("command", ["inspect", "convert --dry-run"])
def test_the_command_line_loads_neither_torch_nor_deepspeed(command: str, tmp_path: Path) -> None:
    verb, *options = command.split()
    words = [verb, str(EXAMPLE), *([str(tmp_path / "out")] if verb == "convert" else []), *options]
    code = (
        "import contextlib, io, sys\n"
        "from reshard.cli import main\n"
        f"sys.argv = ['reshard', *{words!r}]\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    try:\n"
        "        status = main()\n"
        "    except SystemExit as end:\n"
        "        status = end.code\n"
        "assert not status, status"
    )
    assert sorted(loaded_after(code) & HEAVY) == []


# --------------------------------------------------------------------------------------- manners


def test_every_module_has_a_docstring() -> None:
    assert [module.name for module in modules() if not ast.get_docstring(module.tree)] == []


def test_there_are_no_asserts_and_no_global_state() -> None:
    """Invariants raise InternalError, so that ``python -O`` changes nothing."""
    found = [
        f"{module.name}:{node.lineno}"
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Assert | ast.Global)
    ]
    assert found == []


def test_files_functions_and_classes_stay_readable() -> None:
    too_much = [
        f"{module.name}: {complaint}" for module in modules() for complaint in complaints(module)
    ]
    assert too_much == []


def complaints(module: Module) -> Iterator[str]:
    """Say what is too long or too deep in a module."""
    if module.lines > MAX_FILE_LINES:
        yield f"{module.lines} lines"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef):
            if (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES:
                yield f"{node.name} is longer than {MAX_FUNCTION_LINES} lines"
            if nesting(node) > MAX_NESTING:
                yield f"{node.name} nests deeper than {MAX_NESTING}"
        if isinstance(node, ast.ClassDef):
            methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
            if len(methods) > MAX_METHODS:
                yield f"{node.name} has {len(methods)} methods"


BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)


def nesting(node: ast.AST, depth: int = 0) -> int:
    """Return how deep blocks are nested; ``elif`` is not deeper than its ``if``."""
    deepest = depth
    for field, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        for child in children:
            if not isinstance(child, ast.AST) or isinstance(child, ast.FunctionDef):
                continue
            is_elif = isinstance(node, ast.If) and field == "orelse" and len(children) == 1
            step = isinstance(child, BLOCKS) and not (is_elif and isinstance(child, ast.If))
            deepest = max(deepest, nesting(child, depth + step))
    return deepest
