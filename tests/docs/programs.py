"""The commands that a reader has: ``reshard`` and ``python`` of this environment."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path


def path_with_reshard(folder: Path) -> str:
    """Make a folder of programs in ``folder``; return a PATH that begins with it."""
    programs = folder / ".bin"
    if not programs.exists():
        programs.mkdir(parents=True)
        reshard = programs / "reshard"
        reshard.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m reshard "$@"\n')
        reshard.chmod(0o755)
        python = programs / "python"
        python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        python.chmod(0o755)
    return f"{programs}{os.pathsep}{os.environ['PATH']}"
