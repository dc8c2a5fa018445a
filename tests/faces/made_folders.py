"""Small folders of the other formats, made of golden ones, under the name ``ckpt``."""

from __future__ import annotations

from pathlib import Path

import reshard
from reshard.cli import main
from tests.truth import GOLDEN

SOURCE = GOLDEN / "odd_z1_dp2_fp32" / "ckpt"


def universal(home: Path) -> None:
    reshard.convert(SOURCE, home / "ckpt", fsync=False)


def dcp(home: Path) -> None:
    reshard.convert(SOURCE, home / "ckpt", to="dcp", fsync=False)


def safetensors(home: Path) -> None:
    command = ("convert", str(SOURCE), str(home / "ckpt"), "--to", "safetensors", "-q")
    assert main([*command, "--max-shard-size", "3kB", "--no-fsync"]) == 0
    (home / "ckpt" / "reshard_manifest.json").unlink()
