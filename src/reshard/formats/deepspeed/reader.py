"""The reader of native DeepSpeed checkpoints: a folder becomes a `Checkpoint`.

Theory. The walk is: list the files → open every model-state file → settle the degrees of the grid
and demand every cell → open every optimizer file → resolve the flat partitions (`partitions`) →
find the map of every parameter over tensor-parallel ranks (`tensor_parallel`) → compose
(`assembly`). Scalars and settings are collected on the way, and ranks that must agree on them are
made to.

Only headers and pickles are read. The result has no trace of stages, groups or ranks left in its
tensors: only holders and byte ranges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from reshard.errors import CheckpointError, LayoutError, MissingFileError, UnsupportedError
from reshard.formats.assembly import Assembler, stored_order
from reshard.formats.checkpoint import (
    Checkpoint,
    Extra,
    Problem,
    Role,
    Scalar,
    StoredTensor,
    TensorKey,
    Topology,
)
from reshard.formats.deepspeed.contiguous import (
    add_contiguous,
    dense_buffer,
    require_groups,
    shapes_of,
)
from reshard.formats.deepspeed.extras import collect_extras
from reshard.formats.deepspeed.grid import (
    Degrees,
    Inventory,
    require_grid,
    require_one_value,
    settle_degrees,
    take_inventory,
)
from reshard.formats.deepspeed.module import (
    ModuleTensor,
    layer_tensors,
    module_tensors,
    zero3_tensors,
)
from reshard.formats.deepspeed.names import FileKind
from reshard.formats.deepspeed.partitions import MASTER, Partitions, Shard
from reshard.formats.deepspeed.records import (
    ModelStates,
    OptimizerStates,
    read_model_states,
    read_optimizer_states,
)
from reshard.formats.deepspeed.tensor_parallel import (
    GovernedMap,
    Layouts,
    OneShard,
    StoredMaps,
    read_stored_maps,
    refuse_unknown,
)
from reshard.formats.deepspeed.unsharded import add_unsharded
from reshard.formats.deepspeed.zero3 import add_zero3_columns
from reshard.formats.folders import TagFolder
from reshard.geometry import AffinePiece, ParamAffineMap, locate, nest
from reshard.layouts.builders import replicated_map

Shape = tuple[int, ...]
Cells = dict[tuple[int, int], ModelStates]


def open_deepspeed(folder: TagFolder) -> Checkpoint:
    """Open a native DeepSpeed checkpoint of ZeRO-0, 1, 2, 3 or BF16_Optimizer.

    Raises
    ------
    CheckpointError, MissingFileError
        When files are missing, stale, or contradict each other.
    LayoutError
        When the layout of a tensor-parallel parameter is not known.
    ArchiveError
        When a file is damaged or hostile.
    """
    inventory = take_inventory(folder)
    _refuse_experts(inventory)
    models = _open_models(inventory)
    degrees = settle_degrees(models.values(), inventory)
    ranks = _open_ranks(inventory, degrees, models)
    return _Reading(inventory, degrees, models, ranks).checkpoint()


def _refuse_experts(inventory: Inventory) -> None:
    for kind in (FileKind.EXPERT, FileKind.EXPERT_OPTIMIZER):
        for path in inventory.of_kind(kind).values():
            raise UnsupportedError(
                "checkpoints with expert files cannot be read yet",
                file=path,
                next_step="experts come with a later version",
            )


def _open_models(inventory: Inventory) -> Cells:
    """Every model-state file, of the one kind that the checkpoint has."""
    kinds = [k for k in (FileKind.MODEL, FileKind.ZERO3_MODEL) if inventory.of_kind(k)]
    if not kinds:
        raise MissingFileError(
            "no model-state file",
            file=inventory.folder.path,
            expected="mp_rank_*_model_states.pt or zero_pp_rank_*_model_states.pt",
            found=", ".join(path.name for path in inventory.files.values()) or "no files",
        )
    if len(kinds) > 1:
        raise CheckpointError(
            "model-state files of ZeRO-3 and of another stage lie in one folder",
            file=next(iter(inventory.of_kind(FileKind.ZERO3_MODEL).values())),
            next_step="one set is left over from another run; move it away",
        )
    models = {
        (name.dp, name.mp): read_model_states(str(path), name.dp, name.mp)
        for name, path in inventory.of_kind(kinds[0]).items()
    }
    for model in models.values():
        _refuse_expert_model(model)
    return models


def _refuse_expert_model(model: ModelStates) -> None:
    root = model.archive.root
    if not isinstance(root, Mapping):
        return
    for key in ("ds_autoep_layers", "autoep_layers", "num_experts"):
        if root.get(key):
            raise UnsupportedError(
                "checkpoints with experts cannot be read yet",
                file=model.file,
                found=key,
                next_step="experts come with a later version",
            )


def _open_ranks(
    inventory: Inventory, degrees: Degrees, models: Cells
) -> dict[tuple[int, int], OptimizerStates]:
    """Every optimizer file; empty for a checkpoint that has none by right."""
    cells = [(dp, mp) for dp in range(degrees.dp) for mp in range(degrees.mp)]
    zero3 = bool(inventory.of_kind(FileKind.ZERO3_MODEL))
    model_cells = cells if zero3 else [(0, mp) for mp in range(degrees.mp)]
    require_grid(inventory, FileKind.ZERO3_MODEL if zero3 else FileKind.MODEL, model_cells)
    if not inventory.of_kind(FileKind.OPTIMIZER):
        _require_no_zero(models)
        return {}
    paths = require_grid(inventory, FileKind.OPTIMIZER, cells)
    ranks = {cell: read_optimizer_states(str(paths[cell]), *cell) for cell in cells}
    require_one_value({rank.file: rank.flavour for rank in ranks.values()}, "the ZeRO stage")
    if zero3 != (ranks[0, 0].stage == 3):
        raise CheckpointError(
            "the optimizer files are of another ZeRO stage than the model-state files",
            file=ranks[0, 0].file,
            found=ranks[0, 0].flavour,
            next_step="one set is left over from another run; move it away",
        )
    return ranks


def _require_no_zero(models: Cells) -> None:
    """Without optimizer files the optimizer must be in the model-state file."""
    for model in models.values():
        root = model.archive.root
        if model.param_shapes is not None or not (
            isinstance(root, Mapping) and root.get("optimizer")
        ):
            raise MissingFileError(
                "the optimizer states are nowhere: no *_optim_states.pt file, and no `optimizer` "
                "in the model-state file",
                file=model.file,
                next_step="copy the optimizer files here or name their folder with --also; "
                "DeepSpeed 0.17.6 to 0.18.4 never saved them for bf16 with fp32 accumulation",
            )


# --------------------------------------------------------------------------- one reading


@dataclass(slots=True)
class _Reading:
    """What is known while a checkpoint is read."""

    inventory: Inventory
    degrees: Degrees
    models: Cells
    ranks: dict[tuple[int, int], OptimizerStates]
    found: Partitions = field(default_factory=Partitions)
    assembler: Assembler = field(default_factory=Assembler)
    tensors: dict[TensorKey, StoredTensor] = field(default_factory=dict)
    scalars: dict[TensorKey, Scalar] = field(default_factory=dict)
    layouts: Layouts = field(default_factory=lambda: Layouts(()))
    stored: StoredMaps | None = None
    restore_keys: dict[str, Mapping[str, object]] = field(default_factory=dict)

    def checkpoint(self) -> Checkpoint:
        """Read everything."""
        self.stored = read_stored_maps(self.columns[0].info)
        sources = (self.stored,) if self.stored else ()
        self.layouts = Layouts((OneShard(),) if self.degrees.tp == 1 else sources)
        aliases = {a: o for model in self.models.values() for a, o in model.shared.items()}
        if self.ranks:
            self._resolve_partitions()
        governed = self._govern({n: self._shapes(s) for n, s in self.found.shards.items()})
        for name, shards in self.found.shards.items():
            self._add_trained(name, shards, governed[name])
        if not self.ranks:
            self._add_unsharded()
        self._add_module(self._module_tensors(aliases))
        return self._result(aliases)

    @property
    def stage(self) -> int:
        """ZeRO stage."""
        return self.ranks[0, 0].stage if self.ranks else 0

    @property
    def columns(self) -> list[ModelStates]:
        """The model-state file of each model-parallel rank, of data-parallel rank 0."""
        return [self.models[0, mp] for mp in range(self.degrees.mp)]

    def _untouched(self) -> frozenset[str]:
        return self.stored.empty_names() if self.stored else frozenset()

    def _resolve_partitions(self) -> None:
        dp, mp = self.degrees.dp, self.degrees.mp
        if self.stage == 3:
            add_zero3_columns(self.found, self.models, self.ranks, dp, mp, self._untouched())
            return
        for column in range(mp):
            ranks = [self.ranks[rank, column] for rank in range(dp)]
            shapes = shapes_of(self.models[0, column])
            require_groups(ranks, shapes)
            for group, names in enumerate(shapes):
                add_contiguous(self.found, dense_buffer(group, names, ranks, column))

    # ----- layouts

    @staticmethod
    def _shapes(shards: Mapping[int, Shard]) -> dict[int, Shape]:
        return {column: shard.shape for column, shard in shards.items()}

    def _govern(
        self, shapes: Mapping[str, Mapping[int, Shape]], over_world: Iterable[str] = ()
    ) -> dict[str, GovernedMap]:
        """The map of every parameter over columns; all that are not known in one error."""
        governed = {}
        unknown = []
        whole = self.found.over_world.union(over_world)
        for name, by_column in shapes.items():
            if name in whole:
                outer = replicated_map(by_column[0], 1)
                governed[name] = GovernedMap(outer, "partitioned over all ranks, whole")
                continue
            found = self._over_columns(name, by_column)
            if found is None:
                unknown.append(name)
                continue
            governed[name] = found
            if found.restore_keys:
                self.restore_keys[name] = found.restore_keys
        if unknown:
            raise refuse_unknown(unknown, self.columns[0].file, self.degrees.tp)
        return governed

    def _over_columns(self, name: str, shapes: Mapping[int, Shape]) -> GovernedMap | None:
        """The map over columns `mp = pp * tp + tp_rank`, from the map over tensor ranks."""
        tp = self.degrees.tp
        stages: dict[int, dict[int, Shape]] = {}
        for column, shape in shapes.items():
            stages.setdefault(column // tp, {})[column % tp] = shape
        maps = {stage: self.layouts.map_of(name, held) for stage, held in stages.items()}
        first = next(iter(maps.values()))
        if first is None or list(maps) == [0]:
            return first
        if any(other is None or other.map != first.map for other in maps.values()):
            raise LayoutError(
                "pipeline stages hold a shared parameter in different shapes",
                parameter=name,
                found=dict(shapes),
            )
        return replace(first, map=_over_stages(first.map, list(stages), tp))

    # ----- trained parameters

    def _add_trained(self, name: str, shards: Mapping[int, Shard], outer: GovernedMap) -> None:
        fragments = [part for shard in shards.values() for part in shard.fragments]
        if not fragments:
            return
        self._require_same_states(name, shards)
        for state in (MASTER, *fragments[0].states.states):
            located = self.assembler.locate(
                name,
                outer.map,
                {
                    column: [part.stretch(state) for part in shard.fragments]
                    for column, shard in shards.items()
                    if shard.fragments
                },
            )
            dtypes = {part.file: part.record(state).dtype for part in fragments}
            require_one_value(dtypes, f"the dtype of {name}, state {state}")
            self.tensors[name, state] = StoredTensor(
                name,
                state,
                fragments[0].record(state).dtype,
                located.map,
                located.regions,
                Role.PARAMETER,
                outer.provenance,
            )
        for state, scalar in fragments[0].states.scalars.items():
            self.scalars[name, state] = scalar

    @staticmethod
    def _require_same_states(name: str, shards: Mapping[int, Shard]) -> None:
        fragments = [part for shard in shards.values() for part in shard.fragments]
        kept = {part.file: sorted(part.states.states) for part in fragments}
        require_one_value(kept, f"the optimizer states of {name}")
        for state in dict.fromkeys(s for part in fragments for s in part.states.scalars):
            values = {
                part.file: getattr(part.states.scalars.get(state), "value", "absent")
                for part in fragments
            }
            require_one_value(values, f"{state} of {name}")

    # ----- everything else of the model

    def _module_tensors(self, aliases: Mapping[str, str]) -> list[ModuleTensor]:
        trained = frozenset(name for name, _ in self.tensors) | frozenset(self.found.shards)
        if self.stage == 3:
            return list(
                zero3_tensors(
                    self.models,
                    self.degrees.dp,
                    self.degrees.tp,
                    trained,
                    aliases,
                    self._untouched(),
                )
            )
        layers = self.inventory.of_kind(FileKind.LAYER)
        return [
            *module_tensors(self.columns, trained, aliases),
            *layer_tensors(layers, trained),
        ]

    def _add_module(self, tensors: list[ModuleTensor]) -> None:
        governed = self._govern_module(tensors)
        for tensor in tensors:
            outer = governed[tensor.name]
            record = next(iter(tensor.shards.values())).record
            order = stored_order(record, tensor.name, self.columns[0].file)
            if order is not None:
                outer = replace(outer, map=nest(outer.map, dict.fromkeys(tensor.shards, order)))
            located = self.assembler.locate(
                tensor.name,
                outer.map,
                {column: shard.stretches for column, shard in tensor.shards.items()},
            )
            self.tensors[tensor.name, MASTER] = StoredTensor(
                tensor.name,
                MASTER,
                record.dtype,
                located.map,
                located.regions,
                tensor.role,
                outer.provenance,
            )

    def _govern_module(self, tensors: list[ModuleTensor]) -> dict[str, GovernedMap]:
        """Frozen parameters are cut like trained ones; buffers are whole on every rank."""
        shapes = {t.name: {c: shard.shape for c, shard in t.shards.items()} for t in tensors}
        buffers = {tensor.name for tensor in tensors if tensor.role is Role.BUFFER}
        governed = {}
        for name in buffers:
            if len(set(shapes[name].values())) > 1:
                raise LayoutError(
                    "ranks hold a buffer in different shapes",
                    parameter=name,
                    found=shapes[name],
                    next_step="state its layout with --layout",
                )
            shape = next(iter(shapes[name].values()))
            outer = ParamAffineMap(
                shape,
                dict.fromkeys(shapes[name], shape),
                {
                    column: replicated_map(shape, max(shapes[name]) + 1).pieces_by_rank[column]
                    for column in shapes[name]
                },
            )
            governed[name] = GovernedMap(outer, "buffer, whole on every rank")
        frozen = {name: held for name, held in shapes.items() if name not in buffers}
        whole = [tensor.name for tensor in tensors if tensor.over_world]
        return governed | self._govern(frozen, whole)

    def _add_unsharded(self) -> None:
        add_unsharded(self.columns, self.degrees, self.tensors, self.scalars, self.found)

    # ----- the result

    def _result(self, aliases: Mapping[str, str]) -> Checkpoint:
        first = self.columns[0]
        extras: dict[str, Extra] = collect_extras(self.columns, self.ranks, self.found)
        if self.restore_keys:
            extras["restore_keys"] = Extra(self.restore_keys)
        version = first.version or (self.ranks[0, 0].version if self.ranks else "")
        return Checkpoint(
            format="deepspeed",
            path=str(self.inventory.folder.path),
            topology=Topology(self.stage, self.degrees.dp, self.degrees.tp, self.degrees.pp),
            tensors=self.tensors,
            scalars=self.scalars,
            aliases=dict(aliases),
            extras=extras,
            versions={"deepspeed": version} if version else {},
            files=self.inventory.source_files(),
            problems=tuple(dict.fromkeys((*self.found.problems, *_notes(self.ranks)))),
        )


def _notes(ranks: Mapping[tuple[int, int], OptimizerStates]) -> Iterable[Problem]:
    if ranks and not ranks[0, 0].param_groups:
        yield Problem(
            "the optimizer file keeps no hyperparameters (elastic_checkpoint)",
            ranks[0, 0].file,
            next_step="set them in the configuration of the run that resumes",
        )


def _over_stages(single: ParamAffineMap, stages: list[int], tp: int) -> ParamAffineMap:
    """A map over tensor ranks, repeated on every stage that holds the parameter."""
    shapes: dict[int, Shape] = {}
    pieces: dict[int, list[AffinePiece]] = {}
    for stage in stages:
        for rank, shape in single.shard_shapes.items():
            column = stage * tp + rank
            shapes[column] = shape
            pieces[column] = [
                AffinePiece(
                    p.shape,
                    p.source_offset,
                    p.source_strides,
                    p.dest_offset,
                    p.dest_strides,
                    (column,),
                    p.scale,
                )
                for p in single.pieces_by_rank.get(rank, ())
            ]
    return locate(single.logical_shape, shapes, pieces)
