"""The writer of safetensors sets, as transformers' ``from_pretrained`` wants them.

Theory. A set is headers, which are known beforehand, and whole tensors, each a slot. So a target is
all there is to say, and the plan, the memory bound, the crash safety and the comparison of replicas
are those of every other format.

*Which states.* Weights become ``model.safetensors``. Any other state that is selected becomes a set
of its own (``exp_avg.safetensors``), with the names of the parameters as keys, so that no loader of
weights meets it. Scalars and settings have no place in the format.

*Which element type.* The masters are fp32; a weight is rounded to the type that the model was
trained in, so what is served is what computed the last loss, bit for bit. Rules say otherwise for
some names or all. Buffers, integers and other states keep their type.

*Which names.* Every parameter, frozen ones and buffers too. A tied name is written a second time,
or dropped where the loader ties it again.

*Which file.* In the model's order, each file is filled up to the limit, as transformers does it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from reshard.errors import CheckpointError, UsageError
from reshard.formats.checkpoint import Checkpoint, Role, StoredTensor
from reshard.formats.dtypes import DType
from reshard.formats.model_dtypes import model_dtype, stated_dtypes
from reshard.formats.safetensors.companions import (
    CONFIG,
    carried,
    companions,
    link_notes,
    ties_embeddings,
)
from reshard.formats.safetensors.files import INDEX_SUFFIX, shard_name
from reshard.formats.safetensors.header import Entry, header_of
from reshard.formats.safetensors.options import WEIGHTS, SafetensorsOptions, Tied
from reshard.formats.safetensors.reader import STATE_KEY
from reshard.formats.target import Fill, OutputFile, Slot, Target
from reshard.layouts.builders import replicated_map

MODEL = "model"
"""What the files of weights are called."""


@dataclass(frozen=True, slots=True)
class Written:
    """One tensor of the output: its name, the tensor it is filled from, and its element type."""

    name: str
    source: StoredTensor
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Bytes in the output."""
        return self.source.numel * self.dtype.itemsize


def lay_out_safetensors(checkpoint: Checkpoint, *, options: SafetensorsOptions) -> Target:
    """Lay out a safetensors folder.

    Parameters
    ----------
    checkpoint
        What to write: each of its states becomes a set.
    options
        Element types, size of files, tied names.

    Raises
    ------
    UsageError
        A rule for element types meets no name, or one that cannot be rounded.
    UnsupportedError
        The format has no such element type.
    CheckpointError
        A name or a state cannot stand in the output.
    """
    _require_met(checkpoint, options)
    beside = companions(checkpoint.path, options.beside)
    tied = options.tied or (Tied.DROP if ties_embeddings(beside) else Tied.KEEP)
    aliases = checkpoint.aliases if tied is Tied.KEEP else {}
    files: list[OutputFile] = []
    written: list[Written] = []
    for state in dict.fromkeys(state for _, state in checkpoint.tensors):
        held = list(_of_state(checkpoint, state, aliases, options))
        files += _set(_stem(state), held, _metadata(state), options.max_shard_size)
        written += held
    files += carried(beside)
    notes = [*_rounding_notes(written), *_tie_notes(checkpoint, tied), *_other_notes(checkpoint)]
    notes += link_notes(beside)
    if CONFIG not in beside:
        notes.append(
            f"no {CONFIG} lies beside the source; from_pretrained needs one: "
            "bring one with --also DIR"
        )
    return Target("safetensors", tuple(files), None, tuple(notes))


def _require_met(checkpoint: Checkpoint, options: SafetensorsOptions) -> None:
    names = (*checkpoint.names, *checkpoint.aliases)
    for rule in options.dtypes:
        if not any(rule.meets(name) for name in names):
            raise UsageError(
                "a pattern for an element type matches no parameter",
                found=f"--dtype {rule.pattern}={rule.dtype}",
                next_step="reshard inspect --tensors '*' lists the names",
            )


def _stem(state: str) -> str:
    if state == WEIGHTS:
        return MODEL
    if state == MODEL or "/" in state or state in (".", "..") or not state.isprintable():
        raise CheckpointError(
            "a state cannot become the name of a file",
            state=repr(state),
            next_step="leave it out with --states",
        )
    return state


def _metadata(state: str) -> dict[str, str]:
    return {"format": "pt"} if state == WEIGHTS else {"format": "pt", STATE_KEY: state}


# --------------------------------------------------------------------------- tensors


def _of_state(
    checkpoint: Checkpoint, state: str, aliases: Mapping[str, str], options: SafetensorsOptions
) -> Iterator[Written]:
    """The tensors of one state under every name that is written, in the order of the model."""
    stated, configured = stated_dtypes(checkpoint), model_dtype(checkpoint)
    for name in _model_order(stated, (*checkpoint.names, *aliases)):
        source = checkpoint.tensors.get((aliases.get(name, name), state))
        if source is None:
            continue
        trained = stated.get(source.name, configured) if source.role is Role.PARAMETER else None
        dtype = _dtype(name, source, trained, options) if state == WEIGHTS else source.dtype
        yield Written(name, source, dtype)


def _model_order(stated: Iterable[str], names: Sequence[str]) -> list[str]:
    known = set(names)
    return list(dict.fromkeys((*(name for name in stated if name in known), *names)))


def _dtype(
    name: str, source: StoredTensor, trained: DType | None, options: SafetensorsOptions
) -> DType:
    """The element type of a weight: by rule, else as trained, else as it is stored."""
    is_buffer = source.role is Role.BUFFER
    chosen = options.dtype_of(name, is_buffer=is_buffer)
    if source.dtype.is_floating:
        return chosen or trained or source.dtype
    if any(rule.pattern == name for rule in options.dtypes):
        raise UsageError(
            "only floating-point elements are rounded", parameter=name, found=source.dtype
        )
    return source.dtype


# --------------------------------------------------------------------------- files


def _set(
    stem: str, held: Sequence[Written], metadata: Mapping[str, str], limit: int
) -> Iterator[OutputFile]:
    shards = _shards(held, limit)
    weight_map = {}
    for number, shard in enumerate(shards):
        path = shard_name(stem, number, len(shards))
        weight_map.update(dict.fromkeys((one.name for one in shard), path))
        yield _file(path, shard, metadata)
    if len(shards) > 1:
        yield _index(f"{stem}{INDEX_SUFFIX}", held, weight_map)


def _shards(held: Sequence[Written], limit: int) -> list[list[Written]]:
    """Cut a row of tensors into files, as transformers does: in order, each as full as can be."""
    shards: list[list[Written]] = []
    row: list[Written] = []
    nbytes = 0
    for one in held:
        if one.nbytes > limit:
            shards.append([one])
            continue
        if nbytes + one.nbytes > limit:
            shards.append(row)
            row, nbytes = [], 0
        row.append(one)
        nbytes += one.nbytes
    return [*shards, row] if row else shards


def _file(path: str, shard: Sequence[Written], metadata: Mapping[str, str]) -> OutputFile:
    head, entries = header_of([(one.name, one.dtype, one.source.shape) for one in shard], metadata)
    sources = {one.name: one.source for one in shard}
    slots = (_slot(entry, sources[entry.name], len(head)) for entry in entries if prod(entry.shape))
    size = len(head) + (entries[-1].stop if entries else 0)
    return OutputFile(path, size, ((0, head),), tuple(slots))


def _slot(entry: Entry, source: StoredTensor, data: int) -> Slot:
    whole = replicated_map(entry.shape, 1)
    fill = Fill(source.key, entry.dtype, whole, 0, cast=entry.dtype != source.dtype)
    return Slot(data + entry.start, entry.stop - entry.start, (fill,))


def _index(path: str, held: Sequence[Written], weight_map: Mapping[str, str]) -> OutputFile:
    metadata = {
        "total_parameters": sum(one.source.numel for one in held),
        "total_size": sum(one.nbytes for one in held),
    }
    table = {"metadata": metadata, "weight_map": weight_map}
    text = (json.dumps(table, indent=2, sort_keys=True) + "\n").encode()
    return OutputFile(path, len(text), ((0, text),))


# --------------------------------------------------------------------------- notes


def _rounding_notes(written: Iterable[Written]) -> Iterator[str]:
    changed = Counter(
        (one.source.dtype.name, one.dtype.name) for one in written if one.dtype != one.source.dtype
    )
    for (before, after), count in changed.items():
        many = "tensors go" if count > 1 else "tensor goes"
        yield f"{count} {many} from {before} to {after}, to the nearest number, ties to even"


def _tie_notes(checkpoint: Checkpoint, tied: Tied) -> Iterator[str]:
    for alias, owner in checkpoint.aliases.items():
        done = "is dropped" if tied is Tied.DROP else "is written as well"
        yield f"{alias}, which is tied to {owner}, {done}"


def _other_notes(checkpoint: Checkpoint) -> Iterator[str]:
    states = list(dict.fromkeys(state for _, state in checkpoint.scalars))
    if states:
        yield f"not written, for the format holds tensors only: {', '.join(states)}"
