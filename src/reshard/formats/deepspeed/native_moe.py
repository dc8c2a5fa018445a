"""Native DeepSpeed MoE: local expert numbers become global ones.

Theory. A native mixture-of-experts layer (`deepspeed.moe.layer.MoE`) keeps each expert as a module
of its own. Its parameters are called `<layer>.deepspeed_moe.experts.deepspeed_experts.<l>.…`, where
`l` counts the experts *of the rank*. So every rank of an expert-parallel group uses the same names
for different experts, in param_shapes, in the flat buffers and in the mappings. Only the expert
files use global numbers. Expert `l` of EP rank `r`, with `L` experts a rank, is global expert
`r * L + l`; that is the name it has from here on, at every degree (with one rank the two agree).

What no optimizer trains (frozen parameters and buffers of experts) is in the expert files only,
under its global name already.

With several tensor ranks there are two kinds. By default an expert is whole, and expert-parallel
groups run over all ranks, whatever their tensor rank (the layers are *spread*): an expert has one
file, of the tensor rank that has it. With `enable_expert_tensor_parallelism` every tensor rank has
expert-parallel groups of its own and a part of each expert, and every expert has as many files as
there are tensor ranks.

Source: `moe/layer.py`, `moe/experts.py`, `engine.py` (`_save_moe_checkpoint`), DeepSpeed 0.12 to
0.19.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reshard.errors import CheckpointError, MissingFileError
from reshard.formats.deepspeed.expert_files import (
    NATIVE_MARK,
    ExpertFiles,
    tensors_of,
)
from reshard.formats.deepspeed.names import expert_file_name
from reshard.formats.torch_archive import TensorRecord

EXPERTS_ARE_CUT = "experts_are_cut"
"""Key of the extra that says whether tensor ranks have parts of every native expert, or experts are
whole and spread over all ranks; absent where there is one tensor rank."""

_File = tuple[str, Mapping[str, TensorRecord]]
"""Path and tensors of the file of an expert."""


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """One native mixture-of-experts layer, as its expert files show it."""

    number: int
    """Its number in the names of the files."""
    prefix: str
    """Name of the experts, up to and with the mark: a parameter is `<prefix><expert>.<suffix>`."""
    experts: Mapping[int, Mapping[int, _File]]
    """Global number of an expert -> model-parallel rank -> path and tensors by *global* name, in
    the order of the module."""
    is_spread: bool = False
    """Whether every expert is whole on one of several tensor ranks."""

    @property
    def num_experts(self) -> int:
        """Number of experts of the layer."""
        return len(self.experts)

    def file_of(self, expert: int, mp: int) -> _File:
        """Path and tensors of an expert: those of a column, or the only ones where it is spread."""
        held = self.experts[expert]
        return next(iter(held.values())) if self.is_spread else held[mp]

    def suffixes(self, mp: int) -> list[str]:
        """Names of an expert's tensors without prefix and number, in the order of the module."""
        _, tensors = self.file_of(0, mp)
        return [split_name(name)[2] for name in tensors]


def is_native(name: str) -> bool:
    """Whether a name is of a native expert's parameter."""
    return NATIVE_MARK in f".{name}"


def split_name(name: str) -> tuple[str, int, str]:
    """Prefix, number and suffix of a native expert's parameter.

    Examples
    --------
    >>> split_name("moe.deepspeed_moe.experts.deepspeed_experts.3.up.weight")
    ('moe.deepspeed_moe.experts.deepspeed_experts.', 3, 'up.weight')
    """
    head, mark, rest = f".{name}".rpartition(NATIVE_MARK)
    number, _, suffix = rest.partition(".")
    if not mark or not number.isdecimal():
        raise CheckpointError("a name that should be of a native expert is not", parameter=name)
    return f"{head}{mark}"[1:], int(number), suffix


def global_name(name: str, ep_rank: int, local_experts: int) -> str:
    """The global name of a parameter that an EP rank knows by its local number.

    Examples
    --------
    >>> global_name("m.deepspeed_moe.experts.deepspeed_experts.1.w", ep_rank=2, local_experts=4)
    'm.deepspeed_moe.experts.deepspeed_experts.9.w'
    """
    prefix, number, suffix = split_name(name)
    return f"{prefix}{ep_rank * local_experts + number}.{suffix}"


def read_native_layers(
    files: ExpertFiles, counts: Mapping[int, int | None], ranks: Sequence[int], folder: object
) -> tuple[NativeLayer, ...]:
    """Read the expert files of the native layers of a stage.

    Parameters
    ----------
    files
        The expert files of the stage.
    counts
        Number of every native layer -> number of its experts, None where the model-state file does
        not state it.
    ranks
        Model-parallel ranks of the stage; each writes a file of every expert.
    folder
        Where a missing file is to be.

    Raises
    ------
    MissingFileError
        When the file of an expert is missing.
    CheckpointError
        When a file holds another expert than its name says.
    """
    return tuple(
        _read_layer(files, number, count, ranks, folder) for number, count in counts.items()
    )


def _read_layer(
    files: ExpertFiles, number: int, count: int | None, ranks: Sequence[int], folder: object
) -> NativeLayer:
    held = {expert: found for (layer, expert), found in files.items() if layer == number}
    total = max(held, default=0) + 1 if count is None else count
    is_spread = len(ranks) > 1 and all(len(found) == 1 for found in held.values())
    experts: dict[int, dict[int, _File]] = {}
    for expert in range(total):
        by_rank = {file.mp: file.path for file in held.get(expert, ())}
        wanted = [mp for mp in ranks if mp in by_rank][:1] or ranks[:1] if is_spread else ranks
        lost = [mp for mp in wanted if mp not in by_rank]
        if lost:
            raise _missing(folder, number, expert, lost[0], total)
        experts[expert] = {mp: _read_expert(by_rank[mp], expert) for mp in wanted}
    prefixes = {
        split_name(name)[0]
        for holders in experts.values()
        for _, tensors in holders.values()
        for name in tensors
    }
    extra = [
        file.path
        for expert, found in held.items()
        for file in found
        if expert >= total or file.mp not in ranks
    ]
    if extra or len(prefixes) != 1:
        odd = extra[0] if extra else next(iter(experts[0].values()))[0]
        raise _mixed(odd, total, ranks, prefixes)
    return NativeLayer(number, prefixes.pop(), experts, is_spread)


def _read_expert(path: Path, expert: int) -> _File:
    tensors = tensors_of(path)
    _require_expert(tensors, expert, str(path))
    return str(path), tensors


def _mixed(
    odd: object, total: int, ranks: Sequence[int], prefixes: Iterable[str]
) -> CheckpointError:
    return CheckpointError(
        "expert files that do not belong to one layer",
        file=odd,
        expected=f"experts 0 to {total - 1} of one module, of mp ranks "
        + ", ".join(map(str, ranks)),
        found=sorted(prefixes),
        next_step="some of them are left over from another run; move them away",
    )


def _missing(folder: object, layer: int, expert: int, mp: int, total: int) -> MissingFileError:
    return MissingFileError(
        "the file of an expert is missing",
        file=f"{folder}/{expert_file_name(layer, expert, mp)}",
        expected=f"files of experts 0 to {total - 1} of layer {layer}",
        next_step="copy it from the node that wrote it, or name its folder with --also",
    )


def _require_expert(tensors: Mapping[str, TensorRecord], expert: int, path: str) -> None:
    others = [name for name in tensors if not is_native(name) or split_name(name)[1] != expert]
    if others or not tensors:
        raise CheckpointError(
            "an expert file holds something else than its expert",
            file=path,
            expected=f"parameters of expert {expert}",
            found=", ".join(others[:3]) or "no tensor",
            next_step="the file is renamed, or of another run",
        )
