"""Pipelines that are cut by tensor parallelism too: training, resuming, and what they hold.

Theory. The model is Megatron's kind: every block has a column-parallel and a row-parallel matrix,
norms and the bias after the sum are replicated, and the embedding is tied to the head, so it lives
on the first and on the last stage. It cuts itself and says so in ``universal_checkpoint_info``, as
Megatron-DeepSpeed does. A frozen vector and a persistent buffer are in the layer files only.

Ranks are numbered as DeepSpeed's topology does it: pipeline first, then data, then tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import distributed, nn
from torch.nn import functional

from scripts.deepspeed_lab.models import SEQUENCE, VOCAB
from scripts.deepspeed_lab.recipe import BASE_CONFIG, GLOBAL_BATCH, TAG
from scripts.deepspeed_lab.results import Piped, States
from scripts.deepspeed_lab.states import _fragments as fragments_of
from scripts.deepspeed_lab.topologies import PipeRecipe

WIDTH, HIDDEN = 6, 10


# ------------------------------------------------------------------------------------- the model


class _Copy(torch.autograd.Function):
    """The same on all tensor ranks; gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0].contiguous()
        distributed.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    """The sum over all tensor ranks; the gradient is the same on all."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        total = x.contiguous().clone()
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(_ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def _copied(x: torch.Tensor, group: Any) -> torch.Tensor:
    copied: torch.Tensor = _Copy.apply(x, group) if group else x  # type: ignore[no-untyped-call]
    return copied


def _summed(x: torch.Tensor, group: Any) -> torch.Tensor:
    total: torch.Tensor = _Sum.apply(x, group) if group else x  # type: ignore[no-untyped-call]
    return total


class Embed(nn.Module):
    """The embedding, which is the head as well."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        embedded: torch.Tensor = self.table(x)
        return embedded


class Block(nn.Module):
    """Column-parallel up, row-parallel down."""

    def __init__(self, tp: int, group: Any) -> None:
        super().__init__()
        self.group = group
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.gain = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.register_buffer("shift", torch.randn(WIDTH))
        if tp > 1:
            part = distributed.get_rank() % tp
            self.up.weight = _cut(self.up.weight.chunk(tp, 0)[part])
            self.up.bias = _cut(self.up.bias.chunk(tp, 0)[part])
            self.down.weight = _cut(self.down.weight.chunk(tp, 1)[part])

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        hidden = _copied(self.norm(x), self.group)
        part = functional.linear(functional.gelu(self.up(hidden)), self.down.weight)
        total = _summed(part, self.group)
        return x + (total + self.down.bias) * self.gain + self.get_buffer("shift")


def _cut(part: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(part.detach().clone().contiguous())
    parameter.model_parallel = parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    return parameter


def _head(module: Embed, x: torch.Tensor) -> torch.Tensor:
    return x @ module.table.weight.t()


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float().view(-1, VOCAB), labels.view(-1))


def universal_info() -> dict[str, Any]:
    """What the model says about its cuts, Megatron's way."""
    return {
        "universal_checkpoint_version": 0.2,
        "tp_replicated_parameter_patterns": [
            r"\d+\.norm\.",
            r"\d+\.down\.bias",
            r"\d+\.(weight|bias)$",
            r"\d+\.gain",
            r"tied_modules\.",
        ],
        "parameter_with_row_parallelism_patterns": [r"\d+\.down\.weight"],
        "pipeline_replicated_parameter_patterns": [r"tied_modules\."],
    }


# ------------------------------------------------------------------------------------ the engine


def piped(between: list[Any], recipe: PipeRecipe, seed: int) -> Any:
    """A pipeline of layers between an embedding and the head that shares its table."""
    from deepspeed.pipe import PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    layers = [
        TiedLayerSpec("embed", Embed, tied_weight_attr=["table.weight"]),
        *between,
        TiedLayerSpec("embed", Embed, forward_fn=_head, tied_weight_attr=["table.weight"]),
    ]
    return PipelineModule(
        layers=layers,
        topology=PipeModelDataParallelTopology(recipe.pp, recipe.tp, recipe.dp),
        loss_fn=_loss,
        seed_layers=True,
        base_seed=seed,
        partition_method="uniform",
    )


def settings(recipe: PipeRecipe) -> dict[str, Any]:
    """DeepSpeed's configuration for a pipeline."""
    return {
        **BASE_CONFIG,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": GLOBAL_BATCH // recipe.dp,
        "zero_optimization": {"stage": recipe.stage},
        "pipeline": {"activation_checkpoint_interval": 0},
    }


def _engine(recipe: PipeRecipe, seed: int, *, load_universal: bool) -> Any:
    from deepspeed.pipe import LayerSpec

    torch.manual_seed(seed)
    group = _tensor_group(recipe)
    blocks = [LayerSpec(Block, recipe.tp, group) for _ in range(3)]
    model = piped([*blocks, LayerSpec(nn.LayerNorm, WIDTH)], recipe, seed)
    config = settings(recipe)
    if load_universal:
        config["checkpoint"] = {"load_universal": True}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=trained)
    return engine


def _tensor_group(recipe: PipeRecipe) -> Any:
    if recipe.tp == 1:
        return None
    mine = None
    for first in range(0, recipe.world, recipe.tp):
        ranks = list(range(first, first + recipe.tp))
        group = distributed.new_group(ranks)
        mine = group if distributed.get_rank() in ranks else mine
    return mine


def _run(engine: Any, recipe: PipeRecipe, steps: range) -> list[float]:
    rank = engine.grid.get_data_parallel_rank()
    rows = GLOBAL_BATCH // recipe.dp
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(1000 + step)
        ids, labels = (
            torch.randint(0, VOCAB, (GLOBAL_BATCH, SEQUENCE), generator=generator) for _ in range(2)
        )
        mine = range(rank * rows, (rank + 1) * rows)
        batches = iter([(ids[row : row + 1], labels[row : row + 1]) for row in mine])
        losses.append(float(engine.train_batch(data_iter=batches)))
    return losses


# -------------------------------------------------------------------------------------- the jobs


@dataclass(frozen=True, slots=True)
class _Report:
    tp: int
    shapes: dict[str, tuple[int, ...]]
    runs: list[tuple[str, str, int, torch.Tensor]]
    frozen: dict[str, torch.Tensor]


def train_pipeline(recipe: PipeRecipe, folder: Path, seed: int) -> Piped:
    """Train three steps, save, and go on for three."""
    engine = _engine(recipe, seed, load_universal=False)
    _run(engine, recipe, range(3))
    full, frozen = _held(engine, recipe)
    engine.save_checkpoint(
        str(folder),
        tag=TAG,
        client_state={"iteration": 3, "universal_checkpoint_info": universal_info()},
    )
    distributed.barrier()
    return Piped(full, frozen, _run(engine, recipe, range(3, 6)))


def resume_pipeline(recipe: PipeRecipe, folder: Path, tag: str | None, seed: int) -> Piped:
    """Load a universal folder, and go on for three steps."""
    engine = _engine(recipe, seed, load_universal=True)
    distributed.barrier()
    loaded, _ = engine.load_checkpoint(str(folder), tag=tag)
    if loaded is None:
        raise RuntimeError(f"DeepSpeed found nothing to load in {folder}/{tag}")
    full, frozen = _held(engine, recipe)
    return Piped(full, frozen, _run(engine, recipe, range(3, 6)))


def _held(engine: Any, recipe: PipeRecipe) -> tuple[States, dict[str, torch.Tensor]]:
    parameters = dict(engine.module.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    mine = _Report(
        tp=distributed.get_rank() % recipe.tp,
        shapes={name: tuple(parameter.shape) for name, parameter in parameters.items()},
        runs=[(f.name, f.state, f.start, f.values) for f in fragments_of(engine.optimizer, names)],
        frozen={
            name: tensor.detach().float().clone()
            for name, tensor in _untrained(engine.module, parameters)
        },
    )
    everyone: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, mine)
    return _join(everyone), {k: v for one in reversed(everyone) for k, v in one.frozen.items()}


def _untrained(
    module: nn.Module, parameters: dict[str, nn.Parameter]
) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((n, p) for n, p in parameters.items() if not p.requires_grad)
    yield from module.named_buffers()


def _join(reports: list[_Report]) -> States:
    """Fragments of all ranks make shards, shards of the tensor ranks make the parameter."""
    shards: dict[tuple[str, str], dict[int, torch.Tensor]] = defaultdict(dict)
    for one in reports:
        for name, state, start, values in one.runs:
            shape = one.shapes[name]
            shard = shards[name, state].setdefault(one.tp, torch.full(shape, torch.nan))
            flat = shard.view(-1)[start : start + values.numel()]
            if not bool((flat.isnan() | (flat == values)).all()):
                raise RuntimeError(f"{name}/{state}: replicas of tensor rank {one.tp} differ")
            flat.copy_(values)
    full: States = defaultdict(dict)
    for (name, state), by_tp in shards.items():
        held = [by_tp[rank] for rank in sorted(by_tp)]
        if any(bool(shard.isnan().any()) for shard in held):
            raise RuntimeError(f"{name}/{state}: some elements are held by no rank")
        full[name][state] = _cat(name, held)
    return dict(full)


def _cat(name: str, shards: list[torch.Tensor]) -> torch.Tensor:
    if ".up." in name:
        return torch.cat(shards, 0)
    if name.endswith("down.weight"):
        return torch.cat(shards, 1)
    if not all(torch.equal(shard, shards[0]) for shard in shards):
        raise RuntimeError(f"{name}: replicas on tensor ranks differ")
    return shards[0]
