"""A process that converts a raw checkpoint and may be told to die on the way.

Importing and planning take longer than the conversion, so one process does both once and then forks
a child for every conversion it is asked for: a line of JSON in, a line of JSON out. The child is a
process of its own, with its own locks and threads, and is killed as a whole.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from reshard.errors import ReshardError
from reshard.execution import execute, staging
from reshard.execution.buffers import KIB
from reshard.planning import Plan, plan
from tests.execution.raw import replicated, split, target_for, write_checkpoint

REPOSITORY = Path(__file__).parents[2]
TENSORS = 24
STAGES = (
    "journal",
    "folders",
    "filled",
    "manifest",
    "synced",
    "complete",
    "renamed",
    "renamed-durably",
    "pointed",
)


def job_of(folder: Path) -> Plan:
    """Write the input and plan its conversion: small and large tensors, a few MB in all."""
    rng = np.random.default_rng(11)
    layouts = {
        (f"{kind}{number}", state): layout
        for number in range(4)
        for state in ("fp32", "exp_avg")
        for kind, layout in (
            ("rows", split((300, 400), 0, (100, 200))),
            ("columns", split((300, 1000), 1, (600, 400))),
            ("norm", replicated((40,), 2)),
        )
    }
    fulls = {k: rng.standard_normal(m.logical_shape).astype("f4") for k, m in layouts.items()}
    checkpoint = write_checkpoint(folder, {k: (fulls[k], m) for k, m in layouts.items()})
    return plan(checkpoint, target_for(checkpoint))


@dataclass(frozen=True, slots=True)
class Order:
    """One conversion: where to, and how it is to end."""

    out: str
    at: str | None = None
    after: float | None = None
    wait: bool = False
    resume: bool = False
    overwrite: bool = False
    cap: int = 256 * KIB
    file_limit: int | None = None
    exchange: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it ended: exit code (negative: the signal) and what it said."""

    code: int
    text: str


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _convert(job: Plan, order: Order) -> tuple[int, str]:
    def stage(name: str) -> None:
        if name == order.at:
            _die()
        if name == "journal" and order.after is not None:
            threading.Timer(order.after / 1000, _die).start()
        if name == "folders" and order.wait:
            Path(order.out + ".waiting").touch()
            time.sleep(60)

    if not order.exchange:
        staging._exchange = lambda *_: False
    if order.file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (order.file_limit, order.file_limit))
    try:
        report = execute(
            job,
            order.out,
            workers=2,
            max_memory=order.cap,
            resume=order.resume,
            overwrite=order.overwrite,
            stage=stage,
        )
    except ReshardError as error:
        return 2, f"{type(error).__name__}: {error}"
    return 0, f"tensors {report.tensors} kept {report.kept}"


def _child(job: Plan, order: Order, pipe: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code, text = _convert(job, order)
    except BaseException as error:  # noqa: BLE001 - told to the parent
        code, text = 3, repr(error)
    os.write(pipe, text.encode())
    os._exit(code)


def serve(folder: Path) -> None:
    """Carry out orders from standard input until it ends."""
    job = job_of(folder)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        order = Order(**json.loads(line))
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(ours)
            _child(job, order, theirs)
        os.close(theirs)
        Path(order.out + ".pid").write_text(str(child))
        with os.fdopen(ours) as pipe:
            text = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.stdout.write(json.dumps([code, text]) + "\n")
        sys.stdout.flush()


class Server:
    """The forking process, seen from a test."""

    def __init__(self, folder: Path) -> None:
        paths = os.pathsep.join((str(REPOSITORY / "src"), str(REPOSITORY)))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.execution.victim", str(folder)],
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert _line(self._process.stdout) == "ready\n"

    def start(self, order: Order) -> None:
        """Begin a conversion and do not wait for it."""
        assert self._process.stdin is not None
        fields = {name: getattr(order, name) for name in Order.__dataclass_fields__}
        self._process.stdin.write(json.dumps(fields) + "\n")
        self._process.stdin.flush()

    def outcome(self) -> Outcome:
        """Wait for the conversion that was begun."""
        return Outcome(*json.loads(_line(self._process.stdout)))

    def run(self, order: Order) -> Outcome:
        """Carry out one conversion."""
        self.start(order)
        return self.outcome()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def _line(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
