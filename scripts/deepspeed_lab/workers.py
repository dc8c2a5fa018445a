"""Forks the workers of one job, waits for them, and kills all of them when one fails or hangs."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

GRACE_SECONDS = 3.0
"""How long the others may go on after one worker has failed."""


class JobError(RuntimeError):
    """A worker raised, died or hung."""


def run_job(
    function: Callable[..., object],
    arguments: tuple[object, ...],
    *,
    world: int,
    folder: Path,
    timeout: float,
) -> bytes:
    """Run ``function(*arguments)`` in ``world`` forked gloo workers.

    Return rank 0's answer, pickled. With ``world == 0`` one worker runs it without
    torch.distributed. ``folder`` takes the workers' output, their errors and the answer.
    """
    workers: dict[int, int] = {}
    for rank in range(max(world, 1)):
        pid = os.fork()
        if pid == 0:
            _worker(function, arguments, rank=rank, world=world, folder=folder)
        workers[pid] = rank
    if not _wait(workers, timeout):
        raise JobError(_what_went_wrong(folder, timeout))
    return (folder / "result").read_bytes()


def _wait(workers: dict[int, int], timeout: float) -> bool:
    """Wait for all; return whether all ended well and in time."""
    alive, good = set(workers), True
    deadline = time.monotonic() + timeout
    while alive and time.monotonic() < deadline:
        for pid in list(alive):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done == 0:
                continue
            alive.discard(pid)
            if status != 0 and good:
                good = False
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.01)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return good and not alive


def _what_went_wrong(folder: Path, timeout: float) -> str:
    """Return the first real error; a lost connection is only the echo of another rank's."""
    errors = [file.read_text() for file in sorted(folder.glob("rank*.error"))]
    errors.sort(key=lambda text: "Connection" in text or "gloo" in text)
    if errors:
        return errors[0]
    logs = "".join(file.read_text()[-1000:] for file in sorted(folder.glob("rank*.log")))
    return f"no answer after {timeout:.0f} s; the workers said:\n{logs}"


def _worker(
    function: Callable[..., object],
    arguments: tuple[object, ...],
    *,
    rank: int,
    world: int,
    folder: Path,
) -> NoReturn:
    """Be one worker; never returns."""
    status = 1
    try:
        die_with_parent()
        log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if world > 0:
            _join_the_others(rank, world, folder)
        result = function(*arguments)
        if rank == 0:
            (folder / "result").write_bytes(pickle.dumps(result))
        if world > 0:
            from torch import distributed

            distributed.barrier()
        status = 0
    except BaseException:  # noqa: BLE001  # whatever it is, the parent must hear of it
        (folder / f"rank{rank}.error").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _join_the_others(rank: int, world: int, folder: Path) -> None:
    """Meet through a file, not through a port that somebody else may take meanwhile."""
    import deepspeed

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        LOCAL_SIZE=str(world),
        GLOO_SOCKET_IFNAME="lo",
    )
    deepspeed.init_distributed(
        dist_backend="gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=world,
        auto_mpi_discovery=False,
        timeout=timedelta(seconds=100),
        verbose=False,
    )


def die_with_parent() -> None:
    """Have the kernel end this process when its parent ends (Linux only)."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
