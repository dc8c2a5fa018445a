r"""The names of DeepSpeed's files, and what each says about who wrote it.

Theory. A DeepSpeed checkpoint has no index. What a file is, and which rank wrote it, is known from
its name alone, so the grammar is kept in one place::

    mp_rank_{mp:02d}_model_states.pt                       ZeRO 0, 1, 2: one a model-parallel rank
    zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt                ZeRO-3: one a rank
    [bf16_|fp16_]zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt   any ZeRO: one a rank
    layer_{layer:02d}-[model_{tp:02d}-]model_states.pt            weights of a pipeline layer
    layer_{moe}_expert_{expert}_mp_rank_{mp:02d}_model_states.pt  weights of one expert
    expert_{expert}_mp_rank_{mp:02d}_model_states.pt              the same, long ago
    expp_rank_{ep}_mp_rank_{mp:02d}_optim_states.pt               MoE without ZeRO

`mp` counts tensor-parallel ranks fastest: `mp = pp * tp_degree + tp`. Ranks are numbers and are
compared as numbers (DeepSpeed sorts some of them as text, and pairs wrong files from 100 ranks on).

Source: `engine.py` (`_get_ckpt_name`, `_get_zero_ckpt_name`, `_get_expert_ckpt_name`),
`pipe/module.py` (`ckpt_layer_path`), DeepSpeed 0.12 to 0.19.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class FileKind(Enum):
    """What a file of a DeepSpeed checkpoint holds."""

    MODEL = "model states"
    ZERO3_MODEL = "ZeRO-3 model states"
    OPTIMIZER = "optimizer states"
    LAYER = "pipeline layer"
    EXPERT = "expert weights"
    LEGACY_EXPERT = "expert weights without a layer"
    EXPERT_OPTIMIZER = "expert optimizer states"


@dataclass(frozen=True, slots=True)
class FileName:
    """A parsed file name; indices that the name does not carry are 0."""

    kind: FileKind
    """What the file holds."""
    dp: int = 0
    mp: int = 0
    """Data-parallel and model-parallel rank of its writer."""
    layer: int = 0
    expert: int = 0
    """Layer and global expert number, for pipeline and expert files."""


_GRAMMAR: tuple[tuple[FileKind, re.Pattern[str]], ...] = (
    (FileKind.MODEL, re.compile(r"mp_rank_(?P<mp>\d+)_model_states\.pt")),
    (
        FileKind.ZERO3_MODEL,
        re.compile(r"zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt"),
    ),
    (
        FileKind.OPTIMIZER,
        re.compile(
            r"(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_?optim_states\.pt"
        ),
    ),
    (FileKind.LAYER, re.compile(r"layer_(?P<layer>\d+)-(?:model_(?P<mp>\d+)-)?model_states\.pt")),
    (
        FileKind.EXPERT,
        re.compile(
            r"layer_(?P<layer>\d+)_expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt"
        ),
    ),
    (
        FileKind.LEGACY_EXPERT,
        re.compile(r"expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt"),
    ),
    (
        FileKind.EXPERT_OPTIMIZER,
        re.compile(r"expp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt"),
    ),
)


def parse_file_name(name: str) -> FileName | None:
    """What a file name says, or None for a file that is no part of a DeepSpeed checkpoint.

    Examples
    --------
    >>> parse_file_name("bf16_zero_pp_rank_3_mp_rank_01_optim_states.pt")
    FileName(kind=<FileKind.OPTIMIZER: 'optimizer states'>, dp=3, mp=1, layer=0, expert=0)
    >>> parse_file_name("scheduler.pt") is None
    True
    """
    for kind, pattern in _GRAMMAR:
        match = pattern.fullmatch(name)
        if match:
            numbers = {word: int(digits) for word, digits in match.groupdict().items() if digits}
            return FileName(kind, **numbers)
    return None


def model_file_name(mp: int) -> str:
    """Name of the model-state file of a model-parallel rank (ZeRO 0, 1, 2)."""
    return f"mp_rank_{mp:02d}_model_states.pt"


def zero3_model_file_name(dp: int, mp: int) -> str:
    """Name of the model-state file of a rank under ZeRO-3."""
    return f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt"


def optimizer_file_name(dp: int, mp: int, prefix: str = "") -> str:
    """Name of the optimizer file of a rank; `prefix` is ``""``, ``"bf16_"`` or ``"fp16_"``."""
    return f"{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt"


def missing_file_name(kind: FileKind, dp: int, mp: int, present: Iterable[str]) -> str:
    """Name of a file on the grid of ranks that is not there, as those that are there are called.

    Parameters
    ----------
    kind
        Of model or optimizer files.
    dp, mp
        Rank of its writer.
    present
        Names of files of that kind; optimizer files begin with another word in some runs.

    Examples
    --------
    >>> missing_file_name(
    ...     FileKind.OPTIMIZER, 1, 0, ["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"]
    ... )
    'bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt'
    """
    if kind is FileKind.MODEL:
        return model_file_name(mp)
    if kind is FileKind.ZERO3_MODEL:
        return zero3_model_file_name(dp, mp)
    prefix, found, _ = next(iter(present), "").partition("zero_pp_rank_")
    return optimizer_file_name(dp, mp, prefix if found else "")


def expert_file_name(layer: int, expert: int, mp: int) -> str:
    """Name of the file of one expert of one mixture-of-experts layer."""
    return f"layer_{layer}_expert_{expert}_mp_rank_{mp:02d}_model_states.pt"


def expert_optimizer_file_name(ep_rank: int, mp: int) -> str:
    """Name of the optimizer file of an EP rank without ZeRO."""
    return f"expp_rank_{ep_rank}_mp_rank_{mp:02d}_optim_states.pt"


def layer_file_name(layer: int, tp: int | None) -> str:
    """Name of the file of a pipeline layer; `tp` is None without a tensor-parallel axis."""
    rank = "" if tp is None else f"model_{tp:02d}-"
    return f"layer_{layer:02d}-{rank}model_states.pt"
