"""Pipelines with experts: there are no files of layers, so names tell what layers there are.

Theory. DeepSpeed saves a pipeline that has experts, of AutoEP or of its own MoE layers, as it saves
any mixture of experts: the weights of a stage are in its model-state file, those of experts in
files of their own (numbered anew on each stage), and layers have no files. What a stage has is told
by the names in its model-state file, all of which begin with their layer or with a tied module.
Which layers use a tied module is stored nowhere; it is concluded where that leaves one answer, as
without experts.

Source: `engine.py` (`save_checkpoint`, `_save_moe_checkpoint`), `runtime/pipe/engine.py`
(`load_module_state_dict`), DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from reshard.formats.deepspeed.expert_files import tensors_of
from reshard.formats.deepspeed.expert_reading import Experts
from reshard.formats.deepspeed.records import ModelStates
from reshard.formats.dtypes import DType
from reshard.formats.pipelines import (
    TIED,
    Pipeline,
    PipelineLayer,
    PipelineStage,
    split_owner,
)


def pipeline_with_experts(
    columns: Sequence[ModelStates],
    experts: Experts,
    groups: Iterable[Iterable[str]],
    tp: int,
) -> Pipeline | None:
    """What the stages of a pipeline with experts have, None when it is none.

    Parameters
    ----------
    columns
        The model-state files by `mp`.
    experts
        The experts.
    groups
        Trained names by optimizer group, native experts by their global names.
    tp
        The tensor-parallel degree.
    """
    firsts = columns[::tp]
    if len(firsts) == 1 or not experts.present:
        return None
    held = [dict(_tensors(model, experts, stage)) for stage, model in enumerate(firsts)]
    owners = [dict.fromkeys(split_owner(name)[0] for name in names) for names in held]
    if not all(map(_is_of_pipeline, chain(*owners))):
        return None
    stages = tuple(
        PipelineStage((), model.buffer_names & set(names))
        for model, names in zip(firsts, held, strict=True)
    )
    named = [list(group) for group in groups]
    having = {
        name: {number for number, known in enumerate(owners) if split_owner(name)[0] in known}
        for name in chain(*named)
    }
    return Pipeline(_layers(held), stages).held_by_stages(named, having)


def _is_of_pipeline(owner: str) -> bool:
    """Whether a module is a numbered layer or a tied one."""
    return owner.isdecimal() or owner.startswith(TIED)


def _layers(held: Iterable[Mapping[str, DType]]) -> tuple[PipelineLayer, ...]:
    """The numbered layers and their tensors, ascending."""
    tensors: dict[str, dict[str, DType]] = {}
    for names in held:
        for name, dtype in names.items():
            owner, local = split_owner(name)
            tensors.setdefault(owner, {})[local] = dtype
    numbered = ((owner, found) for owner, found in tensors.items() if owner.isdecimal())
    layers = (PipelineLayer(int(owner), owner, found) for owner, found in numbered)
    return tuple(sorted(layers, key=lambda layer: layer.number))


def _tensors(model: ModelStates, experts: Experts, stage: int) -> Iterator[tuple[str, DType]]:
    """Every tensor of a stage and its element type, native experts by their global names."""
    for name, record in (model.module or {}).items():
        yield name, record.dtype
    for one in experts.native[stage]:
        for by_rank in one.experts.values():
            _, tensors = next(iter(by_rank.values()))
            yield from ((name, record.dtype) for name, record in tensors.items())
    for name, layer in experts.fused.items():
        if experts.stage_of(layer) == stage and not layer.partitioned:
            tensors = tensors_of(experts.files[stage][layer.number, 0][0].path)
            yield name, tensors[f"{name}.0"].dtype
