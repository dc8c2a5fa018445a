"""ZeRO-0: states without names get the one name that fits, or are refused.

The pipelines are written here by torch, as ``engine.py`` and ``pipe/module.py`` write them; what
was put in is the oracle. Other checkpoints are real ones, changed in one place.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.errors import CheckpointError, UnsupportedError
from reshard.formats.deepspeed.numbered import Numbered
from reshard.formats.deepspeed.unsharded import assign_among
from reshard.formats.parsing import Cursor
from tests.conversion.reading import load, param, same_bits
from tests.truth import GOLDEN

HALF = GOLDEN / "odd_z0_dp2_bf16" / "ckpt"
TP = GOLDEN / "llama_z0_tp2_bf16" / "ckpt"

Root = dict[str, Any]


def numbered(*shapes: tuple[int, ...] | None, group: int = 0) -> list[Numbered]:
    return [Numbered(group, shape, Cursor({}, "x.pt"), None, False) for shape in shapes]


class TestAssignment:
    CANDIDATES = (("a", (2, 3)), ("b", (3,)), ("c", (2, 3)), ("d", (3,)))

    def test_the_only_one_is_taken(self) -> None:
        entries = numbered((2, 3), (3,), (2, 3), (3,))
        assert assign_among(self.CANDIDATES, entries, "x.pt") == ["a", "b", "c", "d"]

    def test_a_shape_that_is_not_known_fits_any(self) -> None:
        entries = numbered(None, (3,), None, None)
        assert assign_among(self.CANDIDATES, entries, "x.pt") == ["a", "b", "c", "d"]

    def test_groups_may_be_interleaved(self) -> None:
        first, second = numbered((2, 3), (2, 3)), numbered((3,), (3,), group=1)
        mixed = [second[0], first[0], first[1], second[1]]
        assert assign_among(self.CANDIDATES, mixed, "x.pt") == ["b", "a", "c", "d"]

    @pytest.mark.parametrize(
        ("shapes", "why"),
        [
            ([(2, 3)], "more than one assignment"),
            ([None, None], "more than one assignment"),
            ([(3,), (3,), (3,)], "no assignment"),
            ([(3,), (2, 3), (2, 3)], "no assignment"),
        ],
    )
    def test_everything_else_is_refused(
        self, shapes: list[tuple[int, ...] | None], why: str
    ) -> None:
        with pytest.raises(CheckpointError, match=why):
            assign_among(self.CANDIDATES, numbered(*shapes), "x.pt")


def edited(tmp_path: Path, source: Path, change: Any) -> Path:
    folder = tmp_path / "ckpt"
    shutil.copytree(source, folder)
    (file,) = folder.glob("*/mp_rank_00_model_states.pt")
    root = torch.load(file, weights_only=False)
    change(root)
    torch.save(root, file)
    return folder


class TestHalfPrecision:
    def test_masters_are_carried_not_the_rounded_weights(self, tmp_path: Path) -> None:
        folder = tmp_path / "u_universal"
        reshard.convert(TP, folder, fsync=False)
        roots = [load(TP / "step3" / f"mp_rank_0{rank}_model_states.pt") for rank in (0, 1)]
        names = list(roots[0]["module"])
        q = "model.layers.0.self_attn.q_proj.weight"
        group = roots[0]["optimizer"]["fp32_groups"][0]
        matrices = [name for name in names if roots[0]["module"][name].dim() > 1]
        place = matrices.index(q)
        assert group[place].dtype == torch.float32
        shards = [root["optimizer"]["fp32_groups"][0][place].detach() for root in roots]
        assert same_bits(param(folder, q, "fp32"), torch.cat(shards))

    def test_a_master_that_is_not_its_weight_is_refused(self, tmp_path: Path) -> None:
        def swap(root: Root) -> None:
            for group in root["optimizer"]["fp32_groups"]:
                for index, master in enumerate(group):
                    group[index] = master.detach() + 1

        with pytest.raises(CheckpointError, match="is not its weight"):
            reshard.open_checkpoint(edited(tmp_path, HALF, swap))

    def test_flat_masters_are_refused(self, tmp_path: Path) -> None:
        def flatten(root: Root) -> None:
            groups = root["optimizer"].pop("fp32_groups")
            root["optimizer"]["fp32_groups_flat"] = [
                torch.cat([master.detach().flatten() for master in group]) for group in groups
            ]

        with pytest.raises(UnsupportedError, match="fp32_groups_flat"):
            reshard.open_checkpoint(edited(tmp_path, HALF, flatten))

    @pytest.mark.parametrize("lost", ["absent", "none"])
    def test_lost_masters_are_not_replaced_by_rounded_weights(
        self, lost: str, tmp_path: Path
    ) -> None:
        def lose(root: Root) -> None:
            root["optimizer"]["fp32_groups"] = None
            if lost == "absent":
                del root["optimizer"]["fp32_groups"]

        with pytest.raises(CheckpointError, match="half precision without its master weights"):
            reshard.open_checkpoint(edited(tmp_path, HALF, lose))

    def test_a_group_with_a_master_too_few_is_refused(self, tmp_path: Path) -> None:
        def drop(root: Root) -> None:
            root["optimizer"]["fp32_groups"][0].pop()

        with pytest.raises(CheckpointError, match="another number of masters than of parameters"):
            reshard.open_checkpoint(edited(tmp_path, HALF, drop))


# --------------------------------------------------------------------------- pipelines

WIDTHS = (3, 5, 4, 6, 2)
"""Layer `L` is a matrix of `WIDTHS[L + 1]` x `WIDTHS[L]` and a bias."""


def write_pipeline(folder: Path, *, tied: bool = False) -> dict[str, dict[str, torch.Tensor]]:
    """Write two stages of two layers each; return every state by name."""
    generator = torch.Generator().manual_seed(7)
    tag = folder / "step1"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("step1")
    held: dict[str, dict[str, torch.Tensor]] = {}
    for stage in (0, 1):
        states: dict[int, Root] = {}
        for layer in (2 * stage, 2 * stage + 1):
            shape = (WIDTHS[layer + 1], WIDTHS[layer])
            if tied and layer == 3:
                shape = (WIDTHS[1], WIDTHS[0])
            weights = {}
            for local, extents in (("w.weight", shape), ("w.bias", shape[:1])):
                kept = {
                    state: torch.randn(extents, generator=generator)
                    for state in ("fp32", "exp_avg", "exp_avg_sq")
                }
                if tied and layer == 3:
                    kept["fp32"] = held[f"0.{local}"]["fp32"]
                held[f"{layer}.{local}"] = kept
                weights[local] = kept["fp32"]
                moments = {state: kept[state] for state in ("exp_avg", "exp_avg_sq")}
                states[len(states)] = {"step": torch.tensor(1.0), **moments}
            torch.save(weights, tag / f"layer_0{layer}-model_states.pt")
        groups = [{"lr": 0.1, "params": list(states)}]
        root: Root = {
            "module": None,
            "buffer_names": [],
            "optimizer": {"state": states, "param_groups": groups},
            "param_shapes": None,
            "dp_world_size": 1,
            "mp_world_size": 2,
            "global_steps": 1,
            "ds_version": "0.19.8",
            "ds_config": {},
        }
        torch.save(root, tag / f"mp_rank_0{stage}_model_states.pt")
    return held


class TestPipelines:
    def test_stages_follow_each_other(self, tmp_path: Path) -> None:
        held = write_pipeline(tmp_path / "ckpt")
        report = reshard.convert(tmp_path / "ckpt", tmp_path / "u", fsync=False, verify=True)
        assert report.sound
        assert report.source.topology.pp == 2
        for name, states in held.items():
            for state, tensor in states.items():
                assert same_bits(param(tmp_path / "u", name, state), tensor), f"{name}/{state}"
        assert reshard.open_checkpoint(tmp_path / "u").extras["param_groups"].value == [{"lr": 0.1}]

    def test_tied_layers_are_refused(self, tmp_path: Path) -> None:
        write_pipeline(tmp_path / "ckpt", tied=True)
        with pytest.raises(UnsupportedError, match="hold the same weights: they are tied"):
            reshard.open_checkpoint(tmp_path / "ckpt")
