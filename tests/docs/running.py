"""Runs the blocks of one page in a folder of its own, and compares what they print.

Theory. ``reshard`` commands run in this process, by the same entry as the installed command; any
other command runs in ``sh``, where ``reshard`` is there too. What is shown must be what is printed,
but for what differs from run to run: times, rates, free disk, and the path of the folder. A shown
line ``…`` stands for any lines; a page that shows nothing below a command only promises that it
works.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

from reshard.cli import main
from tests.docs.pages import Block, blocks
from tests.docs.programs import path_with_reshard
from tests.docs.setups import SETUPS
from tests.truth import ROOT

_VARYING = (
    (re.compile(r"\b\d+(\.\d+)?( ?[kMGT]?B)/s"), "RATE"),
    (re.compile(r"\b\d+(\.\d+)? (s|ms|min)\b"), "TIME"),
    (re.compile(r"\(?\d+(\.\d+)? [kMGT]?B free\)?"), "FREE"),
    (re.compile(r"[ \t]+$", re.MULTILINE), ""),
)


class Reader:
    """Somebody who types in what a page shows, from its first block to its last.

    ``folder`` must be the working folder of the process.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, object] = {"__name__": "page"}

    def follow(self, page: Path) -> Iterator[Block]:
        """Run the page; yield each block that was run."""
        for block in blocks(page):
            self.provide(block)
            if block.runs:
                self.run(block)
                yield block

    def provide(self, block: Block) -> None:
        """Lay out the folders and files that the comments above the block name."""
        for told in block.said.get("folder", ()):
            target, _, source = (part.strip() for part in told.partition("="))
            shutil.copytree(ROOT / source, self.folder / target, dirs_exist_ok=True)
        for name in block.said.get("file", ()):
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.code, encoding="utf-8")
        for told in block.said.get("setup", ()):
            name, _, place = told.partition(" of ")
            self.names |= SETUPS[name](self.folder / place)

    def run(self, block: Block) -> None:
        """Run one block, which must end as it says and print what it shows."""
        if block.language == "python":
            code = "\n" * block.line + block.code
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(compile(code, str(block.page), "exec"), self.names)
            return
        steps = list(_steps(block))
        for number, (command, shown) in enumerate(steps):
            wanted = int(block.said.get("exit", ["0"])[0]) if number == len(steps) - 1 else 0
            code_of_exit, printed = self.call(command)
            assert code_of_exit == wanted, f"{block}: $ {command}\n{printed}"
            if shown:
                self.compare(block, command, shown, printed)

    def call(self, command: str) -> tuple[int, str]:
        """Run one command; return its exit code and what it prints."""
        words = shlex.split(command, comments=True)
        if words[0] != "reshard" or {"|", ">", "&&"} & set(words):
            return self.shell(command)
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            return main(words[1:]), out.getvalue()

    def shell(self, command: str) -> tuple[int, str]:
        """Run one command in ``sh``."""
        environment = os.environ | {
            "PATH": path_with_reshard(self.folder),
            "PYTHONPATH": str(ROOT / "src"),
        }
        done = subprocess.run(
            ["sh", "-c", command], capture_output=True, text=True, env=environment, check=False
        )
        return done.returncode, done.stdout + done.stderr

    def compare(self, block: Block, command: str, shown: str, printed: str) -> None:
        """Refuse a page that shows what is not printed."""
        wanted = self._steady(shown)
        found = self._steady(printed)
        parts = [re.escape(part) for part in re.split(r"^[ ]*…$\n?", wanted, flags=re.MULTILINE)]
        pattern = r"(?:.*\n)*".join(parts)
        assert re.fullmatch(pattern, found), f"{block}: $ {command}\nprints\n{printed}"

    def _steady(self, text: str) -> str:
        for root in (os.path.realpath(self.folder), str(self.folder)):
            text = text.replace(f"{root}/", "")
        for pattern, word in _VARYING:
            text = pattern.sub(word, text)
        return text.strip("\n") + "\n"


def _steps(block: Block) -> Iterator[tuple[str, str]]:
    """Yield each command of a block, with what is shown below it."""
    code = block.code.replace("\\\n", " ")
    if block.language == "sh":
        for line in code.splitlines():
            if line.strip() and not line.startswith("#"):
                yield line, ""
        return
    head, *steps = re.split(r"^\$ ", code, flags=re.MULTILINE)
    assert not head.strip(), f"{block}: something is shown above the first command"
    for step in steps:
        command, _, shown = step.partition("\n")
        yield command, shown.strip("\n")
