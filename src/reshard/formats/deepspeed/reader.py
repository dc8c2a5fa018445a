"""The reader of native DeepSpeed checkpoints: a folder becomes a `Checkpoint`.

Theory. The walk is: list the files → open every model-state file → settle the degrees of the grid
and demand every cell → find the experts (`expert_reading`) → open every optimizer file → resolve
the flat partitions (`contiguous_columns`, `zero3`) → find the map of every parameter over its
columns (`governing`) → compose (`assembly`). Scalars and settings are collected on the way, and
ranks that must agree on them are made to.

Only headers and pickles are read. The result has no trace of stages, groups or ranks left in its
tensors: only holders and byte ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from reshard.errors import CheckpointError
from reshard.formats.assembly import Assembler
from reshard.formats.checkpoint import (
    Checkpoint,
    Extra,
    Problem,
    Region,
    Role,
    RoundedCopy,
    Scalar,
    StoredTensor,
    TensorKey,
    Topology,
)
from reshard.formats.deepspeed.contiguous_columns import add_contiguous_columns
from reshard.formats.deepspeed.expert_pipelines import pipeline_with_experts
from reshard.formats.deepspeed.expert_reading import (
    Experts,
    leftover_fused,
    leftover_native,
    open_experts,
    report_absent_states,
)
from reshard.formats.deepspeed.extras import collect_extras
from reshard.formats.deepspeed.governing import Governor, expert_keys, in_stored_order
from reshard.formats.deepspeed.grid import (
    Degrees,
    Inventory,
    by_data_rank,
    require_one_value,
    settle_degrees,
    take_inventory,
)
from reshard.formats.deepspeed.model_weights import weight_copies
from reshard.formats.deepspeed.module import (
    ModuleTensor,
    module_tensors,
    zero3_tensors,
)
from reshard.formats.deepspeed.names import FileKind
from reshard.formats.deepspeed.native_moe import EXPERTS_ARE_CUT
from reshard.formats.deepspeed.numbered import has_optimizer, plain_settings
from reshard.formats.deepspeed.optimizer_records import OptimizerStates
from reshard.formats.deepspeed.own_names import require_own_names
from reshard.formats.deepspeed.partitions import MASTER, Fragment, Partitions, Shard
from reshard.formats.deepspeed.pipeline_layers import (
    LayerWeight,
    listed_by_mappings,
    read_layers,
)
from reshard.formats.deepspeed.problems import problems_inside, problems_of, weights_alone
from reshard.formats.deepspeed.rank_files import (
    open_models,
    open_ranks,
    require_models,
)
from reshard.formats.deepspeed.records import ModelStates
from reshard.formats.deepspeed.router_alias import router_aliases
from reshard.formats.deepspeed.sequence_parallel import sequence_note
from reshard.formats.deepspeed.statements import require_module_shapes, stated_aliases
from reshard.formats.deepspeed.steps import odd_steps, step_contradictions
from reshard.formats.deepspeed.tensor_parallel import read_layouts, require_same_for_ties
from reshard.formats.deepspeed.ties import twins, untied
from reshard.formats.deepspeed.unlisted_names import shared_storages, unlisted_notes
from reshard.formats.deepspeed.unsharded import read_unsharded, unstated_ties
from reshard.formats.deepspeed.unsharded_experts import (
    read_unsharded_experts,
)
from reshard.formats.deepspeed.zero3 import add_zero3_columns
from reshard.formats.dtypes import DType
from reshard.formats.folders import TagFolder
from reshard.formats.layout_source import GovernedMap, Layouts
from reshard.formats.manifest import MANIFEST_NAME
from reshard.formats.model_dtypes import MODULE_EXTRA
from reshard.formats.pipelines import PIPELINE, Pipeline
from reshard.formats.stated_layouts import StatedLayouts
from reshard.formats.step_values import require_steps
from reshard.formats.torch_archive import Archive, archive_name, read_archive
from reshard.geometry import ParamAffineMap

Cells = dict[tuple[int, int], ModelStates]


def open_deepspeed(folder: TagFolder, stated: StatedLayouts | None = None) -> Checkpoint:
    """Open a native DeepSpeed checkpoint of ZeRO-0, 1, 2, 3 or BF16_Optimizer.

    Parameters
    ----------
    folder
        The tag folder, and where its other ranks are.
    stated
        Layouts that the user states; they are asked before those of the files.

    Raises
    ------
    CheckpointError, MissingFileError
        When files are missing, stale, or contradict each other.
    LayoutError
        When the layout of a tensor-parallel parameter is not known.
    UnsupportedError
        When the files do not hold enough to tell where something is.
    ArchiveError
        When a file is damaged or hostile.
    """
    inventory = take_inventory(folder)
    inventory, models = by_data_rank(inventory, open_models(inventory))
    degrees = settle_degrees(models.values(), inventory)
    require_models(inventory, degrees)
    experts = open_experts(inventory, models, degrees)
    ranks = open_ranks(inventory, degrees, models, experts)
    _require_own_names(inventory, [f.archive for files in (models, ranks) for f in files.values()])
    require_module_shapes(models.values(), experts.fused)
    return _Reading(inventory, degrees, models, ranks, experts, stated).checkpoint()


def _require_own_names(inventory: Inventory, opened: Sequence[Archive]) -> None:
    """Hold every file but those of layers to the name that it was written under."""
    of_experts = (FileKind.EXPERT, FileKind.EXPERT_OPTIMIZER)
    paths = [str(path) for kind in of_experts for path in inventory.of_kind(kind).values()]
    carried = {archive.path: archive.name for archive in opened}
    require_own_names(carried | {path: archive_name(path) for path in paths})


# --------------------------------------------------------------------------- one reading


@dataclass(slots=True)
class _Reading:
    """What is known while a checkpoint is read."""

    inventory: Inventory
    degrees: Degrees
    models: Cells
    ranks: dict[tuple[int, int], OptimizerStates]
    experts: Experts
    stated: StatedLayouts | None = None
    found: Partitions = field(default_factory=Partitions)
    assembler: Assembler = field(default_factory=Assembler)
    tensors: dict[TensorKey, StoredTensor] = field(default_factory=dict)
    scalars: dict[TensorKey, Scalar] = field(default_factory=dict)
    layers: list[ModuleTensor] = field(default_factory=list)
    weights: tuple[LayerWeight, ...] = ()
    pipeline: Pipeline | None = None
    layouts: Layouts = field(default_factory=Layouts)
    native_ep: int = 1

    def checkpoint(self) -> Checkpoint:
        """Read everything."""
        governor = self._governor()
        aliases = stated_aliases(self.models.values())
        if self.experts.autoep is not None:
            aliases |= router_aliases(self.experts.autoep, self.columns)
        if self.ranks:
            aliases |= shared_storages(self.models.values(), aliases)
            self._resolve_partitions()
        elif self.stage == 0:
            for column in self.columns:
                aliases |= unstated_ties(column, aliases)
            self._add_unsharded(aliases, governor)
        if self.stated is not None:
            require_same_for_ties(self.stated, aliases, self.layouts)
        shapes = {n: {c: s.shape for c, s in held.items()} for n, held in self.found.shards.items()}
        governed = governor.govern(shapes, self.found.over_world)
        for name, shards in self.found.shards.items():
            self._add_trained(name, shards, governed[name])
        self._add_module(self._module_tensors(aliases), governor)
        self._add_fused()
        return self._result(aliases, governor)

    @property
    def stage(self) -> int | None:
        """ZeRO stage; None where the optimizer files that would say it are absent."""
        if self.ranks:
            return self.ranks[0, 0].stage
        plain = any(has_optimizer(column.archive) for column in self.columns)
        return 0 if plain or not self.listed else None

    @property
    def columns(self) -> list[ModelStates]:
        """The model-state file of each model-parallel rank, of data-parallel rank 0."""
        return [self.models[0, mp] for mp in range(self.degrees.mp)]

    @property
    def listed(self) -> dict[str, int]:
        """Trained names, and their group, as the model-state files list them."""
        return {
            name: group
            for model in self.columns
            for group, shapes in enumerate(model.param_shapes or ())
            for name in shapes
        }

    def _governor(self) -> Governor:
        read = read_layers(
            self.inventory.of_kind(FileKind.LAYER),
            self.columns,
            self.degrees.tp,
            self.inventory.folder.path,
            partitioned=bool(self.ranks),
        )
        self.layers, self.pipeline, self.weights = read.weights, read.pipeline, read.copies
        # for layouts, what is in layer files only is as good as in the model-state file
        columns = [self._with_layers(column) for column in self.columns]
        self.layouts = read_layouts(columns, self.degrees.tp, self.stated, self.experts.names())
        return Governor(self.layouts, self.degrees.tp, self.columns[0].file, self.experts.fused)

    def _with_layers(self, column: ModelStates) -> ModelStates:
        held = [tensor for tensor in self.layers if column.mp in tensor.shards]
        if not held:
            return column
        records = {tensor.name: tensor.shards[column.mp].record for tensor in held}
        buffers = {tensor.name for tensor in held if tensor.role is Role.BUFFER}
        return replace(
            column,
            module={**(column.module or {}), **records},
            buffer_names=column.buffer_names | buffers,
        )

    def _resolve_partitions(self) -> None:
        if self.stage == 3:
            add_zero3_columns(
                self.found,
                self.models,
                self.ranks,
                self.degrees,
                self.layouts.empty_names(),
                self.experts.autoep,
            )
        else:
            self.native_ep = add_contiguous_columns(
                self.found, self.columns, self.ranks, self.degrees, self.experts, self.layers
            )
            if self.pipeline is not None:
                self.pipeline = listed_by_mappings(
                    self.pipeline, self.columns, self.ranks, self.degrees
                )

    def _add_unsharded(self, aliases: Mapping[str, str], governor: Governor) -> None:
        read = read_unsharded(self.columns, self.layers, self.degrees, self.found, aliases)
        self.scalars |= read.scalars
        if self.pipeline is not None:
            self.pipeline = self.pipeline.held_by_stages(
                self.found.groups,
                {name: {c // self.degrees.tp for c in held} for name, held in read.columns.items()},
            )
        self._add_states_of_module(read.tensors, governor)
        if self.experts.present:
            of_experts = read_unsharded_experts(
                self.inventory, self.columns, self.experts, self.found
            )
            self.native_ep = of_experts.ep
            self.scalars |= of_experts.scalars
            self.tensors |= {tensor.key: tensor for tensor in of_experts.fused}
            self._add_states_of_module(of_experts.native, governor)

    def _add_states_of_module(
        self, states: Mapping[str, list[ModuleTensor]], governor: Governor
    ) -> None:
        """States that every column keeps whole shards of, by name of the state."""
        for state, tensors in states.items():
            governed = governor.govern_module(tensors)
            for tensor in tensors:
                self._add_whole(tensor, state, governed[tensor.name], Role.PARAMETER)

    # ----- trained parameters

    def _add_trained(self, name: str, shards: Mapping[int, Shard], outer: GovernedMap) -> None:
        fragments = [part for shard in shards.values() for part in shard.fragments]
        if not fragments:
            self._add_empty(name, outer)
            return
        for state in (MASTER, *self._states(name, fragments)):
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

    def _add_empty(self, name: str, outer: GovernedMap) -> None:
        """A trained parameter without elements keeps its shape in every state of its group."""
        if outer.map.numel:
            raise CheckpointError("no rank holds a trained parameter", parameter=name)
        group = next(index for index, names in enumerate(self.found.groups) if name in names)
        rank = self.ranks[0, 0]
        if group >= len(rank.groups):
            return
        held = rank.groups[group]
        nothing = ParamAffineMap(outer.map.logical_shape, {0: (0,)}, {0: ()})
        for state, record in {MASTER: held.master, **held.states}.items():
            self.tensors[name, state] = StoredTensor(
                name,
                state,
                record.dtype,
                nothing,
                {0: Region(rank.file, record.offset, 0)},
                Role.PARAMETER,
                outer.provenance,
            )
        for state, scalar in held.scalars.items():
            self.scalars[name, state] = scalar

    def _states(self, name: str, fragments: Sequence[Fragment]) -> list[str]:
        """The states that every fragment has; scalars are added. All must agree on them.

        For fused experts a state that some rank lacks is absent, which is reported; for everything
        else it is refused.
        """
        if name not in self.experts.fused:
            kept = {part.file: sorted(part.states.states) for part in fragments}
            require_one_value(kept, f"the optimizer states of {name}")
        states = [
            state
            for state in fragments[0].states.states
            if all(state in part.states.states for part in fragments)
        ]
        for state in dict.fromkeys(s for part in fragments for s in part.states.scalars):
            values = {part.file: part.states.scalars.get(state) for part in fragments}
            if None in values.values() and name in self.experts.fused:
                continue
            require_one_value(
                {file: getattr(scalar, "value", "absent") for file, scalar in values.items()},
                f"{state} of {name}",
            )
            self.scalars[name, state] = fragments[0].states.scalars[state]
        return states

    # ----- everything else of the model

    def _module_tensors(self, aliases: Mapping[str, str]) -> list[ModuleTensor]:
        trained = frozenset(name for name, state in self.tensors if state == MASTER)
        trained |= frozenset(self.found.shards)
        if self.stage == 3:
            return list(
                zero3_tensors(
                    self.models,
                    self.degrees,
                    trained,
                    aliases,
                    self.layouts.empty_names(),
                    self.experts.autoep,
                )
            )
        buffers = frozenset(name for model in self.columns for name in model.buffer_names)
        return [
            *module_tensors(self.columns, trained, aliases),
            *(tensor for tensor in self.layers if tensor.name not in trained),
            *leftover_native(self.experts, trained, buffers),
        ]

    def _add_module(self, tensors: list[ModuleTensor], governor: Governor) -> None:
        governed = governor.govern_module(tensors)
        trained = self._trained()
        for tensor in tensors:
            # without optimizer files, the model's weights are all there is of trained parameters
            role = Role.PARAMETER if tensor.name in trained else tensor.role
            self._add_whole(tensor, MASTER, governed[tensor.name], role)

    def _add_whole(self, tensor: ModuleTensor, state: str, outer: GovernedMap, role: Role) -> None:
        """A tensor of which a column holds its shard in one piece."""
        record = next(iter(tensor.shards.values())).record
        outer = in_stored_order(tensor, outer)
        located = self.assembler.locate(
            tensor.name,
            outer.map,
            {column: shard.stretches for column, shard in tensor.shards.items()},
        )
        self.tensors[tensor.name, state] = StoredTensor(
            tensor.name,
            state,
            record.dtype,
            located.map,
            located.regions,
            role,
            outer.provenance,
        )

    def _trained(self) -> set[str]:
        """Names that the trainer trains, whether their optimizer states are there or not."""
        return set(self.listed).union(*self.found.groups)

    def _add_fused(self) -> None:
        """Fused experts that no optimizer file has, from their own files."""
        if self.stage == 3:
            return
        found = {name for name, state in self.tensors if state == MASTER}
        for tensor in leftover_fused(self.experts, found, self._trained()):
            self.tensors[tensor.key] = tensor

    # ----- the result

    def _result(self, aliases: Mapping[str, str], governor: Governor) -> Checkpoint:
        first = self.columns[0]
        if not self.ranks:
            for name, group in self.listed.items():
                self.found.name_group(group, name)
        extras: dict[str, Extra] = collect_extras(self.columns, self.ranks, self.found)
        if self.stage == 0:
            settings = plain_settings(first.archive)
            extras |= {"optimizer_settings": Extra(settings, first.file)} if settings else {}
        pipeline = self.pipeline or pipeline_with_experts(
            self.columns, self.experts, self.found.groups, self.degrees.tp
        )
        if pipeline is not None:
            extras[PIPELINE] = Extra(pipeline)
        if self.degrees.tp > 1 and any(self.experts.native):
            extras[EXPERTS_ARE_CUT] = Extra(self.experts.native_are_cut)
        extras[MODULE_EXTRA] = Extra(self._module_dtypes(), first.file)
        # without ZeRO, states of fused experts come from files of their own, not by the governor
        restore_keys = {
            **{name: expert_keys(layer) for name, layer in self.experts.fused.items()},
            **governor.restore_keys,
        }
        if restore_keys:
            extras["restore_keys"] = Extra(restore_keys)
        # ZeRO-3 has placeholders instead of weights
        shards = {} if self.stage == 3 else self.found.shards
        copies = tuple(weight_copies(self.columns, self.weights, self.experts, shards, aliases))
        require_steps(self.scalars, first.file)
        version = first.version or (self.ranks[0, 0].version if self.ranks else "")
        return Checkpoint(
            format="deepspeed",
            path=str(self.inventory.folder.path),
            topology=self._topology(),
            tensors=self.tensors,
            scalars=self.scalars,
            aliases=dict(aliases),
            extras=extras,
            versions={"deepspeed": version} if version else {},
            files=self.inventory.sources,
            problems=tuple(dict.fromkeys(self._problems(aliases))),
            copies=copies,
            contradictions=tuple(self._contradictions()),
            unproved=tuple(self._untied(copies)),
            cuts=self._stated_cuts(governor),
        )

    def _contradictions(self) -> Iterator[CheckpointError]:
        """What files say against each other; a manifest vouches for what reshard wrote."""
        if not self._is_ours():
            yield from step_contradictions(self.columns, self.ranks, self.scalars)
            yield from twins(self.models, self.ranks)

    def _untied(self, copies: Sequence[RoundedCopy]) -> Iterator[Problem]:
        if not self._is_ours():
            yield from untied(copies, list(self.tensors.values()))

    def _is_ours(self) -> bool:
        return (self.inventory.folder.path / MANIFEST_NAME).exists()

    def _stated_cuts(self, governor: Governor) -> dict[str, ParamAffineMap]:
        """The cuts that a stated layout decided: no other file says them again."""
        stated = self.stated
        if stated is None or self.degrees.tp == 1:
            return {}
        return {
            name: found.map
            for name, found in governor.cuts.items()
            if stated.covers(name) and found.padded is None
        }

    def _module_dtypes(self) -> dict[str, DType]:
        """Element type of every weight in the state dict of the model, in its order."""
        dtypes: dict[str, DType] = {}
        for column in map(self._with_layers, self.columns):
            for name, record in (column.module or {}).items():
                dtypes.setdefault(name, record.dtype)
        return dtypes

    def _topology(self) -> Topology:
        autoep = self.experts.autoep
        ep = self.native_ep if autoep is None else max(self.native_ep, autoep.ep_size)
        return Topology(self.stage, self.degrees.dp, self.degrees.tp, self.degrees.pp, ep)

    def _problems(self, aliases: Mapping[str, str]) -> Iterator[Problem]:
        yield from self.found.problems
        yield from problems_of(self.models, self.ranks, self.layouts.notes)
        yield from odd_steps(self.columns, self.ranks)
        yield from unlisted_notes(self.columns, aliases, self.stage, self.experts.fused)
        if sequences := sequence_note(self.columns[0], self.inventory.sequence):
            yield sequences
        for path in self._expert_files():
            yield from problems_inside(read_archive(path), of_expert=True)
        if self.stage is None:
            yield weights_alone(str(self.inventory.folder.path))
        trained = {tensor.name for tensor in self.tensors.values() if tensor.role is Role.PARAMETER}
        yield from report_absent_states(self.tensors, sorted(trained), self.scalars)

    def _expert_files(self) -> list[str]:
        """The expert files that weights are taken from; the others are only seen to be there."""
        files = set(map(str, self.inventory.of_kind(FileKind.EXPERT).values()))
        if not files:
            return []
        regions = (region for one in self.tensors.values() for region in one.regions.values())
        return sorted({region.file for region in regions} & files)
