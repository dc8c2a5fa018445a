"""The router of an AutoEP layer, which is in the model twice.

Theory. AutoEP hangs the router (`<module>.router`) a second time into its layer, under the name
that the replaced block gave it (`<module>.gate`). Its tensors are in the file twice, listed once,
and no `shared_params` says so. An alias is another child of the layer with exactly the router's
tensors, of the same bytes as far as the file's checksums tell, none of them listed.

Source: `module_inject/auto_ep_layer.py` (`alias_target`), DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from reshard.formats.deepspeed.experts import AutoEP
from reshard.formats.deepspeed.records import ModelStates
from reshard.formats.torch_archive import TensorRecord


def router_aliases(autoep: AutoEP, models: Iterable[ModelStates]) -> dict[str, str]:
    """Names that are the router once more: alias -> owner."""
    aliases: dict[str, str] = {}
    for model in models:
        module = model.module or {}
        listed = set(model.frozen_shapes).union(*(model.param_shapes or ()))
        for layer in autoep.layers.values():
            children: dict[str, dict[str, TensorRecord]] = {}
            for name, record in module.items():
                child, dot, local = name.removeprefix(f"{layer.module}.").partition(".")
                if name.startswith(f"{layer.module}.") and dot:
                    children.setdefault(child, {})[local] = record
            router = children.pop("router", {})
            for child, tensors in children.items():
                names = {local: f"{layer.module}.{child}.{local}" for local in tensors}
                if _same_tensors(router, tensors) and listed.isdisjoint(names.values()):
                    owner = f"{layer.module}.router"
                    aliases |= {name: f"{owner}.{local}" for local, name in names.items()}
    return aliases


def _same_tensors(one: Mapping[str, TensorRecord], other: Mapping[str, TensorRecord]) -> bool:
    return bool(one) and {name: _mark(record) for name, record in one.items()} == {
        name: _mark(record) for name, record in other.items()
    }


def _mark(record: TensorRecord) -> tuple[object, ...]:
    """What is known of a tensor's values without reading them."""
    storage = record.storage
    return (record.dtype, record.shape, record.strides, record.storage_offset, storage.crc32)
