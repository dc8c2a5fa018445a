"""Deals the layers of a pipeline out to the stages of the target, and writes the layers' files.

Theory. A stage of a pipeline is a checkpoint of its own: it has the optimizer groups, restricted to
its layers, in files of its own. So the target is made stage by stage from restricted contents, and
everything else is as without a pipeline. Weights lie in one file a layer, whatever the stages; with
experts they lie in the model-state file of the stage, as in any mixture of experts.

Where stages begin is the model's choice (`partition_method`), and neither the choice nor its
outcome is stored. It is known in three cases: there is one stage, there are the stages of the
source, or the user states the first layer of each (``--stage-starts``; DeepSpeed prints them when a
run begins).

Source: `runtime/pipe/module.py` (`_build`, `save_state_dict`, `load_state_dir`), DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from reshard.errors import CheckpointError, LayoutError, UnsupportedError, count_text
from reshard.formats.deepspeed.names import layer_file_name
from reshard.formats.deepspeed.partitions import MASTER
from reshard.formats.deepspeed.writing.archives import ArchiveShelf, Bulk
from reshard.formats.deepspeed.writing.contents import Contents, Group
from reshard.formats.deepspeed.writing.cuts import Cut
from reshard.formats.deepspeed.writing.dealing import deal_layers
from reshard.formats.deepspeed.writing.options import NativeOptions
from reshard.formats.pipelines import Pipeline, PipelineLayer, PipelineStage, split_owner
from reshard.formats.target import OutputFile
from reshard.formats.torch_archive import NewTensor

# --------------------------------------------------------------------------- stages


def stages_of(contents: Contents, options: NativeOptions) -> tuple[Contents, ...]:
    """What each pipeline stage of the target has; one without a pipeline.

    Parameters
    ----------
    contents, options
        What is written, and for which topology.

    Raises
    ------
    UnsupportedError
        When the target cannot be a pipeline, or DeepSpeed cannot train it.
    LayoutError
        When the source does not tell what a stage would have.
    """
    pipeline = contents.pipeline
    if pipeline is None:
        _require_one_stage(contents, options)
        return (contents,)
    if options.stage > 1:
        raise UnsupportedError(
            "DeepSpeed trains no pipeline under ZeRO-2 and 3",
            expected="--stage 0 or 1",
            found=options.stage,
        )
    stages = _target_stages(pipeline, options)
    if not any(group.has_experts for group in contents.groups):
        return tuple(_restricted(contents, stage) for stage in stages)
    return tuple(_with_weights(_restricted(contents, stage), stage, stages) for stage in stages)


def _require_one_stage(contents: Contents, options: NativeOptions) -> None:
    source = contents.checkpoint
    if source.topology.pp > 1:
        raise UnsupportedError(
            "the source does not say which layers its pipeline has",
            file=source.path,
            found=f"a {source.format} folder of {count_text(source.topology.pp, 'stage')}",
            next_step="convert from the native checkpoint that it was made from, or from a "
            "universal folder that reshard made of it",
        )
    if options.pp > 1:
        raise UnsupportedError(
            "the source is no pipeline, so its parameters belong to no layers",
            file=source.path,
            next_step="choose --pp 1",
        )


def _restricted(contents: Contents, stage: PipelineStage) -> Contents:
    groups = (
        Group(stage.groups[index] if index < len(stage.groups) else (), group.settings)
        for index, group in enumerate(contents.groups)
    )
    buffers = tuple(name for name in contents.buffers if name in stage.buffers)
    return replace(contents, groups=tuple(groups), buffers=buffers)


def _with_weights(
    contents: Contents, stage: PipelineStage, stages: Sequence[PipelineStage]
) -> Contents:
    """Contents of a stage whose weights are in its model-state file, as those with experts are."""
    owners = set(stage.owners())
    known = {owner for one in stages for owner in one.owners()}
    for name in contents.frozen:
        if split_owner(name)[0] not in known:
            raise UnsupportedError(
                "a layer of a pipeline with experts has nothing that is trained, so its stage is "
                "not known",
                parameter=name,
                next_step="convert to universal instead",
            )
    return replace(
        contents,
        frozen=tuple(name for name in contents.frozen if split_owner(name)[0] in owners),
        module=tuple(name for name in contents.module if split_owner(name)[0] in owners),
    )


def _target_stages(pipeline: Pipeline, options: NativeOptions) -> tuple[PipelineStage, ...]:
    starts = options.stage_starts
    if starts is None and options.pp == len(pipeline.stages):
        return pipeline.stages
    if starts is None and options.pp > 1:
        raise LayoutError(
            "which layers each pipeline stage has is not known",
            found=f"a source of {count_text(len(pipeline.stages), 'stage')}",
            next_step="state the first layer of every stage with --stage-starts; DeepSpeed prints "
            "how many layers each stage has when the run begins",
        )
    return deal_layers(pipeline, starts or (0,), options.tied_layers or {})


# --------------------------------------------------------------------------- layers


def layer_files(
    contents: Contents, options: NativeOptions, cuts: Mapping[str, Cut], shelf: ArchiveShelf
) -> Iterator[OutputFile]:
    """The files of every layer of a pipeline; none without one.

    Parameters
    ----------
    contents, options
        What is written, and for which topology.
    cuts
        How every parameter and buffer is cut over tensor ranks.
    shelf
        Lays the archives out.
    """
    if contents.pipeline is None or any(group.has_experts for group in contents.groups):
        return
    for layer in contents.pipeline.layers:
        for tp in range(options.tp):
            bulk = Bulk()
            root = OrderedDict(
                (local, _tensor(contents, cuts, layer, local, tp, bulk)) for local in layer.tensors
            )
            # also with one tensor rank: DeepSpeed's tools expect it, and its loader takes both
            path = layer_file_name(layer.number, tp)
            yield shelf.file(path, root, bulk, None)


def _tensor(
    contents: Contents,
    cuts: Mapping[str, Cut],
    layer: PipelineLayer,
    local: str,
    tp: int,
    bulk: Bulk,
) -> NewTensor:
    """A tensor of a layer: a trained one is its master, rounded to the type of the model."""
    written = layer.name(local)
    name = contents.checkpoint.aliases.get(written, written)
    cut = cuts.get(name)
    if cut is None:
        raise CheckpointError(
            "a pipeline layer has a tensor that the checkpoint does not have", parameter=written
        )
    stored = contents.checkpoint.tensors[name, MASTER].dtype
    return bulk.shard(
        ("layer", local),
        (name, MASTER),
        contents.dtypes[name],
        cut.shapes[tp],
        cut.map,
        tp,
        stored,
    )
