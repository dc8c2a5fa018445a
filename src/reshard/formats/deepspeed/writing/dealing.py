"""Deals the layers of a pipeline out to stages that begin at given layers.

Theory. A layer belongs to the stage in whose range its number is. A tied module belongs to every
stage that has a layer which uses it, and there lies the difficulty: a layer that calls a function
of the module (`forward_fn`) has no file, and which layers have none is stored nowhere. What is
known of the uses of a module:

* a layer whose file holds it uses it;
* every stage of the source that has it uses it in a layer of its own range, and no other stage
  does;
* a use without a file is at a number that has no file.

If all that leaves one answer, it is taken: the usual pipeline, whose last layer calls the embedding
of the first, has its fileless layers at the end, on the last stage. If it leaves several, the user
states the layers (``--tied embed=0,5``).

The order of parameters in a stage follows from `PipelineModule._build`: tied modules first, in the
order of their first use on the stage, then the layers. A source whose optimizer keeps another order
is refused, because how it was made is not known.

Source: `runtime/pipe/module.py` (`_build`, `_index_tied_modules`), DeepSpeed 0.19.8.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from reshard.errors import LayoutError, UsageError
from reshard.formats.pipelines import TIED, Pipeline, PipelineStage, split_owner

Place = tuple[bool, int]
"""Where the owner of a tensor stands in a stage: tied modules before layers, then by number."""

_STATE_TIES = "state the layers that use it with --tied KEY=LAYER,LAYER"


@dataclass(frozen=True, slots=True)
class Uses:
    """Which layers use a tied module."""

    known: frozenset[int]
    """Layers that certainly do."""
    possible: Mapping[int, range | tuple[int, ...]] = field(default_factory=dict)
    """For each source stage, the layers without a file that may."""
    owed: frozenset[int] = frozenset()
    """Source stages that have the module and no known use of it."""


def deal_layers(
    pipeline: Pipeline, starts: Sequence[int], stated: Mapping[str, Sequence[int]]
) -> tuple[PipelineStage, ...]:
    """The stages that begin at ``starts``.

    Parameters
    ----------
    pipeline
        The layers and stages of the source.
    starts
        The first layer of every stage, ascending from 0.
    stated
        The layers that use each tied module, by key, as far as the user states them.

    Raises
    ------
    LayoutError
        When a tensor belongs to no layer, parameters are not in the order of the model, or which
        stages have a tied module is not known.
    UsageError
        When what is stated contradicts the files.

    Examples
    --------
    >>> first = PipelineStage((("tied_modules.e.w", "1.w"),), frozenset())
    >>> second = PipelineStage((("tied_modules.e.w", "2.w", "3.w"),), frozenset())
    >>> from reshard.formats.pipelines import PipelineLayer
    >>> layers = [PipelineLayer(0, "tied_modules.e", {})]
    >>> layers += [PipelineLayer(n, str(n), {}) for n in (1, 2, 3)]
    >>> for stage in deal_layers(Pipeline(tuple(layers), (first, second)), (0, 2, 3), {}):
    ...     print(stage.groups[0])
    ('tied_modules.e.w', '1.w')
    ('2.w',)
    ('tied_modules.e.w', '3.w')
    """
    return _Dealing(pipeline, tuple(starts), stated).stages()


@dataclass(frozen=True, slots=True)
class _Dealing:
    """One dealing."""

    pipeline: Pipeline
    starts: tuple[int, ...]
    stated: Mapping[str, Sequence[int]]

    def stages(self) -> tuple[PipelineStage, ...]:
        """The stages."""
        self._require_order_of_layers()
        tied = [owner for owner in self._owners() if owner.startswith(TIED)]
        self._require_known_keys(tied)
        uses = {owner: self._uses(owner) for owner in tied}
        having = {owner: self._stages_using(owner, uses[owner]) for owner in tied}
        return tuple(
            self._stage(self._places(number, having, uses)) for number in range(len(self.starts))
        )

    # ----- layers

    def _owners(self) -> list[str]:
        """The owners of all tensors, tied modules in the order of their first use."""
        owners = dict.fromkeys(owner for stage in self.pipeline.stages for owner in stage.owners())
        for owner in owners:
            if not owner.isdecimal() and not owner.startswith(TIED):
                raise LayoutError("a tensor of a pipeline belongs to no layer", parameter=owner)
        return list(owners)

    def _require_order_of_layers(self) -> None:
        """The optimizer must list parameters as the model does."""
        for stage in self.pipeline.stages:
            for group in stage.groups:
                owners = list(dict.fromkeys(split_owner(name)[0] for name in group))
                layers = [int(owner) for owner in owners if owner.isdecimal()]
                ties = sum(owner.startswith(TIED) for owner in owners)
                known = {owner: (owner.isdecimal(), at) for at, owner in enumerate(owners)}
                together = list(group) == sorted(group, key=lambda n: known[split_owner(n)[0]])
                ahead = all(owner.startswith(TIED) for owner in owners[:ties])
                if not (together and ahead and layers == sorted(layers)):
                    raise LayoutError(
                        "the optimizer does not list parameters in the order of the layers, so "
                        "their order on other stages is not known",
                        found=f"{group[0]}, …",
                        next_step="keep the stages of the source",
                    )

    def _target_stage(self, layer: int) -> int:
        return bisect_right(self.starts, layer) - 1

    # ----- tied modules

    def _require_known_keys(self, tied: Sequence[str]) -> None:
        for key in self.stated:
            if f"{TIED}{key}" not in tied:
                raise UsageError(
                    "the pipeline has no such tied module",
                    expected=", ".join(owner.removeprefix(TIED) for owner in tied) or "none",
                    found=key,
                )

    def _uses(self, owner: str) -> Uses:
        filed = frozenset(layer.number for layer in self.pipeline.layers if layer.owner == owner)
        stated = self.stated.get(owner.removeprefix(TIED))
        if stated is not None:
            self._require_possible(owner, filed, frozenset(stated))
            return Uses(frozenset(stated))
        possible, owed = {}, set()
        for number, stage in enumerate(self.pipeline.stages):
            if owner in stage.owners():
                low, high = self._span(number)
                possible[number] = tuple(self._fileless(low, high))
                if not any(low <= layer < high for layer in filed):
                    owed.add(number)
        return Uses(filed, possible, frozenset(owed))

    def _require_possible(self, owner: str, filed: frozenset[int], stated: frozenset[int]) -> None:
        others = {layer.number for layer in self.pipeline.layers if layer.owner != owner}
        wrong = sorted((filed - stated) | (stated & others))
        if wrong or not stated:
            raise UsageError(
                "the stated layers of a tied module contradict the layer files",
                expected=f"layers {sorted(filed)}, and such as have no file",
                found=f"{owner.removeprefix(TIED)}={','.join(map(str, sorted(stated)))}",
            )

    def _span(self, number: int) -> tuple[int, int]:
        """Between which layers the source stage can lie, as far as its neighbours leave room."""
        return self._end_of(number - 1), self._start_of(number + 1)

    def _end_of(self, number: int) -> int:
        """One past the last layer that the stages up to ``number`` have for sure."""
        return max((layer for n in range(number + 1) for layer in self._layers(n)), default=-1) + 1

    def _start_of(self, number: int) -> int:
        """The first layer that the stages from ``number`` on have for sure, else past all."""
        later = range(number, len(self.pipeline.stages))
        last = max((layer.number for layer in self.pipeline.layers), default=0)
        beyond = max(last, self.starts[-1]) + 2
        return min((layer for n in later for layer in self._layers(n)), default=beyond)

    def _layers(self, number: int) -> list[int]:
        owners = self.pipeline.stages[number].owners()
        return [int(owner) for owner in owners if owner.isdecimal()]

    def _fileless(self, low: int, high: int) -> Iterator[int]:
        files = {layer.number for layer in self.pipeline.layers}
        return (number for number in range(low, high) if number not in files)

    def _stages_using(self, owner: str, uses: Uses) -> frozenset[int]:
        """The target stages that have a tied module; refused when several answers are possible."""
        sure = {self._target_stage(layer) for layer in uses.known}
        found = set(sure)
        for number, layers in uses.possible.items():
            stages = {self._target_stage(layer) for layer in layers}
            if stages <= sure and (stages or number not in uses.owed):
                continue
            if number in uses.owed and len(stages) == 1:
                found |= stages
                continue
            raise LayoutError(
                "which pipeline stages have a tied module is not known: a layer that calls a "
                "function of it has no file",
                parameter=owner,
                found=f"layers without a file among {min(layers, default=0)} to "
                f"{max(layers, default=0)}",
                next_step=_STATE_TIES,
            )
        return frozenset(found)

    def _places(
        self, number: int, having: Mapping[str, frozenset[int]], uses: Mapping[str, Uses]
    ) -> dict[str, Place]:
        """Where each owner stands on a target stage."""
        tied = [owner for owner, stages in having.items() if number in stages]
        if len(tied) > 1 and number > 0:
            tied.sort(key=lambda owner: self._first_use(owner, uses[owner], number))
        places: dict[str, Place] = {owner: (False, at) for at, owner in enumerate(tied)}
        for owner in self._owners():
            if owner.isdecimal() and self._target_stage(int(owner)) == number:
                places[owner] = (True, int(owner))
        return places

    def _first_use(self, owner: str, uses: Uses, number: int) -> int:
        """The first layer of a target stage that uses a module, where other modules are too."""
        possible = [layer for layers in uses.possible.values() for layer in layers]
        if any(self._target_stage(layer) == number for layer in possible):
            raise LayoutError(
                "the order of the tied modules on a pipeline stage is not known: a layer that "
                "calls a function of one has no file",
                parameter=owner,
                found=f"stage {number}",
                next_step=_STATE_TIES,
            )
        return min(layer for layer in uses.known if self._target_stage(layer) == number)

    # ----- one stage

    def _stage(self, places: Mapping[str, Place]) -> PipelineStage:
        count = max(len(stage.groups) for stage in self.pipeline.stages)
        groups = (self.pipeline.group(index) for index in range(count))
        buffers = (name for stage in self.pipeline.stages for name in stage.buffers)
        return PipelineStage(
            tuple(
                tuple(
                    sorted(
                        (name for name in group if split_owner(name)[0] in places),
                        key=lambda name: places[split_owner(name)[0]],
                    )
                )
                for group in groups
            ),
            frozenset(name for name in buffers if split_owner(name)[0] in places),
        )
