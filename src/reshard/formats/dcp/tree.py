"""Which entry is what: the tree that was saved, sorted into model, optimizer and the rest.

Theory. DCP stores any tree of dicts. What a training loop puts into one follows two functions of
``torch.distributed.checkpoint.state_dict``: ``get_model_state_dict`` gives ``{NAME: tensor}``, and
``get_optimizer_state_dict`` gives one of two forms, under whatever keys the loop chose::

    nested     P / "state" / NAME / STATE             P / "param_groups" / i / KEY
    flattened  P / "state.NAME.STATE"                 P / "param_groups.NAME.KEY"

Everything follows from that form, and no name is looked up in a list. The *optimizer* is the one
place ``P`` with such children. It says which parameters it trains: the ``params`` of its groups, or
the names in ``param_groups.NAME.KEY`` (a ``KEY`` has no dot). The *model* is the one place that has
tensors of all these names. Without an optimizer, the model is the one place with tensors, or the
one called ``model``. Where two places would do, the user says which (:class:`Keys`).

An optimizer saved with ``optimizer.state_dict()`` numbers its parameters, and no file says which is
number 0: refused.

Source: ``torch/distributed/checkpoint/state_dict.py`` (``_flatten_optim_state_dict``),
``_nested_dict.py``, ``_traverse.py``; torchtitan ``components/checkpoint.py``, which keeps the
model under ``model`` or, later, at the root, and the flattened optimizer under ``optimizer``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from reshard.errors import CheckpointError, UnsupportedError, count_text
from reshard.formats.dcp.index import Index, Path
from reshard.formats.dcp.options import Keys

STATE, PARAM_GROUPS, PARAMS = "state", "param_groups", "params"
MODEL = "model"
"""What a model is called where no optimizer tells it from other tensors."""


@dataclass(frozen=True, slots=True)
class StateEntry:
    """An optimizer state: which parameter, which state, and the FQN of its entry."""

    name: str
    state: str
    entry: str


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The entries of an optimizer, behind either form."""

    place: Path
    """Its keys from the root."""
    flattened: bool
    """Whether it is in the flattened form."""
    states: tuple[StateEntry, ...] = ()
    """Entries of states."""
    settings: Mapping[tuple[int | str, str], str] = field(default_factory=dict)
    """FQNs of hyperparameters: ``(group number or name of a parameter, key)`` -> FQN; the key is
    empty for a list of groups that is one object (torch before 2.4)."""


def find_optimizer(index: Index, keys: Keys) -> Optimizer | None:
    """Find the optimizer in the tree; None when there is none.

    Raises
    ------
    CheckpointError
        There are several.
    """
    forms = {
        (path[:at], flattened)
        for path in index.paths.values()
        for at, flattened in _optimizer_marks(path)
    }
    places = sorted({place for place, _ in forms}, key=str)
    if keys.optimizer is not None:
        places = [place for place in places if _joined(place) == keys.optimizer]
        if not places:
            raise CheckpointError(
                "no optimizer at the stated keys", file=index.file, found=repr(keys.optimizer)
            )
    if len(places) > 1:
        raise _ambiguous(index, "optimizers", places, "optimizer")
    if not places:
        return None
    flattened = (places[0], True) in forms
    return Optimizer(places[0], flattened)


def _optimizer_marks(path: Path) -> Iterable[tuple[int, bool]]:
    """Where a path enters an optimizer's groups: position, and whether in the flattened form."""
    last = path[-1]
    if isinstance(last, str) and last.startswith(f"{PARAM_GROUPS}."):
        yield len(path) - 1, True
    for at, key in enumerate(path):
        # One object (torch before 2.4), or a number and a key.
        if key == PARAM_GROUPS and len(path) - at in (1, 3):
            yield at, False


def read_nested(index: Index, found: Optimizer) -> Optimizer:
    """The entries of an optimizer in the nested form."""
    depth = len(found.place)
    states = []
    settings: dict[tuple[int | str, str], str] = {}
    for entry, path in index.paths.items():
        inner = path[depth:]
        if path[:depth] != found.place or not inner:
            continue
        if inner[0] == STATE and len(inner) >= 3:
            states.append(StateEntry(str(inner[1]), _joined(inner[2:]), entry))
        elif inner[0] == PARAM_GROUPS and len(inner) == 1:
            settings[0, ""] = entry
        elif inner[0] == PARAM_GROUPS and len(inner) == 3 and isinstance(inner[1], int):
            settings[inner[1], str(inner[2])] = entry
    return replace(found, states=tuple(states), settings=settings)


def read_flattened(index: Index, found: Optimizer) -> Optimizer:
    """The entries of an optimizer in the flattened form."""
    depth = len(found.place)
    inside = [
        (str(path[-1]), entry)
        for entry, path in index.paths.items()
        if path[:-1] == found.place and len(path) == depth + 1
    ]
    settings: dict[tuple[int | str, str], str] = {}
    for key, entry in inside:
        head, dot, rest = key.partition(".")
        name, _, setting = rest.rpartition(".")
        if head == PARAM_GROUPS and dot and name:
            settings[name, setting] = entry
    names = {name for name, _ in settings}
    states = [
        _flat_state(index, key.removeprefix(f"{STATE}."), entry, names)
        for key, entry in inside
        if key.startswith(f"{STATE}.")
    ]
    return replace(found, states=tuple(states), settings=settings)


def _flat_state(index: Index, key: str, entry: str, names: set[int | str]) -> StateEntry:
    """Cut ``NAME.STATE`` where NAME is a parameter of the optimizer; states may have dots too."""
    at = key.rfind(".")
    cuts = []
    while at > 0:
        if key[:at] in names:
            cuts.append(at)
        at = key.rfind(".", 0, at)
    if len(cuts) != 1:
        raise CheckpointError(
            "a state cannot be told apart from the name of its parameter"
            if cuts
            else "a state is of a parameter that is in no group",
            file=index.file,
            parameter=entry,
            found=[key[:cut] for cut in cuts] or None,
        )
    return StateEntry(key[: cuts[0]], key[cuts[0] + 1 :], entry)


def refuse_numbered(index: Index, names: Iterable[object]) -> None:
    """Refuse an optimizer that numbers its parameters."""
    for name in names:
        if isinstance(name, int) or (isinstance(name, str) and name.isdecimal()):
            raise UnsupportedError(
                "the optimizer numbers its parameters, and no file says which is which",
                file=index.file,
                found=f"parameter {name!r}",
                next_step="save it with torch.distributed.checkpoint.state_dict.get_state_dict",
            )


# --------------------------------------------------------------------------- model


def find_model(
    index: Index, keys: Keys, optimizer: Optimizer | None, trained: frozenset[str]
) -> dict[str, str]:
    """The tensors of the model: name -> FQN of the entry.

    Parameters
    ----------
    index
        The index.
    keys
        What the user says.
    optimizer
        The optimizer, None without one.
    trained
        Names of the parameters it trains.

    Raises
    ------
    CheckpointError
        No place, or several, have tensors of all the trained names.
    """
    inside = set() if optimizer is None else _entries(optimizer)
    paths = {entry: index.paths[entry] for entry in index.tensors if entry not in inside}
    places = _stated(index, keys, paths) if keys.model is not None else _holding(paths, trained)
    if len(places) > 1:
        raise _ambiguous(index, "models", sorted(places, key=str), "model")
    if not places:
        raise CheckpointError(
            "no place in the tree has the tensors of all parameters of the optimizer"
            if trained
            else "no place in the tree is the model",
            file=index.file,
            expected=f"{count_text(len(trained), 'parameter')}, {min(trained)} among them"
            if trained
            else None,
            found=_shown({path[:-1] for path in paths.values()}),
            next_step="say where the model is with --model-key",
        )
    model = _under(places[0], paths, trained)
    lacking = next((name for name in sorted(trained) if name not in model), None)
    if lacking is not None:
        raise CheckpointError(
            "the model at the stated keys lacks a parameter of the optimizer",
            file=index.file,
            parameter=lacking,
            found=repr(keys.model),
            next_step="state another place with --model-key",
        )
    return model


def _under(place: Path, paths: Mapping[str, Path], trained: frozenset[str]) -> dict[str, str]:
    """The tensors at a place: name -> FQN.

    Where the names are keys of one dict, as ``get_model_state_dict`` has them, what lies deeper is
    something else (at the root: all else). Where a dict of dicts was saved, all of it is taken.
    """
    found = {
        _joined(path[len(place) :]): entry
        for entry, path in paths.items()
        if path[: len(place)] == place and len(path) > len(place)
    }
    flat = {name for name, entry in found.items() if len(paths[entry]) == len(place) + 1}
    if not flat or not trained <= flat:
        return found
    return {name: entry for name, entry in found.items() if name in flat}


def _stated(index: Index, keys: Keys, paths: Mapping[str, Path]) -> list[Path]:
    found = {
        path[:at]
        for path in paths.values()
        for at in range(len(path))
        if _joined(path[:at]) == keys.model
    }
    if not found:
        raise CheckpointError(
            "no tensors at the stated keys", file=index.file, found=repr(keys.model)
        )
    return list(found)


def _holding(paths: Mapping[str, Path], trained: frozenset[str]) -> list[Path]:
    """The places that have tensors of all trained names; without names, the one place with any."""
    if trained:
        held = Counter(
            path[:at]
            for path in paths.values()
            for at in range(len(path))
            if _joined(path[at:]) in trained
        )
        return [place for place, count in held.items() if count == len(trained)]
    parents = {path[:-1] for path in paths.values()}
    called = {
        path[:at] for path in paths.values() for at in range(1, len(path)) if path[at - 1] == MODEL
    }
    return list(called or parents)


def _entries(optimizer: Optimizer) -> set[str]:
    return {*(state.entry for state in optimizer.states), *optimizer.settings.values()}


def other_entries(
    index: Index, model: Mapping[str, str], optimizer: Optimizer | None
) -> tuple[str, ...]:
    """FQNs of what is neither of the model nor of the optimizer."""
    known = {*model.values(), *(() if optimizer is None else _entries(optimizer))}
    return tuple(entry for entry in index.paths if entry not in known)


def _joined(path: Path) -> str:
    return ".".join(map(str, path))


def _shown(places: set[Path]) -> str:
    texts = sorted(_joined(place) or "the root" for place in places)
    return f"tensors at {', '.join(texts[:8])}" if texts else "no tensors"


def _ambiguous(index: Index, what: str, places: list[Path], word: str) -> CheckpointError:
    return CheckpointError(
        f"the tree holds {len(places)} {what}",
        file=index.file,
        found=", ".join(_joined(place) or "the root" for place in places[:8]),
        next_step=f"say which with --{word}-key",
    )
