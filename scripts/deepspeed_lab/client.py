"""Starts the lab's server and asks it for jobs. Imports neither torch nor DeepSpeed."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from scripts.deepspeed_lab.workers import JobError

ROOT = Path(__file__).resolve().parents[2]


class Lab:
    """A server process with everything imported; a context manager.

    Jobs are named after the functions of :mod:`scripts.deepspeed_lab.jobs`. The server dies with
    this process, however this process dies, and the workers die with the server.
    """

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by close()
        ours, theirs = socket.socketpair()
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "scripts.deepspeed_lab.server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
            )
        self._connection = Connection(ours.detach())
        self._ready = False

    def run(self, job: str, *arguments: object, world: int, timeout: float = 120.0) -> Any:
        """Run one job in ``world`` workers (0: one process, no torch.distributed).

        Raises
        ------
        JobError
            A worker raised (the text is its traceback), died, or did not answer in time.
        """
        try:
            if not self._ready:
                self._ready = bool(self._connection.recv())
            self._connection.send((job, arguments, world, timeout))
            verdict, result = self._connection.recv()
        except (EOFError, BrokenPipeError) as error:
            raise JobError(f"the lab's server died; it said:\n{self._output()}") from error
        if verdict == "failed":
            raise JobError(result)
        return pickle.loads(result)  # noqa: S301  # pickled by our own worker

    def close(self) -> None:
        """End the server."""
        self._connection.close()
        self._server.terminate()
        self._server.wait()
        self._log.close()

    def _output(self) -> str:
        self._server.kill()
        self._server.wait()
        self._log.seek(0)
        return self._log.read()

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
