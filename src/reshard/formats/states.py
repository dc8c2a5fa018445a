"""What the states of parameters have in common, whatever the format.

Theory. An optimizer keeps its states element by element, so each has the shape of its parameter,
and it creates all states of a parameter at once, at its first update. So a parameter has the states
that the others of its group have, or none (it was never updated). And one state has one element
type, among the parameters whose weights have one type. A file that is not so was damaged, or is of
another parameter or run. A state of no dims is a number, and has no shape to compare.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from reshard.errors import CheckpointError
from reshard.formats.checkpoint import Problem, Role, StoredTensor, TensorKey
from reshard.formats.dtypes import DType

WEIGHTS = "fp32"
"""The state of the weights themselves."""

_NEXT_STEP = "copy the folder again, or leave the state out with --states"


def states_by_name(keys: Iterable[TensorKey]) -> dict[str, set[str]]:
    """The states that are there, by parameter."""
    held: dict[str, set[str]] = {}
    for name, state in keys:
        held.setdefault(name, set()).add(state)
    return held


def require_alike(tensors: Mapping[TensorKey, StoredTensor]) -> None:
    """Refuse a state of another shape, or element type, than the states beside it say.

    Raises
    ------
    CheckpointError
        It is of another shape than its parameter, or of another type than with other parameters.
    """
    for tensor in tensors.values():
        shape = tensors.get((tensor.name, WEIGHTS), tensor).shape
        if tensor.shape not in ((), shape):
            raise _unlike(tensor, "a state has another shape than its parameter", shape)
    kinds: dict[tuple[str, DType | None], list[StoredTensor]] = {}
    for tensor in tensors.values():
        if tensor.role is Role.PARAMETER and tensor.state != WEIGHTS:
            weight = tensors.get((tensor.name, WEIGHTS))
            dtype = None if weight is None else weight.dtype
            kinds.setdefault((tensor.state, dtype), []).append(tensor)
    for like in kinds.values():
        usual = Counter(tensor.dtype for tensor in like).most_common(1)[0][0]
        odd = next((tensor for tensor in like if tensor.dtype != usual), None)
        if odd is not None:
            what = "a state is of another element type than with other parameters"
            raise _unlike(odd, what, usual)


def _unlike(tensor: StoredTensor, what: str, expected: object) -> CheckpointError:
    return CheckpointError(
        what,
        file=next((region.file for region in tensor.regions.values()), None),
        parameter=tensor.name,
        state=tensor.state,
        expected=expected,
        found=tensor.dtype if isinstance(expected, DType) else tensor.shape,
        next_step=_NEXT_STEP,
    )


def require_even(
    held: Mapping[str, set[str]], groups: Iterable[Sequence[str]], file: object
) -> None:
    """Refuse a parameter that has some, and not all, of the states that most of its group have.

    Parameters
    ----------
    held
        The states that are there, by parameter.
    groups
        The names of the parameters that are trained alike.
    file
        For messages.

    Raises
    ------
    CheckpointError
        A state was lost.
    """
    for group in groups:
        kept = {name: frozenset(held.get(name, ())) - {WEIGHTS} for name in group}
        sets = Counter(states for states in kept.values() if states)
        usual, count = sets.most_common(1)[0] if sets else (frozenset(), 0)
        if 2 * count <= sets.total():
            continue
        for name, states in kept.items():
            if states and states < usual:
                raise CheckpointError(
                    "a state of a parameter is missing that others of its group have",
                    file=file,
                    parameter=name,
                    state=min(usual - states),
                    found=f"only {', '.join(sorted(states))}",
                    next_step=_NEXT_STEP,
                )


def uneven_states(
    held: Mapping[str, set[str]], trained: Iterable[str], file: object
) -> Iterator[Problem]:
    """Tell of trained parameters without a state that others have.

    That is no fault: an optimizer keeps no state of what it never updated.
    """
    names = sorted(set(trained) & held.keys())
    for state in sorted(set().union(*(held[name] for name in names))):
        without = [name for name in names if state not in held[name]]
        if without:
            more = f" (and {len(without) - 1} more)" if len(without) > 1 else ""
            what = f"no {state}, which other parameters have"
            yield Problem(what + more, str(file), without[0])
