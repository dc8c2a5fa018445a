"""Servers, and the outcome of one command in one of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from scripts.attack.server import CPU_SECONDS, MEMORY

ROOT = Path(__file__).resolve().parents[2]
REFUSED = 2


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    cpu: float
    memory: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The ``error:`` line, or nothing."""
        lines = self.err.strip().splitlines()
        return lines[-1] if lines and lines[-1].startswith("error: ") else ""

    @property
    def fault(self) -> str:
        """``slow``, ``large`` or ``traceback``, or nothing where it ended as it should."""
        if self.code == -14 or self.cpu > CPU_SECONDS or self.code in (-24, -9):
            return "slow"
        if self.memory > MEMORY or self.line.startswith("error: out of memory"):
            return "large"
        lines = self.err.strip().splitlines()
        clean = self.code == 0 or (self.code == REFUSED and len(lines) == 1 and bool(self.line))
        return "" if clean and not self.line.startswith("error: internal") else "traceback"


class Server:
    """One server; a context manager. It imports reshard once, and ends with its input."""

    def __init__(self, told: Path, warm: Sequence[str | Path] = ()) -> None:
        self._told = told
        told.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "scripts.attack.server", *map(str, warm)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def run(self, *arguments: str | Path) -> Ended:
        """Run ``reshard`` with these arguments."""
        source, sink = self._process.stdout, self._process.stdin
        if source is None or sink is None:
            raise RuntimeError("the server has no pipes")
        request = {"arguments": [*map(str, arguments)], "told": str(self._told)}
        sink.write(json.dumps(request) + "\n")
        sink.flush()
        answer = json.loads(source.readline())
        out, err = (
            (self._told / name).read_text(encoding="utf-8", errors="replace")
            for name in ("out", "err")
        )
        return Ended(int(answer["code"]), answer["cpu"], int(answer["memory"]), out, err)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
