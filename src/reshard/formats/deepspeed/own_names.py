"""The name that a file was written under, against the name that it has.

Theory. What a file of DeepSpeed is, its name says and little else: rank, layer, expert. But
`torch.save` calls the one folder inside its archive after the file that it writes. A file that was
renamed, or copied over another one, still carries its own name there. Archives that were written
through an open file are all called `archive`, and say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from reshard.errors import CheckpointError
from reshard.formats.deepspeed.names import FileKind, parse_file_name

_OF_NO_RANK = {FileKind.LAYER: "layer", FileKind.EXPERT: "expert"}
"""Whose file it is, where the name does not begin with a rank."""

_RENAMED = "the file was renamed or copied over another; give it back its name"
_OVERWRITTEN = (
    "the right file is gone: the one of that name was copied over it; copy it again from where it "
    "was written"
)


def require_own_names(carried: Mapping[str, str]) -> None:
    """Refuse a file that `torch.save` wrote under the name of another one.

    Parameters
    ----------
    carried
        Path of each file -> the name inside its archive.
    """
    for file, whose, fix in wrongly_named(carried):
        raise CheckpointError(
            f"a file carries the name of another {whose}",
            file=file,
            expected=f"what was written as {Path(file).name}",
            found=f"{carried[file]}.pt",
            next_step=fix,
        )


def wrongly_named(carried: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield the files that were written under another name: path, of what, what to do.

    Where the file of that name is there too, and is the right one, this one is a copy of it.

    Parameters
    ----------
    carried
        Path of each file -> the name inside its archive.
    """
    named = {
        file: (parse_file_name(Path(file).name), parse_file_name(f"{name}.pt"))
        for file, name in carried.items()
    }
    right = {own for own, written in named.values() if own == written}
    for file, (own, written) in named.items():
        if own is not None and written is not None and own != written:
            whose = _OF_NO_RANK.get(own.kind, "rank")
            yield file, whose, _OVERWRITTEN if written in right else _RENAMED
