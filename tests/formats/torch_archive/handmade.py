"""Archives and pickles made by hand, opcode by opcode."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

from reshard.formats.torch_archive import Archive, read_archive

STORAGE = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x04tQ"
"""A persistent id: storage 0, four floats."""

HOOKS = b"ccollections\nOrderedDict\n)R"


def text(value: str) -> bytes:
    """The opcode for a text."""
    raw = value.encode()
    return b"X" + len(raw).to_bytes(4, "little") + raw


def named(path: str) -> bytes:
    """The opcode for a global, `module name` with a blank."""
    module, name = path.split(" ")
    return f"c{module}\n{name}\n".encode()


def stack_named(module: str, name: str) -> bytes:
    """The protocol 4 opcodes for a global."""
    return text(module) + text(name) + b"\x93"


def tensor(
    *,
    storage: bytes = STORAGE,
    offset: bytes = b"K\0",
    shape: bytes = b"K\x04\x85",
    strides: bytes = b"K\x01\x85",
    rest: bytes = b"\x89" + HOOKS,
) -> bytes:
    """The opcodes for a tensor of four floats, or a wrong one."""
    place = storage + offset + shape + strides
    return named("torch._utils _rebuild_tensor_v2") + b"(" + place + rest + b"tR"


def archive_bytes_at(path: Path, pickle: bytes, records: Mapping[str, bytes] | None = None) -> Path:
    """Write an archive with that pickle and storage 0 of four floats."""
    content = {
        "data.pkl": pickle,
        "byteorder": b"little",
        "data/0": bytes(range(16)),
        "version": b"3\n",
        **(records or {}),
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as zipped:
        for name, data in content.items():
            zipped.writestr(f"x/{name}", data)
    return path


def read_pickle(folder: Path, pickle: bytes) -> Archive:
    """Open an archive with that pickle; a missing header and end are added."""
    whole = pickle if pickle.startswith(b"\x80") else b"\x80\x02" + pickle + b"."
    return read_archive(archive_bytes_at(folder / "handmade.pt", whole))
