"""The entry point: run one command, return its exit code, whatever happens.

Theory. Typer parses; everything it may raise ends here as well as everything a command may raise,
so no path leads to a traceback. Typer's own error types are named through its public
``BadParameter``, because releases differ in where the rest of the family lives.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import typer

from reshard.cli import failure
from reshard.cli.app import app

COLLECT_AFTER = 100_000
"""New objects between two runs of the garbage collector."""

_USAGE_ERROR: type[BaseException] = typer.BadParameter.__bases__[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``reshard`` with these arguments (the process's own by default) and return its exit code.

    Examples
    --------
    >>> main(["--version"])
    reshard ...
    0
    """
    _prepare_process()
    _prepare_streams()
    if arguments is None and os.environ.get("RESHARD_DEBUG") != "1":
        warnings.simplefilter("ignore")  # of libraries; ours are in the reports
    json = "--json" in (sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(args=arguments, prog_name="reshard", standalone_mode=False)
        sys.stdout.flush()
    except _USAGE_ERROR as error:
        return _refuse_usage(error, json=json)
    except SystemExit as end:  # a shell has its completions, or whoever read our output has gone
        return failure.BROKEN_PIPE if end.code else failure.DONE
    except typer.Abort:
        return failure.refuse(KeyboardInterrupt(), json=json)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the last line of defence
        return failure.refuse(error, json=json)
    if code == failure.INTERRUPTED:  # as typer, from 0.16 on, tells an interrupt
        return failure.refuse(KeyboardInterrupt(), json=json)
    return code if isinstance(code, int) else failure.DONE


def _refuse_usage(error: BaseException, *, json: bool) -> int:
    message = " ".join(str(getattr(error, "format_message", error.__str__)()).split())
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "reshard"
    said = message.replace("Value error, ", "").replace("argument(s)", "argument").rstrip(".")
    line = f"{said[:1].lower()}{said[1:]}; next: {command} --help"
    if json:
        failure.write_error("UsageError", line, failure.REFUSED)
    failure.say_error(line)
    return failure.REFUSED


def _prepare_process() -> None:
    # Small checkpoints should feel instant. We never use linear algebra, so OpenBLAS, which comes
    # with NumPy, need not start its threads; and what is read and planned has hardly a cycle in
    # it, so the collector need not look at it again and again while it grows, nor at the end.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.set_threshold(COLLECT_AFTER)
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)


def _prepare_streams() -> None:
    # A stream may be closed from the start; and a name may hold characters that the encoding of
    # the terminal lacks, and must still be told.
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for good
            setattr(sys, name, nowhere)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
