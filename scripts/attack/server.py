"""A process with reshard imported, that forks a limited child for every command.

One request a line on standard input, ``{"arguments": [...], "told": FOLDER}``; one answer a line on
standard output, ``{"code": N, "cpu": SECONDS, "memory": BYTES}``. What the command says goes into
the files ``out`` and ``err`` of the folder.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path

CPU_SECONDS = 20
WAIT_SECONDS = 120
"""For what waits without working, such as a read of a pipe that nobody writes."""
MEMORY = 1 << 30


def main() -> None:
    from reshard.cli.entry import main as reshard

    warm = sys.argv[1:]
    if warm:
        silent = os.open(os.devnull, os.O_WRONLY)
        kept = os.dup(1)
        os.dup2(silent, 1)
        reshard(warm)
        sys.stdout.flush()
        os.dup2(kept, 1)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(_run(request["arguments"], Path(request["told"]))), flush=True)


def _run(arguments: list[str], told: Path) -> dict[str, float]:
    child = os.fork()
    if child == 0:
        _be_child(arguments, told)
    _, status, usage = os.wait4(child, 0)
    return {
        "code": os.waitstatus_to_exitcode(status),
        "cpu": usage.ru_utime + usage.ru_stime,
        "memory": usage.ru_maxrss * 1024,
    }


def _be_child(arguments: list[str], told: Path) -> None:
    from reshard.cli.entry import main as reshard

    code = 99
    try:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(told / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - that of the child
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS + 1, CPU_SECONDS + 2))
        here = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (here + 3 * MEMORY, here + 3 * MEMORY))
        signal.alarm(WAIT_SECONDS)
        code = reshard(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - a child must end here, and say so
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
