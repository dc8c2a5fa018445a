"""The layers with experts of a source: their order, their experts, and the shapes of these.

Theory. DeepSpeed numbers the layers with experts of a model in the order of its modules, and the
number is in the name of every expert's file. Which layers there are is told by the names of the
experts, trained or not. Their order is told:

* for AutoEP by the metadata of the source, which has the numbers;
* for DeepSpeed's own layers by the state dict, which has the gate of every layer
  (`<layer>.deepspeed_moe.gate.…`), or else by a parameter group that has experts of all of them.

Sources: `engine.py` (`_save_moe_checkpoint`), `moe/layer.py`, DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.experts import WEIGHTS
from reshard.formats.deepspeed.native_moe import is_native, split_name
from reshard.formats.deepspeed.writing.contents import Contents
from reshard.formats.deepspeed.writing.native_experts import count_experts
from reshard.formats.deepspeed.writing.settings import INFO
from reshard.formats.model_dtypes import stated_dtypes

_GATE = "gate."
_EXPERTS = "experts.deepspeed_experts."


@dataclass(frozen=True, slots=True)
class ExpertBlock:
    """A layer with experts."""

    number: int
    """`moe_layer_id`."""
    prefix: str
    module: str
    """Names of its experts and of the layer."""
    num_experts: int
    """Number of experts."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every tensor of its experts, by name: fused ones, or those of single experts."""


def trained_experts(contents: Contents) -> list[str]:
    """Names of the experts that the optimizer trains."""
    return [name for group in contents.groups if group.has_experts for name in group.names]


def untrained_experts(contents: Contents) -> list[str]:
    """Frozen parameters and buffers of experts."""
    fused = {f"{prefix}.{weight}" for prefix in stated_layers(contents) for weight in WEIGHTS}
    names = (*contents.frozen, *contents.buffers)
    return [name for name in names if name in fused or is_native(name)]


# --------------------------------------------------------------------------- DeepSpeed's own layers


def native_blocks(contents: Contents, names: Sequence[str]) -> Iterator[ExpertBlock]:
    """Layers in the order of the model.

    Raises
    ------
    UnsupportedError
        When nothing tells the order.
    """
    counts = count_experts(names)
    for number, prefix in enumerate(_order(contents, counts)):
        shapes = {name: contents.shape(name) for name in names if split_name(name)[0] == prefix}
        yield ExpertBlock(number, prefix, prefix, counts[prefix], shapes)


def _order(contents: Contents, counts: Mapping[str, int]) -> list[str]:
    gates = {prefix.removesuffix(_EXPERTS) + _GATE: prefix for prefix in counts}
    stated = [
        prefix
        for name in stated_dtypes(contents.checkpoint)
        for gate, prefix in gates.items()
        if name.startswith(gate)
    ]
    listed = list(dict.fromkeys(stated))
    if len(listed) == len(counts):
        return listed
    groups = [group.names for group in contents.groups if group.has_experts]
    for order in map(count_experts, groups):
        if order.keys() == counts.keys():
            return list(order)
    if len(counts) == 1:
        return list(counts)
    raise UnsupportedError(
        "no parameter group has experts of every layer, so the order of the layers is not known",
        found=", ".join(counts),
        next_step="convert to universal instead",
    )


# --------------------------------------------------------------------------- AutoEP


def fused_blocks(contents: Contents, names: Sequence[str]) -> Iterator[ExpertBlock]:
    """Layers by prefix; number and name as the source's metadata says, else in their order.

    Raises
    ------
    UnsupportedError
        When experts are of neither kind.
    """
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
    stated = stated_layers(contents)
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


def stated_layers(contents: Contents) -> dict[str, Mapping[str, object]]:
    """The entries of `ds_autoep_layers` by the prefix of the experts."""
    extra = contents.checkpoint.extras.get(INFO)
    value = extra.value if extra is not None else None
    layers = value.get("ds_autoep_layers") if isinstance(value, Mapping) else None
    return {
        str(entry.get("expert_key_prefix")): {str(k): v for k, v in entry.items()}
        for entry in (layers if isinstance(layers, (list, tuple)) else ())
        if isinstance(entry, Mapping)
    }
