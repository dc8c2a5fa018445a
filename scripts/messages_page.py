"""Writes docs/messages.md: what every error of reshard says, by what it is about.

``python -m scripts.messages_page`` writes the page anew; a test tells when a message is new. A
message is the first argument wherever an error is made. Its texts are read out of the source, and
``…`` stands for what varies. What goes with the message into the line (where, expected, found,
the next step) is not on the page, for the line itself says it.
"""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

from reshard import errors

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "reshard"
PAGE = ROOT / "docs" / "messages.md"
KINDS = frozenset(
    name
    for name, value in inspect.getmembers(errors, inspect.isclass)
    if issubclass(value, errors.ReshardError)
)

FAMILIES = {
    "api": (
        "The request",
        (
            "An argument is not what it should be, or names what the checkpoint does not "
            "have. Correct the call; nothing was read or written."
        ),
    ),
    "cli": (
        "The command line",
        (
            "Options contradict each other, or cannot be read. `reshard COMMAND --help` "
            "lists what a command takes."
        ),
    ),
    "execution": (
        "Reading and writing",
        (
            "The disk, or another process: files that change, disappear or end while they "
            "are read, an output that exists, is taken or finds no room. The output is not "
            "there; what a stopped run has finished is kept for `--resume`."
        ),
    ),
    "formats": (
        "Any checkpoint",
        (
            "The files do not fit together, or a layout, name or option does not fit them. "
            "`reshard doctor CKPT` lists all that is wrong at once."
        ),
    ),
    "formats/dcp": (
        "PyTorch DCP",
        (
            "The index (`.metadata`) and the data files contradict each other, mostly "
            "because files of two saves lie in one folder or a rank's file was not copied; "
            "or the tree of the folder is not one that says what is the model and what the "
            "optimizer. Copy the folder again, or name the parts (`--model-key`, "
            "`--optimizer-key`)."
        ),
    ),
    "formats/deepspeed": (
        "DeepSpeed files",
        (
            "The files of the ranks contradict each other, or themselves: files of two runs "
            "in one folder, a rank's file that is missing or damaged, or a save of a "
            "DeepSpeed that wrote less than is needed. Copy the files of one save again, "
            "all of them."
        ),
    ),
    "formats/deepspeed/writing": (
        "Native DeepSpeed targets",
        (
            "The topology that was asked for cannot hold what the source holds, or the "
            "source does not say what such files must: choose another topology, or state "
            "what is missing ([what is refused, and why](native.md#what-is-refused-and-"
            "why))."
        ),
    ),
    "formats/safetensors": (
        "Safetensors",
        (
            "The header or the index is not what the format says, or belongs to other "
            "files. Fetch the files again."
        ),
    ),
    "formats/torch_archive": (
        "torch archives (`.pt`)",
        (
            "A file is cut short, damaged, or was not written by `torch.save`. Copy it "
            "again from where it was written. Where a file names what never belongs in a "
            "checkpoint, do not open it with `torch.load`."
        ),
    ),
    "formats/universal": (
        "Universal folders",
        (
            "A folder lacks files, or holds what cannot be the name of a file. Copy it "
            "again, or convert again."
        ),
    ),
    "names": (
        "Names of another side",
        (
            "A file of rules is malformed, or does not take all of the checkpoint, or "
            "contradicts it ([the words of such a file](names.md))."
        ),
    ),
    "geometry": (
        "Maps and plans",
        (
            "A map breaks a property that every map must have, or two maps do not belong "
            "together. From a checkpoint: the map that it stores is false. From your own "
            "code: [what makes a map valid](geometry.md#4-what-makes-a-map-valid)."
        ),
    ),
    "layouts": (
        "Layouts",
        (
            "A parameter cannot be cut in the way that is stated. Correct the "
            "[layout](layouts.md), or the number of ranks."
        ),
    ),
    "live": (
        "Between running processes",
        (
            "Ranks of a live transfer contradict each other, one refused or was lost, or a "
            "message is damaged: the same on all ranks where it follows from what all said. "
            "The source is as it was."
        ),
    ),
    "planning": (
        "Planning",
        (
            "The source does not hold what the output needs. Select less (`--states`, "
            "`--include`), or convert from the checkpoint that has it."
        ),
    ),
}
"""Package -> title, and what its errors mean and what to do; the longest that fits counts."""

PASSED_ON = frozenset({"error.what", "listed(objections, '; ')"})
"""First arguments that only carry on what another place says."""

HEAD = """\
# Every message

Each message that an error can begin with, for finding one that you have met; `…` stands for names
and numbers. [The errors](errors.md) explains the classes, and the messages that are met most. The
line itself goes on with the place, with what was expected and found, and mostly with what to do.
(`python -m scripts.messages_page` writes this page.)
"""


Scope = ast.Module | ast.FunctionDef


class Module:
    """The messages of one file of the source."""

    def __init__(self, file: Path) -> None:
        self.file = file.relative_to(SOURCE)
        self.tree = ast.parse(file.read_text(encoding="utf-8"))
        self.inner: dict[ast.AST, Scope] = {}
        for scope in ast.walk(self.tree):  # outer ones come first
            if isinstance(scope, Scope):
                self.inner |= dict.fromkeys(ast.walk(scope), scope)

    def messages(self) -> Iterator[tuple[str, str]]:
        """Yield the class and the text of every error that is made here."""
        for call in self._calls(KINDS):
            if call.args:
                found = list(self.texts(call.args[0]))
                if not found and ast.unparse(call.args[0]) not in PASSED_ON:
                    raise SystemExit(f"{self.file}:{call.lineno}: its text cannot be told")
                yield from ((called(call), text) for text in found)

    def texts(self, node: ast.expr) -> Iterator[str]:
        """Yield every text that an expression can be."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from [node.value] if node.value else []
        elif isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
            )
        elif isinstance(node, ast.IfExp):
            yield from (*self.texts(node.body), *self.texts(node.orelse))
        elif isinstance(node, ast.BoolOp):
            yield from (text for value in node.values for text in self.texts(value))
        elif isinstance(node, ast.BinOp):
            left, right = (list(self.texts(side)) or ["…"] for side in (node.left, node.right))
            yield from (one + other for one in left for other in right)
        elif isinstance(node, ast.Name):
            values = self._values(node.id, self.inner[node])
            yield from (text for value in values for text in self.texts(value))

    def _values(self, name: str, scope: Scope) -> list[ast.expr]:
        """What a name stands for: assigned here, else handed in, else assigned in the file."""
        found = [
            value
            for node in ast.walk(scope)
            if isinstance(node, ast.Assign) and self.inner[node] is scope
            for value in _assigned(node.targets[0], node.value, name)
        ]
        if found or isinstance(scope, ast.Module):
            return found
        names = [argument.arg for argument in scope.args.args]
        if name not in names:
            return self._values(name, self.tree)
        at = names.index(name) - ("self" in names)
        return [call.args[at] for call in self._calls({scope.name}) if len(call.args) > at]

    def _calls(self, names: Collection[str]) -> Iterator[ast.Call]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and called(node) in names:
                yield node


def called(call: ast.Call) -> str:
    """Return the last name of what is called."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _assigned(target: ast.expr, value: ast.expr, name: str) -> Iterator[ast.expr]:
    if isinstance(target, ast.Name) and target.id == name:
        yield value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, its in zip(target.elts, value.elts, strict=True):
            yield from _assigned(one, its, name)


def family(file: Path) -> str:
    """Return the package that speaks for a file."""
    fitting = [name for name in FAMILIES if file.as_posix().startswith(f"{name}/")]
    if not fitting:
        raise SystemExit(f"{file}: no family in {Path(__file__).name} is for its errors")
    return max(fitting, key=len)


def catalogue() -> dict[str, dict[str, set[str]]]:
    """Return family -> class -> messages."""
    found: dict[str, dict[str, set[str]]] = {name: defaultdict(set) for name in FAMILIES}
    for file in sorted(SOURCE.rglob("*.py")):
        module = Module(file)
        for kind, text in module.messages():
            found[family(module.file)][kind].add(text)
    return found


def page() -> str:
    """Return the text of the page."""
    lines = [HEAD]
    for name, kinds in catalogue().items():
        title, told = FAMILIES[name]
        lines.append(f"\n## {title}\n\n{told}\n")
        for kind in sorted(kinds):
            lines.append(f"\n[{kind}](errors.md#{kind.lower()}):\n\n")
            lines += [f"* {_code(text)}\n" for text in sorted(kinds[kind])]
    return "".join(lines)


def _code(text: str) -> str:
    fence = "``" if "`" in text else "`"
    pad = " " if "`" in text else ""
    return f"{fence}{pad}{text.strip()}{pad}{fence}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
