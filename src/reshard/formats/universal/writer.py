"""The writer of universal folders: one form that a target of any ZeRO stage can load.

Theory. DeepSpeed's own converter writes two dialects, one after ZeRO-1/2 and one after ZeRO-3, and
each loads only under the stage it came from. There is a form that both loaders take (facts: format
notes, section 12, tried on nine pairs), and it is the only one written here:

* every state of every parameter is a dict with `param`, the full tensor in its full shape, and
`step.pt`
  beside it (the ZeRO-3 loader flattens what it finds and ignores `step.pt`);
* `zero/optimizer_state.pt` carries the keys of both loaders: `param_groups`, `ds_version` and the
scaler
  for ZeRO-1/2, `optimizer_state_dict` with the step and the groups for ZeRO-3;
* the model-state files exist under both names. Their `module` is empty: universal loading takes
weights
  from `zero/`, so bulk there would be dead weight.

Frozen parameters and buffers go into `zero/` too, as `fp32.pt` in their own dtype. DeepSpeed's
loader reads neither back (the parameters are not in its optimizer); they are there so that nothing
is lost.

Sources: `base_optimizer.py`, `stage3.py` (`load_hp_checkpoint_state_from_checkpoint_dir…`),
`engine.py` (`_load_checkpoint`), DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from reshard.errors import InternalError
from reshard.formats.checkpoint import Checkpoint, Role, Scalar, StoredTensor
from reshard.formats.pipelines import PIPELINE, Pipeline
from reshard.formats.target import Fill, OutputFile, Slot, Target
from reshard.formats.torch_archive import (
    ArchiveLayout,
    NewTensor,
    Size,
    StorageSlot,
    crc32,
    lay_out_archive,
)
from reshard.formats.universal.loader_notes import notes
from reshard.formats.universal.names import (
    LAYERS,
    OPTIMIZER_STATE,
    SCALARS,
    STEP,
    require_distinct,
    state_path,
)
from reshard.geometry import ParamAffineMap
from reshard.layouts.builders import replicated_map

POINTER = "latest_universal"
"""The pointer file that DeepSpeed follows when `load_universal` is set."""

SPOKEN_VERSION = "0.19.8"
"""Version stated in the output when the source states none; the loader demands one."""


def lay_out_universal(checkpoint: Checkpoint, *, tag: str) -> Target:
    """Lay out a universal folder.

    Parameters
    ----------
    checkpoint
        What to write.
    tag
        Name of the output folder, for the pointer file.

    Raises
    ------
    CheckpointError
        When a name cannot become a path.
    """
    forms, keys = _Forms(), _restore_keys(checkpoint)
    files = [
        *(
            _tensor_file(tensor, keys.get(tensor.name, {}), forms)
            for tensor in checkpoint.tensors.values()
        ),
        *_step_files(checkpoint, forms),
        _value_file(OPTIMIZER_STATE, _optimizer_state(checkpoint)),
        *_model_files(checkpoint),
    ]
    require_distinct(file.path for file in files)
    return Target(
        "universal",
        tuple(files),
        (POINTER, tag),
        tuple(notes(checkpoint, len(_param_groups(checkpoint)))),
    )


# --------------------------------------------------------------------------- parameters


def _restore_keys(checkpoint: Checkpoint) -> Mapping[str, Mapping[str, object]]:
    """Keys that loaders without a map of their own need (`cat_dim`, …), by parameter."""
    extra = checkpoint.extras.get("restore_keys")
    value = extra.value if extra is not None else None
    return value if isinstance(value, Mapping) else {}


class _Forms:
    """Archives and maps made so far: a model has thousands of tensors, but tens of forms."""

    def __init__(self) -> None:
        self._maps: dict[tuple[int, ...], ParamAffineMap] = {}
        self._tensors: dict[Hashable, ArchiveLayout] = {}
        self._steps: dict[Hashable, OutputFile] = {}

    def map_of(self, shape: tuple[int, ...]) -> ParamAffineMap:
        """The map of a tensor that one file holds whole."""
        known = self._maps.get(shape)
        if known is None:
            known = self._maps[shape] = replicated_map(shape, 1)
        return known

    def archive(self, tensor: StoredTensor, keys: Mapping[str, object]) -> ArchiveLayout:
        """The archive of one state of a tensor."""
        if not all(type(value) in (bool, int, str) for value in keys.values()):
            return _tensor_archive(tensor, keys)  # what is not compared by its content alone
        said = tuple((key, type(value), value) for key, value in keys.items())
        form = (tensor.state, tensor.dtype, tensor.shape, said)
        known = self._tensors.get(form)
        if known is None:
            known = self._tensors[form] = _tensor_archive(tensor, keys)
        return known

    def step(self, path: str, scalar: Scalar) -> OutputFile:
        """The file of a step; its bytes do not depend on the parameter."""
        form = (type(scalar.value), repr(scalar.value), scalar.dtype)
        known = self._steps.get(form)
        if known is None:
            known = self._steps[form] = _value_file(path, scalar_value(scalar))
        return replace(known, path=path)


def _tensor_archive(tensor: StoredTensor, keys: Mapping[str, object]) -> ArchiveLayout:
    # DeepSpeed's converter puts the tensor last, but first for experts.
    param: dict[str, object] = {"param": NewTensor(tensor.dtype, tensor.shape)}
    root = {**param, **keys} if "is_expert_param" in keys else {**keys, **param}
    return lay_out_archive(root, tensor.state)


def _tensor_file(tensor: StoredTensor, keys: Mapping[str, object], forms: _Forms) -> OutputFile:
    path = state_path(tensor.name, tensor.state)
    archive = forms.archive(tensor, keys)
    fill = Fill(tensor.key, tensor.dtype, forms.map_of(tensor.shape), 0)
    slots = tuple(
        Slot(slot.offset, slot.nbytes, (fill,), slot.crc_offsets) for slot in archive.slots
    )
    return OutputFile(path, archive.size, archive.literals, slots)


def _step_files(checkpoint: Checkpoint, forms: _Forms) -> Iterator[OutputFile]:
    for (name, state), scalar in checkpoint.scalars.items():
        if state == STEP:
            yield forms.step(state_path(name, STEP), scalar)


def scalar_value(scalar: Scalar) -> object:
    """A scalar as the loader wants it: a 0-dimensional tensor when it was one, else the number."""
    if scalar.dtype is None:
        return scalar.value
    data = np.array(scalar.value, dtype=scalar.dtype.numpy()).tobytes()
    return NewTensor(scalar.dtype, (), data=data)


def _value_file(path: str, root: object) -> OutputFile:
    """A file whose bytes are all known."""
    archive = lay_out_archive(root, path.rsplit("/", 1)[-1].removesuffix(".pt"))
    literals = list(archive.literals)
    for slot in archive.slots:
        literals += _carried_bytes(slot)
    return OutputFile(path, archive.size, tuple(sorted(literals)))


def _carried_bytes(slot: StorageSlot) -> Iterator[tuple[int, bytes]]:
    """Tensors among the client's state (such as an RNG state): small, so copied as they are."""
    if slot.source is None:
        raise InternalError("a value file has a tensor without bytes", found=slot.label)
    with Path(slot.source.path).open("rb") as file:
        file.seek(slot.source.offset)
        data = file.read(slot.source.nbytes)
    yield slot.offset, data
    for place in slot.crc_offsets:
        yield place, crc32(data).to_bytes(4, "little")


# --------------------------------------------------------------------------- optimizer


def _optimizer_state(checkpoint: Checkpoint) -> dict[str, object]:
    settings = _mapping(checkpoint, "optimizer_settings")
    groups = _param_groups(checkpoint)
    state: dict[str, object] = {**settings, "ds_version": _version(checkpoint)}
    state["param_groups"] = groups
    steps = [scalar for (_, name), scalar in checkpoint.scalars.items() if name == STEP]
    first: dict[str, object] = {STEP: scalar_value(steps[0])} if steps else {}
    state["optimizer_state_dict"] = {"state": {0: first}, "param_groups": groups}
    others = _other_scalars(checkpoint)
    if others:
        state[SCALARS] = others
    pipeline = checkpoint.extras.get(PIPELINE)
    if pipeline is not None and isinstance(pipeline.value, Pipeline):
        state[LAYERS] = pipeline.value.document()
    return state


def _mapping(checkpoint: Checkpoint, key: str) -> dict[str, object]:
    extra = checkpoint.extras.get(key)
    value = extra.value if extra is not None else None
    return {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else {}


def _sequence(checkpoint: Checkpoint, key: str) -> list[object]:
    extra = checkpoint.extras.get(key)
    value = extra.value if extra is not None else None
    return list(value) if isinstance(value, Sequence) else []


def _version(checkpoint: Checkpoint) -> str:
    return checkpoint.versions.get("deepspeed") or SPOKEN_VERSION


def _param_groups(checkpoint: Checkpoint) -> list[dict[str, object]]:
    """Hyperparameters by group; empty ones when the source kept none (elastic checkpoints)."""
    stored = _sequence(checkpoint, "param_groups")
    count = len(stored) or len(_sequence(checkpoint, "groups"))
    groups = []
    for index in range(count):
        group = stored[index] if index < len(stored) else {}
        kept = (
            {str(key): value for key, value in group.items()} if isinstance(group, Mapping) else {}
        )
        groups.append({**kept, "params": [index]})
    return groups


def _other_scalars(checkpoint: Checkpoint) -> dict[str, dict[str, object]]:
    others: dict[str, dict[str, object]] = {}
    for (name, state), scalar in checkpoint.scalars.items():
        if state != STEP:
            others.setdefault(name, {})[state] = scalar_value(scalar)
    return others


# --------------------------------------------------------------------------- model-state files


def _model_files(checkpoint: Checkpoint) -> Iterator[OutputFile]:
    """One model-state file a model-parallel rank of the source, under the names of both loaders."""
    parts = _sequence(checkpoint, "model_files") or [{}]
    shared = _model_keys(checkpoint, len(parts))
    for rank, part in enumerate(parts):
        kept = {str(key): value for key, value in part.items()} if isinstance(part, Mapping) else {}
        root = {**kept, **shared}
        root.setdefault("lr_scheduler", None)
        file = _value_file(f"mp_rank_{rank:02d}_model_states.pt", root)
        yield file
        yield replace(file, path=f"zero_pp_rank_0_{file.path}")


def _model_keys(checkpoint: Checkpoint, ranks: int) -> dict[str, object]:
    """Keys that describe the model and the source topology, with full shapes."""
    topology = checkpoint.topology
    roles = {tensor.name: tensor.role for tensor in checkpoint.tensors.values()}
    shapes = {tensor.name: Size(tensor.shape) for tensor in checkpoint.tensors.values()}
    groups = [
        OrderedDict((name, shapes[name]) for name in group if name in shapes)
        for group in _sequence(checkpoint, "groups")
        if isinstance(group, Sequence)
    ]
    return {
        "module": OrderedDict(),
        "buffer_names": [name for name, role in roles.items() if role is Role.BUFFER],
        "optimizer": None,
        "param_shapes": groups,
        "frozen_param_shapes": OrderedDict(
            (name, shapes[name]) for name, role in roles.items() if role is Role.FROZEN
        ),
        "frozen_param_fragments": None,
        "shared_params": dict(checkpoint.aliases),
        "dp_world_size": topology.dp,
        "mp_world_size": ranks,
        "checkpoint_parallel_dimensions": {"pp_degree": topology.pp, "tp_degree": topology.tp},
        "ds_version": _version(checkpoint),
    }
