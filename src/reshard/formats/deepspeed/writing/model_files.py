"""The model-state file of one rank: ``mp_rank_*`` or, under ZeRO-3, ``zero_pp_rank_*``.

Theory. This file tells what there is: names and shapes in the order of the flat buffers, counters,
schedulers, whatever the client added. Its `module` is the state dict that DeepSpeed loads into the
model, so what it must hold depends on the stage:

* ZeRO-0, 1, 2: every parameter of the column in the element type of the model, which for trained
  ones is the master weight rounded to it, as the optimizer itself rounds after a step. (The loader
  of ZeRO-1 and 2 takes the master from the optimizer file and the weight from here; it does not
  compare them.)
* ZeRO-3: empty placeholders of the right element type. Weights are rounded from the masters when
  they are loaded; frozen parameters come from `frozen_param_fragments`, one block a rank.

Buffers are real in every file, whole on every rank.

Sources: `engine.py` (`_common_checkpoint_state`, `_save_checkpoint`, `load_module_state_dict`,
`_get_shared_params`), DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from reshard.formats.assembly import Assembler
from reshard.formats.deepspeed.info_entry import INFO_VERSION
from reshard.formats.deepspeed.partitions import MASTER
from reshard.formats.deepspeed.writing.archives import Bulk, Label
from reshard.formats.deepspeed.writing.contents import Contents
from reshard.formats.deepspeed.writing.cuts import Cut
from reshard.formats.deepspeed.writing.expert_grid import PATTERNS, ExpertGrid
from reshard.formats.deepspeed.writing.flat_groups import Bank, compose_fragments
from reshard.formats.deepspeed.writing.folded import FOLDING, Writer
from reshard.formats.deepspeed.writing.options import NativeOptions
from reshard.formats.deepspeed.writing.settings import INFO
from reshard.formats.torch_archive import NewTensor, Size
from reshard.layouts.flat import ceil_div, per_parameter_partition

ORDERED = (
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "shared_params",
    "frozen_param_fragments",
    "lr_scheduler",
    "data_sampler",
    "random_ltd",
    "skipped_steps",
    "global_steps",
    "global_samples",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "ds_config",
    "ds_version",
    "num_experts",
    "ds_autoep_layers",
)
"""Keys that DeepSpeed itself writes, in its order; what the client added comes after them."""

OPTIONAL = frozenset(("global_samples", "num_experts", "ds_autoep_layers"))
"""Those of them that not every file has."""


@dataclass(frozen=True, slots=True)
class Column:
    """One model-parallel rank of the target."""

    mp: int
    """Its number."""
    contents: Contents
    options: NativeOptions
    """What its pipeline stage has, and for which topology."""
    cuts: Mapping[str, Cut]
    """How every parameter and buffer is cut over columns, experts over EP ranks."""
    banks: Sequence[Bank]
    """Its flat buffers; empty without ZeRO."""
    experts: ExpertGrid | None
    """Where the experts are, None for a model without."""
    part: Mapping[str, object]
    """What its file says besides the model: counters, schedulers, client state."""
    ep_rank: int = 0
    """Whose experts its file speaks of: those of its first data-parallel rank."""

    @property
    def tp(self) -> int:
        """Its tensor-parallel rank, by which parameters are cut."""
        return self.mp % self.options.tp

    def shard(self, name: str) -> int:
        """Number of the column's shard in the cut of a tensor."""
        if self.experts is None or name not in self.experts.names:
            return self.tp
        return self.experts.shard(self.ep_rank, self.tp)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of the column's shard, None when it has none."""
        return self.cuts[name].shapes.get(self.shard(name))

    def called(self, name: str) -> str:
        """What a rank of the column calls a tensor: experts may have numbers of its own."""
        return name if self.experts is None else self.experts.local_names.get(name, name)

    @property
    def unoptimized(self) -> list[str]:
        """Parameters of the column that are in no flat buffer: frozen ones, and empty shards."""
        names = [
            name for group in self.contents.groups for name in group.names if not group.has_experts
        ]
        empty = [name for name in names if self.shape(name) is not None and not self._numel(name)]
        return [name for name in (*self.contents.frozen, *empty) if self.shape(name) is not None]

    @property
    def lists_frozen(self) -> bool:
        """Whether its file holds frozen parameters beside the module.

        Under ZeRO-2 they are in the module already. DeepSpeed adds them, experts of the rank that
        saves among them, and then loads those on every rank in place of its own. Without the list
        every rank has its own experts, from their files. Where the source has no frozen parameters
        because the run left them out, there is no list: of an empty one each is demanded.
        """
        experts = self.experts.names if self.experts is not None else frozenset()
        may = self.options.stage >= 2 and not experts.intersection(self.contents.frozen)
        return may and (self.contents.lists_frozen or bool(self.unoptimized))

    @property
    def module(self) -> list[str]:
        """Names of the state dict; experts are not in it."""
        experts = self.experts.names if self.experts is not None else frozenset()
        return [name for name in self.contents.module if name not in experts]

    def _numel(self, name: str) -> int:
        return prod(self.shape(name) or (0,))


def model_tree(column: Column, rank: int, optimizer: object, bulk: Bulk) -> dict[str, object]:
    """The content of the model-state file of data-parallel rank ``rank`` of a column.

    Parameters
    ----------
    column
        The model-parallel rank.
    rank
        Data-parallel rank; below ZeRO-3 only rank 0 writes a file.
    optimizer
        State dict of the optimizer without ZeRO, else None.
    bulk
        Receives what goes into the storages.
    """
    contents, options = column.contents, column.options
    # the weights of a pipeline without experts are in the files of its layers
    in_layers = contents.pipeline is not None and column.experts is None
    module = None if in_layers else _module(column, bulk)
    keeps_frozen = column.lists_frozen
    own: dict[str, object] = {
        "module": module,
        "buffer_names": _buffer_names(column),
        "optimizer": optimizer,
        "param_shapes": _param_shapes(column),
        "frozen_param_shapes": _frozen_shapes(column) if keeps_frozen else None,
        "shared_params": _shared(column, rank),
        "frozen_param_fragments": _frozen_fragments(column, rank, bulk) if keeps_frozen else None,
        "dp_world_size": options.dp,
        "mp_world_size": options.mp,
        "checkpoint_parallel_dimensions": {"pp_degree": options.pp, "tp_degree": options.tp},
    }
    root = {**column.part, **own, **_of_experts(column, rank)}
    kept = {key: root.get(key) for key in ORDERED if key not in OPTIONAL or key in root}
    return kept | {key: value for key, value in root.items() if key not in kept}


def _buffer_names(column: Column) -> list[str]:
    buffers = set(column.contents.buffers)
    return [
        column.called(name)
        for name in column.contents.module
        if name in buffers and column.shape(name) is not None
    ]


def _of_experts(column: Column, rank: int) -> dict[str, object]:
    """What the file of a model with experts says about them."""
    grid = column.experts
    if grid is None:
        return {}
    counts = [block.num_experts for block in grid.blocks]
    if grid.is_native:
        return {"num_experts": counts, "ds_autoep_layers": None}
    layers = grid.metadata(column.options.stage, rank, column.tp)
    info = column.part.get(INFO)
    kept = {str(k): v for k, v in info.items()} if isinstance(info, Mapping) else {}
    kept.setdefault("universal_checkpoint_version", INFO_VERSION)
    stated: dict[str, object] = {
        "num_experts": counts,
        "ds_autoep_layers": layers,
        INFO: {**kept, "expert_parameter_patterns": list(PATTERNS), "ds_autoep_layers": layers},
    }
    if grid.is_folded:
        stated[FOLDING] = Writer(grid, rank, column.tp).of_the_model(column.module)
    return stated


def _param_shapes(column: Column) -> list[OrderedDict[str, Size]]:
    """Names and shapes in the order of the optimizer.

    Without ZeRO DeepSpeed itself leaves them out, and reads them nowhere. They are what tells the
    numbered states apart, so they are written all the same.
    """
    if column.options.stage:
        return [_sizes(column, bank.first.shapes) for bank in column.banks]
    return [_sizes(column, _held(column, group.names)) for group in column.contents.groups]


def _held(column: Column, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that the column has."""
    return {name: shape for name in names if (shape := column.shape(name)) is not None}


def _sizes(column: Column, shapes: Mapping[str, tuple[int, ...]]) -> OrderedDict[str, Size]:
    return OrderedDict((column.called(name), Size(shape)) for name, shape in shapes.items())


def _shared(column: Column, rank: int) -> dict[str, str]:
    """Tied names, on the first rank of all; DeepSpeed itself leaves them out without ZeRO."""
    return dict(column.contents.checkpoint.aliases) if (rank, column.mp) == (0, 0) else {}


# --------------------------------------------------------------------------- module


def _module(column: Column, bulk: Bulk) -> OrderedDict[str, NewTensor]:
    return _placeholders(column, bulk) if column.options.stage == 3 else _weights(column, bulk)


def _weights(column: Column, bulk: Bulk) -> OrderedDict[str, NewTensor]:
    """Every tensor of the module; a tied name is a second view of its owner's storage."""
    aliases = column.contents.checkpoint.aliases
    module: OrderedDict[str, NewTensor] = OrderedDict()
    for name in column.module:
        tensor = _of_module(column, aliases.get(name, name), bulk)
        if tensor is not None:
            module[name] = tensor
    return module


def weight(column: Column, name: str, label: Label, bulk: Bulk) -> NewTensor | None:
    """The column's shard of a tensor in the type of the model, None when it has none.

    Parameters
    ----------
    column
        The model-parallel rank.
    name
        The tensor.
    label
        Of its storage.
    bulk
        Receives what goes into the storage.
    """
    shape = column.shape(name)
    if shape is None:
        return None
    dtype = column.contents.dtypes[name]
    stored = column.contents.checkpoint.tensors[name, MASTER].dtype
    target = column.cuts[name].map
    return bulk.shard(label, (name, MASTER), dtype, shape, target, column.shard(name), stored)


def _of_module(column: Column, name: str, bulk: Bulk) -> NewTensor | None:
    return weight(column, name, ("module", name), bulk)


def _placeholders(column: Column, bulk: Bulk) -> OrderedDict[str, NewTensor]:
    contents = column.contents
    aliases, buffers = contents.checkpoint.aliases, set(contents.buffers)
    module: OrderedDict[str, NewTensor] = OrderedDict()
    for name in column.module:
        owner = aliases.get(name, name)
        if owner in buffers:
            tensor = _of_module(column, owner, bulk)
        elif column.shape(owner) is None:
            tensor = None
        else:
            tensor = NewTensor(contents.dtypes[owner], (0,))
        if tensor is not None:
            module[name] = tensor
    return module


# --------------------------------------------------------------------------- frozen parameters


def _frozen_shapes(column: Column) -> OrderedDict[str, Size]:
    return _sizes(column, _held(column, column.unoptimized))


def _frozen_fragments(column: Column, rank: int, bulk: Bulk) -> OrderedDict[str, NewTensor]:
    """ZeRO-2: the tensors of the module themselves. ZeRO-3: this rank's block of each."""
    fragments: OrderedDict[str, NewTensor] = OrderedDict()
    for name in column.unoptimized:
        whole = column.options.stage == 2
        tensor = _of_module(column, name, bulk) if whole else _block(column, name, rank, bulk)
        if tensor is not None:
            fragments[column.called(name)] = tensor
    return fragments


def _block(column: Column, name: str, rank: int, bulk: Bulk) -> NewTensor:
    dp, cut = column.options.dp, column.cuts[name]
    parts = [
        (mp, part)
        for mp, shape in cut.shapes.items()
        for part in per_parameter_partition([prod(shape)], dp)
    ]
    dtype, label = column.contents.dtypes[name], ("frozen", name)
    length = ceil_div(prod(cut.shapes[column.tp]), dp)
    composed, holders = compose_fragments(Assembler(), name, cut, parts)
    for (mp, part), holder in zip(parts, holders, strict=True):
        if (mp, part.partition) == (column.tp, rank) and holder is not None:
            stored = column.contents.checkpoint.tensors[name, MASTER].dtype
            key = (name, MASTER)
            return bulk.shard(label, key, dtype, (length,), composed, holder, stored)
    return bulk.flat(label, MASTER, dtype, length, ())
