"""The report of ``reshard inspect``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.cli.blocks import Block, Tone, fields, lines, table
from reshard.cli.units import counted, format_bytes, format_count, format_shape
from reshard.cli.values import brief
from reshard.geometry.notation import ranks_text

if TYPE_CHECKING:
    from reshard.api import Inspection
    from reshard.errors import UnknownLayoutError
    from reshard.formats.checkpoint import Checkpoint, SourceFile, StoredTensor
    from reshard.names.translation import Translation

_GROUP_EXTRAS = ("groups", "param_groups")
"""The extras that every format uses for the parameter groups: names, and hyperparameters."""
_OWN_EXTRAS = ("lists_frozen", "model_files", "restore_keys")
"""What readers keep for writers; it says nothing to a person, and ``--json`` names it."""
_HYPERPARAMETERS_LIMIT = 400
_FEW = 4


def inspection_blocks(inspection: Inspection) -> Iterator[Block]:
    """Give the blocks of a whole inspection, in reading order."""
    checkpoint = inspection.checkpoint
    yield _header(inspection)
    yield _files(inspection)
    yield _states(inspection)
    yield table("scalars", "state value >parameters", _scalar_rows(checkpoint))
    yield table("groups", "group >parameters hyperparameters", _group_rows(checkpoint))
    yield table("tied names", "name is", sorted(checkpoint.aliases.items()))
    yield table("extras", "key value file", _extra_rows(checkpoint))
    yield table(
        "inert records", "where what file", ((r.where, r.what, r.file) for r in inspection.inert)
    )
    if inspection.listed:
        yield tensor_table(inspection.listed)
    yield lines("problems", checkpoint.problems, Tone.NOTICE)


def names_blocks(translations: Iterable[Translation]) -> Iterator[Block]:
    """Give what rules of names would make of a checkpoint, and which of them meet nothing."""
    for one in translations:
        yield table(
            f"names of {one.target_side}, by {one.rules.source}",
            "name shape from rule",
            (
                (
                    made.name,
                    format_shape(made.join.map.logical_shape),
                    ", ".join(made.sources[:_FEW]) + (", ..." if len(made.sources) > _FEW else ""),
                    made.rule.text.partition(" (")[0],
                )
                for made in one.solution.made
            ),
        )
        yield lines("left out, as the rules say", one.solution.dropped)
        yield lines("rules that meet nothing", (rule.text for rule in one.solution.unused))


def tensor_table(tensors: Iterable[StoredTensor]) -> Block:
    """Return one row for each tensor, with where its map came from."""
    return table(
        "tensors",
        "name state shape dtype >bytes >holders role map",
        (
            (
                tensor.name,
                tensor.state,
                format_shape(tensor.shape),
                tensor.dtype,
                format_count(tensor.nbytes),
                len(tensor.regions),
                tensor.role.value,
                tensor.provenance,
            )
            for tensor in tensors
        ),
    )


def file_table(files: Iterable[SourceFile]) -> Block:
    """Return one row for each file."""
    return table(
        "files",
        "name >bytes",
        ((Path(file.path).name, format_count(file.nbytes)) for file in files),
    )


def unknown_layouts(error: UnknownLayoutError) -> Block:
    """Return one row for each parameter whose layout nobody states, with its shards."""
    return table(
        "parameters whose layout nobody states",
        "name shard ranks",
        (
            (name, format_shape(shape), ranks_text(ranks))
            for name, shards in error.shards.items()
            for shape, ranks in _by_shape(shards).items()
        ),
    )


def _by_shape(shards: Mapping[int, tuple[int, ...]]) -> dict[tuple[int, ...], list[int]]:
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, shape in shards.items():
        ranks.setdefault(shape, []).append(rank)
    return ranks


def shown_path(file: str, checkpoint: Checkpoint) -> str:
    """Return the path of a file as short as it is clear: inside the checkpoint, relative to it."""
    inside = file.startswith(checkpoint.path.rstrip("/") + "/")
    return str(Path(file).relative_to(checkpoint.path)) if inside else file


def facts_of(inspection: Inspection) -> tuple[tuple[str, object], ...]:
    """What a checkpoint is in a few words: pairs of a label and what it says."""
    checkpoint = inspection.checkpoint
    roles = ", ".join(
        counted(number, role.value if role.value != "frozen" else "frozen parameter")
        for role, number in inspection.roles.items()
    )
    versions = ", ".join(f"{name} {version}" for name, version in checkpoint.versions.items())
    return (
        ("format", checkpoint.format),
        ("versions", versions),
        ("topology", checkpoint.topology),
        ("holds", roles),
        ("elements", format_count(inspection.numel)),
        ("tensor bytes", f"{format_bytes(checkpoint.nbytes)}, not read"),
    )


def _header(inspection: Inspection) -> Block:
    path = inspection.checkpoint.path
    where = (("path", path), ("tag", Path(path).name))
    return fields("checkpoint", (*where, *facts_of(inspection)))


def _files(inspection: Inspection) -> Block:
    rows = [(f.kind, format_count(f.files), format_bytes(f.nbytes)) for f in inspection.files]
    if len(rows) > 1:
        total = sum(file.nbytes for file in inspection.checkpoint.files)
        rows.append(("all", format_count(len(inspection.checkpoint.files)), format_bytes(total)))
    return table("files", "kind >files >size", rows)


def _states(inspection: Inspection) -> Block:
    return table(
        "states",
        "state >tensors >elements dtypes >size",
        (
            (
                state.state,
                format_count(state.tensors),
                format_count(state.numel),
                ", ".join(state.dtypes),
                format_bytes(state.nbytes),
            )
            for state in inspection.states
        ),
    )


def _scalar_rows(checkpoint: Checkpoint) -> list[tuple[str, str, str]]:
    found: dict[tuple[str, str], int] = {}
    for (_, state), scalar in checkpoint.scalars.items():
        key = (state, repr(scalar.value))
        found[key] = found.get(key, 0) + 1
    return [(state, value, format_count(n)) for (state, value), n in found.items()]


def _group_rows(checkpoint: Checkpoint) -> list[tuple[object, ...]]:
    names, settings = (_listed(checkpoint, key) for key in _GROUP_EXTRAS)
    return [
        (
            index,
            len(members) if isinstance(members, Sized) else "",
            brief(hyperparameters, limit=_HYPERPARAMETERS_LIMIT),
        )
        for index, (members, hyperparameters) in enumerate(
            zip_longest(names, settings, fillvalue="")
        )
    ]


def _listed(checkpoint: Checkpoint, key: str) -> Sequence[object]:
    extra = checkpoint.extras.get(key)
    value = extra.value if extra is not None else None
    return value if isinstance(value, list | tuple) else ()


def _extra_rows(checkpoint: Checkpoint) -> list[tuple[str, str, str]]:
    return [
        (key, brief(extra.value), shown_path(extra.file, checkpoint))
        for key, extra in checkpoint.extras.items()
        if key not in _GROUP_EXTRAS and key not in _OWN_EXTRAS
    ]
