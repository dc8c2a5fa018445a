"""A survey of a DCP folder: its index, and every data file that it names or does not.

Theory. The index says how long each data file must be at least: to the end of the last archive in
it. So missing and cut-short files are found without opening an archive, all at once. A data file
that the index does not name was left by an earlier save of more ranks into the same folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from reshard.errors import count_text
from reshard.formats.dcp.chunks import saving_rank
from reshard.formats.dcp.index import DATA_SUFFIX, METADATA, Index
from reshard.formats.dcp.metadata import read_index
from reshard.formats.folders import TagFolder
from reshard.formats.survey import AGAIN, Findings, Presence, RankFile, Survey

CHUNKS = "chunks"


def survey_dcp(folder: TagFolder) -> Survey:
    """Look at every file of a DCP folder, and collect what is wrong."""
    path = folder.path / METADATA
    if not path.is_file():
        return Survey()  # the reader says what there is instead
    findings = Findings()
    index = findings.opened(path, lambda _: read_index(path))
    presence = Presence.DAMAGED if index is None else Presence.PRESENT
    files = [RankFile("index", None, None, presence, str(path), path.stat().st_size)]
    if index is not None:
        files += [*_named(folder.path, index, findings), *_unnamed(folder, index, findings)]
    whole = all(file.presence in (Presence.PRESENT, Presence.STALE) for file in files)
    return Survey(tuple(files), tuple(findings.problems), whole=whole)


def _named(folder: Path, index: Index, findings: Findings) -> Iterator[RankFile]:
    """The data files that the index names."""
    ends: dict[str, int] = {}
    for place in index.places.values():
        ends[place.file] = max(ends.get(place.file, 0), place.offset + place.nbytes)
    entries = Counter(place.file for place in index.places.values())
    for name, end in sorted(ends.items()):
        path = folder / name
        nbytes = path.stat().st_size if path.is_file() else 0
        presence = Presence.PRESENT
        if not path.is_file():
            presence = Presence.MISSING
            findings.add(
                f"a data file is missing, with {count_text(entries[name], 'chunk')} and objects",
                path,
                "copy it from the node that wrote it",
            )
        elif nbytes < end:
            presence = Presence.DAMAGED
            findings.add(
                f"the file is cut short (expected at least {end} bytes, found {nbytes})",
                path,
                AGAIN,
            )
        yield RankFile(CHUNKS, saving_rank(name), None, presence, str(path), nbytes)


def _unnamed(folder: TagFolder, index: Index, findings: Findings) -> Iterator[RankFile]:
    """Data files that the index does not name."""
    known = {place.file for place in index.places.values()}
    for name, (path, *_) in folder.listing().items():
        if name.endswith(DATA_SUFFIX) and name not in known:
            findings.add(
                "the index does not name this data file: an earlier save left it",
                path,
                "delete it",
            )
            rank = saving_rank(name)
            yield RankFile(CHUNKS, rank, None, Presence.STALE, str(path), path.stat().st_size)
