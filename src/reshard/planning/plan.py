"""The plan: which bytes go where, as pure data.

Theory. A plan is a list of output files. Of each file the bytes known beforehand are *literals*;
the rest are *slots*, and a slot holds *fills*, each one shard of one tensor state. What a fill
needs is geometry (a *route*: which elements of which holders go to which elements of the shard) and
addresses (*places*: where in which source file the shard of each holder starts). The two are kept
apart because a model has tens of geometries and thousands of tensors: a route is planned once and
shared by all the fills that have the same pair of maps, and a fill only adds its addresses. ::

    byte of the target = slot.offset + fill.offset + itemsize * element of the target shard
    byte of the source = place.offset + itemsize * element of the holder's shard

A plan holds no handle, lock, buffer or clock; it can be compared, printed, saved, priced, filtered
and carried out on another machine that sees the same files.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from reshard.formats.checkpoint import TensorKey, Topology
    from reshard.formats.dtypes import DType
    from reshard.geometry import ParamAffineMap
    from reshard.planning.moves import Ints, Move

PLAN_VERSION = 1


@dataclass(frozen=True, slots=True)
class PlannedSource:
    """A file that is read, or whose content the plan depends on."""

    path: str
    """Where it is."""
    name: str
    """Its path relative to the checkpoint, the same on every machine."""
    nbytes: int
    """The size in bytes it had when it was planned."""
    stamp: tuple[int, ...] = field(default=(), compare=False)
    """As in :class:`~reshard.formats.checkpoint.SourceFile`; it says nothing on other machines."""


@dataclass(frozen=True, slots=True)
class Route:
    """The geometry of a fill, shared by all fills with the same pair of maps."""

    numel: int
    """Elements of the target shard."""
    holders: tuple[int, ...]
    """The source ranks concerned, ascending; a move names one by its index here."""
    moves: tuple[Move, ...]
    """What writes the shard: ordered moves, ascending by target offset, each target element
    once."""
    checks: tuple[Move, ...] = ()
    """The copies that were not chosen: moves whose elements must equal those already written."""
    origins: tuple[Move, ...] = ()
    """Where each element of the target shard lies in the logical tensor, as ordered moves from
    the logical tensor (holder 0); empty when the shard *is* the logical tensor, row-major."""
    source_map: ParamAffineMap | None = field(default=None, repr=False, compare=False)
    """The map the route was made from, for the record."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a holder's shard starts: index of the source file, and first byte in it."""

    source: int
    offset: int


@dataclass(frozen=True, slots=True)
class PlannedFill:
    """One shard of one tensor state inside a slot."""

    key: TensorKey
    """`(name, state)`."""
    dtype: DType
    """Element type in the target."""
    shape: Ints
    """Shape of the target shard."""
    offset: int
    """First byte inside the slot."""
    nbytes: int
    """Length in bytes."""
    route: Route
    """The geometry."""
    places: tuple[Place, ...]
    """Start of each holder's shard, in the order of `route.holders`."""
    stored: DType | None = None
    """Element type in the source where it is another one and elements are rounded; else None."""


@dataclass(frozen=True, slots=True)
class PlannedSlot:
    """A byte range of an output file that is filled with tensor elements.

    Bytes that no fill covers become zeros. ``crc_offsets`` are the places in the file that receive
    the CRC-32 of the slot (4 bytes, little-endian).
    """

    offset: int
    nbytes: int
    fills: tuple[PlannedFill, ...]
    crc_offsets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One output file: path relative to the output folder, size, known bytes, slots."""

    path: str
    size: int
    literals: tuple[tuple[int, bytes], ...]
    slots: tuple[PlannedSlot, ...] = ()


@dataclass(frozen=True, slots=True)
class Origin:
    """What the plan was made from, in words, for the manifest."""

    format: str = ""
    topology: str = ""
    """Of the source."""
    versions: tuple[tuple[str, str], ...] = ()
    """What the source files state about themselves."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything an executor needs to know."""

    format: str
    """Format of the output."""
    sources: tuple[PlannedSource, ...]
    """Source files."""
    files: tuple[PlannedFile, ...]
    """Output files."""
    pointer: tuple[str, str] | None = None
    """`(file name, text)` of the pointer file beside the output folder, or None."""
    replicas: str = "refuse"
    """``"refuse"``, ``"first"`` or ``"mean"``: what to do where replicas differ."""
    origin: Origin = field(default_factory=Origin)
    """What it was made from."""
    notes: tuple[str, ...] = ()
    """What the user should know."""
    topology: Topology | None = None
    """The degrees that the output is for, None where it is the same for all."""
    copied: tuple[PlannedFill, ...] = ()
    """The whole of every tensor that has copies, where copies may differ: what differs is
    counted once, however often the output has the elements."""

    def fills(self) -> Iterator[PlannedFill]:
        """Every fill of every slot of every file, in order."""
        for file in self.files:
            for slot in file.slots:
                yield from slot.fills

    @property
    def routes(self) -> tuple[Route, ...]:
        """The distinct geometries, in order of first use."""
        seen: dict[int, Route] = {}
        for fill in self.fills():
            seen.setdefault(id(fill.route), fill.route)
        return tuple(seen.values())

    def digest(self) -> str:
        """Digest (hexadecimal) of everything that decides the bytes of the output.

        Paths of the source files are left out, so a moved checkpoint keeps its plan.
        """
        state = xxhash.xxh3_128()
        state.update(repr((PLAN_VERSION, self.format, self.replicas, self.pointer)).encode())
        state.update(repr([(s.name, s.nbytes) for s in self.sources]).encode())
        routes = self.routes
        for route in routes:
            state.update(repr(route).encode())
        number = {id(route): k for k, route in enumerate(routes)}
        for file in self.files:
            state.update(repr((file.path, file.size)).encode())
            for offset, data in file.literals:
                state.update(offset.to_bytes(8, "little"))
                state.update(data)
            for slot in file.slots:
                state.update(repr((slot.offset, slot.nbytes, slot.crc_offsets)).encode())
                for fill in slot.fills:
                    state.update(_fill_text(fill, number[id(fill.route)]).encode())
        return state.hexdigest()

    def to_dict(self) -> dict[str, object]:
        """The plan as plain values that JSON can hold; literals in base 64.

        Each distinct route is given once, and a fill refers to it by index.
        """
        routes = self.routes
        number = {id(route): k for k, route in enumerate(routes)}
        return {
            "version": PLAN_VERSION,
            "format": self.format,
            "replicas": self.replicas,
            "pointer": list(self.pointer) if self.pointer else None,
            "notes": list(self.notes),
            "sources": [{"path": s.path, "name": s.name, "nbytes": s.nbytes} for s in self.sources],
            "routes": [_route_dict(route) for route in routes],
            "files": [_file_dict(file, number) for file in self.files],
        }


def _fill_text(fill: PlannedFill, route: int) -> str:
    places = [(place.source, place.offset) for place in fill.places]
    dtypes = (fill.dtype.name, *((fill.stored.name,) if fill.stored else ()))
    return repr((fill.key, *dtypes, fill.shape, fill.offset, fill.nbytes, route, places))


def _move_list(move: Move) -> list[object]:
    return [
        list(move.shape),
        move.holder,
        move.source_offset,
        list(move.source_strides),
        move.target_offset,
        list(move.target_strides),
        move.scale,
    ]


def _route_dict(route: Route) -> dict[str, object]:
    return {
        "numel": route.numel,
        "holders": list(route.holders),
        "moves": [_move_list(move) for move in route.moves],
        "checks": [_move_list(move) for move in route.checks],
        "origins": [_move_list(move) for move in route.origins],
    }


def _fill_dict(fill: PlannedFill, number: Mapping[int, int]) -> dict[str, object]:
    return {
        "name": fill.key[0],
        "state": fill.key[1],
        "dtype": fill.dtype.name,
        **({"rounded_from": fill.stored.name} if fill.stored else {}),
        "shape": list(fill.shape),
        "offset": fill.offset,
        "nbytes": fill.nbytes,
        "route": number[id(fill.route)],
        "places": [[place.source, place.offset] for place in fill.places],
    }


def _file_dict(file: PlannedFile, number: Mapping[int, int]) -> dict[str, object]:
    return {
        "path": file.path,
        "size": file.size,
        "literals": [[offset, b64encode(data).decode()] for offset, data in file.literals],
        "slots": [
            {
                "offset": slot.offset,
                "nbytes": slot.nbytes,
                "crc_offsets": list(slot.crc_offsets),
                "fills": [_fill_dict(fill, number) for fill in slot.fills],
            }
            for slot in file.slots
        ],
    }
