"""Sizes that no degree divides: DeepSpeed's own converter reads what reshard wrote, every state.

Numbers of elements that are prime, groups smaller than the ranks, many sub-groups; at more ranks
than the judge can start engines for. Each checkpoint of a chain is read by ``ds_to_universal``,
which knows nothing of reshard, and must give back the first values bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from reshard.formats.registry import open_checkpoint
from tests.deepspeed_judge.judge import Judge, differences, read_universal
from tests.formats.native.sources import Shapes, made_up, write
from tests.truth import States

pytestmark = pytest.mark.deepspeed

PRIMES: list[Shapes] = [{"a": (89,), "b": (2, 7)}, {"c": (101,)}]
"""103 and 101 elements."""
FIVE: list[Shapes] = [{"w": (5,)}, {"other": (3, 11)}]
MANY: list[Shapes] = [{f"w{k}": (k + 1, 5) for k in range(12)}, {"v": (7,)}]

CHAINS: dict[str, tuple[list[Shapes], list[dict[str, int]]]] = {
    "primes": (PRIMES, [{"stage": 3, "dp": 4}, {"stage": 2, "dp": 6}, {"stage": 1, "dp": 4}]),
    "five over eight": (
        FIVE,
        [
            {"stage": 1, "dp": 8},
            {"stage": 3, "dp": 8},
            {"stage": 2, "dp": 8},
            {"stage": 2, "dp": 3},
        ],
    ),
    "many sub-groups": (
        MANY,
        [
            {"stage": 3, "dp": 3, "sub_group_size": 20},
            {"stage": 3, "dp": 7, "sub_group_size": 3},
            {"stage": 1, "dp": 5},
        ],
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_deepspeeds_converter_finds_every_element(name: str, judge: Judge, tmp_path: Path) -> None:
    groups, chain = CHAINS[name]
    source, values = made_up(tmp_path / "source", groups)
    expected: States = {}
    for (parameter, state), array in values.items():
        expected.setdefault(parameter, {})[state] = torch.from_numpy(array)
    for number, step in enumerate(chain):
        folder = tmp_path / str(number)
        write(source, folder, **step)
        judge.convert_with_deepspeed(folder / "step3", tmp_path / f"u{number}")
        found = read_universal(tmp_path / f"u{number}")
        assert differences(flat(expected), flat(found)) == [], step
        source = open_checkpoint(folder)


def flat(states: States) -> States:
    """Without shapes, which its converter of ZeRO-3 forgets."""
    return {
        name: {state: tensor.flatten() for state, tensor in held.items()}
        for name, held in states.items()
    }
