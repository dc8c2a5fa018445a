"""What the manifest in a folder says that reshard wrote: its files, and the tensors in them.

Theory. Some folders are their own index: a universal folder from which a parameter's folder was
lost looks like a whole checkpoint of a smaller model. What reshard wrote has a manifest
(`reshard_manifest.json`) that lists every file, so there a loss can be told from a smaller model,
and is refused. Folders written by others have no manifest, and nothing is asked of them.

It also holds a digest of every byte, so when a folder is opened all that lies outside of tensors
is held against what was written. Of an archive that is also the checksums of its tensors, so files
that were exchanged or edited are found without reading a tensor.

The manifest is foreign like any other file: it is read once, within limits, to typed values or an
error. Its paths are compared with what is there and are never opened.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from reshard.errors import ArchiveError, CheckpointError, MissingFileError, count_text
from reshard.formats.folders import TagFolder

MANIFEST_NAME = "reshard_manifest.json"
MANIFEST_FORMAT = "reshard-manifest"
MANIFEST_VERSION = 1

LARGEST_MANIFEST = 1 << 30
"""Bytes of a manifest; that of a model of a thousand tensors on a thousand ranks has far fewer."""

_REMEDY = "remove it to read the folder without it; then nothing says whether a file is missing"
_FIX = "copy the file again, convert again, or remove the manifest if the folder was written anew"


@dataclass(frozen=True, slots=True)
class ManifestPart:
    """Bytes of one tensor state in one file, and their digest."""

    name: str
    state: str
    file: str
    offset: int
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """A file: its size, the digest of its bytes outside ``slots``, and its slots."""

    path: str
    nbytes: int
    rest: str
    slots: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Loss:
    """A file that the manifest lists and that is not there; a tensor of it, if it holds one."""

    path: str
    name: str | None = None
    state: str | None = None

    def error(self, folder: Path, found: str | None = None) -> MissingFileError:
        """The refusal that names the file."""
        return MissingFileError(
            "a file is missing that the manifest of the folder lists",
            file=folder / self.path,
            parameter=self.name,
            state=self.state,
            found=found,
            next_step=_FIX,
        )


@dataclass(frozen=True, slots=True)
class Listing:
    """What a manifest lists, by the paths at which the files of the folder are now."""

    files: Mapping[str, ManifestFile]
    """The files that are there."""
    parts: Mapping[str, tuple[ManifestPart, ...]]
    """The tensors in each, ascending by offset."""
    lost: tuple[Loss, ...] = ()
    """What is not there."""


def changed(what: str, file: str, part: ManifestPart | None = None) -> CheckpointError:
    """The refusal of a file that is no longer what the manifest says was written."""
    return CheckpointError(
        what,
        file=file,
        parameter=part.name if part else None,
        state=part.state if part else None,
        found=f"another digest or size than in {MANIFEST_NAME}",
        next_step=_FIX,
    )


# --------------------------------------------------------------------------- what is lost


def read_listing(folder: TagFolder) -> Listing | None:
    """Read what the manifest of a folder lists; None where it has none.

    Parameters
    ----------
    folder
        The tag folder; a file may also lie in one of its `also` folders.

    Raises
    ------
    ArchiveError
        The manifest is not one that this version of reshard reads.
    """
    path = folder.path / MANIFEST_NAME
    if not path.exists():
        return None
    document = manifest_document(path)
    held: dict[str, list[ManifestPart]] = {}
    for part in manifest_parts(document, path):
        held.setdefault(part.file, []).append(part)
    files, parts, lost = {}, {}, []
    for file in manifest_files(document, path):
        places = (place / file.path for place in (folder.path, *folder.also))
        found = next((str(place) for place in places if place.is_file()), None)
        inside = sorted(held.get(file.path, ()), key=lambda part: part.offset)
        if found is not None:
            files[found], parts[found] = file, tuple(inside)
        else:
            first = (inside[0].name, inside[0].state) if inside else ()
            lost.append(Loss(file.path, *first))
    return Listing(files, parts, tuple(lost))


def require_as_written(listing: Listing, paths: Iterable[str]) -> None:
    """Refuse files of another size than was written, or of other bytes outside the tensors.

    An archive has the checksums of its tensors there, so files that were exchanged are found.

    Raises
    ------
    CheckpointError
        A file was changed, or exchanged with another, since the folder was written.
    """
    for path in paths:
        file = listing.files.get(path)
        if file is None:
            continue
        size = Path(path).stat().st_size
        if size != file.nbytes:
            raise changed("a file has another size than was written", path)
        if _rest_of(path, file) != file.rest:
            part = next(iter(listing.parts.get(path, ())), None)
            raise changed("a file does not hold what was written", path, part)


def _rest_of(path: str, file: ManifestFile) -> str:
    """Digest of the bytes of a file outside its slots."""
    state = xxhash.xxh3_128()
    with Path(path).open("rb") as opened:
        at = 0
        for start, nbytes in (*file.slots, (file.nbytes, 0)):
            opened.seek(at)
            state.update(opened.read(max(start - at, 0)))
            at = start + nbytes
    return state.hexdigest()


def require_files(folder: TagFolder, suffix: str = "") -> Listing | None:
    """Refuse a folder that has lost a file, of those whose names end so; else its listing.

    Raises
    ------
    MissingFileError
        A file is not there.
    ArchiveError
        The manifest is not one that this version of reshard reads.
    """
    listing = read_listing(folder)
    lost = [loss for loss in listing.lost if loss.path.endswith(suffix)] if listing else []
    if lost:
        many = f"{count_text(len(lost), 'file')} missing"
        raise lost[0].error(folder.path, many)
    return listing


# --------------------------------------------------------------------------- reading


def manifest_document(path: Path) -> Mapping[str, object]:
    """Read a manifest as far as its format and version.

    Raises
    ------
    MissingFileError
        There is none.
    ArchiveError
        It is too long, no sound JSON, or of another format or version.
    """
    content = _json(path)
    if not isinstance(content, dict):
        raise ArchiveError(
            "the manifest is no JSON object", file=path, found=_shown(content), next_step=_REMEDY
        )
    said = (content.get("format"), content.get("version"))
    if said != (MANIFEST_FORMAT, MANIFEST_VERSION) or isinstance(said[1], bool):
        raise ArchiveError(
            "the manifest is of another version",
            file=path,
            expected=f"{MANIFEST_FORMAT} {MANIFEST_VERSION}",
            found=" ".join(map(_shown, said)),
            next_step=_REMEDY,
        )
    return content


def _json(path: Path) -> object:
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            found = os.fstat(file.fileno())
            text = file.read() if _is_readable(found) else b""
    except FileNotFoundError:
        raise MissingFileError("the folder has no manifest", file=path) from None
    except OSError as error:
        raise ArchiveError(
            "the manifest cannot be read", file=path, found=error.strerror, next_step=_REMEDY
        ) from error
    if not stat.S_ISREG(found.st_mode):
        raise ArchiveError(
            "the manifest cannot be read", file=path, found="no regular file", next_step=_REMEDY
        )
    if not _is_readable(found):
        raise ArchiveError(
            "the manifest is too long",
            file=path,
            expected=f"at most {LARGEST_MANIFEST} bytes",
            next_step=_REMEDY,
        )
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        said = "brackets nested too deep"
    except ValueError as error:
        said = str(error)
    raise ArchiveError("the manifest is not JSON", file=path, found=said, next_step=_REMEDY)


def _without_waiting(path: str, flags: int) -> int:
    """Open a pipe, too, which would otherwise wait for somebody who writes it."""
    return os.open(path, flags | os.O_NONBLOCK)


def _is_readable(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) and found.st_size <= LARGEST_MANIFEST


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is no JSON")


def manifest_files(document: Mapping[str, object], path: Path) -> tuple[ManifestFile, ...]:
    """Read the files that a manifest lists."""
    return tuple(_file(entry, path) for entry in entries(document, "files", path))


def manifest_parts(document: Mapping[str, object], path: Path) -> tuple[ManifestPart, ...]:
    """Read the tensors that a manifest lists."""
    return tuple(_part(entry, path) for entry in entries(document, "tensors", path))


def entries(document: Mapping[str, object], key: str, path: Path) -> list[object]:
    """Return the list under a key of the manifest."""
    listed = document.get(key)
    if not isinstance(listed, list):
        raise malformed(path, f"a list of {key}", listed)
    return listed


def malformed(path: Path, expected: str, found: object) -> ArchiveError:
    """The error of a manifest that says something else than it should."""
    return ArchiveError(
        "the manifest is malformed",
        file=path,
        expected=expected,
        found=_shown(found),
        next_step=_REMEDY,
    )


def _shown(found: object) -> str:
    """A foreign value, cut to a length that a line can hold; JSON has no deep ones here."""
    if isinstance(found, dict | list):
        return f"{'an object' if isinstance(found, dict) else 'a list'} of {len(found)}"
    text = json.dumps(found)
    return text if len(text) <= 80 else text[:77] + "..."


def _file(entry: object, path: Path) -> ManifestFile:
    expected = "[path, bytes, digest, slots] of a file"
    if not (isinstance(entry, list) and len(entry) == 4):
        raise malformed(path, expected, entry)
    name, nbytes, rest, slots = entry
    if not (_is_inside(name) and is_natural(nbytes) and isinstance(rest, str)):
        raise malformed(path, expected, name)
    if not (isinstance(slots, list) and all(map(_is_slot, slots))):
        raise malformed(path, f"[offset, bytes] of the slots of {name}", slots)
    return ManifestFile(name, nbytes, rest, tuple((start, size) for start, size in slots))


def _is_inside(name: object) -> bool:
    """Whether a value is a path that stays in the folder."""
    if not isinstance(name, str) or "\0" in name or "\\" in name:
        return False
    try:
        os.fsencode(name)
    except UnicodeEncodeError:  # half a character, which no file name can hold
        return False
    return all(part not in ("", ".", "..") for part in name.split("/"))


def is_natural(value: object) -> bool:
    """Whether a value is a natural number; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_slot(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_natural, value))


def _part(entry: object, path: Path) -> ManifestPart:
    if not isinstance(entry, dict):
        raise malformed(path, "an object for a tensor", entry)
    texts = [entry.get(word) for word in ("name", "state", "file", "digest")]
    numbers = [entry.get(word) for word in ("offset", "nbytes")]
    if not (all(isinstance(text, str) for text in texts) and all(map(is_natural, numbers))):
        raise malformed(path, "name, state, file, offset, nbytes, digest of a tensor", texts[0])
    name, state, file, digest = map(str, texts)
    return ManifestPart(name, state, file, entry["offset"], entry["nbytes"], digest)
