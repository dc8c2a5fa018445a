"""What a pipeline is made of: its layers, and what each of its stages has.

Theory. A pipeline is one model cut into stages of consecutive layers. Its files say which stage has
which names; which layers those are is in the names: `L.<local>` is of layer `L`, and
`tied_modules.<key>.<local>` is of a module that several layers share. A layer that shares a module
has a file of its own only when it calls the module as it is; one that calls a function of it
(`forward_fn`) has none. So the files do not tell every layer of a tied module.

A writer needs this to make the files of the layers again and to deal the layers out to other
stages. Readers keep it as the extra :data:`PIPELINE`; a universal folder, which has no layers,
keeps it as a document, so that a pipeline can be made of it again.

Source: `runtime/pipe/module.py` (`_build`, `save_state_dict`), DeepSpeed 0.12 to 0.19.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

from reshard.errors import CheckpointError
from reshard.formats.dtypes import DTYPES, DType
from reshard.formats.parsing import Cursor

PIPELINE = "pipeline"
"""Key of the extra that holds a :class:`Pipeline`."""

TIED = "tied_modules."
"""How names of tied modules begin."""


@dataclass(frozen=True, slots=True)
class PipelineLayer:
    """A layer that has files."""

    number: int
    """Its place in the pipeline."""
    owner: str
    """How names of its tensors begin: its number, or the tied module that it shares."""
    tensors: Mapping[str, DType]
    """Names that are local to the layer, in the order of its file, and their element types."""

    def name(self, local: str) -> str:
        """The name of one of its tensors in the model."""
        return f"{self.owner}.{local}"


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """What one stage has."""

    groups: tuple[tuple[str, ...], ...]
    """Names of its trained parameters by optimizer group, in the order of the flat buffer."""
    buffers: frozenset[str]
    """Names of its buffers."""

    def names(self) -> Iterator[str]:
        """Every name: trained parameters in their order, then buffers."""
        for group in self.groups:
            yield from group
        yield from sorted(self.buffers)

    def owners(self) -> list[str]:
        """The owners of its tensors, in their order."""
        return list(dict.fromkeys(split_owner(name)[0] for name in self.names()))


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline: its layers with files, ascending, and its stages."""

    layers: tuple[PipelineLayer, ...]
    stages: tuple[PipelineStage, ...]

    def group(self, index: int) -> list[str]:
        """The names of an optimizer group over all stages, each where it comes first."""
        held = (stage.groups[index] if index < len(stage.groups) else () for stage in self.stages)
        return list(dict.fromkeys(name for names in held for name in names))

    def held_by_stages(
        self, groups: Iterable[Iterable[str]], stages: Mapping[str, Container[int]]
    ) -> Pipeline:
        """The same layers, where the stages of every trained name are known.

        Parameters
        ----------
        groups
            Names by optimizer group, in the order of the model.
        stages
            Which stages have a name.
        """
        named = [list(group) for group in groups]
        held = (
            tuple(tuple(name for name in group if number in stages[name]) for group in named)
            for number in range(len(self.stages))
        )
        return Pipeline(
            self.layers,
            tuple(
                PipelineStage(own, stage.buffers)
                for own, stage in zip(held, self.stages, strict=True)
            ),
        )

    def document(self) -> dict[str, object]:
        """The pipeline in plain values, as other formats keep it; see :func:`read_pipeline`."""
        return {
            "layers": [
                {
                    "number": layer.number,
                    "owner": layer.owner,
                    "tensors": {local: dtype.name for local, dtype in layer.tensors.items()},
                }
                for layer in self.layers
            ],
            "stages": [
                {
                    "groups": [list(group) for group in stage.groups],
                    "buffers": sorted(stage.buffers),
                }
                for stage in self.stages
            ],
        }


def read_pipeline(document: Cursor) -> Pipeline:
    """Read what :meth:`Pipeline.document` wrote.

    Raises
    ------
    CheckpointError
        When it is not of that form.
    """
    layers = (
        PipelineLayer(
            layer.at("number").integer(),
            layer.at("owner").text(),
            {local: _dtype(name) for local, name in layer.at("tensors").named()},
        )
        for layer in document.at("layers").each()
    )
    stages = (
        PipelineStage(
            tuple(
                tuple(name.text() for name in group.each()) for group in stage.at("groups").each()
            ),
            frozenset(name.text() for name in stage.at("buffers").each()),
        )
        for stage in document.at("stages").each()
    )
    return Pipeline(tuple(layers), tuple(stages))


def _dtype(name: Cursor) -> DType:
    found = DTYPES.get(name.text())
    if found is None:
        raise CheckpointError("no element type", file=name.file, found=name.text())
    return found


def split_owner(name: str) -> tuple[str, str]:
    """The owner of a tensor (`3`, `tied_modules.embed`) and its local name.

    Examples
    --------
    >>> split_owner("3.norm.weight"), split_owner("tied_modules.embed.e.weight")
    (('3', 'norm.weight'), ('tied_modules.embed', 'e.weight'))
    """
    if name.startswith(TIED):
        key, _, local = name.removeprefix(TIED).partition(".")
        return f"{TIED}{key}", local
    owner, _, local = name.partition(".")
    return owner, local
