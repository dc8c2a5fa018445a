"""What a pointer file says before a run replaces it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from reshard.formats.folders import POINTER_LIMIT, pointer_bytes

if TYPE_CHECKING:
    from reshard.planning import Plan


def pointed_to(destination: Path, job: Plan) -> str | None:
    """Return what the pointer file of a plan names now, None when that will stay so.

    Parameters
    ----------
    destination
        The output folder; the pointer file lies beside it.
    job
        The plan that would write it.
    """
    if job.pointer is None:
        return None
    name, text = job.pointer
    said = named_by(destination.parent / name)
    return None if said == text.strip() else said


def named_by(pointer: Path) -> str | None:
    """Return what a pointer file names, None when there is none."""
    if not pointer.exists():
        return None
    return pointer_bytes(pointer)[:POINTER_LIMIT].decode("utf-8", "backslashreplace").strip()
