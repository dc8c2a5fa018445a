"""A ``DTensor`` is read as what it holds: the oracle is the data that torch itself put there."""

from __future__ import annotations

import pytest

from tests.live.ranks import Crews


@pytest.mark.parametrize("mesh", [(4,), (2, 2), (3, 2)], ids=str)
def test_every_placement_is_read_as_torch_cuts(crews: Crews, mesh: tuple[int, ...]) -> None:
    world = 1
    for degree in mesh:
        world *= degree
    assert crews.done("placed", mesh, world=world) == [[]] * world


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (3, 2)])
def test_fsdp2_over_tensor_parallelism_is_read_as_it_cuts(crews: Crews, dp: int, tp: int) -> None:
    assert crews.done("placed_by_fsdp", dp, tp, world=dp * tp) == [[]] * (dp * tp)
