"""Which entries may lie at one place: tied names, and values that are equal; no others.

Theory. A place is one archive, so two entries at one place hold the same bytes. That is meant in
two cases only, both of which reshard's writer makes use of. *Tied names* are tensors of the model
that agree in everything: element type, shape, chunks, and the place of every chunk; at most one of
them is trained, for an optimizer has a tied parameter once. *Values* (objects, settings and numbers
such as ``step``) are stored once where they are equal. Anywhere else one of the two entries would
be read from bytes that are not its own, and no other check could tell: shape and element type may
well agree. Archives that overlap without being one are of no sound folder either.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise

from reshard.errors import CheckpointError
from reshard.formats.dcp.index import Index, Place

_NEXT_STEP = "the index was changed, or is of two saves; take another checkpoint"


def find_aliases(
    index: Index, model: Mapping[str, str], trained: Collection[str]
) -> dict[str, str]:
    """The tied names of a model: alias -> owner, which is the one that is trained.

    Parameters
    ----------
    index
        The index.
    model
        Name -> FQN of its entry.
    trained
        Names of the parameters in the groups of the optimizer.

    Raises
    ------
    CheckpointError
        Two trained parameters lie at one place.
    """
    alike: dict[object, list[str]] = {}
    for name, entry in model.items():
        tensor = index.tensors[entry]
        places = tuple(index.places.get((entry, chunk.offsets)) for chunk in tensor.chunks)
        whole = places and None not in places
        alike.setdefault((tensor, places) if whole else entry, []).append(name)
    aliases = {}
    for names in alike.values():
        owners = [name for name in names if name in trained] or names[:1]
        if len(owners) > 1:
            raise _two_trained(index, model, owners)
        aliases.update({name: owners[0] for name in names if name != owners[0]})
    return aliases


def require_own_places(index: Index, tied: Mapping[str, str], values: Collection[str]) -> None:
    """Refuse entries at one place that cannot be one thing.

    Parameters
    ----------
    index
        The index.
    tied
        Tied entries of the model: FQN of an alias -> FQN of its owner.
    values
        FQNs of the tensors that are settings or numbers.

    Raises
    ------
    CheckpointError
        Two entries share a place, or parts of their archives.
    """
    held: dict[Place, tuple[str, object]] = {}
    for (entry, offsets), place in index.places.items():
        what: object = (tied.get(entry, entry), offsets)
        if offsets is None:
            what = None
        elif entry in values:
            what = (index.tensors.get(entry), offsets)
        first, known = held.setdefault(place, (entry, what))
        # Two chunks of one tensor are refused where the tensor is put together.
        if known != what and first != entry:
            raise _not_the_same(index, first, entry, place)
    ordered = sorted(held, key=lambda place: (place.file, place.offset, place.nbytes))
    for before, after in pairwise(ordered):
        if before.file == after.file and before.offset + before.nbytes > after.offset:
            raise _overlap(index, held, before, after)


# --------------------------------------------------------------------------- errors


def _two_trained(index: Index, model: Mapping[str, str], names: list[str]) -> CheckpointError:
    first, second = (model[name] for name in names[:2])
    place = index.places[first, index.tensors[first].chunks[0].offsets]
    return CheckpointError(
        "two parameters that the optimizer trains lie at one place",
        file=index.file,
        parameter=names[1],
        expected="a place of its own; of tied names the optimizer has one",
        found=f"{first} and {second} at {_bytes(place)}",
        next_step=_NEXT_STEP,
    )


def _not_the_same(index: Index, first: str, second: str, place: Place) -> CheckpointError:
    return CheckpointError(
        "two entries that are not the same lie at one place",
        file=index.file,
        parameter=second,
        expected="a place of its own, unless it is tied to the other or an equal value",
        found=f"{first} and {second} at {_bytes(place)}",
        next_step=_NEXT_STEP,
    )


def _overlap(
    index: Index, held: Mapping[Place, tuple[str, object]], before: Place, after: Place
) -> CheckpointError:
    first, second = held[before][0], held[after][0]
    return CheckpointError(
        "the places of two entries overlap",
        file=index.file,
        parameter=second,
        expected="a place of its own",
        found=f"{first} at {_bytes(before)}, {second} at {_bytes(after)}",
        next_step=_NEXT_STEP,
    )


def _bytes(place: Place) -> str:
    return f"bytes {place.offset} to {place.offset + place.nbytes} of {place.file}"
