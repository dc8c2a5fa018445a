"""Who says how a parameter was cut: sources of layouts, asked in turn.

Theory. A shard alone does not tell which part of the parameter it is. The answer comes from the
checkpoint or from the user, never from a guess at the name. Each kind of answer is a
:class:`LayoutSource`: maps that the checkpoint stores, keys that describe its cuts, rules that the
user states. :class:`Layouts` asks them in turn; the first that knows the parameter decides, and the
rest is superseded.

What a source says is foreign input. Before a byte of a tensor is read,

* :meth:`Layouts.require_used` lets every source object to rules of its own that match nothing,
* :meth:`Layouts.require_clear` to parameters that its rules leave ambiguous, and
* every map must be valid and fit the shards that the files hold (:func:`require_fit`).

All objections are collected into one error, so that they can be mended in one go.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

from reshard.errors import InvalidMapError, LayoutError, UnknownLayoutError, count_text
from reshard.formats.patterns import compile_pattern, literal_name
from reshard.geometry import ParamAffineMap
from reshard.layouts.builders import replicated_map

__all__ = [
    "GovernedMap",
    "LayoutSource",
    "Layouts",
    "OneShard",
    "Shape",
    "compile_pattern",
    "listed",
    "literal_name",
    "located",
    "require_fit",
]

Shape = tuple[int, ...]

SHOWN = 5
"""How many names or objections a message lists before it only counts."""


@dataclass(frozen=True, slots=True)
class GovernedMap:
    """A map, and what it comes from."""

    map: ParamAffineMap
    """From the logical tensor to tensor-parallel ranks. It may leave elements of shards out,
    which are then not read (rows that only pad a vocabulary), but none of the logical tensor."""
    provenance: str
    """Its source in words."""
    restore_keys: Mapping[str, object] = field(default_factory=dict)
    """Keys that a universal loader without a map of its own needs beside the tensor (`cat_dim`
    and others)."""
    padded: ParamAffineMap | None = None
    """The map of the tensor with its padding, None when it has none."""

    @property
    def whole(self) -> ParamAffineMap:
        """The map that uses every element of every shard."""
        return self.map if self.padded is None else self.padded


class LayoutSource:
    """Something that knows how parameters were cut; the base says that it knows nothing.

    A reader calls, in this order: `unused` once, with every name of the checkpoint; `unclear` with
    the parameters that no earlier source covers; `map_of` for each parameter; and `why_not` for
    those that no source knew.
    """

    __slots__ = ()

    def covers(self, name: str) -> bool:
        """Whether the source decides about this parameter."""
        del name
        return False

    def map_of(self, name: str, shards: Mapping[int, Shape], degree: int) -> GovernedMap | None:
        """The map of a parameter, None when it is not known.

        Parameters
        ----------
        name
            The parameter.
        shards
            Tensor rank -> shape of its shard; ranks that hold no element may be absent.
        degree
            Number of tensor ranks.
        """
        del name, shards, degree
        return None

    def unused(self, names: Collection[str]) -> Iterator[str]:
        """Objections to rules that concern none of the names."""
        del names
        return iter(())

    def unclear(self, shapes: Mapping[str, Mapping[int, Shape]]) -> Iterator[str]:
        """Objections to parameters that the rules do not settle."""
        del shapes
        return iter(())

    def why_not(self, name: str) -> str | None:
        """Why a parameter has no map, when the source can tell."""
        del name
        return None

    def is_expert(self, name: str) -> bool:
        """Whether the source knows the parameter to be one of experts, which it never maps."""
        del name
        return False

    def notes(self, shapes: Mapping[str, Mapping[int, Shape]]) -> Iterator[str]:
        """What is taken for granted about parameters that the source covers."""
        del shapes
        return iter(())

    def empty_names(self) -> frozenset[str]:
        """Names whose map was made from an empty placeholder (`zero.Init`), so says nothing."""
        return frozenset()


@dataclass(frozen=True, slots=True)
class OneShard(LayoutSource):
    """The layout of a single tensor-parallel rank: the shard is the parameter."""

    def covers(self, name: str) -> bool:
        """See :class:`LayoutSource`."""
        del name
        return True

    def map_of(self, name: str, shards: Mapping[int, Shape], degree: int) -> GovernedMap | None:
        """See :class:`LayoutSource`."""
        del name, degree
        shape = next(iter(shards.values()))
        return GovernedMap(replicated_map(shape, 1), "one tensor-parallel rank")


@dataclass(frozen=True, slots=True)
class Layouts:
    """Sources of layouts, asked in turn."""

    sources: tuple[LayoutSource, ...] = ()
    """Who is asked first stands first."""
    degree: int = 1
    """Number of tensor ranks."""
    file: str = ""
    """The file that the sources of the checkpoint come from, for messages."""
    notes: tuple[str, ...] = ()
    """What is taken for granted about parameters."""
    shapes: Mapping[str, Mapping[int, Shape]] = field(default_factory=dict)
    """Parameter -> model-parallel rank -> shape of the shard, for messages."""

    def map_of(self, name: str, shards: Mapping[int, Shape]) -> GovernedMap | None:
        """The first source that knows the parameter decides."""
        for source in self.sources:
            found = source.map_of(name, shards, self.degree)
            if found is not None:
                return found
        return None

    def require_used(self, names: Collection[str]) -> None:
        """Refuse rules that concern none of the names of the checkpoint.

        Raises
        ------
        LayoutError
            With all of them.
        """
        self._refuse([text for source in self.sources for text in source.unused(names)])

    def require_clear(self, shapes: Mapping[str, Mapping[int, Shape]]) -> list[str]:
        """Refuse parameters that the rules leave ambiguous.

        Parameters
        ----------
        shapes
            Parameter -> model-parallel rank -> shape of the shard.

        Returns
        -------
        list of str
            What is taken for granted about the others.

        Raises
        ------
        LayoutError
            With all of them.
        """
        objections: list[str] = []
        notes: list[str] = []
        left = dict(shapes)
        for source in self.sources:
            objections += source.unclear(left)
            notes += source.notes(left)
            left = {name: held for name, held in left.items() if not source.covers(name)}
        self._refuse(objections)
        return notes

    def is_expert(self, name: str) -> bool:
        """Whether a source knows the parameter to be one of experts."""
        return any(source.is_expert(name) for source in self.sources)

    def empty_names(self) -> frozenset[str]:
        """Names whose stored map says nothing; see :class:`LayoutSource`."""
        return frozenset(name for source in self.sources for name in source.empty_names())

    def _refuse(self, objections: Sequence[str]) -> None:
        if objections:
            raise LayoutError(
                listed(objections, "; "),
                file=self.file,
                next_step="state the layout of these parameters with --layout FILE, or name what "
                "is to be accepted under `waive` in that file",
            )

    def unknown(
        self, shapes: Mapping[str, Mapping[int, Shape]], known: Collection[str] = ()
    ) -> UnknownLayoutError:
        """The error for parameters whose layout nobody states; it names all there are.

        Parameters
        ----------
        shapes
            Those that were met: parameter -> model-parallel rank -> shape of the shard.
        known
            Names that need no source.
        """
        settled = self.empty_names().union(known)
        others = {
            name: held
            for name, held in self.shapes.items()
            if name not in settled
            and not self.is_expert(name)
            and not any(source.covers(name) for source in self.sources)
        }
        missing = {**others, **shapes}
        reasons = dict.fromkeys(filter(None, map(self._why_not, missing)))
        return UnknownLayoutError(
            f"how {count_text(len(missing), 'parameter')} {'was' if len(missing) == 1 else 'were'} "
            f"cut over {self.degree} tensor-parallel ranks is not known",
            shards=missing,
            file=self.file,
            parameter=listed(list(missing)),
            expected="an affine_map, conversion patterns, or a stated layout",
            found=listed(list(reasons)) if reasons else "none that covers them",
            next_step="state their layout with --layout FILE (docs/layouts.md); `reshard inspect` "
            "lists all of them with the shapes of their shards",
        )

    def _why_not(self, name: str) -> str | None:
        return next(filter(None, (source.why_not(name) for source in self.sources)), None)


def listed(entries: Sequence[str], separator: str = ", ") -> str:
    """The first entries, and how many more there are.

    >>> listed(["a", "b"]), listed([str(number) for number in range(7)])
    ('a, b', '0, 1, 2, 3, 4 and 2 more')
    """
    shown = separator.join(entries[:SHOWN])
    return shown + (f" and {len(entries) - SHOWN} more" if len(entries) > SHOWN else "")


def require_fit(
    name: str, governing: ParamAffineMap, shards: Mapping[int, Shape], file: str
) -> None:
    """Refuse a map that is not valid or does not fit the shards of the files.

    Parameters
    ----------
    name
        The parameter.
    governing
        Its map, padding included.
    shards
        Tensor rank -> shape of the shard that the files hold; ranks without elements may be absent.
    file
        Where the map was stated.

    Raises
    ------
    InvalidMapError
        When the map breaks a property.
    LayoutError
        When it says another shape for a rank than the files.
    """
    if not _is_valid(governing):
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
                next_step=f"state its layout with --layout{_fitting(governing, shards)}",
            )


@lru_cache(maxsize=4096)
def _is_valid(one: ParamAffineMap) -> bool:
    """Whether a map is valid; a model of many equal layers has few different maps."""
    try:
        one.validate()
    except InvalidMapError:
        return False
    return True


def _agree(stated: Shape, held: Shape) -> bool:
    if prod(stated) != prod(held):
        return False
    left, right = ([extent for extent in shape if extent != 1] for shape in (stated, held))
    return len(left) != len(right) or left == right


def _fitting(governing: ParamAffineMap, shards: Mapping[int, Shape]) -> str:
    """A hint: the dim along which shards of these shapes would make up the parameter."""
    shape = governing.logical_shape
    if any(len(held) != len(shape) for held in shards.values()):
        return ""
    for dim in range(len(shape)):
        others = {(*held[:dim], *held[dim + 1 :]) for held in shards.values()}
        total = sum(held[dim] for held in shards.values())
        if others == {(*shape[:dim], *shape[dim + 1 :])} and total == shape[dim]:
            return f"; the shards have the shapes of a split of dim {dim}"
    return ""


def located(error: LayoutError, name: str, file: str) -> LayoutError:
    """The same error with the parameter and the file that it is about."""
    return LayoutError(
        error.what,
        file=error.file or file,
        rank=error.rank,
        parameter=error.parameter or name,
        dim=error.dim,
        expected=error.expected,
        found=error.found,
        next_step=error.next_step or "state its layout with --layout FILE",
    )
