"""What the user may choose about a safetensors set."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase

from reshard.errors import UsageError
from reshard.formats.dtypes import DType, short_names, spelled_dtype

WEIGHTS = "fp32"
"""The state under which weights go, whatever their element type."""

SERVED_DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""Element types that weights may be rounded to."""

DEFAULT_SHARD_SIZE = 5 * 10**9
"""Bytes of tensors in one file at most."""


class Tied(str, Enum):
    """What becomes of names that are the same parameter as another."""

    DROP = "drop"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class DTypeRule:
    """An element type, and the names it is for; None means every parameter, but no buffer."""

    dtype: DType
    pattern: str | None = None

    def __post_init__(self) -> None:
        if self.dtype.name not in SERVED_DTYPES:
            raise UsageError(
                "weights are not rounded to this element type",
                expected=f"one of {short_names(SERVED_DTYPES)}",
                found=self.dtype,
                next_step="choose one of them, or leave --dtype out: as the model was trained",
            )

    def meets(self, name: str) -> bool:
        """Whether a name is the pattern or matches it."""
        return self.pattern is None or name == self.pattern or fnmatchcase(name, self.pattern)


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsOptions:
    """How a safetensors set is written.

    Examples
    --------
    >>> options = SafetensorsOptions(dtypes=dtype_rules(["bf16", "*norm*=fp32"]))
    >>> [str(options.dtype_of(name)) for name in ("norm.weight", "head.weight")]
    ['float32', 'bfloat16']
    """

    dtypes: tuple[DTypeRule, ...] = ()
    """Element types of weights. Of the rules that meet a name the last one counts; where none
    does, a weight gets the type that the model was trained in."""
    max_shard_size: int = DEFAULT_SHARD_SIZE
    """Bytes of tensors in one file at most; a larger tensor gets a file of its own."""
    tied: Tied | None = None
    """Whether tied names are dropped or written twice. None drops them where a ``config.json``
    beside the source says ``tie_word_embeddings``, for then the loader ties them again."""
    beside: tuple[str, ...] = ()
    """Further folders in which ``config.json`` and the files of the tokenizer may lie."""

    def __post_init__(self) -> None:
        if self.max_shard_size < 1:
            raise UsageError("a file must have room for a byte", found=self.max_shard_size)

    def dtype_of(self, name: str, *, is_buffer: bool = False) -> DType | None:
        """Return the element type that the rules give a name, None when no rule meets it."""
        met = [
            rule
            for rule in self.dtypes
            if rule.meets(name) and not (is_buffer and rule.pattern is None)
        ]
        return met[-1].dtype if met else None


def dtype_rules(texts: Iterable[str]) -> tuple[DTypeRule, ...]:
    """Read rules as the command line gives them: ``DTYPE`` or ``PATTERN=DTYPE``.

    Raises
    ------
    UsageError
        There is no such element type, or weights are not rounded to it.
    """
    rules = []
    for text in texts:
        pattern, sign, word = text.rpartition("=")
        rules.append(DTypeRule(spelled_dtype(word), pattern if sign else None))
    return tuple(rules)
