"""The order of EP ranks where no file has the configuration: told by the weights, or refused.

Theory. Over which ranks experts are spread in which order is a key of the configuration
(`expert_buffers`). A configuration given to DeepSpeed as a path is not in the checkpoint. Both
orders are then tried: under the right one every master, rounded to the model's dtype, is the weight
in the expert file. If exactly one order passes it is the one; if both or none do, nothing is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reshard.errors import CheckpointError
from reshard.formats.deepspeed.contiguous import add_contiguous
from reshard.formats.deepspeed.expert_buffers import by_ep_rank, refuse_untold_order
from reshard.formats.deepspeed.expert_files import ExpertFiles, tensors_of
from reshard.formats.deepspeed.experts import ExpertLayer
from reshard.formats.deepspeed.native_moe import NativeLayer, split_name
from reshard.formats.deepspeed.partitions import Buffer, Fragment, Part, Partitions
from reshard.formats.deepspeed.unlisted import is_weight_of

Holders = Sequence[tuple[Part, ...]]
Check = Callable[[str, int, Fragment], bool]
"""Whether a fragment of a parameter's shard (name, column) holds the weights of the model."""


def tell_order(
    pool: Sequence[Part],
    ep: int,
    what: str,
    lay_out: Callable[[Holders], list[Buffer]],
    check: Check,
) -> bool:
    """Whether data ranks come first, by the weights.

    Parameters
    ----------
    pool
        All ranks that share the experts.
    ep
        The expert-parallel degree.
    what
        A parameter of the group, for the message.
    lay_out
        From holders by EP rank to buffers.
    check
        Compares a fragment with the weights.

    Raises
    ------
    UnsupportedError
        When the weights do not tell.
    """
    edp = len(pool) // ep
    fitting = [
        data_first
        for data_first in (False, True)
        if _fits(lay_out(by_ep_rank(pool, edp, data_first=data_first)), check)
    ]
    if len(fitting) != 1:
        raise refuse_untold_order(pool, ep, what)
    return fitting[0]


def _fits(buffers: Sequence[Buffer], check: Check) -> bool:
    found = Partitions()
    try:
        for buffer in buffers:
            add_contiguous(found, buffer)
    except CheckpointError:
        return False
    return all(
        check(name, column, fragment)
        for name, columns in found.shards.items()
        for column, shard in columns.items()
        for fragment in shard.fragments
    )


def fused_check(layers: dict[str, ExpertLayer], files: ExpertFiles) -> Check:
    """Compare with the files of fused experts; the column is the EP rank."""

    def check(name: str, column: int, fragment: Fragment) -> bool:
        layer = layers[name]
        held = layer.placement.experts_by_rank[column]
        each = fragment.shard_numel // len(held)
        position = fragment.shard_start // each if each else 0
        file = files[layer.number, held[position]][0]
        record = tensors_of(file.path).get(f"{name}.{held[position]}")
        if record is None:
            return False
        return is_weight_of(fragment, str(file.path), record, skip=position * each)

    return check


def native_check(layers: Sequence[NativeLayer]) -> Check:
    """Compare with the files of native experts; the column is the model-parallel rank."""
    by_prefix = {layer.prefix: layer for layer in layers}

    def check(name: str, column: int, fragment: Fragment) -> bool:
        prefix, expert, _ = split_name(name)
        path, tensors = by_prefix[prefix].experts[expert][column]
        return is_weight_of(fragment, path, tensors[name])

    return check
