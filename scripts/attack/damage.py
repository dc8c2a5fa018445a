"""Bytes: flipped, overwritten, cut off, added, in parts of files that mean different things."""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.attack.room import Mutation, NothingToDoError, Room, replace

LOCAL_HEADER = 30
PICKLES = ("data.pkl", "version", "byteorder", ".format_version", ".storage_alignment")


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a file, and what it is."""

    what: str
    start: int
    length: int


def parts(content: bytes, name: str) -> list[Part]:
    """Cut a file into what its bytes mean."""
    if name.endswith(".safetensors"):
        header = 8 + struct.unpack("<Q", content[:8])[0]
        return [Part("header", 0, header), Part("tensor", header, len(content) - header)]
    if content[:2] == b"PK":
        return [part for part in _zip_parts(content) if part.length > 0]
    if name.endswith(".distcp"):
        return [Part("chunks", 0, len(content))]
    what = {".json": "json", ".metadata": "index"}.get(Path("x" + name).suffix, "whole")
    return [Part(what, 0, len(content))]


def _zip_parts(content: bytes) -> Iterator[Part]:
    try:
        archive = zipfile.ZipFile(io.BytesIO(content))
    except zipfile.BadZipFile:  # several archives in one file (DCP)
        yield Part("chunks", 0, len(content))
        return
    for info in archive.infolist():
        at = info.header_offset
        names, extra = struct.unpack("<HH", content[at + 26 : at + 30])
        data = at + LOCAL_HEADER + names + extra
        yield Part("local", at, data - at)
        yield Part("tensor" if "/data/" in info.filename else "pickle", data, info.file_size)
    start = archive.start_dir
    yield Part("directory", start, len(content) - start)


def flip(what: str) -> Mutation:
    """Return the mutation that flips one bit of a part of this kind."""

    def mutate(room: Room) -> str:
        path, part, content = _chosen(room, what)
        at = part.start + room.chance.randrange(part.length)
        bit = 1 << room.chance.randrange(8)
        replace(path, content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
        return f"bit {bit:#x} of byte {at} of {room.name(path)} ({part.what} at {part.start})"

    return mutate


def overwrite(what: str) -> Mutation:
    """Return the mutation that overwrites some bytes of a part by zeros or by chance."""

    def mutate(room: Room) -> str:
        path, part, content = _chosen(room, what)
        start = part.start + room.chance.randrange(part.length)
        length = min(room.chance.choice((1, 2, 4, 8, 64, 512)), part.start + part.length - start)
        new = room.chance.randbytes(length) if room.chance.random() < 0.7 else bytes(length)
        replace(path, content[:start] + new + content[start + length :])
        return f"{new[:8].hex()}… over {length} bytes at {start} of {room.name(path)} ({part.what})"

    return mutate


def _chosen(room: Room, what: str) -> tuple[Path, Part, bytes]:
    files = room.files()
    room.chance.shuffle(files)
    for path in files:
        content = path.read_bytes()
        fitting = [p for p in parts(content, path.name) if p.what == what and p.length]
        if fitting:
            return path, room.chance.choice(fitting), content
    raise NothingToDoError


def sealed_pickle(room: Room) -> str:
    """Change bytes of a pickle and give it the checksum that then holds."""
    path, _, content = _chosen(room, "pickle")
    archive = zipfile.ZipFile(io.BytesIO(content))
    info = next(i for i in archive.infolist() if i.filename.endswith("data.pkl"))
    names, extra = struct.unpack("<HH", content[info.header_offset + 26 : info.header_offset + 30])
    start = info.header_offset + LOCAL_HEADER + names + extra
    body = bytearray(content[start : start + info.file_size])
    changed = []
    for _ in range(room.chance.choice((1, 1, 1, 2, 5))):
        at = room.chance.randrange(len(body))
        body[at] = room.chance.randrange(256)
        changed.append(f"{at}={body[at]}")
    crc, old = zlib.crc32(body), struct.pack("<L", info.CRC)
    whole = content[:start] + bytes(body) + content[start + len(body) :]
    replace(path, whole.replace(old, struct.pack("<L", crc)))
    return f"bytes {', '.join(changed)} of the pickle of {room.name(path)}, checksum renewed"


def truncate(room: Room) -> str:
    """Cut a file short."""
    path = room.any_file()
    content = path.read_bytes()
    end = room.chance.choice((0, 1, room.chance.randrange(len(content)), len(content) - 1))
    replace(path, content[:end])
    return f"{room.name(path)} cut to {end} of {len(content)} bytes"


def extend(room: Room) -> str:
    """Add bytes at the end of a file."""
    path = room.any_file()
    content = path.read_bytes()
    added = room.chance.choice(
        (b"\0", b"\n", bytes(512), room.chance.randbytes(100), content[:4096], content)
    )
    replace(path, content + added)
    return f"{len(added)} bytes ({added[:4].hex()}…) after the end of {room.name(path)}"


def hole(room: Room) -> str:
    """Take bytes out of the middle, or put some in."""
    path = room.any_file()
    content = path.read_bytes()
    at, length = room.chance.randrange(len(content)), room.chance.choice((1, 4, 64))
    if room.chance.random() < 0.5:
        replace(path, content[:at] + content[at + length :])
        return f"{length} bytes taken out at {at} of {room.name(path)}"
    replace(path, content[:at] + bytes(length) + content[at:])
    return f"{length} zeros put in at {at} of {room.name(path)}"


def edit_header(room: Room) -> str:
    """Change the JSON header of a safetensors file, and its length."""
    path = _one_with(room, ".safetensors")
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    said = edit_json(room, header)
    new = json.dumps(header).encode()
    new += b" " * (-len(new) % 8)
    replace(path, struct.pack("<Q", len(new)) + new + content[8 + length :])
    return f"{room.name(path)}: {said}"


def edit_document(room: Room) -> str:
    """Change a value of a JSON file."""
    path = _one_with(room, ".json")
    document = json.loads(path.read_bytes())
    said = edit_json(room, document)
    replace(path, json.dumps(document, indent=1).encode())
    return f"{room.name(path)}: {said}"


def _one_with(room: Room, ending: str) -> Path:
    files = room.files(ending)
    if not files:
        raise NothingToDoError
    return room.chance.choice(files)


def edit_json(room: Room, document: Any) -> str:
    """Change one thing somewhere in a document, in place."""
    places = list(_places(document, ()))
    holder, key, path = room.chance.choice(places)
    where = "/".join(map(str, path))
    same = [(h, k, p) for h, k, p in places if h is not holder and type(h[k]) is type(holder[key])]
    choice = room.chance.randrange(3 if same else 2)
    if choice == 0:
        del holder[key]
        return f"{where} removed"
    if choice == 1:
        old = holder[key]
        holder[key] = _other_value(room, old)
        return f"{where}: {old!r:.40} -> {holder[key]!r:.40}"
    one, its, other = room.chance.choice(same)
    holder[key], one[its] = one[its], holder[key]
    return f"{where} and {'/'.join(map(str, other))} exchanged"


def _places(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, Any, tuple[Any, ...]]]:
    pairs = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in list(pairs):
        yield node, key, (*path, key)
        if isinstance(value, dict | list):
            yield from _places(value, (*path, key))


def _other_value(room: Room, old: Any) -> Any:
    if isinstance(old, bool) or old is None:
        return not old
    if isinstance(old, int):
        return room.chance.choice((old + 1, old - 1, 0, -old, 2 * old, 1 << 62))
    if isinstance(old, str):
        return room.chance.choice((old + "x", "", old[::-1], "../" + old))
    if isinstance(old, list):
        return room.chance.choice((old[::-1], old[:-1], old * 2, []))
    return room.chance.choice((None, "text", {}, 1.5))
