"""Loss scalers in fp16: stated ones go along, absent ones stay absent, whatever the way there.

What is in the files is read with torch and DeepSpeed's own class of the scaler.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.writing import NativeOptions, lay_out_deepspeed
from reshard.formats.dtypes import DTYPES
from reshard.formats.registry import open_checkpoint
from tests.formats.native.sources import converted
from tests.truth import case_named

CASE = "0.19.8/plain_fp16forced_z1_dp2"
MODEL = "step3/mp_rank_00_model_states.pt"
SCALER_KEYS = {"loss_scaler", "dynamic_loss_scale", "cur_scale", "scale_window"}


def optimizers(folder: Path) -> list[dict[str, Any]]:
    """What every rank's optimizer file says."""
    return [
        torch.load(file, weights_only=False)["optimizer_state_dict"]
        for file in sorted(folder.glob("step3/*optim_states.pt"))
    ]


def notes(source: Path, **options: Any) -> list[str]:
    chosen = NativeOptions(**{"dp": 2, **options})
    return list(lay_out_deepspeed(open_checkpoint(source), tag="step3", options=chosen).notes)


def without_zero(folder: Path, **changes: object) -> Path:
    """The run without ZeRO as DeepSpeed saves it: numbers instead of a scaler."""
    out = converted(case_named(CASE).path, folder, stage=0, dp=2)
    root = torch.load(out / MODEL, weights_only=False)
    del root["optimizer"]["loss_scaler"]
    root["optimizer"].update(changes)
    torch.save(root, out / MODEL)
    for manifest in out.rglob("*manifest.json"):
        manifest.unlink()
    return out


def left_without(folder: Path) -> Path:
    """A run in fp16 that a conversion left without its scaler."""
    return converted(without_zero(folder / "0"), folder / "1", stage=1, dp=4)


def from_bfloat16(folder: Path) -> Path:
    case = case_named("golden/odd_z2_dp2_bf16")
    return converted(case.path, folder, stage=1, dp=2, dtype=DTYPES["float16"])


def through_universal(folder: Path) -> Path:
    out = folder / "universal"
    reshard.convert(left_without(folder), out, fsync=False)
    return out


@pytest.mark.parametrize("source", [left_without, from_bfloat16, through_universal])
def test_an_absent_scaler_stays_absent(source: Any, tmp_path: Path) -> None:
    """And is never taken for one of the factor 1, which would train without any scaling."""
    found = source(tmp_path / "source")
    for stage in (1, 2):
        out = converted(found, tmp_path / str(stage), stage=stage, dp=2)
        assert optimizers(out)
        assert not any(SCALER_KEYS & body.keys() for body in optimizers(out))
        expected = "the source has no loss scaler: the run that resumes begins with a new one"
        assert expected in notes(found, stage=stage)
    for stage in (0, 3):
        with pytest.raises(UnsupportedError, match=r"from the checkpoint, .* none for fp16; next"):
            notes(found, stage=stage)


def test_a_way_over_another_topology_writes_the_same_files(tmp_path: Path) -> None:
    over = converted(left_without(tmp_path), tmp_path / "over", stage=1, dp=2)
    at_once = converted(tmp_path / "0", tmp_path / "at_once", stage=1, dp=2)
    files = sorted(path.name for path in (at_once / "step3").glob("*.pt"))
    assert len(files) == 3
    for name in files:
        assert (over / "step3" / name).read_bytes() == (at_once / "step3" / name).read_bytes()


def with_factor_one(folder: Path) -> Path:
    """A run whose user chose `loss_scale: 1`: DeepSpeed stores a scaler that never changes."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler

    shutil.copytree(case_named(CASE).path, folder)
    for file in folder.glob("step3/*optim_states.pt"):
        root = torch.load(file, weights_only=False)
        root["optimizer_state_dict"].update(loss_scaler=LossScaler(1.0), dynamic_loss_scale=False)
        torch.save(root, file)
    return folder


def numbers_of_factor_one(folder: Path) -> Path:
    return without_zero(folder, dynamic_loss_scale=False, cur_scale=1.0)


@pytest.mark.parametrize("source", [with_factor_one, numbers_of_factor_one])
def test_a_stated_factor_of_one_goes_along(source: Any, tmp_path: Path) -> None:
    found = source(tmp_path / "source")
    for number, stage in enumerate((1, 3, 0, 2)):
        found = converted(found, tmp_path / str(number), stage=stage, dp=number + 1)
        bodies = optimizers(found) or [torch.load(found / MODEL, weights_only=False)["optimizer"]]
        for body in bodies:
            assert (body["loss_scaler"].cur_scale, body["loss_scaler"].dynamic) == (1.0, False)
            assert body["dynamic_loss_scale"] is False
            assert body.get("cur_scale", 1.0) == 1.0
        assert reshard.verify(tmp_path / "source", found).equal
        assert not [note for note in notes(found, stage=1) if "scaler" in note]
