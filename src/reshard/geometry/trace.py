"""Tracing: the map of any partition function, found by watching what it does to markers.

Theory. A function that cuts a parameter for a rank is describable exactly when it is a *view*:
every element of what it returns is one element of ``F`` times a constant. To find out which, it is
run on markers instead of weights:

* ones, so that what comes out is the factor of each element;
* the offsets ``1, 2, 3, …``, so that what comes out, divided by the factor, says where each
  element comes from;
* random values of either sign and of very different sizes, on which the map that was found must
  predict the result. This is the proof: whatever adds, averages, compares or rounds gives
  something else here.

The element-wise result is then compressed into pieces and brought into canonical form. Markers
are NumPy arrays; where a function cannot take those it is given torch tensors, and only then is
torch imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reshard.errors import TraceError
from reshard.geometry.affine_map import ParamAffineMap
from reshard.geometry.buffers import Tensor, torch_of
from reshard.geometry.index_math import as_indices, numel
from reshard.geometry.piece import AffinePiece

Partition = Callable[[Tensor, int], Tensor]
"""A partition function: ``(full tensor, rank) -> that rank's shard``."""
_REFUSALS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a function raises that cannot work on what it was given."""
Values = NDArray[np.float64]
Offsets = NDArray[np.int64]


def trace_map(
    partition: Partition, logical_shape: Iterable[int], ranks: Iterable[int]
) -> ParamAffineMap:
    """Return the canonical map of a partition function.

    Parameters
    ----------
    partition
        ``(full, rank) -> shard``. It may return views, copies, transposed or empty tensors, of
        any shape. It is called a few times per rank with float64 markers, which it may overwrite.
    logical_shape
        Shape of the full tensor that it is given.
    ranks
        The ranks to call it for.

    Raises
    ------
    TraceError
        When the function is not a pure view up to constant factors; the message says whether it
        adds elements, adds a constant, or depends on values. Also when no rank is given.

    Examples
    --------
    >>> print(trace_map(lambda full, rank: np.split(full, 2, axis=1)[rank], (4, 4), range(2)))
    4×4 over 2 ranks
      0 (4×2): F[0 + 4×4 2×1] → [0 + 4×2 2×1] on 0
      1 (4×2): F[2 + 4×4 2×1] → [0 + 4×2 2×1] on 1
    >>> trace_map(lambda full, rank: full + 1, (4,), [0])
    Traceback (most recent call last):
        ...
    reshard.errors.TraceError: the partition function adds a constant: rank 0: found 1.0 from zeros
    """
    shape = as_indices(logical_shape, "logical_shape")
    total = numel(shape)
    asked = as_indices(ranks, "ranks")
    if not asked:
        raise TraceError("there is no rank to call the partition function for")
    views = {rank: _view(partition, shape, rank) for rank in asked}
    labels, sets = _holder_sets({rank: view.offsets for rank, view in views.items()}, total)
    pieces = {
        rank: [
            AffinePiece((n,), source, (step,), dest, (1,), sets[label], scale)
            for dest, n, source, step, label, scale in _runs(view, labels)
        ]
        for rank, view in views.items()
    }
    shapes = {rank: view.shape for rank, view in views.items()}
    return ParamAffineMap(shape, shapes, pieces).canonical()


@dataclass(frozen=True, slots=True)
class _View:
    """What a partition function does for one rank, element by element."""

    shape: tuple[int, ...]
    offsets: Offsets
    scales: Values


def _view(partition: Partition, shape: tuple[int, ...], rank: int) -> _View:
    run = _runner(partition, shape, rank)
    total = numel(shape)
    ones, out_shape = run(np.ones(total))
    marks, _ = run(np.arange(1.0, total + 1.0))
    noise = _noise(total)
    out, _ = run(noise)
    if ones.shape != marks.shape or ones.shape != out.shape:
        raise TraceError("the partition function cuts by value: its shape changes", rank=rank)
    with np.errstate(all="ignore"):
        places = np.rint(marks / ones) - 1
        inside = np.isfinite(places) & (places >= 0) & (places < total)
        offsets = np.where(inside, places, 0).astype(np.int64)
        expected = noise[offsets] * ones if total else out
        # Division by a constant rounds otherwise than multiplication by its inverse.
        exact = inside & (np.abs(out - expected) <= 4e-16 * np.abs(expected))
    if not exact.all():
        _explain(run, noise, out, rank, int(np.argmin(exact)), ones)
    return _View(out_shape, offsets, ones)


def _noise(total: int) -> Values:
    """Return distinct values of either sign over 24 powers of two, the same every time."""
    random = np.random.default_rng(20260729)
    signs = random.choice([-1.0, 1.0], total)
    return np.asarray(signs * random.uniform(1, 2, total) * 2.0 ** random.integers(-12, 12, total))


def _explain(run: _Runner, noise: Values, out: Values, rank: int, at: int, ones: Values) -> None:
    """Raise the error that says in which way a function is not a view."""
    zeros, _ = run(np.zeros(len(noise)))
    if zeros.any() and np.isfinite(zeros).all():
        first = float(zeros[np.flatnonzero(zeros)[0]])
        raise TraceError(
            "the partition function adds a constant", rank=rank, found=f"{first} from zeros"
        )
    other = _noise(len(noise))[::-1].copy()
    alone, _ = run(other)
    both, _ = run(noise + other)
    what = "the partition function depends on the values that it cuts"
    if alone.shape == both.shape == out.shape:
        linear = np.allclose(both, out + alone, rtol=1e-9, atol=1e-12)
        if linear and ones[at] == 0 and out[at] == 0:
            what = "the partition function makes elements that are in no way part of F"
        elif linear:
            what = "the partition function adds or averages several elements"
    raise TraceError(
        what,
        rank=rank,
        found=f"element {at} of its result",
        next_step="describe the layout without that step; only views have a map",
    )


_Runner = Callable[[Values], tuple[Values, tuple[int, ...]]]


def _runner(partition: Partition, shape: tuple[int, ...], rank: int) -> _Runner:
    """Return a function that runs the partition on a flat marker, in the library that it takes."""

    def run(values: Values) -> tuple[Values, tuple[int, ...]]:
        marker = values.copy().reshape(shape)
        # Markers of zeros and ones make some functions divide by 0; what comes out is looked at.
        with np.errstate(all="ignore"):
            return _flat_result(partition(marker if plain else _torch_tensor(marker), rank), rank)

    plain = True
    try:
        run(np.ones(numel(shape)))
    except TraceError:
        raise
    except _REFUSALS as refused:
        plain = False
        try:
            run(np.ones(numel(shape)))
        except _REFUSALS as failed:
            raise TraceError(
                f"the partition function failed: {type(failed).__name__}: {failed}", rank=rank
            ) from refused
    return run


def _torch_tensor(marker: Values) -> Tensor:
    return importlib.import_module("torch").from_numpy(marker)


def _flat_result(result: Tensor, rank: int) -> tuple[Values, tuple[int, ...]]:
    if torch_of(result) is not None:
        result = result.detach().cpu().numpy()
    if not isinstance(result, np.ndarray | np.generic):
        raise TraceError(
            "the partition function returns no tensor", rank=rank, found=type(result).__name__
        )
    array = np.asarray(result)
    if array.dtype != np.float64:
        raise TraceError(
            "the partition function changes the dtype",
            rank=rank,
            expected="float64",
            found=array.dtype,
        )
    return array.reshape(-1).copy(), array.shape


def _holder_sets(
    offsets: Mapping[int, Offsets], total: int
) -> tuple[Offsets, list[tuple[int, ...]]]:
    """Return a label for each element of ``F``, and the set of ranks that each label means."""
    labels = np.zeros(total, np.int64)
    sets: list[tuple[int, ...]] = [()]
    for rank in sorted(offsets):
        held = np.zeros(total, np.int64)
        held[offsets[rank]] = 1
        kinds, labels = np.unique(labels * 2 + held, return_inverse=True)
        sets = [
            (*sets[kind // 2], rank) if kind % 2 else sets[kind // 2] for kind in kinds.tolist()
        ]
    return labels, sets


def _runs(view: _View, labels: Offsets) -> list[tuple[int, int, int, int, int, float]]:
    """Cut a shard into runs of even step, one label and one scale.

    Each is its dest offset, length, source offset, source step, label and scale.
    """
    size = len(view.offsets)
    if size == 0:
        return []
    here = labels[view.offsets]
    steps = np.diff(view.offsets)
    joined = (steps >= 0) & (here[1:] == here[:-1]) & (view.scales[1:] == view.scales[:-1])
    first = 0
    found = []
    # Where the step changes a run may still begin: each run takes all that follow evenly.
    even = np.append(joined[1:] & joined[:-1] & (steps[1:] == steps[:-1]), False)
    breaks = np.flatnonzero(~even).tolist()
    for at in breaks:
        if at < first:
            continue
        last = at + 1 if at < len(steps) and joined[at] else at
        step = int(steps[first]) if last > first else 1
        source = int(view.offsets[first])
        found.append(
            (first, last - first + 1, source, step, int(here[first]), float(view.scales[first]))
        )
        first = last + 1
    if first < size:
        source = int(view.offsets[first])
        found.append((first, 1, source, 1, int(here[first]), float(view.scales[first])))
    return found
