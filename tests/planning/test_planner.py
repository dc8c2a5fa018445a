"""Plans: what they share, what they refuse, what they say, and how fast they are made."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from reshard.errors import CheckpointError, InternalError, ScaledStateError, UsageError
from reshard.formats.checkpoint import Checkpoint, Region, SourceFile, StoredTensor, Topology
from reshard.formats.dtypes import DType
from reshard.formats.target import Fill, OutputFile, Slot, Target
from reshard.geometry import AffinePiece, ParamAffineMap
from reshard.planning import estimate, filtered, plan
from tests.execution.raw import replicated, split, target_for, write_checkpoint

KEY = ("w", "fp32")
FLOAT32 = DType.named("float32")


def one_tensor(folder: Path, layout: ParamAffineMap) -> Checkpoint:
    full = np.arange(np.prod(layout.logical_shape), dtype="f4").reshape(layout.logical_shape)
    return write_checkpoint(folder, {KEY: (full, layout)})


def target_of(fill: Fill, nbytes: int) -> Target:
    return Target("raw", (OutputFile("w.bin", nbytes, (), (Slot(0, nbytes, (fill,)),)),))


class TestWhatIsShared:
    def test_equal_maps_have_one_route(self, tmp_path: Path) -> None:
        tensors = {
            (f"layer{k}", state): (np.ones((8, 6), "f4"), split((8, 6), 1, (3, 3)))
            for k in range(5)
            for state in ("fp32", "exp_avg")
        }
        checkpoint = write_checkpoint(tmp_path, tensors)
        made = plan(checkpoint, target_for(checkpoint))
        assert len(made.routes) == 1
        assert len(list(made.fills())) == 10

    def test_equal_inputs_give_equal_plans(self, tmp_path: Path) -> None:
        checkpoint = one_tensor(tmp_path, split((8, 6), 0, (5, 3)))
        first, second = (plan(checkpoint, target_for(checkpoint)) for _ in range(2))
        assert first == second
        assert first.digest() == second.digest()

    def test_a_moved_checkpoint_keeps_its_digest(self, tmp_path: Path) -> None:
        digests = set()
        for name in ("here", "there"):
            checkpoint = one_tensor(tmp_path / name, split((8, 6), 0, (5, 3)))
            digests.add(plan(checkpoint, target_for(checkpoint)).digest())
        assert len(digests) == 1

    def test_the_digest_sees_literals_places_and_policy(self, tmp_path: Path) -> None:
        checkpoint = one_tensor(tmp_path, split((8, 6), 0, (5, 3)))
        made = plan(checkpoint, target_for(checkpoint))
        file = made.files[0]
        other_literal = replace(file, literals=((0, b"another-"), *file.literals[1:]))
        fill = file.slots[0].fills[0]
        moved = replace(fill, places=tuple(replace(p, offset=p.offset + 4) for p in fill.places))
        other_place = replace(file, slots=(replace(file.slots[0], fills=(moved,)),))
        variants = [
            made,
            replace(made, replicas="mean"),
            replace(made, files=(other_literal,)),
            replace(made, files=(other_place,)),
        ]
        assert len({variant.digest() for variant in variants}) == len(variants)


class TestWhatIsRefused:
    def test_an_unknown_policy(self, tmp_path: Path) -> None:
        checkpoint = one_tensor(tmp_path, replicated((4,), 1))
        with pytest.raises(UsageError, match="refuse, first, mean"):
            plan(checkpoint, target_for(checkpoint), replicas="vote")

    def test_a_tensor_that_the_source_lacks(self, tmp_path: Path) -> None:
        checkpoint = one_tensor(tmp_path, replicated((4,), 1))
        fill = Fill(("v", "fp32"), FLOAT32, replicated((4,), 1), 0)
        with pytest.raises(CheckpointError, match="does not have: parameter v, state fp32"):
            plan(checkpoint, target_of(fill, 16))

    def test_another_element_type(self, tmp_path: Path) -> None:
        checkpoint = one_tensor(tmp_path, replicated((4,), 1))
        fill = Fill(KEY, DType.named("bfloat16"), replicated((4,), 1), 0)
        with pytest.raises(CheckpointError, match="expected bfloat16, found float32"):
            plan(checkpoint, target_of(fill, 8))

    def test_elements_without_a_source(self, tmp_path: Path) -> None:
        half = AffinePiece((2,), 0, (1,), 0, (1,), (0,))
        layout = ParamAffineMap((4,), {0: (2,)}, {0: [half]})
        checkpoint = one_tensor(tmp_path, layout)
        fill = Fill(KEY, FLOAT32, replicated((4,), 1), 0)
        with pytest.raises(CheckpointError, match="expected 4 elements, found 2"):
            plan(checkpoint, target_of(fill, 16))

    def test_bytes_that_no_fill_covers_are_padding(self, tmp_path: Path) -> None:
        checkpoint = one_tensor(tmp_path, replicated((4,), 1))
        fill = Fill(KEY, FLOAT32, replicated((4,), 1), 0, offset=8)
        (file,) = plan(checkpoint, target_of(fill, 64)).files
        assert file.slots[0].fills[0].offset == 8

    def test_a_scaled_optimizer_state(self, tmp_path: Path) -> None:
        piece = AffinePiece((4,), 0, (1,), 0, (1,), (0,), 0.5)
        layout = ParamAffineMap((4,), {0: (4,)}, {0: [piece]})
        tensors = {("w", state): (np.ones(4, "f4"), layout) for state in ("fp32", "exp_avg")}
        checkpoint = write_checkpoint(tmp_path, tensors)
        for state, scaled in (("fp32", False), ("exp_avg", True)):
            fill = Fill(("w", state), FLOAT32, replicated((4,), 1), 0)
            if not scaled:
                plan(checkpoint, target_of(fill, 16))
                continue
            with pytest.raises(ScaledStateError, match="state exp_avg"):
                plan(checkpoint, target_of(fill, 16))

    @pytest.mark.parametrize(("offset", "nbytes"), [(64, 12), (70, 16)])
    def test_a_region_too_short_for_its_shard(
        self, tmp_path: Path, offset: int, nbytes: int
    ) -> None:
        checkpoint = one_tensor(tmp_path, replicated((4,), 1))
        tensor = checkpoint.tensors[KEY]
        short = replace(tensor, regions={0: Region(tensor.regions[0].file, offset, nbytes)})
        with pytest.raises(CheckpointError, match="too short for the shard"):
            plan(replace(checkpoint, tensors={KEY: short}), target_for(checkpoint))

    def test_a_region_in_an_unlisted_file(self, tmp_path: Path) -> None:
        checkpoint = one_tensor(tmp_path, replicated((4,), 1))
        with pytest.raises(InternalError, match="not listed"):
            plan(replace(checkpoint, files=()), target_for(checkpoint))

    @pytest.mark.parametrize("offsets", [(0, 8), (0, 60)])
    def test_fills_that_overlap_or_leave_their_slot(
        self, tmp_path: Path, offsets: tuple[int, int]
    ) -> None:
        checkpoint = one_tensor(tmp_path, replicated((4,), 1))
        fills = tuple(Fill(KEY, FLOAT32, replicated((4,), 1), 0, offset) for offset in offsets)
        target = Target("raw", (OutputFile("w.bin", 64, (), (Slot(0, 64, fills),)),))
        with pytest.raises(InternalError, match="overlap or leave"):
            plan(checkpoint, target)


class TestWhatItSays:
    def test_it_is_json(self, tmp_path: Path) -> None:
        checkpoint = one_tensor(tmp_path, split((8, 6), 1, (4, 2)))
        made = json.loads(json.dumps(plan(checkpoint, target_for(checkpoint)).to_dict()))
        (fill,) = made["files"][0]["slots"][0]["fills"]
        assert (fill["name"], fill["route"], len(fill["places"])) == ("w", 0, 2)
        assert [source["name"] for source in made["sources"]] == ["rank_0.bin", "rank_1.bin"]
        assert made["routes"][0]["moves"][0] == [[8, 4], 0, 0, [4, 1], 0, [6, 1], 1.0]

    def test_the_estimate_counts_replicas_as_compared(self, tmp_path: Path) -> None:
        tensors = {
            ("a", "fp32"): (np.ones((10, 6), "f4"), split((10, 6), 1, (3, 3))),
            ("b", "fp32"): (np.ones(7, "f4"), replicated((7,), 3)),
        }
        checkpoint = write_checkpoint(tmp_path, tensors)
        found = estimate(plan(checkpoint, target_for(checkpoint)))
        assert found.read_nbytes == 4 * (60 + 3 * 7)
        assert found.compared_nbytes == 4 * 2 * 7
        assert found.strided_nbytes == 4 * 60
        assert (found.files, found.routes) == (2, 2)

    def test_filtering_keeps_the_files_asked_for(self, tmp_path: Path) -> None:
        tensors = {(name, "fp32"): (np.ones(4, "f4"), replicated((4,), 1)) for name in "abc"}
        checkpoint = write_checkpoint(tmp_path, tensors)
        made = filtered(plan(checkpoint, target_for(checkpoint)), lambda f: f.path[0] != "b")
        assert [file.path for file in made.files] == ["a/fp32.0.bin", "c/fp32.0.bin"]


def test_ten_thousand_tensors_over_64_ranks_take_seconds() -> None:
    layouts = [split((64 * k, 16), 0, (k,) * 64) for k in range(1, 11)]
    size = 64 * 16 * 10 * 4 * 10_000
    files = tuple(SourceFile(f"/none/rank_{rank}", size, "shards") for rank in range(64))
    tensors = {}
    for number in range(10_000):
        layout = layouts[number % 10]
        nbytes = layout.numel // 64 * 4
        regions = {r: Region(files[r].path, number * 5120, nbytes) for r in range(64)}
        key = (f"layer{number}.weight", "fp32")
        tensors[key] = StoredTensor(*key, FLOAT32, layout, regions)
    checkpoint = Checkpoint("raw", "/none", Topology(dp=64), tensors, files=files)
    target = target_for(checkpoint)
    start = time.process_time()
    made = plan(checkpoint, target)
    made.digest()
    seconds = time.process_time() - start
    assert len(made.routes) == 10
    assert seconds < 30
