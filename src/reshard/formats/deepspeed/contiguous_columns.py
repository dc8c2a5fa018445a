"""All flat buffers of ZeRO-1, ZeRO-2 and BF16_Optimizer, column by column.

Theory. Every model-parallel rank has its own groups. A dense group is one buffer over the
data-parallel ranks of the column; a group of experts is one buffer for every EP rank
(`expert_buffers`). With AutoEP and AutoTP folded, EP groups run across the columns of a stage, so
their expert groups are resolved once, for all columns together.

A group of experts may be missing from every optimizer file; then it is left out here, and the
weights come from the expert files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from reshard.errors import CheckpointError, UnsupportedError
from reshard.formats.deepspeed.contiguous import (
    add_contiguous,
    dense_buffer,
    require_groups,
    shapes_of,
)
from reshard.formats.deepspeed.expert_buffers import (
    data_comes_first,
    expert_layers,
    folded_holders,
    fused_buffers,
    is_native_group,
    native_buffers,
    native_degree,
    require_local_shapes,
    unfolded_holders,
)
from reshard.formats.deepspeed.expert_reading import Cell, Experts
from reshard.formats.deepspeed.experts import AutoEP, ExpertLayer
from reshard.formats.deepspeed.folding import Folding, read_folding
from reshard.formats.deepspeed.grid import Degrees, require_one_value
from reshard.formats.deepspeed.module import ModuleTensor
from reshard.formats.deepspeed.native_moe import NativeLayer, is_native
from reshard.formats.deepspeed.optimizer_records import OptimizerStates
from reshard.formats.deepspeed.partitions import Buffer, Part, Partitions
from reshard.formats.deepspeed.rank_order import Holders, fused_check, native_check, tell_order
from reshard.formats.deepspeed.records import ModelStates, Shapes
from reshard.formats.deepspeed.unlisted import (
    Weights,
    dense_shapes,
    expert_shapes,
    require_same_weights,
    weights_of,
)
from reshard.formats.parsing import Cursor


def add_contiguous_columns(
    found: Partitions,
    columns: Sequence[ModelStates],
    ranks: Mapping[Cell, OptimizerStates],
    degrees: Degrees,
    experts: Experts,
    layers: Sequence[ModuleTensor] = (),
) -> int:
    """Resolve all columns; return the largest expert-parallel degree of native experts, or 1.

    `layers` are the tensors of a pipeline's layer files, by tensor rank.
    """
    reading = _Columns(found, columns, ranks, degrees, experts, layers)
    for column in range(degrees.mp):
        reading.add(column)
    return reading.native_ep


@dataclass(slots=True)
class _Columns:
    found: Partitions
    columns: Sequence[ModelStates]
    ranks: Mapping[Cell, OptimizerStates]
    degrees: Degrees
    experts: Experts
    layers: Sequence[ModuleTensor] = ()
    native_ep: int = 1

    def add(self, column: int) -> None:
        """Resolve one column."""
        own = [self.ranks[d, column] for d in range(self.degrees.dp)]
        if self.columns[column].param_shapes is None and self._is_mapped(own):
            self._add_unlisted(column, own)
            return
        shapes = self._present(shapes_of(self.columns[column]), own)
        for group, names in enumerate(shapes):
            for buffer in self._buffers(column, group, names, own):
                add_contiguous(self.found, buffer)

    @staticmethod
    def _is_mapped(own: Iterable[OptimizerStates]) -> bool:
        """Whether the files say themselves where each parameter is."""
        return all(group.mapping is not None for rank in own for group in rank.groups)

    def _present(
        self, shapes: Sequence[Shapes], own: Sequence[OptimizerStates]
    ) -> Sequence[Shapes]:
        """The groups that the optimizer files have.

        All files have all groups, but for groups of fused experts at the end: a file has none when
        its rank holds no expert, and no file has any when the experts' optimizer shards are absent.
        """
        fused = self.experts.fused
        for rank in own:
            absent = shapes[len(rank.groups) :]
            if not all(names and all(name in fused for name in names) for names in absent):
                require_groups([rank], shapes)
        most = max(len(rank.groups) for rank in own)
        if most > len(shapes):
            require_groups(own, shapes)
        return shapes[:most]

    def _buffers(
        self, column: int, group: int, names: Shapes, own: Sequence[OptimizerStates]
    ) -> list[Buffer]:
        file = self.columns[column].file
        layers = expert_layers(names, self.experts.autoep, file)
        if layers and self.experts.autoep is not None:
            return self._fused(column, group, names, layers, self.experts.autoep)
        if is_native_group(names, file):
            return self._native(column, group, names, own)
        return [dense_buffer(group, names, own, column)]

    # ----- fused experts

    def _fused(
        self, column: int, group: int, names: Shapes, layers: list[ExpertLayer], autoep: AutoEP
    ) -> list[Buffer]:
        model = self.columns[column]
        what, ep = next(iter(names)), layers[0].ep_size
        if self.degrees.tp > 1:
            return self._folded(column, group, names, ep, autoep)
        place = autoep.places.get((model.dp, model.mp))
        require_local_shapes(names, autoep, place.ep_rank if place else 0, model.file)
        pool = [Part(self.ranks[d, column], group) for d in range(self.degrees.dp)]

        def lay_out(holders: Holders) -> list[Buffer]:
            return fused_buffers(group, names, autoep, list(holders))

        data_first = self._data_first()
        if data_first is None:
            files = self.experts.files[column // self.degrees.tp]
            check = fused_check(self.experts.fused, files)
            data_first = self._told(pool, ep) and tell_order(pool, ep, what, lay_out, check)
        return lay_out(unfolded_holders(pool, ep, data_first=data_first, what=what))

    @staticmethod
    def _told(pool: Sequence[Part], ep: int) -> bool:
        """Whether the order of ranks makes a difference, so that it must be told."""
        return 1 < ep < len(pool) and len(pool) % ep == 0

    def _folded(
        self, column: int, group: int, names: Shapes, ep: int, autoep: AutoEP
    ) -> list[Buffer]:
        """The experts of all columns of a stage, filed with its first column."""
        tp = self.degrees.tp
        stage = column // tp
        mates = range(stage * tp, (stage + 1) * tp)
        listed = {self.columns[mate].file: self._names_of(mate, group) for mate in mates}
        require_one_value(listed, f"the experts of group {group}")
        pool = []
        for d in range(self.degrees.dp):
            for mate in mates:
                rank = self.ranks[d, mate]
                pool.append((Part(rank, group), self._folding(rank, mate - stage * tp, ep)))
        place = autoep.places.get((self.columns[column].dp, column))
        file = self.columns[column].file
        require_local_shapes(names, autoep, place.ep_rank if place else 0, file)
        if column != mates[0]:
            return []
        holders = folded_holders(pool, ep, next(iter(names)))
        return fused_buffers(group, names, autoep, holders)

    def _names_of(self, column: int, group: int) -> list[str]:
        shapes = shapes_of(self.columns[column])
        return list(shapes[group]) if group < len(shapes) else []

    def _folding(self, rank: OptimizerStates, tp_rank: int, ep: int) -> Folding:
        folding = read_folding(Cursor(rank.archive.root, rank.file))
        if folding is None:
            raise UnsupportedError(
                "experts under tensor parallelism, and the file does not say how they share ranks",
                file=rank.file,
                expected="folding: tp_rank, ep_rank, zero_partition_rank",
                found="no folding",
                next_step="save the checkpoint with DeepSpeed 0.19.8 or newer",
            )
        stated = (folding.tp_size, folding.tp_rank, folding.ep_size)
        if stated != (self.degrees.tp, tp_rank, ep):
            raise CheckpointError(
                "the folding metadata contradicts the rank that wrote the file",
                file=rank.file,
                expected=f"tp {self.degrees.tp}, tp_rank {tp_rank}, ep {ep}",
                found=f"tp {stated[0]}, tp_rank {stated[1]}, ep {stated[2]}",
                next_step="the file is of another run",
            )
        return folding

    def _data_first(self) -> bool | None:
        configs = {model.file: model.config for model in self.columns}
        configs |= {rank.file: rank.config for rank in self.ranks.values()}
        return data_comes_first(configs)

    # ----- native experts

    def _native(
        self, column: int, group: int, names: Shapes, own: Sequence[OptimizerStates]
    ) -> list[Buffer]:
        """The buffers of a column; spread experts are filed with the first column of the stage."""
        if not self.experts.native_are_spread:
            ep = self._degree(group, own)
            pool = [Part(rank, group) for rank in own]
            return self._native_buffers(column, group, [names] * ep, pool)
        tp = self.degrees.tp
        first = column - column % tp
        mates = range(first, first + tp)
        listed = {self.columns[mate].file: self._names_of(mate, group) for mate in mates}
        require_one_value(listed, f"the experts of group {group}")
        if column != first:
            return []
        ranks = [self.ranks[d, mate] for d in range(self.degrees.dp) for mate in mates]
        ep = self._degree(group, ranks)
        pool = [Part(rank, group) for rank in ranks]
        buffers = self._native_buffers(0, group, [names] * ep, pool, stage=first // tp)
        self.found.over_world |= {name for b in buffers for name in b.names.values()}
        return buffers

    def _degree(self, group: int, own: Sequence[OptimizerStates]) -> int:
        ep = native_degree(group, own)
        self.native_ep = max(self.native_ep, ep)
        return ep

    def _native_holders(
        self,
        column: int,
        group: int,
        shapes: Sequence[Shapes],
        pool: Sequence[Part],
        layers: Sequence[NativeLayer],
    ) -> list[tuple[Part, ...]]:
        ep, what = len(shapes), next(iter(shapes[0]), f"group {group}")

        def lay_out(holders: Holders) -> list[Buffer]:
            return native_buffers(group, shapes, list(holders), column, layers)

        data_first = self._data_first()
        if data_first is None:
            check = native_check(layers)
            data_first = self._told(pool, ep) and tell_order(pool, ep, what, lay_out, check)
        return unfolded_holders(pool, ep, data_first=data_first, what=what)

    def _native_buffers(
        self,
        column: int,
        group: int,
        shapes: Sequence[Shapes],
        pool: Sequence[Part],
        stage: int | None = None,
    ) -> list[Buffer]:
        layers = self.experts.native[column // self.degrees.tp if stage is None else stage]
        holders = self._native_holders(column, group, shapes, pool, layers)
        return native_buffers(group, shapes, holders, column, layers)

    # ----- checkpoints that list no parameters

    def _add_unlisted(self, column: int, own: Sequence[OptimizerStates]) -> None:
        """Recover order and shapes, and prove them by the weights."""
        weights = self._weights(column)
        groups = range(len(own[0].groups))
        native = [group for group in groups if self._is_native(group, own)]
        before = {name for name, held in self.found.shards.items() if column in held}
        for group in groups:
            pool = [Part(rank, group) for rank in own]
            if group not in native:
                shapes = dense_shapes(group, pool, weights)
                add_contiguous(self.found, dense_buffer(group, shapes, own, column))
                continue
            ep = self._degree(group, own)
            holders = unfolded_holders(
                pool, ep, data_first=bool(self._data_first()), what=f"group {group}"
            )
            layers = self.experts.native[column // self.degrees.tp]
            local, problems = expert_shapes(group, holders, layers, column, only=len(native) == 1)
            self.found.problems += problems
            for buffer in native_buffers(group, local, holders, column, layers):
                add_contiguous(self.found, replace(buffer, mapped=not problems))
        added = {n: column for n, held in self.found.shards.items() if column in held}
        proved = {name: column for name in added if name not in before}
        require_same_weights(self.found, proved, weights)

    @staticmethod
    def _is_native(group: int, own: Iterable[OptimizerStates]) -> bool:
        return any(is_native(name) for rank in own for name in rank.groups[group].mapping or ())

    def _weights(self, column: int) -> Weights:
        model = self.columns[column]
        weights = {name: (model.file, record) for name, record in (model.module or {}).items()}
        weights |= weights_of(self.layers, column % self.degrees.tp)
        for layer in self.experts.native[column // self.degrees.tp]:
            for by_rank in layer.experts.values():
                path, tensors = next(iter(by_rank.values())) if layer.is_spread else by_rank[column]
                weights |= {name: (path, record) for name, record in tensors.items()}
        return weights
