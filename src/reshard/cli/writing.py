"""What the options of ``reshard convert`` choose about the output, for the format it is written in.

Theory. The command has one list of options, and each format takes some of them. An option that
means nothing to the format of the output is refused by its name, for a run that ignores what it was
told looks like one that obeyed. A new format adds its options to :class:`WritingFlags` and one
entry to the table: which it takes, and what it makes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from reshard.api.arguments import parse_bytes
from reshard.errors import UsageError
from reshard.formats.dcp.options import DEFAULT_SHARD_BYTES, TREES, DcpOptions
from reshard.formats.deepspeed.writing import MODEL_DTYPES, NativeOptions
from reshard.formats.dtypes import DType, short_names, spelled_dtype
from reshard.formats.registry import WriteOptions
from reshard.formats.safetensors.options import (
    DEFAULT_SHARD_SIZE,
    SafetensorsOptions,
    Tied,
    dtype_rules,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingFlags:
    """The options that choose something about the output, as given.

    None, False and an empty tuple mean that an option was not given.
    """

    stage: int | None = None
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    kv_heads: int | None = None
    vocab_multiple: int | None = None
    stage_starts: str | None = None
    tied: tuple[str, ...] = ()
    sub_group_size: int | None = None
    dtype: tuple[str, ...] = ()
    drop_in: bool = False
    max_shard_size: str | None = None
    tied_weights: str | None = None
    dcp_tree: str | None = None
    adam: str | None = None

    def given(self) -> frozenset[str]:
        """Names of the options that were given."""
        return frozenset(field.name for field in fields(self) if getattr(self, field.name))


@dataclass(frozen=True, slots=True)
class _Taken:
    """The options that a format takes, and what it makes of them."""

    flags: tuple[str, ...]
    options: Callable[[WritingFlags], WriteOptions]


def write_options(to: str, flags: WritingFlags) -> WriteOptions | None:
    """Return what the options say to the format `to`; None where it takes none.

    Raises
    ------
    UsageError
        An option is given that the format does not take, or one is missing or makes no sense.
    """
    taken = _TAKEN.get(to)
    foreign = flags.given().difference(taken.flags if taken else ())
    if foreign:
        raise _not_taken(to, foreign)
    return taken.options(flags) if taken else None


def _not_taken(to: str, foreign: frozenset[str]) -> UsageError:
    takers = [name for name, taken in _TAKEN.items() if foreign <= set(taken.flags)]
    other = f", or write with --to {' or '.join(takers)}" if takers else ""
    return UsageError(
        f"the format {to!r} does not take {_spelled(foreign)}",
        next_step=f"leave {'it' if len(foreign) == 1 else 'them'} out{other}",
    )


def _spelled(flags: frozenset[str]) -> str:
    return " and ".join(
        f"--{field.name.replace('_', '-')}" for field in fields(WritingFlags) if field.name in flags
    )


# --------------------------------------------------------------------------- native DeepSpeed


def _native(flags: WritingFlags) -> NativeOptions:
    if flags.stage is None or flags.dp is None:
        raise UsageError(
            "a native DeepSpeed checkpoint is written for one topology",
            next_step="name it with both --stage and --dp (and --tp, --pp, --ep)",
        )
    return NativeOptions(
        stage=flags.stage,
        dp=flags.dp,
        tp=flags.tp or 1,
        pp=flags.pp or 1,
        ep=flags.ep or 1,
        kv_heads=flags.kv_heads,
        vocab_multiple=flags.vocab_multiple,
        stage_starts=None if flags.stage_starts is None else _layers(flags.stage_starts),
        tied_layers=dict(map(_tied, flags.tied)) or None,
        sub_group_size=flags.sub_group_size,
        dtype=_model_dtype(flags.dtype),
        drop_in=flags.drop_in,
    )


def _model_dtype(given: tuple[str, ...]) -> DType | None:
    if not given:
        return None
    dtype = spelled_dtype(given[0])
    if len(given) > 1 or dtype.name not in MODEL_DTYPES:
        raise UsageError(
            "no element type of a model",
            expected=f"one of {short_names(MODEL_DTYPES)}",
            found=" and ".join(given),
        )
    return dtype


# --------------------------------------------------------------------------- safetensors


def _safetensors(flags: WritingFlags) -> SafetensorsOptions:
    size = flags.max_shard_size
    return SafetensorsOptions(
        dtypes=dtype_rules(flags.dtype),
        max_shard_size=DEFAULT_SHARD_SIZE if size is None else parse_bytes(size),
        tied=None if flags.tied_weights is None else Tied(flags.tied_weights),
    )


def _layers(text: str) -> tuple[int, ...]:
    """Numbers of pipeline layers, as in ``0,3``."""
    numbers = [part.strip() for part in text.split(",")]
    if not all(number.isascii() and number.isdecimal() for number in numbers):
        raise UsageError("no list of layers", expected="numbers like 0,3", found=text)
    return tuple(map(int, numbers))


def _tied(text: str) -> tuple[str, tuple[int, ...]]:
    """A tied module and its layers, as in ``embed=0,5``."""
    key, separator, layers = text.partition("=")
    if not (key and separator):
        raise UsageError(
            "no tied module and its layers", expected="something like embed=0,5", found=text
        )
    return key, _layers(layers)


_NATIVE = (
    *("stage", "dp", "tp", "pp", "ep", "kv_heads", "vocab_multiple"),
    *("stage_starts", "tied", "sub_group_size", "dtype", "drop_in"),
)

# --------------------------------------------------------------------------- dcp


def _dcp(flags: WritingFlags) -> DcpOptions:
    name = flags.dcp_tree or "get_state_dict"
    if name not in TREES:
        raise UsageError("there is no such tree", expected=" or ".join(TREES), found=repr(name))
    limit = DEFAULT_SHARD_BYTES
    if flags.max_shard_size is not None:
        limit = parse_bytes(flags.max_shard_size)
    dtype = _model_dtype(flags.dtype)
    return DcpOptions(tree=TREES[name], max_shard_bytes=limit, dtype=dtype, adam=flags.adam)


_TAKEN: Mapping[str, _Taken] = {
    "deepspeed": _Taken(_NATIVE, _native),
    "safetensors": _Taken(("dtype", "max_shard_size", "tied_weights"), _safetensors),
    "dcp": _Taken(("dtype", "max_shard_size", "dcp_tree", "adam"), _dcp),
}
"""What each format takes; one that is not here takes nothing."""
