"""Which map governs a parameter over its columns.

Theory. Partitions and files are found per *column*; how columns make up the parameter is decided
here, name by name:

* fused experts: a column is a rank of the expert-parallel group, and the expert placement is the
  map. AutoTP's own map calls them replicated, and is not asked;
* a parameter partitioned over the world is whole: one column, one shard;
* a buffer is whole on every rank;
* everything else is cut over tensor-parallel ranks as a layout source says (`tensor_parallel`), and
  repeated on every pipeline stage that holds it. Stages that hold one parameter must hold it in the
  same shapes; that their values are equal is for whoever reads the bytes to check, as with every
  replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from reshard.errors import LayoutError
from reshard.formats.assembly import row_major_order, stored_order
from reshard.formats.checkpoint import Role
from reshard.formats.deepspeed.experts import ExpertLayer
from reshard.formats.deepspeed.grid import require_one_value
from reshard.formats.deepspeed.module import ModuleShard, ModuleTensor
from reshard.formats.layout_source import GovernedMap, Layouts
from reshard.geometry import AffinePiece, ParamAffineMap, locate, nest
from reshard.layouts.builders import replicated_map

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Governor:
    """Finds the map of every parameter over its columns."""

    layouts: Layouts
    """Who knows how parameters are cut over tensor-parallel ranks."""
    tp: int
    """The tensor-parallel degree; column `mp = stage * tp + tp_rank`."""
    file: str
    """For messages: where the layout would be stated."""
    experts: Mapping[str, ExpertLayer]
    """Fused expert parameters, by name."""
    restore_keys: dict[str, Mapping[str, object]] = field(default_factory=dict)
    """Keys that universal loaders need beside a tensor, by name; filled as maps are found."""
    cuts: dict[str, GovernedMap] = field(default_factory=dict)
    """Maps over tensor ranks, by name; filled as maps are found."""

    def govern(
        self, shapes: Mapping[str, Mapping[int, Shape]], whole: Iterable[str]
    ) -> dict[str, GovernedMap]:
        """The map of every parameter; all that are not known in one error.

        Parameters
        ----------
        shapes
            Name -> column -> shape of the shard.
        whole
            Names whose one shard is the whole parameter.

        Raises
        ------
        LayoutError
            When a layout is not known, or stages contradict each other.
        """
        governed: dict[str, GovernedMap] = {}
        unknown = []
        entire = set(whole)
        for name, by_column in shapes.items():
            found = self._map_of(name, by_column, entire)
            if found is None:
                unknown.append(name)
                continue
            governed[name] = found
            if found.restore_keys:
                self.restore_keys[name] = found.restore_keys
        if unknown:
            raise self.layouts.unknown(
                {name: shapes[name] for name in unknown}, known=entire.union(self.experts)
            )
        return governed

    def _map_of(
        self, name: str, by_column: Mapping[int, Shape], whole: set[str]
    ) -> GovernedMap | None:
        if name in self.experts:
            return self.expert(name, next(iter(by_column.values()))[1:])
        if name in whole:
            outer = replicated_map(by_column[0], 1)
            return GovernedMap(outer, "partitioned over all ranks, whole")
        return self._over_columns(name, by_column)

    def expert(self, name: str, tail: Shape) -> GovernedMap:
        """The map of a fused expert parameter whose experts have shape `tail`."""
        layer = self.experts[name]
        return GovernedMap(layer.map_of(tail), "expert placement", expert_keys(layer))

    def _over_columns(self, name: str, shapes: Mapping[int, Shape]) -> GovernedMap | None:
        """The map over columns `mp = pp * tp + tp_rank`, from the map over tensor ranks."""
        stages: dict[int, dict[int, Shape]] = {}
        for column, shape in shapes.items():
            stages.setdefault(column // self.tp, {})[column % self.tp] = shape
        maps = {stage: self.layouts.map_of(name, held) for stage, held in stages.items()}
        first = next(iter(maps.values()))
        if first is not None:
            self.cuts[name] = first
        if first is None or list(maps) == [0]:
            return first
        if any(other is None or other.map != first.map for other in maps.values()):
            raise LayoutError(
                "pipeline stages hold a shared parameter in different shapes",
                file=self.file,
                parameter=name,
                found=dict(shapes),
                next_step="the files are of different runs",
            )
        return replace(first, map=_over_stages(first.map, list(stages), self.tp))

    def govern_module(self, tensors: Iterable[ModuleTensor]) -> dict[str, GovernedMap]:
        """The maps of tensors that no optimizer trains: frozen ones are cut like trained ones."""
        listed = list(tensors)
        shapes = {t.name: {c: shard.shape for c, shard in t.shards.items()} for t in listed}
        buffers = [tensor.name for tensor in listed if tensor.role is Role.BUFFER]
        governed = {name: _whole_everywhere(name, shapes.pop(name)) for name in buffers}
        return governed | self.govern(shapes, [t.name for t in listed if t.over_world])


def expert_keys(layer: ExpertLayer) -> dict[str, object]:
    """What DeepSpeed's loader needs beside a fused expert parameter to cut it by EP rank."""
    return {
        "cat_dim": 0,
        "is_expert_param": True,
        "ep_num_experts": layer.placement.num_experts,
    }


def _whole_everywhere(name: str, shapes: Mapping[int, Shape]) -> GovernedMap:
    if len(set(shapes.values())) > 1:
        raise LayoutError(
            "ranks hold a buffer in different shapes",
            parameter=name,
            found=dict(shapes),
            next_step="state its layout with --layout",
        )
    shape = next(iter(shapes.values()))
    outer = ParamAffineMap(
        shape,
        dict.fromkeys(shapes, shape),
        {
            column: replicated_map(shape, max(shapes) + 1).pieces_by_rank[column]
            for column in shapes
        },
    )
    return GovernedMap(outer, "buffer, whole on every rank")


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


def in_stored_order(tensor: ModuleTensor, outer: GovernedMap) -> GovernedMap:
    """The map to the storages, when a column stores its shard in another order (transposed)."""
    dtypes = {
        shard.stretches[0].region.file: shard.record.dtype
        for shard in tensor.shards.values()
        if shard.stretches
    }
    require_one_value(dtypes, f"the dtype of {tensor.name}")
    orders = {
        column: stored_order(shard.record, tensor.name, _file_of(shard), column)
        for column, shard in tensor.shards.items()
    }
    if not any(orders.values()):
        return outer
    inner = {
        column: order or row_major_order(tensor.shards[column].shape, column)
        for column, order in orders.items()
    }
    return replace(outer, map=nest(outer.map, inner))


def _file_of(shard: ModuleShard) -> str:
    return shard.stretches[0].region.file if shard.stretches else ""
