"""Names of `module` that stand in no list: not trained, not frozen, no buffer, no stated tie.

Theory. `module` is whatever the model's `state_dict()` gave, and models give more than they list. A
module under two names gives one tensor twice, and ZeRO notes no tie for it; but a torch archive
keeps a storage once, so the second name is a view of the first one's storage, at every stage
(ZeRO-3 stores an empty placeholder, which is one all the same). Layers add tensors of their own
(tables of quantized weights), whose bytes are there. What is empty under ZeRO-3 is the place of a
parameter that the run left out. Entries that are no tensors (`_extra_state`) have no place among
tensors.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from math import prod

from reshard.errors import count_text
from reshard.formats.checkpoint import Problem
from reshard.formats.deepspeed.expert_files import NATIVE_MARK
from reshard.formats.deepspeed.records import ModelStates
from reshard.formats.torch_archive import TensorRecord

_SHOWN = 3


def shared_storages(models: Iterable[ModelStates], stated: Mapping[str, str]) -> dict[str, str]:
    """Ties that no list states, alias -> owner: one view of one storage under a listed name too.

    Parameters
    ----------
    models
        The model-state files.
    stated
        The ties that are stated.
    """
    ties: dict[str, set[str | None]] = {}
    for model in models:
        module, trained = model.module or {}, trained_names(model)
        owners: dict[object, list[str]] = {}
        for name in trained & module.keys():
            owners.setdefault(_view(module[name]), []).append(name)
        for name, record in module.items():
            if name not in trained and not _is_listed(name, model) and name not in stated:
                held = owners.get(_view(record), [])
                ties.setdefault(name, set()).add(held[0] if len(held) == 1 else None)
    agreed = {name: owners.pop() for name, owners in ties.items() if len(owners) == 1}
    return {name: owner for name, owner in agreed.items() if owner is not None}


def trained_names(model: ModelStates) -> set[str]:
    """Names that `param_shapes` lists."""
    return {name for shapes in model.param_shapes or () for name in shapes}


def _is_listed(name: str, model: ModelStates) -> bool:
    return name in model.buffer_names or name in model.frozen_shapes


def _view(record: TensorRecord) -> object:
    return record.storage.key, record.storage_offset, record.shape, record.strides, record.dtype


def unlisted_notes(
    models: Iterable[ModelStates], aliases: Container[str], stage: int | None, fused: Container[str]
) -> Iterator[Problem]:
    """Say what became of entries of `module` that no list names, and which entries are missed.

    Parameters
    ----------
    models
        One model-state file a column.
    aliases
        Names that are others of a parameter.
    stage
        ZeRO stage.
    fused
        Names of fused experts, which `module` holds under other names; native ones it has not.
    """
    for model in models:
        if model.module is None:
            continue
        trained = trained_names(model)
        extra = {
            name: record
            for name, record in model.module.items()
            if name not in trained and name not in aliases and not _is_listed(name, model)
        }
        full = [name for name, record in extra.items() if prod(record.shape)]
        if stage == 3:
            empty = [name for name in extra if name not in full]
            yield from _note(full, "in no list of the model; carried as buffers", model)
            yield from _note(empty, "empty and in no list of the model; left out", model)
        objects = [name for name in _entries(model) if name not in model.module]
        yield from _note(objects, "in `module` and no tensors; left out", model)
        # where the file has no weights at all, none of them is missed
        missing = trained.difference(_entries(model)) if model.module else set()
        missing = {name for name in missing if name not in fused and NATIVE_MARK not in name}
        instead = f", which has {_names(full)} in no list" if full else ""
        yield from _note(sorted(missing), f"trained and not in `module`{instead}", model)


def _entries(model: ModelStates) -> list[str]:
    root = model.archive.root
    module = root.get("module") if isinstance(root, Mapping) else None
    return [str(name) for name in module] if isinstance(module, Mapping) else []


def _note(names: list[str], what: str, model: ModelStates) -> Iterator[Problem]:
    if names:
        some = count_text(len(names), "entry", "entries")
        yield Problem(f"{some} of the model: {what}: {_names(names)}", model.file)


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
