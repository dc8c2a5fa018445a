"""The flat buffers of ZeRO-1, ZeRO-2 and BF16_Optimizer, checked and resolved.

Theory. Shards follow each other in the buffer, which is cut into equal parts. Nothing is taken on
trust that can be checked:

* partitions are as long as the rule says, with the padding that the files state;
* the files' own `param_slice_mappings` agree with the rule. They are known to be wrong, and are
  then ignored, in one case only: `round_robin_gradients`, where DeepSpeed lays the buffer out in
  round-robin order and writes the mapping for the original one (`param_shapes` has the right
  order);
* every rank of a buffer states the same number of partitions and the same alignment.

Sources: `stage_1_and_2.py` (`get_data_parallel_partitions`, `_create_param_mapping`),
`bf16_optimizer.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from reshard.errors import CheckpointError, count_text
from reshard.formats.checkpoint import Problem
from reshard.formats.deepspeed.grid import require_one_value
from reshard.formats.deepspeed.optimizer_records import OptimizerStates
from reshard.formats.deepspeed.partitions import Buffer, Part, Partitions
from reshard.formats.deepspeed.records import ModelStates, Shapes
from reshard.layouts.flat import FlatFragment, contiguous_partition, flat_offsets


def shapes_of(model: ModelStates) -> tuple[Shapes, ...]:
    """The `param_shapes` of a model-state file, which must be there."""
    if model.param_shapes is None:
        raise CheckpointError(
            "the file lists no param_shapes, so the order of the flat buffers is not known",
            file=model.file,
            next_step="it is of an old format, or not the model-state file of a ZeRO run",
        )
    return model.param_shapes


def require_groups(ranks: Sequence[OptimizerStates], shapes: Sequence[Shapes]) -> None:
    """Refuse when a file has another number of groups than the model-state file."""
    for rank in ranks:
        if len(rank.groups) != len(shapes):
            raise CheckpointError(
                "the optimizer file has another number of groups than the model-state file",
                file=rank.file,
                expected=len(shapes),
                found=len(rank.groups),
            )


def dense_buffer(
    group: int, shapes: Shapes, ranks: Iterable[OptimizerStates], column: int
) -> Buffer:
    """The buffer of a group that all data-parallel ranks of a column share, by rank."""
    return Buffer(group, shapes, tuple(Part(rank, group) for rank in ranks), column)


def add_contiguous(found: Partitions, buffer: Buffer) -> None:
    """Resolve one buffer."""
    numels = [prod(shape) for shape in buffer.shapes.values()]
    alignment = _alignment(buffer, len(numels))
    length = _partition_length(buffer, numels, alignment)
    flat = list(contiguous_partition(numels, length, alignment)) if length else []
    if buffer.mapped:
        _check_mappings(found, buffer, flat)
    found.add(buffer, flat)


def _alignment(buffer: Buffer, count: int) -> tuple[int, ...]:
    stated = {part.file: part.states.alignment for part in buffer.parts}
    require_one_value(stated, f"param_alignment_paddings of group {buffer.group}")
    alignment = buffer.parts[0].states.alignment
    if alignment and len(alignment) != count:
        raise CheckpointError(
            f"param_alignment_paddings of group {buffer.group} do not fit param_shapes",
            file=buffer.parts[0].file,
            expected=count,
            found=len(alignment),
        )
    return alignment


def _partition_length(buffer: Buffer, numels: Sequence[int], alignment: Sequence[int]) -> int:
    """Elements of a partition with its padding, agreed by all files and by the rule."""
    count, group = len(buffer.parts), buffer.group
    lengths = {}
    for part in buffer.parts:
        states = part.states
        if states.partitions not in (None, count):
            raise CheckpointError(
                f"group {group} is cut into another number of partitions than ranks hold it",
                file=part.file,
                expected=count,
                found=states.partitions,
                next_step="files of another run lie in this folder, or this is an expert group",
            )
        padded = part.rank.flavour == "BF16_Optimizer"
        lengths[part.file] = states.master.shape[0] + (0 if padded else states.padding)
    require_one_value(lengths, f"the partition length of group {group}")
    length = next(iter(lengths.values()))
    _, end = flat_offsets(numels, alignment)
    slack = length * count - end
    if not 0 <= slack < 2 * count:
        raise CheckpointError(
            f"the partitions of group {group} do not hold the parameters that param_shapes lists",
            file=buffer.parts[0].file,
            expected=f"{count_text(end, 'element')} and less than {2 * count} of padding",
            found=f"{count_text(count, 'partition')} of {length}",
            next_step="a rank file is from another run",
        )
    return length


def _check_mappings(found: Partitions, buffer: Buffer, flat: Iterable[FlatFragment]) -> None:
    """Compare the files' own mappings with the rule; see the theory for the one known lie."""
    names = list(buffer.shapes)
    ours: list[dict[str, tuple[int, int]]] = [{} for _ in buffer.parts]
    for piece in flat:
        ours[piece.partition][names[piece.index]] = (piece.partition_start, piece.numel)
    for part, mine in zip(buffer.parts, ours, strict=True):
        stated = part.states.mapping
        if stated is None or dict(stated) == mine:
            continue
        if is_round_robin(part.rank):
            found.problems.append(
                Problem(
                    "DeepSpeed wrote wrong param_slice_mappings, as it does under "
                    "round_robin_gradients; the order of param_shapes, which is right, was used",
                    part.file,
                )
            )
            continue
        raise _contradiction(buffer, part, mine, stated)


def _contradiction(
    buffer: Buffer,
    part: Part,
    mine: Mapping[str, tuple[int, int]],
    stated: Mapping[str, tuple[int, int]],
) -> CheckpointError:
    odd = next(name for name in {**mine, **stated} if stated.get(name) != mine.get(name))
    return CheckpointError(
        f"param_slice_mappings of group {buffer.group} contradict param_shapes",
        file=part.file,
        parameter=odd,
        expected=_range(mine.get(odd)),
        found=_range(stated.get(odd)),
        next_step="the files are of different runs, or of a layout that is not known",
    )


def is_round_robin(rank: OptimizerStates) -> bool:
    """Whether the configuration says `round_robin_gradients`."""
    zero = rank.config.get("zero_optimization")
    return isinstance(zero, Mapping) and zero.get("round_robin_gradients") is True


def _range(bounds: tuple[int, int] | None) -> str:
    return "nothing" if bounds is None else f"{bounds[1]} elements from {bounds[0]}"
