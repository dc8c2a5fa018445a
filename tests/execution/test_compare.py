"""Comparing checkpoints: equal across topologies, and every difference found where it is."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.errors import CheckpointError
from reshard.execution import Comparison, compare
from reshard.execution.buffers import KIB, MIB
from reshard.formats.checkpoint import Checkpoint, Extra, Scalar, TensorKey
from reshard.geometry import ParamAffineMap
from tests.execution.raw import Array, replicated, split, write_checkpoint
from tests.execution.strategies import layout_pairs

A, B = ("a", "fp32"), ("b", "exp_avg")


def check(left: Checkpoint, right: Checkpoint, cap: int = 64 * KIB) -> Comparison:
    return compare(left, right, workers=2, max_memory=cap)


def fulls() -> dict[TensorKey, Array]:
    rng = np.random.default_rng(8)
    return {
        A: rng.standard_normal((300, 80)).astype("f4"),
        B: rng.standard_normal((50,)).astype("f4"),
    }


def saved(folder: Path, values: dict[TensorKey, Array], ranks: int, **more: object) -> Checkpoint:
    layouts = {
        A: split((300, 80), 1, (80 - 10 * (ranks - 1), *(10,) * (ranks - 1))),
        B: replicated((50,), ranks),
    }
    tensors = {key: (full, layouts[key]) for key, full in values.items()}
    return replace(write_checkpoint(folder, tensors), **more)  # type: ignore[arg-type]


@settings(deadline=None)
@given(layout_pairs(), st.sampled_from((64 * KIB, MIB)))
def test_layouts_do_not_matter(
    tmp_path_factory: pytest.TempPathFactory,
    pair: tuple[ParamAffineMap, ParamAffineMap],
    cap: int,
) -> None:
    folder = tmp_path_factory.mktemp("equal")
    full = np.random.default_rng(1).standard_normal(pair[0].logical_shape).astype("f4")
    left, right = (
        write_checkpoint(folder / str(k), {A: (full, layout)}) for k, layout in enumerate(pair)
    )
    found = check(left, right, cap)
    assert found.equal
    assert (found.tensors, found.nbytes) == (1, full.nbytes)


@settings(deadline=None)
@given(st.lists(st.integers(0, 23_999), min_size=1, max_size=8, unique=True))
def test_differences_equal_a_dense_comparison(
    tmp_path_factory: pytest.TempPathFactory, places: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("differ")
    one, other = fulls(), fulls()
    for place in places:
        other[A].flat[place] += place % 7 + 1
    left, right = saved(folder / "l", one, 3), saved(folder / "r", other, 2)
    found = check(left, right)
    (difference,) = found.differences
    first = min(places)
    assert difference.key == A
    assert difference.count == len(places)
    assert difference.index == tuple(np.unravel_index(first, (300, 80)))
    assert difference.largest == np.abs(one[A].astype("f8") - other[A].astype("f8")).max()
    assert (difference.left, difference.right) == (
        str(one[A].flat[first]),
        str(other[A].flat[first]),
    )
    totals = {total.state: (total.tensors, total.differing, total.count) for total in found.states}
    assert totals == {"fp32": (1, 1, len(places)), "exp_avg": (1, 0, 0)}


class TestWhatIsLookedAt:
    def test_missing_tensors_shapes_and_dtypes(self, tmp_path: Path) -> None:
        values = fulls()
        left = saved(tmp_path / "l", values, 2)
        right = write_checkpoint(
            tmp_path / "r",
            {
                A: (np.zeros((300, 81), "f4"), replicated((300, 81), 1)),
                ("c", "fp32"): (values[B], replicated((50,), 1)),
            },
        )
        found = check(left, right)
        whats = {difference.key: difference.what for difference in found.differences}
        assert whats == {A: "shape", B: "only in left", ("c", "fp32"): "only in right"}
        halves = {A: (values[A].astype("f2"), replicated((300, 80), 1))}
        other = write_checkpoint(tmp_path / "d", halves, dtype="float16")
        (difference, _) = check(left, other).differences
        assert (difference.what, difference.left, difference.right) == (
            "dtype",
            "float32",
            "float16",
        )

    @pytest.mark.parametrize("bits", [0x80000000, 0x7F800001, 0x00000001])
    def test_every_bit(self, tmp_path: Path, bits: int) -> None:
        one, other = fulls(), fulls()
        one[B][3] = 0.0
        other[B].view("u4")[3] = bits
        found = check(saved(tmp_path / "l", one, 1), saved(tmp_path / "r", other, 1))
        (difference,) = found.differences
        assert (difference.key, difference.count, difference.index) == (B, 1, (3,))

    def test_nan_everywhere_is_equal(self, tmp_path: Path) -> None:
        values = fulls()
        values[B][:] = np.nan
        found = check(saved(tmp_path / "l", values, 1), saved(tmp_path / "r", values, 2))
        assert found.equal

    def test_a_difference_of_nan_has_no_size(self, tmp_path: Path) -> None:
        one, other = fulls(), fulls()
        other[B][3] = np.nan
        found = check(saved(tmp_path / "l", one, 1), saved(tmp_path / "r", other, 1))
        assert math.isnan(found.differences[0].largest)

    def test_scalars_and_extras(self, tmp_path: Path) -> None:
        left = saved(
            tmp_path / "l",
            fulls(),
            1,
            scalars={
                ("a", "step"): Scalar(3.0),
                ("b", "step"): Scalar(3),
                ("c", "step"): Scalar(1),
            },
            extras={"global_steps": Extra(3), "client_state": Extra({"x": [1, 2]})},
        )
        right = saved(
            tmp_path / "r",
            fulls(),
            2,
            scalars={("a", "step"): Scalar(3), ("b", "step"): Scalar(4)},
            extras={"global_steps": Extra(3), "client_state": Extra({"x": [1, 3]})},
        )
        found = check(left, right)
        assert not found.equal
        assert [(d.what, d.left, d.right) for d in found.values] == [
            ("step of b", "3", "4"),
            ("step of c", "1", "missing"),
            ("client_state", "{'x': [1, 2]}", "{'x': [1, 3]}"),
        ]
        assert (found.scalars, found.extras) == (2, 2)

    def test_replicas_inside_a_side(self, tmp_path: Path) -> None:
        left, right = (saved(tmp_path / name, fulls(), 2) for name in "lr")
        region = right.tensors[B].regions[1]
        with Path(region.file).open("r+b") as file:
            file.seek(region.offset + 4 * 7)
            file.write(b"\1\2\3\4")
        found = check(left, right)
        assert found.differences == ()
        ((side, finding),) = found.replicas
        assert (side, finding.key, finding.first) == ("right", B, 7)
        assert not found.equal

    def test_complex_values(self, tmp_path: Path) -> None:
        full = np.arange(200).astype("c16")
        other = full.copy()
        other[150] += 3 + 4j
        left, right = (
            write_checkpoint(tmp_path / str(k), {A: (v, replicated((200,), 1))}, dtype="complex128")
            for k, v in enumerate((full, other))
        )
        (difference,) = check(left, right).differences
        assert (difference.count, difference.index, difference.largest) == (1, (150,), 5.0)

    def test_a_damaged_file_is_an_error(self, tmp_path: Path) -> None:
        left, right = (saved(tmp_path / name, fulls(), 2) for name in "lr")
        path = Path(right.files[0].path)
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(CheckpointError, match="changed since it was opened"):
            check(left, right)
