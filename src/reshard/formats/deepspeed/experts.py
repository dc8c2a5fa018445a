"""What AutoEP says about its experts: `ds_autoep_layers`, read strictly.

Theory. AutoEP replaces a mixture-of-experts block by a layer whose experts are fused in three
parameters, `<prefix>.w1`, `.w2` and `.w3`. A rank holds only its experts, under the *same* name as
every other rank, so a name and a shape do not say which experts they are. The metadata does: one
entry a layer, in every model-state file, with the placement of the experts over the ranks of the
expert-parallel group, and the same placement once more as maps. Both are read; where they disagree
the file is refused.

Entries of different files must agree on everything but the place of the rank that wrote the file
(:class:`ExpertPlace`). Files of pipeline stages list different layers, so the layers of all files
are united.

Where AutoTP is on as well (*folding*), the expert-parallel group runs across tensor-parallel ranks.
AutoTP's own `affine_map` then calls the experts replicated; it is not asked about them.

Source: `engine.py` (`_save_moe_checkpoint`), `checkpoint/autoep_zero3_metadata.py`,
`module_inject/auto_ep_folding.py`, DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from reshard.errors import CheckpointError, DocumentError, LayoutError, UnsupportedError, count_text
from reshard.formats.deepspeed.records import ModelStates
from reshard.formats.parsing import Cursor
from reshard.geometry import ParamAffineMap, maps_from_document
from reshard.layouts.experts import ExpertPlacement, expert_map

METADATA_KEYS = ("ds_autoep_layers", "autoep_layers")
"""Where the metadata is kept; the second is of older checkpoints."""

WEIGHTS = ("w1", "w2", "w3")
"""The fused parameters of a layer."""

PARTITIONED = "zero3_partitioned"
"""`checkpoint_format` of ZeRO-3: experts are in the rank files, there are no expert files."""

_FORMATS = (None, "per_expert_files", PARTITIONED)
_MAPS_VERSION = 1
_PARTITIONED_VERSION = 1


@dataclass(frozen=True, slots=True)
class ExpertPlace:
    """Where the writer of a file stands: its EP rank, and its rank among the replicas of that.

    `edp_rank` and `edp` are None where the file does not state them.
    """

    ep_rank: int
    edp_rank: int | None = None
    edp: int | None = None


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """One AutoEP layer."""

    number: int
    """`moe_layer_id`, the number in the names of expert files."""
    prefix: str
    """Name of the experts; the parameters are `<prefix>.w1`, `.w2`, `.w3`."""
    module: str
    """Name of the layer."""
    placement: ExpertPlacement
    """Which EP rank holds which experts."""
    stored: Mapping[str, ParamAffineMap] = field(default_factory=dict)
    """The maps that the checkpoint carries beside the placement, by name; may be empty."""
    partitioned: bool = False
    """Whether the experts are in the rank files (ZeRO-3)."""
    file: str = field(default="", compare=False)
    """The file that says so."""

    @property
    def names(self) -> tuple[str, ...]:
        """The fused parameters."""
        return tuple(f"{self.prefix}.{weight}" for weight in WEIGHTS)

    @property
    def ep_size(self) -> int:
        """Number of ranks of the expert-parallel group."""
        return len(self.placement.experts_by_rank)

    def local_shape(self, ep_rank: int, tail: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of an EP rank's shard of a parameter whose experts have shape `tail`."""
        return (len(self.placement.experts_by_rank[ep_rank]), *tail)

    def map_of(self, tail: tuple[int, ...]) -> ParamAffineMap:
        """The map of a parameter over EP ranks."""
        return _lowered(self.placement, (self.placement.num_experts, *tail))


@dataclass(frozen=True, slots=True)
class AutoEP:
    """Everything that the metadata says."""

    layers: Mapping[str, ExpertLayer]
    """By prefix, in the order of the files."""
    places: Mapping[tuple[int, int], ExpertPlace]
    """Place of the writer of each model-state file, by `(dp, mp)`; files may state none."""
    columns: Mapping[str, frozenset[int]]
    """Model-parallel ranks whose files list a layer, by prefix."""

    @property
    def by_name(self) -> dict[str, ExpertLayer]:
        """The layer of every fused parameter."""
        return {name: layer for layer in self.layers.values() for name in layer.names}

    @property
    def ep_size(self) -> int:
        """The largest expert-parallel degree of any layer."""
        return max(layer.ep_size for layer in self.layers.values())

    @property
    def partitioned(self) -> bool:
        """Whether the experts are in the rank files (ZeRO-3)."""
        return any(layer.partitioned for layer in self.layers.values())


@lru_cache(maxsize=64)
def _lowered(placement: ExpertPlacement, shape: tuple[int, ...]) -> ParamAffineMap:
    """The canonical map; layers of a model share a handful of them."""
    return expert_map(placement, shape).canonical()


# --------------------------------------------------------------------------- the layers


def read_autoep(models: Iterable[ModelStates]) -> AutoEP | None:
    """The AutoEP metadata of all model-state files, None when there is none.

    Raises
    ------
    CheckpointError, LayoutError, DocumentError
        When an entry is malformed, contradicts itself, or files disagree.
    """
    layers: dict[str, ExpertLayer] = {}
    places: dict[tuple[int, int], ExpertPlace] = {}
    columns: dict[str, frozenset[int]] = {}
    for model in models:
        entries = _entries(model)
        listed = [_layer(entry) for entry in entries]
        _require_distinct(listed, model.file)
        for entry, layer in zip(entries, listed, strict=True):
            known = layers.setdefault(layer.prefix, layer)
            if known != layer:
                raise CheckpointError(
                    "model-state files disagree on the experts of a layer",
                    file=model.file,
                    parameter=layer.prefix,
                    expected=f"what {known.file} says",
                    next_step="files of different saves lie in one folder; move the stale away",
                )
            columns[layer.prefix] = columns.get(layer.prefix, frozenset()) | {model.mp}
            place = _place(entry, layer)
            if place is not None and places.setdefault((model.dp, model.mp), place) != place:
                raise _malformed(entry, "layers of one file state different places of its writer")
    return AutoEP(layers, places, columns) if layers else None


def _entries(model: ModelStates) -> list[Cursor]:
    root = Cursor(model.archive.root, model.file)
    for key in METADATA_KEYS:
        found = root.maybe(key)
        if found is not None:
            return found.each()
    return []


def _require_distinct(layers: list[ExpertLayer], file: str) -> None:
    for word, values in (
        ("moe_layer_id", [layer.number for layer in layers]),
        ("expert_key_prefix", [layer.prefix for layer in layers]),
    ):
        if len(set(values)) != len(values):
            raise CheckpointError(
                f"two entries of ds_autoep_layers have one {word}", file=file, found=values
            )


def _layer(entry: Cursor) -> ExpertLayer:
    prefix = entry.at("expert_key_prefix").text()
    if not prefix:
        raise _malformed(entry, "an empty expert_key_prefix")
    stated = entry.maybe("checkpoint_format")
    kind = None if stated is None else stated.text()
    if kind not in _FORMATS:
        raise UnsupportedError(
            "unknown checkpoint_format of experts", file=entry.file, parameter=prefix, found=kind
        )
    version = entry.maybe("checkpoint_format_version")
    if kind == PARTITIONED and (version is None or version.value != _PARTITIONED_VERSION):
        raise UnsupportedError(
            "unknown version of partitioned experts",
            file=entry.file,
            parameter=prefix,
            expected=_PARTITIONED_VERSION,
            found=None if version is None else version.value,
        )
    placement = _placement(entry, prefix)
    return ExpertLayer(
        number=entry.at("moe_layer_id").integer(),
        prefix=prefix,
        module=entry.at("module_path").text(),
        placement=placement,
        stored=_stored_maps(entry, prefix, placement),
        partitioned=kind == PARTITIONED,
        file=entry.file,
    )


def _placement(entry: Cursor, prefix: str) -> ExpertPlacement:
    """The descriptor, or the uniform placement of checkpoints that have none."""
    experts, ep_size = entry.at("num_experts").integer(1), entry.at("ep_size").integer(1)
    local = entry.at("num_local_experts").integer()
    descriptor = entry.maybe("expert_placement")
    if descriptor is None:
        if local * ep_size != experts:
            raise _malformed(
                entry,
                "num_local_experts x ep_size is not num_experts, and no placement explains it",
                expected=experts,
                found=f"{local} x {ep_size}",
            )
        return ExpertPlacement.uniform(experts, ep_size)
    try:
        placement = ExpertPlacement.from_descriptor(descriptor.value)
    except LayoutError as error:
        raise LayoutError(
            f"the expert placement is malformed: {error.what}",
            file=entry.file,
            rank=error.rank,
            parameter=prefix,
            expected=error.expected,
            found=error.found,
        ) from error
    ranks = len(placement.experts_by_rank)
    if (placement.num_experts, ranks) != (experts, ep_size):
        raise _malformed(
            entry,
            "the expert placement contradicts its layer",
            expected=f"{count_text(experts, 'expert')} over {count_text(ep_size, 'rank')}",
            found=f"{count_text(placement.num_experts, 'expert')} over {count_text(ranks, 'rank')}",
        )
    return placement


def _stored_maps(
    entry: Cursor, prefix: str, placement: ExpertPlacement
) -> dict[str, ParamAffineMap]:
    """The maps beside the placement, which must say the same."""
    document = entry.maybe("affine_maps")
    if document is None or not document.mapping():
        return {}
    version = document.maybe("version")
    if version is None or version.value != _MAPS_VERSION:
        raise DocumentError(
            "unknown version of expert maps",
            file=entry.file,
            parameter=prefix,
            expected=_MAPS_VERSION,
            found=None if version is None else version.value,
        )
    try:
        stored = maps_from_document(document.value)
    except DocumentError as error:
        raise DocumentError(
            error.what, file=entry.file, expected=error.expected, found=error.found
        ) from error
    for weight in WEIGHTS:
        name = f"{prefix}.{weight}"
        if name not in stored:
            raise _malformed(entry, "no map of an expert parameter", expected=name)
        _require_same_map(name, stored[name], placement, entry.file)
    return {f"{prefix}.{weight}": stored[f"{prefix}.{weight}"] for weight in WEIGHTS}


def _require_same_map(
    name: str, stored: ParamAffineMap, placement: ExpertPlacement, file: str
) -> None:
    shape = stored.logical_shape
    if not shape or shape[0] != placement.num_experts:
        raise _conflict(
            name, file, None, count_text(placement.num_experts, "expert"), f"shape {shape}"
        )
    placed = _lowered(placement, shape)
    if placed.same_elements(stored):
        return
    said = stored.canonical()
    for rank in sorted({*placed.ranks, *said.ranks}):
        expected, found = placed.pieces_by_rank.get(rank), said.pieces_by_rank.get(rank)
        if expected != found or placed.shard_shapes.get(rank) != said.shard_shapes.get(rank):
            texts = ("; ".join(map(str, pieces or ())) or "nothing" for pieces in (expected, found))
            raise _conflict(name, file, rank, *texts)


def _conflict(name: str, file: str, rank: int | None, expected: str, found: str) -> LayoutError:
    return LayoutError(
        "the stored map of an expert parameter contradicts the expert placement",
        file=file,
        rank=None if rank is None else f"ep {rank}",
        parameter=name,
        expected=expected,
        found=found,
        next_step="the metadata is damaged; no part of it can be trusted",
    )


def _malformed(
    entry: Cursor, what: str, *, expected: object = None, found: object = None
) -> CheckpointError:
    return CheckpointError(
        f"{what} ({entry.path})", file=entry.file, expected=expected, found=found
    )


# --------------------------------------------------------------------------- the writer's place


def _place(entry: Cursor, layer: ExpertLayer) -> ExpertPlace | None:
    stated = entry.maybe("ep_rank")
    if stated is None:
        return None
    ep_rank = stated.integer()
    if ep_rank >= layer.ep_size:
        raise _malformed(
            entry, "ep_rank is no rank of the placement", expected=layer.ep_size, found=ep_rank
        )
    held = layer.placement.experts_by_rank[ep_rank]
    local = entry.at("num_local_experts").integer()
    if local != len(held):
        raise _malformed(
            entry, "num_local_experts contradicts the placement", expected=len(held), found=local
        )
    _require_range(entry, held)
    rank, count = (
        entry.maybe("expert_data_parallel_rank"),
        entry.maybe("expert_data_parallel_world_size"),
    )
    return ExpertPlace(
        ep_rank,
        None if rank is None else rank.integer(),
        None if count is None else count.integer(1),
    )


def _require_range(entry: Cursor, held: tuple[int, ...]) -> None:
    """`global_expert_start` and `_end` speak of uniform placements only; there they must fit."""
    if entry.maybe("expert_placement") is not None:
        return
    start, end = entry.maybe("global_expert_start"), entry.maybe("global_expert_end")
    if start is None or end is None:
        return
    if (start.value, end.value) != (held[0], held[-1] + 1):
        raise _malformed(
            entry,
            "the range of global experts contradicts ep_rank",
            expected=f"{held[0]} to {held[-1] + 1}",
            found=f"{start.value} to {end.value}",
        )
