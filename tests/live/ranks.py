"""Ranks for tests: real processes with gloo, forked from a server that has imported torch once.

A *crew* is a set of ranks that lives until a rank is killed or has failed; jobs run on it one after
the other, so that a thousand cases cost a thousand exchanges and not a thousand starts. A job is a
function of :mod:`tests.live.jobs` by name, run on every rank with the same arguments; what each
rank returns, or the error it raised, comes back by rank.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

SERVER = "import sys; from tests.live import ranks; ranks.serve(int(sys.argv[1]))"
"""Imported, so that what it pickles is of this module and not of a program."""
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank raised."""

    kind: str
    text: str
    trace: str


class Crews:
    """Crews of ranks, by size; a context manager."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-c", SERVER, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            )
        self._connection = Connection(ours.detach())

    def run(self, job: str, *arguments: object, world: int, timeout: float = 120.0) -> list[Any]:
        """Run a job on all ranks of a crew; what each returned, a :class:`Failure`, or None.

        None is of a rank that died or did not answer in time.
        """
        self._connection.send((job, arguments, world, timeout))
        answers: list[Any] = pickle.loads(self._connection.recv_bytes())
        return answers

    def done(self, job: str, *arguments: object, world: int, timeout: float = 120.0) -> list[Any]:
        """The same, of a job that must do well on all ranks."""
        answers = self.run(job, *arguments, world=world, timeout=timeout)
        for rank, answer in enumerate(answers):
            if answer is None or isinstance(answer, Failure):
                trace = answer.trace if answer else "no answer"
                raise AssertionError(f"rank {rank}: {trace}")
        return answers

    def close(self) -> None:
        """End the server; the ranks end with it."""
        self._connection.close()
        self._server.terminate()
        self._server.wait()

    def __enter__(self) -> Crews:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


# ------------------------------------------------------------------------------------ the server


def serve(socket_number: int) -> None:
    """Serve jobs until the other end is closed."""
    from scripts.deepspeed_lab.workers import die_with_parent

    die_with_parent()
    connection = Connection(socket_number)
    importlib.import_module("tests.live.jobs")
    crews: dict[int, list[tuple[int, Connection]]] = {}
    while True:
        try:
            job, arguments, world, timeout = connection.recv()
        except EOFError:
            return
        if world not in crews:
            crews[world] = _crew(world)
        answers = _answers(crews[world], (job, arguments), timeout)
        if any(answer is None or isinstance(answer, Failure) for answer in answers):
            _end(crews.pop(world))  # its groups may be broken
        connection.send_bytes(pickle.dumps(answers))


def _crew(world: int) -> list[tuple[int, Connection]]:
    folder = tempfile.mkdtemp(prefix="ranks_")
    crew = []
    for rank in range(world):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            _be_rank(rank, world, f"file://{folder}/meeting", Connection(theirs.detach()))
        theirs.close()
        crew.append((pid, Connection(ours.detach())))
    return crew


def _answers(
    crew: list[tuple[int, Connection]], job: tuple[str, tuple[object, ...]], timeout: float
) -> list[Any]:
    for _, pipe in crew:
        pipe.send(job)
    answers: list[Any] = [None] * len(crew)
    waiting = {pipe: rank for rank, (_, pipe) in enumerate(crew)}
    while waiting:
        ready = wait(list(waiting), timeout)
        if not ready:
            break
        for pipe in [pipe for pipe in waiting if pipe in ready]:
            rank = waiting.pop(pipe)
            try:
                answers[rank] = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                answers[rank] = None
    return answers


def _end(crew: list[tuple[int, Connection]]) -> None:
    for pid, pipe in crew:
        pipe.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _be_rank(rank: int, world: int, meeting: str, pipe: Connection) -> NoReturn:
    from torch import distributed

    from scripts.deepspeed_lab.workers import die_with_parent

    die_with_parent()
    jobs = importlib.import_module("tests.live.jobs")
    distributed.init_process_group(
        "gloo",
        init_method=meeting,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    while True:
        try:
            name, arguments = pipe.recv()
        except (EOFError, ConnectionResetError):
            os._exit(0)
        try:
            answer = getattr(jobs, name)(*arguments)
        except Exception as error:  # noqa: BLE001 - the test judges it
            answer = Failure(type(error).__name__, str(error), traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))
