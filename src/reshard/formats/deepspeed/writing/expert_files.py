"""The expert files below ZeRO-3: the weights of one expert of one layer each.

Theory. Below ZeRO-3 experts are left out of the model-state file, because every EP rank would write
others under the same names. Each has a file of its own, under its number in the whole layer, so the
files do not depend on the degree.

Source: `engine.py` (`_save_moe_checkpoint`, `load_moe_state_dict`), DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from reshard.formats.deepspeed.names import expert_file_name
from reshard.formats.deepspeed.native_moe import split_name
from reshard.formats.deepspeed.partitions import MASTER
from reshard.formats.deepspeed.writing.archives import ArchiveShelf, Bulk
from reshard.formats.deepspeed.writing.expert_blocks import ExpertBlock
from reshard.formats.deepspeed.writing.folded import FOLDING, Writer
from reshard.formats.deepspeed.writing.model_files import Column, weight
from reshard.formats.target import OutputFile
from reshard.layouts.builders import contiguous_split_map


def expert_files(column: Column) -> Iterator[OutputFile]:
    """Every expert file of a column; none under ZeRO-3, or without experts."""
    if column.experts is None or column.options.stage == 3:
        return
    shelf, grid = ArchiveShelf(), column.experts
    # with several tensor ranks each column writes only the experts that its own ranks have
    holders = grid.first_holders(column.tp)
    for block in grid.blocks:
        for expert in range(block.num_experts):
            ep_rank = expert * grid.ep // block.num_experts
            if ep_rank not in holders:
                continue
            bulk = Bulk()
            if grid.is_native:
                root = dict(_native(replace(column, ep_rank=ep_rank), block, expert, bulk))
            else:
                root = {
                    f"{name}.{expert}": _expert(column, name, expert, shape, bulk)
                    for name, shape in block.shapes.items()
                }
            if grid.is_folded:
                root[FOLDING] = Writer(grid, holders[ep_rank], column.tp).of_an_expert()
            yield shelf.file(expert_file_name(block.number, expert, column.mp), root, bulk, None)


def _expert(column: Column, name: str, expert: int, shape: tuple[int, ...], bulk: Bulk) -> object:
    """The weight of one expert: a slice of the fused parameter."""
    contents = column.contents
    each = contiguous_split_map(shape, [1] * shape[0], 0)
    stored = contents.checkpoint.tensors[name, MASTER].dtype
    dtype = contents.dtypes[name]
    return bulk.shard((name,), (name, MASTER), dtype, shape[1:], each, expert, stored)


def _native(
    column: Column, block: ExpertBlock, expert: int, bulk: Bulk
) -> Iterator[tuple[str, object]]:
    """What the column has of one expert, under its number in the layer."""
    for name in block.shapes:
        if split_name(name)[1] == expert:
            yield name, weight(column, name, (name,), bulk)
