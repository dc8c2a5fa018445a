"""How pipelines and mixtures of experts are spread: values that import no DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PipeRecipe:
    """A pipeline: its degrees and its ZeRO stage; `ep` and `auto` (AutoEP) where it has experts."""

    pp: int
    tp: int = 1
    dp: int = 1
    stage: int = 1
    ep: int = 1
    auto: bool = False

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.pp * self.tp * self.dp

    def __str__(self) -> str:
        experts = f" ep{self.ep}{' auto' * self.auto}" if self.ep > 1 or self.auto else ""
        return f"pp{self.pp} tp{self.tp} dp{self.dp} zero{self.stage}{experts}"


@dataclass(frozen=True, slots=True)
class MixRecipe:
    """A mixture of experts.

    Parameters
    ----------
    world
        Number of processes.
    ep
        Expert-parallel degree.
    tp
        Tensor-parallel degree; above 1 AutoEP and AutoTP are folded.
    stage, dtype
        ZeRO stage and model dtype.
    native
        Whether it is a native DeepSpeed MoE instead of a Mixtral under AutoEP.
    data_first
        ``use_data_before_expert_parallelism``.
    cut_experts
        Of native experts with several tensor ranks, whether each rank has a part of every expert
        (``enable_expert_tensor_parallelism``).
    frozen
        Whether some matrices of experts are not trained.
    round_robin
        ``round_robin_gradients``.
    """

    world: int
    ep: int
    tp: int = 1
    stage: int = 1
    dtype: str = "fp32"
    native: bool = False
    data_first: bool = False
    cut_experts: bool = False
    frozen: bool = False
    round_robin: bool = False

    @property
    def dp(self) -> int:
        """The data-parallel degree."""
        return self.world // self.tp

    def __str__(self) -> str:
        return f"ep{self.ep} dp{self.dp} zero{self.stage}"


@dataclass(frozen=True, slots=True)
class TrainerRecipe:
    """A run of ``transformers.Trainer``, data-parallel.

    Parameters
    ----------
    world
        Number of processes.
    stage, dtype
        ZeRO stage and model dtype.
    trainers_optimizer
        Whether the trainer makes its AdamW itself, in two parameter groups, and DeepSpeed wraps it.
    """

    world: int
    stage: int
    dtype: str = "fp32"
    trainers_optimizer: bool = False

    def __str__(self) -> str:
        optimizer = " own optimizer" if self.trainers_optimizer else ""
        return f"zero{self.stage} dp{self.world} {self.dtype}{optimizer}"
