"""The manifest: what an output holds, so that any later change can be found.

Theory. `reshard_manifest.json` lies in the output folder and says, in JSON, what wrote the output,
from which source (format, topology, versions, and of each file its name, size and fingerprint), by
which maps, and then for every tensor state where its bytes lie and their digest, and for every file
its size and the digest of the bytes outside the tensors. Together these cover every byte of the
output once. It names no clock, host or absolute path, so equal conversions have equal manifests.

One line a file or tensor, so that it can be read and compared with the usual tools. DeepSpeed opens
only the file names it knows, so a JSON file beside them does not disturb it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.execution.digests import DIGEST_NAME
from reshard.execution.output import filled_ranges
from reshard.execution.replicas import ReplicaFinding
from reshard.formats.manifest import (
    MANIFEST_FORMAT,
    MANIFEST_NAME,
    MANIFEST_VERSION,
    ManifestFile,
    ManifestPart,
    entries,
    is_natural,
    malformed,
    manifest_document,
    manifest_files,
    manifest_parts,
)

if TYPE_CHECKING:
    from reshard.execution.journal import Records
    from reshard.planning.plan import Plan

LARGEST_MAP_PIECES = 4096


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a manifest says about an output."""

    files: tuple[ManifestFile, ...]
    parts: tuple[ManifestPart, ...]
    """Its bytes."""
    plan: str
    sources: tuple[tuple[str, int, str], ...]
    """The digest of the plan, and `(name, bytes, digest)` of the files it was made from."""
    findings: tuple[ReplicaFinding, ...]
    """Replicas that differ and were let through."""


def manifest_text(
    plan: Plan,
    records: Records,
    fingerprints: Sequence[tuple[str, int, str]],
    findings: Sequence[ReplicaFinding],
    version: str,
) -> str:
    """The manifest of a finished output.

    Parameters
    ----------
    plan
        What was carried out.
    records
        Digests of all slots and files.
    fingerprints
        `(name, bytes, digest)` of the source files.
    findings
        Replicas that differ and were let through.
    version
        Version of reshard.
    """
    routes = {id(route): number for number, route in enumerate(plan.routes)}
    head: dict[str, object] = {
        "format": MANIFEST_FORMAT,
        "version": MANIFEST_VERSION,
        "reshard": version,
        "output": plan.format,
        "plan": plan.digest(),
        "digest": DIGEST_NAME,
        "source": {
            "format": plan.origin.format,
            "topology": plan.origin.topology,
            "versions": dict(plan.origin.versions),
        },
        "replicas": {"policy": plan.replicas, "differ": [_finding(f) for f in findings]},
    }
    sections = {
        "sources": (list(source) for source in fingerprints),
        "maps": _maps(plan),
        "files": _files(plan, records),
        "tensors": _tensors(plan, records, routes),
    }
    return "".join(_pieces(head, sections))


def _pieces(head: Mapping[str, object], sections: Mapping[str, Iterator[object]]) -> Iterator[str]:
    """A JSON object with one line an entry of the head and of each section."""
    yield "{\n"
    yield "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
    for number, (key, listed) in enumerate(sections.items()):
        lines = ",\n".join(json.dumps(entry) for entry in listed)
        comma = "," if number + 1 < len(sections) else ""
        yield f"{json.dumps(key)}: [\n{lines}\n]{comma}\n"
    yield "}\n"


def _finding(finding: ReplicaFinding) -> dict[str, object]:
    return {
        "name": finding.key[0],
        "state": finding.key[1],
        "count": finding.count,
        "first": finding.first,
        "largest": repr(finding.largest),
        "files": list(finding.files),
    }


def _maps(plan: Plan) -> Iterator[object]:
    for route in plan.routes:
        source = route.source_map
        small = source is not None and sum(1 for _ in source.pieces()) <= LARGEST_MAP_PIECES
        yield source.to_dict() if source is not None and small else None


def _files(plan: Plan, records: Records) -> Iterator[object]:
    for number, file in enumerate(plan.files):
        filled = [list(range_) for range_ in filled_ranges(file)]
        yield [file.path, file.size, records.files[number], filled]


def _tensors(plan: Plan, records: Records, routes: Mapping[int, int]) -> Iterator[object]:
    for number, file in enumerate(plan.files):
        for index, slot in enumerate(file.slots):
            digests = records.slots[number, index].digests
            for fill, digest in zip(slot.fills, digests, strict=True):
                yield {
                    "name": fill.key[0],
                    "state": fill.key[1],
                    "dtype": fill.dtype.name,
                    "shape": list(fill.shape),
                    "file": file.path,
                    "offset": slot.offset + fill.offset,
                    "nbytes": fill.nbytes,
                    "digest": digest,
                    "map": routes[id(fill.route)],
                }


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of an output.

    Parameters
    ----------
    folder
        The output folder.

    Raises
    ------
    MissingFileError
        When there is none.
    ArchiveError
        When it is not one that this version of reshard reads.
    """
    path = folder / MANIFEST_NAME
    content = manifest_document(path)
    plan, replicas = content.get("plan"), content.get("replicas")
    if not isinstance(plan, str) or not isinstance(replicas, dict):
        raise malformed(path, "a plan and replicas", plan)
    return Manifest(
        manifest_files(content, path),
        manifest_parts(content, path),
        plan,
        tuple(_source(entry, path) for entry in entries(content, "sources", path)),
        tuple(_read_finding(entry, path) for entry in entries(replicas, "differ", path)),
    )


def _source(entry: object, path: Path) -> tuple[str, int, str]:
    if isinstance(entry, list) and len(entry) == 3:
        name, size, digest = entry
        if isinstance(name, str) and isinstance(digest, str) and is_natural(size):
            return name, size, digest
    raise malformed(path, "[name, bytes, digest] of a source", entry)


def _read_finding(entry: object, path: Path) -> ReplicaFinding:
    if not isinstance(entry, dict):
        raise malformed(path, "an object for copies that differ", entry)
    words = [entry.get(word) for word in ("name", "state", "largest")]
    count, first, files = (entry.get(word) for word in ("count", "first", "files"))
    try:
        largest = float(str(words[2]))
    except ValueError:
        raise malformed(path, "the largest difference of two copies", words[2]) from None
    if not (isinstance(files, list) and all(isinstance(text, str) for text in (*words, *files))):
        raise malformed(path, "name, state and files of copies that differ", words[0])
    if not (is_natural(count) and is_natural(first)):
        raise malformed(path, "count and first of copies that differ", words[0])
    return ReplicaFinding(
        (str(words[0]), str(words[1])), entry["count"], entry["first"], largest, (), tuple(files)
    )
