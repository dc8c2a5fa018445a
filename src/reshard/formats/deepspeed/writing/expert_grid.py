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
one EP rank. They stand in the same grid.

Experts are in parameter groups of their own, marked `moe` and named after the degree. Below ZeRO-3
the weights of each expert are a file; under ZeRO-3 there are only the rank files, and the optimizer
file tells which ranks share each sub-group, which DeepSpeed compares when it loads.

Sources: `engine.py` (`_save_moe_checkpoint`), `utils/groups.py`, `stage3.py`
(`_zero3_partition_group_metadata`), DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from reshard.errors import UnsupportedError, UsageError
from reshard.formats.deepspeed.experts import PARTITIONED, WEIGHTS
from reshard.formats.deepspeed.native_moe import is_native as is_native_expert
from reshard.formats.deepspeed.native_moe import split_name
from reshard.formats.deepspeed.writing.contents import Contents
from reshard.formats.deepspeed.writing.cuts import Cut
from reshard.formats.deepspeed.writing.native_experts import (
    count_experts,
    cut_to_rank,
    local_names,
)
from reshard.formats.deepspeed.writing.options import NativeOptions
from reshard.formats.deepspeed.writing.settings import INFO
from reshard.geometry import maps_to_document
from reshard.layouts.experts import ExpertPlacement, expert_map

PATTERNS = (r".*\.experts\.w[123]$",)
"""The value of `expert_parameter_patterns` that AutoEP writes."""


@dataclass(frozen=True, slots=True)
class ExpertBlock:
    """A layer with experts.

    Parameters
    ----------
    number
        `moe_layer_id`.
    prefix, module
        Names of its experts and of the layer.
    num_experts
        Number of experts.
    shapes
        Shape of every fused parameter, by name.
    """

    number: int
    prefix: str
    module: str
    num_experts: int
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ExpertGrid:
    """The experts of a model on the target.

    Parameters
    ----------
    blocks
        The layers, in the order of the model.
    dp, ep, tp
        Degrees.
    data_first
        Whether neighbours hold the same experts.
    is_native
        Whether the layers are DeepSpeed's own, which keep a parameter an expert.
    """

    blocks: tuple[ExpertBlock, ...]
    dp: int
    ep: int
    tp: int = 1
    data_first: bool = False
    is_native: bool = False

    @property
    def edp(self) -> int:
        """How many ranks hold the same experts."""
        return self.dp * self.tp // self.ep

    def place(self, dp_rank: int, tp_rank: int = 0) -> tuple[int, int]:
        """Place of a rank in its expert-parallel group, and among those with the same experts."""
        rank = dp_rank * self.tp + tp_rank
        if self.data_first:
            return rank // self.edp, rank % self.edp
        return rank % self.ep, rank // self.ep

    def ranks_of(self, ep_rank: int) -> list[int]:
        """The ranks that hold the experts of an EP rank, numbered over all tensor ranks."""
        ranks = range(self.dp * self.tp)
        return [r for r in ranks if self.place(*divmod(r, self.tp))[0] == ep_rank]

    @property
    def names(self) -> frozenset[str]:
        """All expert parameters."""
        return frozenset(name for block in self.blocks for name in block.shapes)

    @property
    def group_name(self) -> str:
        """Name of the parameter groups of experts."""
        return f"ep_size_{self.ep}"

    def cuts(self) -> dict[str, Cut]:
        """How every expert parameter is cut over EP ranks."""
        return {
            name: self._cut_of(block, name, shape)
            for block in self.blocks
            for name, shape in block.shapes.items()
        }

    def _cut_of(self, block: ExpertBlock, name: str, shape: tuple[int, ...]) -> Cut:
        if self.is_native:
            return cut_to_rank(shape, split_name(name)[1] * self.ep // block.num_experts)
        return Cut.exact(expert_map(ExpertPlacement.uniform(shape[0], self.ep), shape))

    @property
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
        When they are not AutoEP's, or the target is one that cannot be written.
    """
    names = [name for group in contents.groups if group.has_experts for name in group.names]
    if not names:
        if options.ep > 1:
            raise UsageError("the source has no experts to spread", found=f"--ep {options.ep}")
        return None
    if options.stage == 0:
        raise UnsupportedError(
            "experts can be written for ZeRO-1, 2 and 3 only",
            found="stage 0",
            next_step="choose --stage 1",
        )
    raw = contents.config.raw
    first = isinstance(raw, Mapping) and raw.get("use_data_before_expert_parallelism") is True
    if options.tp > 1 and (first or options.ep == 1):
        raise UnsupportedError(
            "DeepSpeed trains no such experts with several tensor ranks",
            expected="--ep above 1, without use_data_before_expert_parallelism",
            found=f"--tp {options.tp}, --ep {options.ep}",
        )
    is_native = any(map(is_native_expert, names))
    if is_native:
        _require_native_target(contents, options, names)
    blocks = tuple((_native_blocks if is_native else _blocks)(contents, names))
    for block in blocks:
        if block.num_experts % options.ep:
            raise UsageError(
                "the expert-parallel degree does not divide the experts of a layer",
                expected=f"a divisor of {block.num_experts}, as {block.module} has",
                found=options.ep,
            )
    return ExpertGrid(blocks, options.dp, options.ep, options.tp, first, is_native)


def _require_native_target(contents: Contents, options: NativeOptions, names: list[str]) -> None:
    """Refuse what native experts cannot be written for."""
    groups = [group for group in contents.groups if group.has_experts]
    degrees = {str(group.settings.get("name")) for group in groups}
    untrained = [n for n in (*contents.frozen, *contents.buffers) if is_native_expert(n)]
    found = None
    if not all(map(is_native_expert, names)):
        found = "experts of AutoEP beside them"
    elif options.stage == 3:
        found = "--stage 3, under which DeepSpeed trains none"
    elif options.tp > 1:
        found = f"--tp {options.tp}"
    elif len(degrees) > 1:
        found = f"layers of several expert-parallel degrees: {', '.join(sorted(degrees))}"
    elif untrained:
        found = f"frozen parameters or buffers of experts: {untrained[0]}"
    if found is not None:
        raise UnsupportedError(
            "experts of DeepSpeed's own MoE layers cannot be written natively",
            found=found,
            next_step="convert to universal instead",
        )


def _native_blocks(contents: Contents, names: list[str]) -> Iterator[ExpertBlock]:
    """Layers in the order of the model, which a parameter group that has them all tells."""
    counts = count_experts(names)
    groups = [group.names for group in contents.groups if group.has_experts]
    order = next((o for o in map(count_experts, groups) if o.keys() == counts.keys()), None)
    if order is None:
        raise UnsupportedError(
            "no parameter group has experts of every layer, so the order of the layers is not "
            "known",
            found=", ".join(counts),
            next_step="convert to universal instead",
        )
    for number, prefix in enumerate(order):
        shapes = {name: contents.shape(name) for name in names if split_name(name)[0] == prefix}
        yield ExpertBlock(number, prefix, prefix, counts[prefix], shapes)


def _blocks(contents: Contents, names: list[str]) -> Iterator[ExpertBlock]:
    """Layers by prefix; number and name as the source's metadata says, else in their order."""
    by_prefix: dict[str, dict[str, tuple[int, ...]]] = {}
    for name in names:
        prefix, _, weight = name.rpartition(".")
        if weight not in WEIGHTS:
            raise UnsupportedError(
                "experts of an unknown kind cannot be written natively",
                parameter=name,
                next_step="convert to universal instead",
            )
        by_prefix.setdefault(prefix, {})[name] = contents.shape(name)
    stated = _stated_layers(contents)
    for number, (prefix, shapes) in enumerate(by_prefix.items()):
        entry = stated.get(prefix, {})
        module = entry.get("module_path", prefix.rpartition(".")[0])
        found = entry.get("moe_layer_id", number)
        yield ExpertBlock(
            found if isinstance(found, int) else number,
            prefix,
            str(module),
            next(iter(shapes.values()))[0],
            dict(sorted(shapes.items())),
        )


def _stated_layers(contents: Contents) -> dict[str, Mapping[str, object]]:
    extra = contents.checkpoint.extras.get(INFO)
    value = extra.value if extra is not None else None
    layers = value.get("ds_autoep_layers") if isinstance(value, Mapping) else None
    return {
        str(entry.get("expert_key_prefix")): {str(k): v for k, v in entry.items()}
        for entry in (layers if isinstance(layers, (list, tuple)) else ())
        if isinstance(entry, Mapping)
    }
