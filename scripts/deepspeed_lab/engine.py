"""From a recipe to a DeepSpeed engine, and three training steps on data that never changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import deepspeed
import torch
from deepspeed.utils import groups
from torch import distributed, nn

from scripts.deepspeed_lab.models import SEQUENCE, VOCAB, build_model
from scripts.deepspeed_lab.recipe import GLOBAL_BATCH

if TYPE_CHECKING:
    from collections.abc import Iterable

    from scripts.deepspeed_lab.recipe import Recipe


class MegatronGrid:
    """The ``mpu`` object of a Megatron-style run: tensor parallelism first, then data."""

    def __init__(self, tp: int) -> None:
        self.tp, rank, world = tp, distributed.get_rank(), distributed.get_world_size()
        self.dp = world // tp
        self.tp_rank, self.dp_rank = rank % tp, rank // tp
        self.tp_group = _group_of(rank, [range(i * tp, i * tp + tp) for i in range(self.dp)])
        self.dp_group = _group_of(rank, [range(i, world, tp) for i in range(tp)])

    def get_model_parallel_rank(self) -> int:  # noqa: D102
        return self.tp_rank

    def get_model_parallel_world_size(self) -> int:  # noqa: D102
        return self.tp

    def get_model_parallel_group(self) -> Any:  # noqa: D102
        return self.tp_group

    def get_data_parallel_rank(self) -> int:  # noqa: D102
        return self.dp_rank

    def get_data_parallel_world_size(self) -> int:  # noqa: D102
        return self.dp

    def get_data_parallel_group(self) -> Any:  # noqa: D102
        return self.dp_group

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group


def _group_of(rank: int, sets: list[range]) -> Any:
    """Make a process group of every set (all ranks must), and return the one that has ``rank``."""
    made = [(ranks, distributed.new_group(list(ranks))) for ranks in sets]
    return next(group for ranks, group in made if rank in ranks)


def make_engine(
    recipe: Recipe, *, seed: int, load_universal: bool = False, model: nn.Module | None = None
) -> Any:
    """Initialise DeepSpeed for the recipe, all ranks together."""
    if recipe.dtype == "fp16":
        _allow_fp16_on_cpu()
    mpu = MegatronGrid(recipe.tp) if recipe.hand_cut else None
    if model is None:
        model = build_model(recipe, seed=seed, mpu=mpu)
    arguments: dict[str, Any] = {}
    if recipe.optimizer is not None:
        name, options = recipe.optimizer
        arguments["optimizer"] = getattr(torch.optim, name)(
            parameter_groups(recipe, model), **options
        )
    elif not recipe.own_groups:
        arguments["model_parameters"] = parameter_groups(recipe, model)
    config = recipe.deepspeed_config(load_universal=load_universal)
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu, **arguments)
    return engine


def parameter_groups(recipe: Recipe, model: nn.Module) -> list[Any]:
    """Return the trainable parameters, in one group or in one with and one without decay."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not recipe.two_groups:
        return trainable
    return [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]


def tp_rank(recipe: Recipe) -> int:
    """Return this process's tensor-parallel rank."""
    if recipe.tp == 1:
        return 0
    if recipe.hand_cut:
        return distributed.get_rank() % recipe.tp
    return cast("int", groups.get_tensor_model_parallel_rank())


def run_steps(engine: Any, recipe: Recipe, steps: Iterable[int]) -> list[float]:
    """Train the given steps and return the loss of each, averaged over all ranks."""
    row = distributed.get_rank() // recipe.tp
    if recipe.tp > 1 and not recipe.hand_cut:
        row = groups.get_data_parallel_rank()
    losses = []
    for step in steps:
        input_ids, labels = batch(step, row, recipe.dp, recipe.rows)
        output = engine(input_ids=input_ids, labels=labels)
        loss = output if torch.is_tensor(output) else output.loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().reshape(1).clone()
        distributed.all_reduce(mean)
        losses.append(mean.item() / recipe.world)
    return losses


def batch(
    step: int, dp_rank: int, dp: int, total: int = GLOBAL_BATCH
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's rows of the step's fixed data, which are ``total`` for all ranks."""
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (total, SEQUENCE)
    input_ids = torch.randint(0, VOCAB, shape, generator=generator)
    labels = torch.randint(0, VOCAB, shape, generator=generator)
    rows = slice(dp_rank * total // dp, (dp_rank + 1) * total // dp)
    return input_ids[rows], labels[rows]


def _allow_fp16_on_cpu() -> None:
    """Let DeepSpeed train in fp16, which its CPU accelerator denies although torch can do it."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    accelerator.supported_dtypes = lambda: [torch.float, torch.half, torch.bfloat16]
