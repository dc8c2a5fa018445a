"""Which map says how a parameter was cut over tensor-parallel ranks, in a DeepSpeed checkpoint.

Theory. Four sources are asked in turn (:func:`read_layouts`):

1. what the user states (`--layout`), which can mend what the files say wrongly;
2. the *stored maps*: `affine_map` in `universal_checkpoint_info`, written by AutoTP from 0.19.8 on;
3. the *conversion keys*: lists of patterns beside it (`conversion_keys`);
4. with one tensor rank, the shard itself, which is the parameter.

Anything else is refused with the list of what is not known.

A stored map is foreign input. Before it is used it must satisfy the properties that every map must
have, and fit the shards that the files hold: same ranks, same number of elements, and the same
shape where it has as many dimensions. Three kinds that DeepSpeed 0.19.8 writes are false:

* for convolution layers the cut dim is wrong. Where the shapes show it the map is refused, with the
  cut that would fit; rebuilding would scramble the weight silently.
* under `zero.Init` a parameter that AutoTP never touched has a map of shape `(0,)`, made from the
  placeholder. It says nothing, and the next source is asked.
* with AutoEP and AutoTP together, experts have maps that call the local experts of a rank the whole
  parameter, replicated. They are not used: placement decides.

Source: `checkpoint/constants.py`, `module_inject/layers.py`
(`collect_autotp_universal_checkpoint_info`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from reshard.errors import LayoutError
from reshard.formats.deepspeed.conversion_keys import ConversionKeys
from reshard.formats.deepspeed.info import read_conversion_keys
from reshard.formats.deepspeed.records import ModelStates
from reshard.formats.layout_source import (
    GovernedMap,
    Layouts,
    LayoutSource,
    OneShard,
    Shape,
    require_fit,
)
from reshard.formats.parsing import Cursor
from reshard.formats.patterns import PatternTable
from reshard.formats.stated_layouts import StatedLayouts
from reshard.formats.torch_archive import same_value
from reshard.geometry import ParamAffineMap, maps_from_document

__all__ = [
    "GovernedMap",
    "LayoutSource",
    "Layouts",
    "OneShard",
    "StoredMaps",
    "parameter_shapes",
    "read_layouts",
    "read_stored_maps",
    "require_same_for_ties",
]


@dataclass(frozen=True, slots=True)
class StoredMaps(LayoutSource):
    """The maps that the checkpoint carries."""

    maps: PatternTable[ParamAffineMap]
    """By pattern."""
    keys: ConversionKeys
    """The keys beside them, which still say what pads a vocabulary."""
    file: str
    """Where they are from."""

    def covers(self, name: str) -> bool:
        """See :class:`LayoutSource`."""
        found = self.find(name)
        return found is not None and found.numel > 0 and not self.keys.is_expert(name)

    def map_of(self, name: str, shards: Mapping[int, Shape], degree: int) -> GovernedMap | None:
        """See :class:`LayoutSource`."""
        found = self.find(name)
        is_void = found is not None and not found.numel and any(map(prod, shards.values()))
        if found is None or is_void or self.keys.is_expert(name):
            return None
        require_fit(name, found, shards, self.file)
        restore_keys = self.keys.restore_keys_of(name, shards, degree)
        return self.keys.without_padding(name, GovernedMap(found, "stored map", restore_keys))

    def find(self, name: str) -> ParamAffineMap | None:
        """The map stored for a name, whether it fits or not."""
        matching = self.maps.matching(name)
        if len(matching) > 1:
            raise LayoutError(
                "more than one stored map matches a parameter",
                file=self.file,
                parameter=name,
                found=len(matching),
            )
        return matching[0] if matching else None

    def empty_names(self) -> frozenset[str]:
        """See :class:`LayoutSource`."""
        return frozenset(
            name for name in self.maps.names if not any(m.numel for m in self.maps.matching(name))
        )


def read_layouts(
    columns: Sequence[ModelStates],
    degree: int,
    stated: StatedLayouts | None = None,
    experts: Iterable[str] = (),
) -> Layouts:
    """The sources of layouts of a checkpoint, after all their objections have been heard.

    Parameters
    ----------
    columns
        The model-state file of each model-parallel rank `mp = stage * degree + tensor rank`.
    degree
        Number of tensor ranks.
    stated
        What the user states.
    experts
        Names of experts, which a rule may mean although no model-state file has them.

    Raises
    ------
    LayoutError
        When ranks state different layouts, rules match nothing or contradict each other, or leave
        a parameter unsettled.
    DocumentError, CheckpointError
        When what they state is malformed.
    """
    info = _one_info([column.info for column in columns])
    keys = read_conversion_keys(info, degree, stated.waived if stated else frozenset())
    stored = read_stored_maps(info, keys)
    sources: list[LayoutSource] = [source for source in (stated, stored) if source is not None]
    sources.append(keys)
    if degree == 1:
        sources.append(OneShard())
    layouts = Layouts(tuple(sources), degree, columns[0].file)
    layouts.require_used(_names(columns).union(experts))
    shapes = parameter_shapes(columns)
    notes = layouts.require_clear(shapes)
    if stated is not None:
        notes += _left_out(stated, shapes, degree)
    return replace(layouts, notes=tuple(notes), shapes=shapes)


def _left_out(
    stated: StatedLayouts, shapes: Mapping[str, Mapping[int, Shape]], degree: int
) -> Iterator[str]:
    """Say how many rows the user's word leaves out: nothing in the files tells that they pad."""
    for name, by_column in shapes.items():
        if stated.vocabulary_size(name) is None:
            continue
        found = stated.map_of(name, _by_rank(by_column, degree), degree)
        if found is not None and found.padded is not None:
            there, left = found.padded.logical_shape[0], found.map.logical_shape[0]
            yield (
                f"{there - left} of {there} rows of {name} are left out: original_vocab_size of "
                f"{stated.file} is {left}"
            )


def _by_rank(by_column: Mapping[int, Shape], degree: int) -> dict[int, Shape]:
    """The shapes of a parameter's shards on the tensor ranks of its first stage."""
    stage = min(by_column) // degree
    return {c % degree: shape for c, shape in by_column.items() if c // degree == stage}


def require_same_for_ties(stated: StatedLayouts, ties: Mapping[str, str], layouts: Layouts) -> None:
    """Refuse what the user states differently for two names of one parameter.

    Parameters
    ----------
    stated
        What the user states.
    ties
        Other name -> parameter.
    layouts
        The layouts that it is part of, with the shapes of all shards.

    Raises
    ------
    LayoutError
        With both names and both rules.
    """

    def answer(name: str, owner: str) -> ParamAffineMap | None:
        by_column = layouts.shapes.get(owner)
        if by_column is None:
            return None
        found = stated.map_of(name, _by_rank(by_column, layouts.degree), layouts.degree)
        return None if found is None else found.whole

    stated.require_one_answer(ties, answer)


def _names(columns: Sequence[ModelStates]) -> frozenset[str]:
    """Every name that a rule may mean: parameters, buffers, and other names of tied ones."""
    names: set[str] = set()
    for column in columns:
        names.update(column.module or (), column.frozen_shapes, column.shared)
        for group in column.param_shapes or ():
            names.update(group)
    return frozenset(names)


def parameter_shapes(columns: Sequence[ModelStates]) -> dict[str, dict[int, Shape]]:
    """Shapes of trained and frozen parameters, by column."""
    shapes: dict[str, dict[int, Shape]] = {}
    for number, column in enumerate(columns):
        trained = {
            name: shape for group in column.param_shapes or () for name, shape in group.items()
        }
        in_module = {
            name: record.shape
            for name, record in (column.module or {}).items()
            if name not in column.buffer_names and name not in column.shared
        }
        # The frozen ones of ZeRO-3 have placeholders in the module, and their shapes beside it.
        for name, shape in {**in_module, **column.frozen_shapes, **trained}.items():
            shapes.setdefault(name, {})[number] = shape
    return {name: held for name, held in shapes.items() if any(map(prod, held.values()))}


def read_stored_maps(info: Cursor | None, keys: ConversionKeys | None = None) -> StoredMaps | None:
    """The `affine_map` of `universal_checkpoint_info`, None when there is none.

    Raises
    ------
    DocumentError
        When the document is malformed or of an unknown version.
    """
    document = None if info is None else info.maybe("affine_map")
    if document is None:
        return None
    maps = PatternTable.of(maps_from_document(document.value).items(), document.file)
    return StoredMaps(maps, keys or ConversionKeys(), document.file)


def _one_info(infos: Sequence[Cursor | None]) -> Cursor | None:
    """The info that all model-parallel ranks state."""
    first = infos[0] if infos else None
    for info in infos:
        one, other = (None if found is None else found.value for found in (first, info))
        # The comparison of Python is fast; only pickled objects need the one that looks inside.
        if one != other and not same_value(one, other):
            raise LayoutError(
                "model-state files state different layouts (universal_checkpoint_info)",
                file=" and ".join(found.file for found in (first, info) if found is not None),
                next_step="a file is from another run; move it away",
            )
    return first
