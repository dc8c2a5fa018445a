"""Experts of the target: which rank holds which, and what is said about it.

Theory. AutoEP spreads the experts of a layer over a group of `ep` ranks, in order and evenly, and
every such shard is cut by ZeRO over the `edp = dp / ep` ranks that hold the same experts. So an
expert parameter has `ep` shards where a dense one has as many as there are tensor ranks, and a rank
`D` of the data-parallel group stands in both: it holds a partition of the shard of its EP rank. By
default neighbours are in one expert-parallel group (`ep_rank = D mod ep`); with
``use_data_before_expert_parallelism`` neighbours hold the same experts. With several tensor ranks
experts are spread over all of them as over one pool (`folded`): `D * tp + T` is then what `D` is
here.

DeepSpeed's own MoE layers keep a parameter an expert instead (`native_experts`): each is whole on
one EP rank. They stand in the same grid. Only with ``enable_expert_tensor_parallelism`` every
tensor rank has EP groups of its own, and its part of every expert.

Experts are in parameter groups of their own, marked `moe` and named after the degree. Below ZeRO-3
the weights of each expert are a file; under ZeRO-3 there are only the rank files, and the optimizer
file tells which ranks share each sub-group, which DeepSpeed compares when it loads.

Sources: `engine.py` (`_save_moe_checkpoint`), `utils/groups.py`, `moe/layer.py`
(`_create_process_groups`), `stage3.py` (`_zero3_partition_group_metadata`), DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from reshard.errors import LayoutError, UnsupportedError, UsageError
from reshard.formats.deepspeed.experts import PARTITIONED
from reshard.formats.deepspeed.native_moe import EXPERTS_ARE_CUT, split_name
from reshard.formats.deepspeed.native_moe import is_native as is_native_expert
from reshard.formats.deepspeed.writing.contents import Contents
from reshard.formats.deepspeed.writing.cuts import Cut, moved
from reshard.formats.deepspeed.writing.expert_blocks import (
    ExpertBlock,
    fused_blocks,
    native_blocks,
    trained_experts,
    untrained_experts,
)
from reshard.formats.deepspeed.writing.native_experts import cut_to_rank, local_names
from reshard.formats.deepspeed.writing.options import NativeOptions
from reshard.formats.pipelines import split_owner
from reshard.geometry import maps_to_document
from reshard.layouts.experts import ExpertPlacement, expert_map

PATTERNS = (r".*\.experts\.w[123]$",)
"""The value of `expert_parameter_patterns` that AutoEP writes."""


@dataclass(frozen=True)
class ExpertGrid:
    """The experts of a model on the target."""

    blocks: tuple[ExpertBlock, ...]
    """The layers, in the order of the model."""
    dp: int
    ep: int
    tp: int = 1
    """Degrees."""
    data_first: bool = False
    """Whether neighbours hold the same experts."""
    is_native: bool = False
    """Whether the layers are DeepSpeed's own, which keep a parameter an expert."""
    is_cut: bool = False
    """Whether every tensor rank has EP groups of its own, and its part of every expert."""

    def on_stage(self, stage: Contents) -> ExpertGrid:
        """The experts of a pipeline stage, which counts its layers anew.

        Raises
        ------
        UnsupportedError
            When it has none.
        """
        owners = {split_owner(name)[0] for group in stage.groups for name in group.names}
        held = [block for block in self.blocks if split_owner(block.prefix)[0] in owners]
        if not held:
            raise UnsupportedError(
                "DeepSpeed cannot go on with a pipeline with experts on some of its stages only",
                found=f"a stage of layers {', '.join(sorted(owners))} without experts",
                next_step="choose other stages with --stage-starts, or fewer",
            )
        blocks = tuple(replace(block, number=number) for number, block in enumerate(held))
        return replace(self, blocks=blocks)

    @property
    def edp(self) -> int:
        """How many ranks hold the same experts, or the same parts of them."""
        return self.dp * (1 if self.is_cut else self.tp) // self.ep

    @property
    def has_writers(self) -> bool:
        """Whether DeepSpeed saves files for every tensor rank.

        Of the ranks with the same experts the first writes, under its own tensor rank.
        """
        ranks = [(dp_rank, tp_rank) for dp_rank in range(self.dp) for tp_rank in range(self.tp)]
        writers = {self.place(*rank)[0]: rank[1] for rank in ranks if not self.place(*rank)[1]}
        return self.is_cut or all(
            writers[self.place(*rank)[0]] == rank[1] and (rank[0] or not self.place(*rank)[1])
            for rank in ranks
        )

    @property
    def is_folded(self) -> bool:
        """Whether the files say how experts of AutoEP are spread over tensor ranks."""
        return self.tp > 1 and not self.is_native

    def place(self, dp_rank: int, tp_rank: int = 0) -> tuple[int, int]:
        """Place of a rank in its expert-parallel group, and among those with the same experts."""
        rank = dp_rank if self.is_cut else dp_rank * self.tp + tp_rank
        if self.data_first:
            return rank // self.edp, rank % self.edp
        return rank % self.ep, rank // self.ep

    def shard(self, ep_rank: int, tp_rank: int) -> int:
        """Number of the shard that an EP rank has, in the cuts of its experts."""
        return ep_rank * self.tp + tp_rank if self.is_cut else ep_rank

    def first_holders(self, tp_rank: int) -> dict[int, int]:
        """The EP ranks that a tensor rank has, and the first data-parallel rank of each."""
        holders: dict[int, int] = {}
        for dp_rank in range(self.dp):
            holders.setdefault(self.place(dp_rank, tp_rank)[0], dp_rank)
        return holders

    def ranks_of(self, ep_rank: int) -> list[int]:
        """The ranks that hold the experts of an EP rank, numbered over all tensor ranks."""
        ranks = range(self.dp * self.tp)
        return [r for r in ranks if self.place(*divmod(r, self.tp))[0] == ep_rank]

    @cached_property
    def names(self) -> frozenset[str]:
        """All tensors of experts."""
        return frozenset(name for block in self.blocks for name in block.shapes)

    @property
    def group_name(self) -> str:
        """Name of the parameter groups of experts."""
        return f"ep_size_{self.ep}"

    def cuts(self, columns: Mapping[str, Cut]) -> dict[str, Cut]:
        """How the tensors of experts are cut over EP ranks, and over tensor ranks beside that.

        Parameters
        ----------
        columns
            How tensor ranks cut them, where they do.
        """
        return {
            name: self._cut_of(block, name, shape, columns)
            for block in self.blocks
            for name, shape in block.shapes.items()
        }

    def _cut_of(
        self, block: ExpertBlock, name: str, shape: tuple[int, ...], columns: Mapping[str, Cut]
    ) -> Cut:
        if not self.is_native:
            return Cut.exact(expert_map(ExpertPlacement.uniform(shape[0], self.ep), shape))
        ep_rank = split_name(name)[1] * self.ep // block.num_experts
        if self.is_cut:
            return moved(columns[name], ep_rank * self.tp)
        return cut_to_rank(shape, ep_rank)

    @cached_property
    def local_names(self) -> dict[str, str]:
        """Names that a rank has of its own for its experts."""
        if not self.is_native:
            return {}
        counts = {block.prefix: block.num_experts for block in self.blocks}
        return local_names(self.names, counts, self.ep)

    def metadata(self, stage: int, dp_rank: int, tp_rank: int) -> list[dict[str, object]]:
        """`ds_autoep_layers` of the file that a rank writes."""
        place = self.place(dp_rank, tp_rank)
        return [self._entry(block, stage, *place) for block in self.blocks]

    def _entry(
        self, block: ExpertBlock, stage: int, rank: int, partition: int
    ) -> dict[str, object]:
        placement = ExpertPlacement.uniform(block.num_experts, self.ep)
        maps = {name: expert_map(placement, shape) for name, shape in block.shapes.items()}
        local = block.num_experts // self.ep
        return {
            "moe_layer_id": block.number,
            "module_path": block.module,
            "num_experts": block.num_experts,
            "num_local_experts": local,
            "ep_size": self.ep,
            "expert_placement": placement.to_descriptor(),
            "affine_maps": maps_to_document(maps),
            "expert_key_prefix": block.prefix,
            "checkpoint_format": PARTITIONED if stage == 3 else "per_expert_files",
            "checkpoint_format_version": 1 if stage == 3 else None,
            "ep_group_name": self.group_name,
            "ep_rank": rank,
            "expert_data_parallel_rank": partition,
            "expert_data_parallel_world_size": self.edp,
            "global_expert_start": rank * local,
            "global_expert_end": (rank + 1) * local,
        }


def expert_grid(contents: Contents, options: NativeOptions) -> ExpertGrid | None:
    """The experts of the target, None for a model without.

    Raises
    ------
    UsageError
        When experts are asked for that the source does not have, or do not divide.
    UnsupportedError
        When the target is one that DeepSpeed cannot train or save, or that cannot be written.
    """
    names = [*trained_experts(contents), *untrained_experts(contents)]
    if not names:
        if options.ep > 1:
            raise UsageError("the source has no experts to spread", found=f"--ep {options.ep}")
        return None
    raw = contents.config.raw
    first = isinstance(raw, Mapping) and raw.get("use_data_before_expert_parallelism") is True
    is_native = any(map(is_native_expert, names))
    is_cut = is_native and options.tp > 1 and are_cut(contents, options, names)
    if is_native:
        _require_native_target(contents, options, names, is_cut=is_cut)
    else:
        _require_fused_target(contents, options, data_first=first)
    blocks = tuple((native_blocks if is_native else fused_blocks)(contents, names))
    for block in blocks:
        if block.num_experts % options.ep:
            raise UsageError(
                "the expert-parallel degree does not divide the experts of a layer",
                expected=f"a divisor of {block.num_experts}, as {block.module} has",
                found=options.ep,
            )
    grid = ExpertGrid(blocks, options.dp, options.ep, options.tp, first, is_native, is_cut)
    if is_native and not grid.has_writers:
        raise UnsupportedError(
            "DeepSpeed leaves out the files of some tensor ranks when it saves such a run, so it "
            "could not go on from its own checkpoints",
            expected=f"an --ep that {options.tp} divides, without "
            "use_data_before_expert_parallelism",
            found=f"--tp {options.tp}, --ep {options.ep}",
        )
    return grid


def expert_notes(contents: Contents, grid: ExpertGrid | None) -> Iterator[str]:
    """What the user should know about the experts of the target."""
    if grid is None or not grid.is_native or grid.tp == 1:
        return
    if EXPERTS_ARE_CUT not in contents.checkpoint.extras and not grid.is_cut:
        yield (
            "experts are whole, and spread over all tensor ranks; for a model with "
            "enable_expert_tensor_parallelism state how an expert is cut with --layout"
        )


def are_cut(contents: Contents, options: NativeOptions, names: Sequence[str]) -> bool:
    """Whether the target's tensor ranks have parts of native experts.

    A source of several tensor ranks tells. From any other it is so where the user states how an
    expert is cut; DeepSpeed's own default is that experts are whole.
    """
    known = contents.checkpoint.extras.get(EXPERTS_ARE_CUT)
    if known is not None:
        return known.value is True
    return any(_is_stated_cut(contents, options, name) for name in names)


def _is_stated_cut(contents: Contents, options: NativeOptions, name: str) -> bool:
    """Whether the user states a layout of an expert, and not that every rank has it whole."""
    stated, shape = options.layouts, contents.shape(name)
    if stated is None or not stated.covers(name):
        return False
    try:
        found = stated.map_of(name, dict.fromkeys(range(options.tp), shape), options.tp)
    except LayoutError:
        return True
    return found is None or found.whole.logical_shape != shape


def _require_fused_target(contents: Contents, options: NativeOptions, *, data_first: bool) -> None:
    """Refuse what experts of AutoEP cannot be trained as."""
    if options.tp > 1 and (data_first or options.ep == 1):
        raise UnsupportedError(
            "DeepSpeed trains no such experts with several tensor ranks",
            expected="--ep above 1, without use_data_before_expert_parallelism",
            found=f"--tp {options.tp}, --ep {options.ep}",
        )
    if options.tp > 1 and contents.pipeline is not None:
        raise UnsupportedError(
            "DeepSpeed trains no AutoEP on the tensor ranks of a pipeline",
            found=f"--tp {options.tp}, and a pipeline",
            next_step="choose --tp 1",
        )
    frozen = untrained_experts(contents)
    if frozen and options.stage == 3:
        raise UnsupportedError(
            "DeepSpeed saves no frozen experts under ZeRO-3",
            parameter=frozen[0],
            found="--stage 3",
            next_step="choose --stage 1 or 2",
        )


def _require_native_target(
    contents: Contents, options: NativeOptions, names: Sequence[str], *, is_cut: bool
) -> None:
    """Refuse what native experts cannot be written for."""
    groups = [group for group in contents.groups if group.has_experts]
    degrees = {str(group.settings.get("name")) for group in groups}
    found, instead = None, "convert to universal instead"
    if not all(map(is_native_expert, names)):
        found = "experts of AutoEP beside them"
    elif options.stage == 3:
        found, instead = "--stage 3, under which DeepSpeed trains none", "choose --stage 2"
    elif options.stage and not groups:
        found = "nothing but frozen experts, which DeepSpeed trains without ZeRO only"
        instead = "choose --stage 0"
    elif is_cut and options.dp % options.ep:
        found = f"--ep {options.ep}, which does not divide --dp {options.dp}"
        instead = "with enable_expert_tensor_parallelism it must"
    elif len(degrees) > 1:
        found = f"layers of several expert-parallel degrees: {', '.join(sorted(degrees))}"
    if found is not None:
        raise UnsupportedError(
            "experts of DeepSpeed's own MoE layers cannot be written natively",
            found=found,
            next_step=instead,
        )
