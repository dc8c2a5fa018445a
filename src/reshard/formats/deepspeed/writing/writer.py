"""Laying out a native checkpoint: every file of every rank of the target topology.

Theory. The walk is: sort the source (`contents`) → deal it out to pipeline stages (`stages`) → find
how the target cuts every parameter over tensor ranks (`tensor_parallel`) → lay out and cut the flat
buffers of every stage (`flat_groups`) → make each rank's files → say what could not be carried.
Nothing is read but what the source's reader read already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

from reshard.formats.checkpoint import Checkpoint
from reshard.formats.deepspeed.names import (
    expert_optimizer_file_name,
    model_file_name,
    optimizer_file_name,
    zero3_model_file_name,
)
from reshard.formats.deepspeed.writing.archives import ArchiveShelf, Bulk
from reshard.formats.deepspeed.writing.contents import Contents, contents_of
from reshard.formats.deepspeed.writing.cuts import Cut
from reshard.formats.deepspeed.writing.expert_files import expert_files
from reshard.formats.deepspeed.writing.expert_grid import ExpertGrid, expert_grid, expert_notes
from reshard.formats.deepspeed.writing.flat_groups import Bank, flat_banks
from reshard.formats.deepspeed.writing.folded import FOLDING, Writer
from reshard.formats.deepspeed.writing.heads import heads_note, require_fitting_heads
from reshard.formats.deepspeed.writing.model_files import Column, model_tree
from reshard.formats.deepspeed.writing.optimizer_files import optimizer_tree
from reshard.formats.deepspeed.writing.options import NativeOptions
from reshard.formats.deepspeed.writing.plain_optimizer import plain_optimizer, require_plain
from reshard.formats.deepspeed.writing.settings import carried_part, notes
from reshard.formats.deepspeed.writing.source_cuts import source_of
from reshard.formats.deepspeed.writing.stages import layer_files, stages_of
from reshard.formats.deepspeed.writing.target_info import target_info
from reshard.formats.deepspeed.writing.tensor_parallel import cuts_of
from reshard.formats.deepspeed.writing.vocabulary import vocabulary_note
from reshard.formats.target import OutputFile, Target

POINTER = "latest"
"""The pointer file that DeepSpeed follows when no tag is given."""


def lay_out_deepspeed(checkpoint: Checkpoint, *, tag: str, options: NativeOptions) -> Target:
    """Lay out a native DeepSpeed checkpoint.

    Parameters
    ----------
    checkpoint
        What to write.
    tag
        Name of the output folder, for the pointer file.
    options
        The topology to write for.

    Raises
    ------
    CheckpointError
        When the source lacks what a native checkpoint must have.
    LayoutError
        When how the target cuts a parameter is not known.
    UnsupportedError
        When the target's optimizer cannot hold what the source holds.
    """
    contents = contents_of(checkpoint, options)
    stages = stages_of(contents, options)
    source = source_of(contents)
    experts = expert_grid(contents, options)
    cuts = cuts_of(contents, options, source, experts)
    info = target_info(contents, options, source, cuts)
    columns = [
        column
        for number, stage in enumerate(stages)
        for column in _columns(number, stage, options, cuts, experts, info)
    ]
    shelf = ArchiveShelf()
    files = [
        *_model_files(columns, shelf),
        *layer_files(contents, options, cuts, shelf),
        *(file for column in columns for file in expert_files(column)),
        *_optimizer_files(columns, shelf),
        *_expert_optimizer_files(columns, shelf),
    ]
    require_fitting_heads(options, source, cuts)
    said = [
        *notes(contents, options, [column.banks for column in columns], _empty(columns)),
        *heads_note(options, source, cuts),
        *vocabulary_note(options, source, cuts),
        *expert_notes(contents, experts),
    ]
    return Target("deepspeed", tuple(files), (POINTER, tag), tuple(said), options.topology)


def _columns(
    number: int,
    stage: Contents,
    options: NativeOptions,
    cuts: Mapping[str, Cut],
    experts: ExpertGrid | None,
    info: Mapping[str, object] | None,
) -> Iterator[Column]:
    """The tensor ranks of one pipeline stage."""
    if experts is not None and stage.pipeline is not None:
        experts = experts.on_stage(stage)
    banks: tuple[tuple[Bank, ...], ...] = ((),) * options.tp
    if options.stage:
        banks = flat_banks(stage, options, cuts, experts)
    else:
        require_plain(stage)
    for tp in range(options.tp):
        mp = number * options.tp + tp
        part = carried_part(stage, options, mp, info)
        ep_rank = experts.place(0, tp)[0] if experts is not None else 0
        yield Column(mp, stage, options, cuts, banks[tp], experts, part, ep_rank)


def _empty(columns: list[Column]) -> list[str]:
    """Parameters of which some column holds no element."""
    cuts = columns[0].cuts
    return [name for name, cut in cuts.items() if not all(map(prod, cut.shapes.values()))]


def _model_files(columns: list[Column], shelf: ArchiveShelf) -> Iterator[OutputFile]:
    for column in columns:
        stage3 = column.options.stage == 3
        for rank in range(column.options.dp if stage3 else 1):
            bulk = Bulk()
            optimizer = None if column.options.stage else plain_optimizer(column, bulk)
            root = model_tree(column, rank, optimizer, bulk)
            name = zero3_model_file_name(rank, column.mp) if stage3 else model_file_name(column.mp)
            # All ranks but the first of all (which lists tied names) have the same tree, unless
            # their files tell where their experts are.
            shared = rank > 0 and column.experts is None
            yield shelf.file(name, root, bulk, ("model", column.mp) if shared else None)


def _optimizer_files(columns: list[Column], shelf: ArchiveShelf) -> Iterator[OutputFile]:
    for column in columns:
        if not column.banks:
            continue
        contents, options = column.contents, column.options
        prefix = "bf16_" if contents.model_dtype.name == "bfloat16" else ""
        head = {key: column.part.get(key) for key in ("ds_config", "ds_version")}
        for rank in range(options.dp):
            bulk = Bulk()
            root = optimizer_tree(contents, options, column.banks, rank, column.tp, head, bulk)
            shared = options.stage == 3 and column.experts is None
            kind = ("optimizer", column.mp) if shared else None
            name = optimizer_file_name(rank, column.mp, prefix)
            yield shelf.file(name, root, bulk, kind)


def _expert_optimizer_files(columns: list[Column], shelf: ArchiveShelf) -> Iterator[OutputFile]:
    """Without ZeRO: the optimizer of every EP rank, which is loaded instead of the model's."""
    for column in columns:
        grid = column.experts
        if grid is None or column.options.stage:
            continue
        for ep_rank, dp_rank in grid.first_holders(column.tp).items():
            bulk = Bulk()
            own = plain_optimizer(replace(column, ep_rank=ep_rank), bulk)
            root: dict[str, object] = {"optimizer": own}
            if grid.is_folded:
                root[FOLDING] = Writer(grid, dp_rank, column.tp).of_an_expert()
            name = expert_optimizer_file_name(ep_rank, column.mp)
            yield shelf.file(name, root, bulk, None)
