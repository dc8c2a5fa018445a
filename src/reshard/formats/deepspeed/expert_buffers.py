"""Which ranks hold which experts: the flat buffers of expert groups.

Theory. Experts are in parameter groups of their own, and such a group has not one flat buffer but
one for every rank of the expert-parallel (EP) group: the ranks with the same EP rank hold the same
experts and cut *their* buffer among themselves (expert data parallelism, `edp`). So for `ep` EP
ranks there are `ep` buffers of `edp` partitions each, and all must be known, in order.

Over the *pool* of ranks that share the experts of a layer (the data-parallel ranks of a column; all
ranks of a stage, `D * tp + T`, when AutoEP and AutoTP are folded) there are two orders::

    experts first (default)   pool 0 1 2 3 4 5, ep 2:   EP rank 0 holds 0 2 4, EP rank 1 1 3 5
    data first                                          EP rank 0 holds 0 1 2, EP rank 1 3 4 5

The second is `use_data_before_expert_parallelism` of the configuration. Where every rank's file
states its own place (ZeRO-3, folding) that is used, and must be complete.

Source: `utils/groups.py` (`_create_expert_and_data_parallel`, `_get_expert_parallel_ranks`),
`module_inject/auto_ep_folding.py` (`expected_folding_group_tables`), DeepSpeed 0.12 to 0.19.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from reshard.errors import CheckpointError, UnsupportedError, count_text
from reshard.formats.deepspeed.experts import AutoEP, ExpertLayer, ExpertPlace
from reshard.formats.deepspeed.folding import Folding
from reshard.formats.deepspeed.grid import require_one_value
from reshard.formats.deepspeed.native_moe import NativeLayer, global_name, is_native, split_name
from reshard.formats.deepspeed.optimizer_records import OptimizerStates
from reshard.formats.deepspeed.partitions import Buffer, Part
from reshard.formats.deepspeed.records import Shapes

ORDER_KEY = "use_data_before_expert_parallelism"
"""Key of the configuration that chooses the order of ranks."""

_EP_SIZE = re.compile(r"ep_size_(\d+)")


# --------------------------------------------------------------------------- the order of ranks


def data_comes_first(configs: Mapping[str, Mapping[object, object]]) -> bool | None:
    """Which order the configuration chooses, None when no file has the configuration.

    Parameters
    ----------
    configs
        File -> its DeepSpeed configuration, empty where it is kept as a path.
    """
    stated = {file: config.get(ORDER_KEY, False) for file, config in configs.items() if config}
    require_one_value(stated, ORDER_KEY)
    for file, value in stated.items():
        if not isinstance(value, bool):
            raise CheckpointError(
                f"{ORDER_KEY} is no boolean", file=file, expected="true or false", found=value
            )
        return value
    return None


def by_ep_rank(pool: Sequence[Part], edp: int, *, data_first: bool) -> list[tuple[Part, ...]]:
    """Share a pool of ranks out to EP ranks, each with its ranks in the order of their partitions.

    Parameters
    ----------
    pool
        All ranks that share the experts, in order.
    edp
        How many of them hold the same experts.
    data_first
        The order; see the theory.
    """
    ep = len(pool) // edp
    if data_first:
        return [tuple(pool[rank * edp : (rank + 1) * edp]) for rank in range(ep)]
    return [tuple(pool[rank::ep]) for rank in range(ep)]


def by_stated_place(
    pool: Mapping[ExpertPlace, Sequence[Part]], ep: int, edp: int, what: str
) -> list[tuple[Part, ...]]:
    """Share a pool out to EP ranks by the places that the files state, which must be complete.

    Raises
    ------
    CheckpointError
        When a place is taken by no rank, or by more than one.
    """
    files = [part.file for parts in pool.values() for part in parts]
    holders = []
    for ep_rank in range(ep):
        held = []
        for edp_rank in range(edp):
            parts = pool.get(ExpertPlace(ep_rank, edp_rank, edp), ())
            if len(parts) != 1:
                raise CheckpointError(
                    f"partition {edp_rank} of the experts of EP rank {ep_rank} is held by "
                    + count_text(len(parts), "rank"),
                    file=parts[1].file if parts else files[0],
                    parameter=what,
                    expected=f"each of {ep} x {edp} places once",
                    found=", ".join(f"{p.ep_rank}.{p.edp_rank} of {p.edp}" for p in pool),
                    next_step="files of different runs lie in one folder",
                )
            held.append(parts[0])
        holders.append(tuple(held))
    return holders


# --------------------------------------------------------------------------- AutoEP


def expert_layers(names: Iterable[str], autoep: AutoEP | None, file: str) -> list[ExpertLayer]:
    """The AutoEP layers of a group's parameters, empty for a group without experts.

    Raises
    ------
    CheckpointError
        When a group mixes experts with other parameters, or layers of different EP degrees.
    """
    known = {} if autoep is None else autoep.by_name
    listed = list(names)
    layers = [known[name] for name in listed if name in known]
    if layers and len(layers) != len(listed):
        raise CheckpointError(
            "a group holds experts and other parameters",
            file=file,
            found=next(name for name in listed if name not in known),
            next_step="the metadata is of another run than the file",
        )
    if len({layer.ep_size for layer in layers}) > 1:
        raise CheckpointError(
            "a group holds experts of layers with different expert-parallel degrees",
            file=file,
            found=sorted({layer.ep_size for layer in layers}),
        )
    return layers


def fused_buffers(
    group: int, shapes: Shapes, autoep: AutoEP, holders: Sequence[tuple[Part, ...]]
) -> list[Buffer]:
    """The buffers of a group of fused experts, one an EP rank; `holders` are by EP rank.

    Names are the same on every EP rank. Shapes are those of the rank that wrote `shapes`; with an
    uneven placement the other ranks have another number of experts.
    """
    layers = autoep.by_name
    buffers = []
    for ep_rank, parts in enumerate(holders):
        local = {
            name: layers[name].local_shape(ep_rank, tuple(shape[1:]))
            for name, shape in shapes.items()
        }
        filled = {name: shape for name, shape in local.items() if shape[0]}
        if not filled:
            continue  # an EP rank without experts has no buffer
        for part in parts:
            if group >= len(part.rank.groups):
                raise CheckpointError(
                    "the optimizer file lacks a group of experts that its rank holds",
                    file=part.file,
                    rank=f"ep {ep_rank}",
                    parameter=next(iter(filled)),
                    expected=f"group {group}",
                    found=count_text(len(part.rank.groups), "group"),
                    next_step="a rank file is from another run",
                )
        buffers.append(Buffer(group, filled, parts, ep_rank))
    return buffers


def require_local_shapes(shapes: Shapes, autoep: AutoEP, ep_rank: int, file: str) -> None:
    """Refuse when a rank's shards do not hold as many experts as the placement gives it."""
    layers = autoep.by_name
    for name, shape in shapes.items():
        layer = layers[name]
        expected = layer.local_shape(ep_rank, tuple(shape[1:]))
        if not shape or tuple(shape) != expected:
            raise CheckpointError(
                "a rank holds another number of experts than the placement says",
                file=file,
                rank=f"ep {ep_rank}",
                parameter=name,
                expected=f"shape {expected}",
                found=f"shape {tuple(shape)}",
                next_step="the metadata is of another run than the file",
            )


def unfolded_holders(
    pool: Sequence[Part], ep: int, *, data_first: bool, what: str
) -> list[tuple[Part, ...]]:
    """Who holds the experts of every EP rank when each column has its own EP groups."""
    if len(pool) % ep:
        raise CheckpointError(
            "the data-parallel degree is not a multiple of the expert-parallel degree",
            file=pool[0].file,
            parameter=what,
            expected=f"a multiple of {ep}",
            found=len(pool),
            next_step="the metadata is of another run than the files",
        )
    return by_ep_rank(pool, len(pool) // ep, data_first=data_first)


def folded_holders(
    pool: Sequence[tuple[Part, Folding]], ep: int, what: str
) -> list[tuple[Part, ...]]:
    """Who holds the experts of every EP rank when the EP groups run across tensor ranks.

    Parameters
    ----------
    pool
        All ranks of the stage, `D * tp + T` ascending, with what they state.
    ep
        The expert-parallel degree.
    what
        A parameter of the group: which partition of it a rank holds may be stated by name.
    """
    if len(pool) % ep:
        raise CheckpointError(
            "the number of ranks is not a multiple of the expert-parallel degree",
            file=pool[0][0].file,
            parameter=what,
            expected=f"a multiple of {ep}",
            found=len(pool),
        )
    edp = len(pool) // ep
    places: dict[ExpertPlace, list[Part]] = {}
    for number, (part, folding) in enumerate(pool):
        partition = folding.partition_ranks.get(what, number // ep)
        places.setdefault(ExpertPlace(folding.ep_rank, partition, edp), []).append(part)
    return by_stated_place(places, ep, edp, what)


# --------------------------------------------------------------------------- native MoE


def is_native_group(names: Iterable[str], file: str) -> bool:
    """Whether a group holds native experts.

    Raises
    ------
    CheckpointError
        When it holds other parameters as well.
    """
    kinds = {name: is_native(name) for name in names}
    if len(set(kinds.values())) > 1:
        raise CheckpointError(
            "a group holds experts and other parameters",
            file=file,
            found=next(name for name, native in kinds.items() if not native),
            next_step="DeepSpeed keeps experts in groups of their own; the file is damaged",
        )
    return any(kinds.values())


def native_degree(group: int, ranks: Sequence[OptimizerStates]) -> int:
    """The expert-parallel degree of a native group, from the number of its partitions.

    Raises
    ------
    CheckpointError
        When it does not fit the data-parallel degree, or the name of the group says another.
    """
    stated = {rank.file: rank.groups[group].partitions for rank in ranks}
    require_one_value(stated, f"partition_count of group {group}")
    edp = ranks[0].groups[group].partitions or 0
    if not edp or len(ranks) % edp:
        raise CheckpointError(
            f"the partitions of expert group {group} do not fit the data-parallel degree",
            file=ranks[0].file,
            expected=f"a divisor of {len(ranks)}",
            found=edp,
        )
    ep = len(ranks) // edp
    hyper = ranks[0].param_groups
    name = hyper[group].get("name") if group < len(hyper) else None
    named = _EP_SIZE.fullmatch(name) if isinstance(name, str) else None
    if named and int(named[1]) != ep:
        raise CheckpointError(
            f"the name of expert group {group} says another expert-parallel degree",
            file=ranks[0].file,
            expected=ep,
            found=name,
        )
    return ep


def native_buffers(
    group: int,
    shapes: Sequence[Shapes],
    holders: Sequence[tuple[Part, ...]],
    column: int,
    layers: Iterable[NativeLayer],
) -> list[Buffer]:
    """The buffers of a group of native experts, one an EP rank, with global names.

    Parameters
    ----------
    group
        Number of the group.
    shapes
        For every EP rank, local name -> shape, in the order of its buffer.
    holders
        For every EP rank, who holds its buffer.
    column
        The model-parallel rank; native experts may be cut by tensor parallelism besides.
    layers
        The native layers of the stage.
    """
    by_prefix = {layer.prefix: layer for layer in layers}
    buffers = []
    for ep_rank, parts in enumerate(holders):
        names = {
            name: global_name(name, ep_rank, _local_experts(name, by_prefix, holders))
            for name in shapes[ep_rank]
        }
        buffer = Buffer(group, shapes[ep_rank], parts, column, names)
        _require_weights(buffer, by_prefix)
        buffers.append(buffer)
    return buffers


def _local_experts(
    name: str, layers: Mapping[str, NativeLayer], holders: Sequence[tuple[Part, ...]]
) -> int:
    prefix, number, _ = split_name(name)
    layer = layers.get(prefix)
    file = holders[0][0].file
    if layer is None:
        raise CheckpointError(
            "no expert file is of this layer, so its global experts are not known",
            file=file,
            parameter=name,
            expected="layer_*_expert_*_mp_rank_*_model_states.pt",
            next_step="copy the expert files here, or name their folder with --also",
        )
    ep = len(holders)
    local, rest = divmod(layer.num_experts, ep)
    if rest or number >= local:
        raise CheckpointError(
            "the experts of a layer do not fit the expert-parallel degree",
            file=file,
            parameter=name,
            expected=f"{count_text(layer.num_experts, 'expert')} over {count_text(ep, 'rank')}",
            found=f"local expert {number}",
            next_step="the expert files are of another run than the optimizer files",
        )
    return local


def _require_weights(buffer: Buffer, layers: Mapping[str, NativeLayer]) -> None:
    """Refuse when an expert file has its tensor in another shape than the buffer."""
    for local, shape in buffer.shapes.items():
        name = buffer.names[local]
        prefix, expert, _ = split_name(name)
        path, tensors = layers[prefix].file_of(expert, buffer.column)
        record = tensors.get(name)
        if record is None or record.shape != tuple(shape):
            raise CheckpointError(
                "an expert file does not hold the parameter that the optimizer has",
                file=path,
                parameter=name,
                expected=f"shape {tuple(shape)}",
                found="nothing" if record is None else f"shape {record.shape}",
                next_step="the expert files are of another run than the optimizer files",
            )


# --------------------------------------------------------------------------- what cannot be told


def refuse_untold_order(pool: Sequence[Part], ep: int, what: str) -> UnsupportedError:
    """The error for a checkpoint whose order of EP ranks nobody states."""
    return UnsupportedError(
        f"which ranks hold which experts is not known: no file has the configuration, so "
        f"{ORDER_KEY} may be on or off, and the expert files fit neither or both",
        file=pool[0].file,
        parameter=what,
        expected=f"{ep} EP ranks of {len(pool) // ep} replicas each",
        next_step="give DeepSpeed its configuration as a dict, not as a path, and save again",
    )
