"""What the user may choose about a native checkpoint: the topology, and the element type.

Theory. Everything else follows from the source. A choice that is not made is None, and means "as in
the source".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.errors import UsageError
from reshard.formats.checkpoint import Topology
from reshard.formats.dtypes import DType, short_names

if TYPE_CHECKING:
    from reshard.formats.stated_layouts import StatedLayouts

MODEL_DTYPES = ("float32", "bfloat16", "float16")
"""Element types that a DeepSpeed engine can run a model in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeOptions:
    """The topology to write for.

    Raises
    ------
    UsageError
        A degree or stage that cannot be.

    Examples
    --------
    >>> NativeOptions(stage=2, dp=6).mp
    1
    >>> NativeOptions(stage=4, dp=1)
    Traceback (most recent call last):
    reshard.errors.UsageError: there is no such ZeRO stage: expected 0, 1, 2 or 3, found 4
    """

    stage: int
    """ZeRO stage, 0 to 3."""
    dp: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    """Data-, tensor-, pipeline- and expert-parallel degrees."""
    dtype: DType | None = None
    """Element type of the model weights; None keeps the source's. Master weights and optimizer
    states keep theirs in any case."""
    stage_starts: tuple[int, ...] | None = None
    """The first layer of every pipeline stage; None keeps the stages of the source."""
    tied_layers: Mapping[str, tuple[int, ...]] | None = None
    """Of a pipeline, the layers that use each tied module, by its key; None leaves it to the
    files."""
    sub_group_size: int | None = None
    """``zero_optimization.sub_group_size`` of the run that will load it (ZeRO-3), in elements;
    None takes the source's configuration, and DeepSpeed's default where that has none."""
    kv_heads: int | None = None
    """Number of key/value heads of the model, for tensor-parallel layouts that follow from it
    and that the source's maps leave open."""
    vocab_multiple: int | None = None
    """What a padded vocabulary is a multiple of on each tensor rank (Megatron's
    ``--make-vocab-size-divisible-by``)."""
    layouts: StatedLayouts | None = None
    """How the user says that parameters are cut."""
    drop_in: bool = False
    """Whether the whole trainer's folder that the source lies in is written."""

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise UsageError(
                "there is no such ZeRO stage", expected="0, 1, 2 or 3", found=self.stage
            )
        for word in ("dp", "tp", "pp", "ep", "sub_group_size", "kv_heads", "vocab_multiple"):
            value = getattr(self, word)
            if value is not None and value < 1:
                raise UsageError(f"{word} must be at least 1", found=value)
        if self.dtype is not None and self.dtype.name not in MODEL_DTYPES:
            raise UsageError(
                "a model cannot run in this element type",
                expected=short_names(MODEL_DTYPES),
                found=self.dtype,
            )
        starts = self.stage_starts
        if starts is not None and not (
            len(starts) == self.pp and starts[0] == 0 and list(starts) == sorted(set(starts))
        ):
            raise UsageError(
                "the first layers of the pipeline stages must ascend from 0",
                expected=f"{self.pp} numbers",
                found=starts,
            )
        if self.dp * self.tp % self.ep:
            raise UsageError(
                "the expert-parallel degree must divide the data-parallel degree, times the "
                "tensor-parallel one",
                expected=f"a divisor of {self.dp * self.tp}",
                found=self.ep,
            )

    @property
    def mp(self) -> int:
        """Number of model-parallel ranks."""
        return self.tp * self.pp

    @property
    def topology(self) -> Topology:
        """The degrees alone."""
        return Topology(self.stage, self.dp, self.tp, self.pp, self.ep)
