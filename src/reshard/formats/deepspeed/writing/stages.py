"""Deals the layers of a pipeline out to the stages of the target, and writes the layers' files.

Theory. A stage of a pipeline is a checkpoint of its own: it has the optimizer groups, restricted to
its layers, in files of its own. So the target is made stage by stage from restricted contents, and
everything else is as without a pipeline. Weights lie in one file a layer, whatever the stages.

Where stages begin is the model's choice (`partition_method`) and is stored nowhere. It is known in
three cases: there is one stage, there are the stages of the source, or the user states the first
layer of each (``--stage-starts``). Two more facts are checked when the stages change:

* the optimizer lists parameters in the order of the model: tied modules first, in the order of
  their first layers, then layer by layer;
* with several stages, no module is tied: a layer that only calls a function of a tied module has
  no file, so nobody knows which stages have that module.

Source: `runtime/pipe/module.py` (`_build`, `save_state_dict`, `load_state_dir`), DeepSpeed 0.19.8.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from reshard.errors import CheckpointError, LayoutError, UnsupportedError
from reshard.formats.deepspeed.names import layer_file_name
from reshard.formats.deepspeed.partitions import MASTER
from reshard.formats.deepspeed.pipelines import (
    TIED,
    Pipeline,
    PipelineLayer,
    PipelineStage,
    split_owner,
)
from reshard.formats.deepspeed.writing.archives import ArchiveShelf, Bulk
from reshard.formats.deepspeed.writing.contents import Contents, Group
from reshard.formats.deepspeed.writing.cuts import Cut
from reshard.formats.deepspeed.writing.options import NativeOptions
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
    if options.stage != 1:
        raise UnsupportedError(
            "DeepSpeed trains no pipeline under ZeRO-2 and 3, and without ZeRO it keeps no names",
            expected="--stage 1",
            found=options.stage,
        )
    if options.ep > 1 or any(group.has_experts for group in contents.groups):
        raise UnsupportedError("experts in a pipeline cannot be written")
    return tuple(_restricted(contents, stage) for stage in _target_stages(pipeline, options))


def _require_one_stage(contents: Contents, options: NativeOptions) -> None:
    source = contents.checkpoint
    if source.topology.pp > 1:
        raise UnsupportedError(
            "the source does not say which layers its pipeline has",
            file=source.path,
            found=f"a {source.format} folder of {source.topology.pp} stages",
            next_step="convert from the native checkpoint that it was made from",
        )
    if options.pp > 1:
        raise UnsupportedError(
            "the source is no pipeline, so its parameters belong to no layers",
            file=source.path,
            next_step="choose --pp 1",
        )


def _restricted(contents: Contents, stage: PipelineStage) -> Contents:
    groups = (
        Group(names, group.settings)
        for names, group in zip(stage.groups, contents.groups, strict=True)
    )
    buffers = tuple(name for name in contents.buffers if name in stage.buffers)
    return replace(contents, groups=tuple(groups), buffers=buffers)


def _target_stages(pipeline: Pipeline, options: NativeOptions) -> tuple[PipelineStage, ...]:
    starts = options.stage_starts
    if starts is None and options.pp == len(pipeline.stages):
        return pipeline.stages
    if starts is None and options.pp > 1:
        raise LayoutError(
            "which layers each pipeline stage has is not known",
            found=f"a source of {len(pipeline.stages)} stages",
            next_step="state the first layer of every stage with --stage-starts",
        )
    return _Dealing(pipeline, starts or (0,)).stages()


@dataclass(frozen=True, slots=True)
class _Dealing:
    """Layers dealt out to stages that begin at given layers."""

    pipeline: Pipeline
    starts: tuple[int, ...]

    def stages(self) -> tuple[PipelineStage, ...]:
        """The stages.

        Raises
        ------
        LayoutError
            When a tensor belongs to no layer, or parameters are not in the order of the model.
        """
        places = self._places()
        groups = self._ordered(places)
        buffers = [name for stage in self.pipeline.stages for name in stage.buffers]
        return tuple(
            PipelineStage(
                tuple(
                    tuple(name for name in group if self._stage(places[name]) == number)
                    for group in groups
                ),
                frozenset(name for name in buffers if self._stage(places[name]) == number),
            )
            for number in range(len(self.starts))
        )

    def _stage(self, place: tuple[bool, int]) -> int:
        is_layer, number = place
        return bisect_right(self.starts, number) - 1 if is_layer else 0

    def _places(self) -> dict[str, tuple[bool, int]]:
        """Where in the model the owner of each tensor is: tied modules by turn, then layers."""
        names = [
            name
            for stage in self.pipeline.stages
            for names in (*stage.groups, sorted(stage.buffers))
            for name in names
        ]
        owners = {name: split_owner(name)[0] for name in names}
        tied = [owner for owner in dict.fromkeys(owners.values()) if owner.startswith(TIED)]
        if tied and len(self.starts) > 1:
            raise LayoutError(
                "which pipeline stages have a tied module is not known",
                found=tied[0],
                next_step="choose --pp 1, or as many stages as the source has",
            )
        places = {}
        for name, owner in owners.items():
            if owner not in tied and not owner.isdecimal():
                raise LayoutError("a tensor of a pipeline belongs to no layer", parameter=name)
            places[name] = (False, tied.index(owner)) if owner in tied else (True, int(owner))
        return places

    def _ordered(self, places: Mapping[str, tuple[bool, int]]) -> list[list[str]]:
        """The parameter groups over all stages, in the order of the model."""
        for stage in self.pipeline.stages:
            for group in stage.groups:
                if list(group) != sorted(group, key=places.__getitem__):
                    raise LayoutError(
                        "the optimizer does not list parameters in the order of the layers, so "
                        "their order on other stages is not known",
                        found=f"{group[0]}, …",
                        next_step="keep the stages of the source",
                    )
        count = max(len(stage.groups) for stage in self.pipeline.stages)
        merged = [self.pipeline.group(index) for index in range(count)]
        return [sorted(group, key=places.__getitem__) for group in merged]


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
    if contents.pipeline is None:
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
