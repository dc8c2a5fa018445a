"""Experts of DeepSpeed's own MoE layers, as a target has them: their order, ranks and names.

Theory. A native layer keeps every expert as a module of its own. A checkpoint here has them under
their global numbers; a rank of the target has experts `r * L` to `(r + 1) * L - 1` of a layer and
calls them 0 to `L - 1`. So where AutoEP cuts one fused parameter, here whole parameters are dealt
out, and all that changes inside a rank's files is the number in the name.

The optimizer lists parameters in the order of the model: layer by layer, expert by expert. A source
lists the experts of its first rank, then those of the second; merged into the order of the model
they serve every degree. Where the source's own ranks list theirs in another order, how it was made
is not known, and it is refused.

Source: `moe/layer.py`, `moe/experts.py`, `moe/utils.py`
(`split_params_into_different_moe_groups_for_optimizer`), DeepSpeed 0.12 to 0.19.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.native_moe import split_name
from reshard.formats.deepspeed.writing.cuts import Cut
from reshard.geometry import AffinePiece, ParamAffineMap
from reshard.geometry.index_math import row_major_strides

Place = tuple[int, int, int]
"""Where an expert's parameter is in the model: layer, expert, place in the expert."""


def count_experts(names: Iterable[str]) -> dict[str, int]:
    """Number of experts of every layer, by prefix, in the order in which layers first appear."""
    counts: dict[str, int] = {}
    for name in names:
        prefix, number, _ = split_name(name)
        counts[prefix] = max(counts.get(prefix, 0), number + 1)
    return counts


def in_model_order(names: Sequence[str], ep: int) -> list[str]:
    """The experts of a parameter group in the order of the model.

    Parameters
    ----------
    names
        Global names in the order of the source: those of its first EP rank, then of the next.
    ep
        Expert-parallel degree of the source.

    Raises
    ------
    UnsupportedError
        When the ranks of the source list their experts in another order.

    Examples
    --------
    >>> m = "m.deepspeed_moe.experts.deepspeed_experts."
    >>> n = "n.deepspeed_moe.experts.deepspeed_experts."
    >>> names = in_model_order([f"{m}0.w", f"{n}0.w", f"{m}1.w", f"{n}1.w"], 2)
    >>> [name[0] + name[-3] for name in names]
    ['m0', 'm1', 'n0', 'n1']
    """
    counts = count_experts(names)
    layers = list(counts)
    suffixes: dict[str, dict[str, int]] = {prefix: {} for prefix in layers}
    for name in names:
        prefix, _, suffix = split_name(name)
        suffixes[prefix].setdefault(suffix, len(suffixes[prefix]))

    def place(name: str) -> Place:
        prefix, number, suffix = split_name(name)
        return layers.index(prefix), number, suffixes[prefix][suffix]

    def rank(name: str) -> int:
        prefix, number, _ = split_name(name)
        return number * ep // counts[prefix]

    expected = sorted(names, key=lambda name: (rank(name), place(name)))
    if expected != list(names):
        wrong = next(a for a, b in zip(names, expected, strict=True) if a != b)
        raise UnsupportedError(
            "the optimizer does not list experts in the order of the model, so their order on "
            "other ranks is not known",
            parameter=wrong,
            next_step="convert to universal instead",
        )
    return sorted(names, key=place)


def cut_to_rank(shape: tuple[int, ...], rank: int) -> Cut:
    """The cut of a parameter that only one rank has, whole."""
    strides = row_major_strides(shape)
    piece = AffinePiece(shape, 0, strides, 0, strides, (rank,))
    return Cut.exact(ParamAffineMap(shape, {rank: shape}, {rank: (piece,)}))


def local_names(names: Iterable[str], counts: Mapping[str, int], ep: int) -> dict[str, str]:
    """What a rank of the target calls its experts, by their global names."""
    found = {}
    for name in names:
        prefix, number, suffix = split_name(name)
        found[name] = f"{prefix}{number % (counts[prefix] // ep)}.{suffix}"
    return found
