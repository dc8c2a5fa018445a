"""Which map says how a parameter was cut over tensor-parallel ranks.

Theory. A shard alone does not tell which part of the parameter it is. The answer comes from the
checkpoint or from the user, never from a guess at the name: the *stored map* (`affine_map` in
`universal_checkpoint_info`, written by AutoTP from 0.19.8 on), or the one shard that is the
parameter when there is one tensor rank. Anything else is refused with the list of what is not
known.

A stored map is foreign input. Before it is used it must satisfy the properties that every map must
have, and fit the shards that the files hold: same ranks, same number of elements, and the same
shape where it has as many dimensions (DeepSpeed 0.19.8 writes a map with transposed shards for
convolution layers; it would rebuild, silently, scrambled).

Source: `checkpoint/constants.py`, `module_inject/layers.py`
(`collect_autotp_universal_checkpoint_info`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

from reshard.errors import LayoutError
from reshard.formats.parsing import Cursor
from reshard.geometry import ParamAffineMap, maps_from_document
from reshard.layouts.builders import replicated_map

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GovernedMap:
    """A map, and what it comes from.

    Parameters
    ----------
    map
        From the logical tensor to tensor-parallel ranks.
    provenance
        Its source in words.
    restore_keys
        Keys that a universal loader without a map of its own needs beside the tensor (`cat_dim`, …).
    """

    map: ParamAffineMap
    provenance: str
    restore_keys: Mapping[str, object] = field(default_factory=dict)


class LayoutSource(Protocol):
    """Something that knows how parameters were cut."""

    def map_of(self, name: str, shards: Mapping[int, Shape]) -> GovernedMap | None:
        """The map of a parameter with these shards (rank -> shape), None when it is not known."""


@dataclass(frozen=True, slots=True)
class OneShard:
    """The layout of a single tensor-parallel rank: the shard is the parameter."""

    def map_of(self, name: str, shards: Mapping[int, Shape]) -> GovernedMap | None:
        """See :class:`LayoutSource`."""
        shape = next(iter(shards.values()))
        return GovernedMap(replicated_map(shape, 1), "one tensor-parallel rank")


@dataclass(frozen=True, slots=True)
class StoredMaps:
    """The maps that the checkpoint carries, by parameter name or by pattern."""

    by_name: Mapping[str, ParamAffineMap]
    by_pattern: tuple[tuple[re.Pattern[str], ParamAffineMap], ...]
    file: str

    def map_of(self, name: str, shards: Mapping[int, Shape]) -> GovernedMap | None:
        """See :class:`LayoutSource`."""
        found = self.find(name)
        if found is None:
            return None
        require_fit(name, found, shards, self.file)
        return GovernedMap(found, "stored map")

    def find(self, name: str) -> ParamAffineMap | None:
        """The map stored for a name, whether it fits or not."""
        if name in self.by_name:
            return self.by_name[name]
        matching = [stored for pattern, stored in self.by_pattern if pattern.match(name)]
        if len(matching) > 1:
            raise LayoutError(
                "more than one stored map matches a parameter",
                file=self.file,
                parameter=name,
                found=len(matching),
            )
        return matching[0] if matching else None

    def empty_names(self) -> frozenset[str]:
        """Names whose map was made from an empty placeholder (`zero.Init`), so says nothing."""
        return frozenset(
            name for name, stored in self.by_name.items() if prod(stored.logical_shape) == 0
        )


def read_stored_maps(info: Cursor | None) -> StoredMaps | None:
    """The `affine_map` of `universal_checkpoint_info`, None when there is none.

    Raises
    ------
    DocumentError
        When the document is malformed or of an unknown version.
    """
    document = None if info is None else info.maybe("affine_map")
    if document is None:
        return None
    by_name = {}
    by_pattern = []
    for pattern, stored in maps_from_document(document.value).items():
        name = literal_name(pattern)
        if name is None:
            by_pattern.append((compile_pattern(pattern, document.file), stored))
        else:
            by_name[name] = stored
    return StoredMaps(by_name, tuple(by_pattern), document.file)


def literal_name(pattern: str) -> str | None:
    r"""The one name that an exact-match pattern (`^re.escape(name)$`) stands for, else None.

    Examples
    --------
    >>> literal_name(r"^lm_head\\.weight$")
    'lm_head.weight'
    >>> literal_name(r".*\\.weight$") is None
    True
    """
    if not (pattern.startswith("^") and pattern.endswith("$")):
        return None
    name = re.sub(r"\\(.)", r"\1", pattern[1:-1], flags=re.DOTALL)
    return name if re.escape(name) == pattern[1:-1] else None


def compile_pattern(pattern: str, file: str) -> re.Pattern[str]:
    """A pattern of the checkpoint as a regular expression."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise LayoutError(
            f"a pattern is no regular expression: {error}", file=file, found=repr(pattern)
        ) from error


def require_fit(
    name: str, governing: ParamAffineMap, shards: Mapping[int, Shape], file: str
) -> None:
    """Refuse a map that does not fit the shards of the files.

    Parameters
    ----------
    shards
        Tensor rank -> shape of the shard that the files hold; ranks without elements may be absent.
    """
    governing.validate(name)
    for rank in sorted(set(governing.shard_shapes) | set(shards)):
        stated, held = governing.shard_shapes.get(rank), shards.get(rank)
        if held is None and stated is not None and prod(stated) == 0:
            continue
        if stated is None or held is None or not _agree(stated, held):
            raise LayoutError(
                "the map of a parameter does not fit the shard that the files hold",
                file=file,
                parameter=name,
                rank=f"tp {rank}",
                expected=f"shape {stated}" if stated is not None else "no shard",
                found=f"shape {held}" if held is not None else "no shard",
                next_step="state its layout with --layout",
            )


def _agree(stated: Shape, held: Shape) -> bool:
    if prod(stated) != prod(held):
        return False
    left, right = ([extent for extent in shape if extent != 1] for shape in (stated, held))
    return len(left) != len(right) or left == right


@dataclass(frozen=True, slots=True)
class Layouts:
    """Sources of layouts, asked in turn."""

    sources: tuple[LayoutSource, ...]

    def map_of(self, name: str, shards: Mapping[int, Shape]) -> GovernedMap | None:
        """The first source that knows the parameter decides."""
        for source in self.sources:
            found = source.map_of(name, shards)
            if found is not None:
                return found
        return None


def refuse_unknown(names: Iterable[str], file: str, degree: int) -> LayoutError:
    """The error for parameters whose layout nobody states."""
    unknown = list(names)
    shown = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
    return LayoutError(
        f"how {len(unknown)} parameters were cut over {degree} tensor-parallel ranks is not known",
        file=file,
        parameter=shown,
        expected="an affine_map, conversion patterns, or a stated layout",
        found="none that covers them",
        next_step="state their layout with --layout FILE",
    )
