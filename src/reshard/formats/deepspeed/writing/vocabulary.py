"""What the target says about a vocabulary that it pads.

Theory. Padding rows are in the files and in no logical tensor, so only words tell a later reader
that they do not count: `vocabulary_parameter_patterns` names the tables, `original_vocab_size` says
how many of their rows count, `padded_vocab_size` how many there are. Megatron states them itself.
Where the user stated the padding, they are made here: a target that forgot them would hand its
zeros on as content.

There is one `original_vocab_size` in an info, so tables that count different numbers of rows cannot
be stated together. In an info of AutoTP the key means something else (`conversion_keys`), and no
reader leaves padding out by it. Both are refused.

Source: `checkpoint/ds_to_universal.py` (`merge_tp_slices`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from reshard.errors import UsageError
from reshard.formats.deepspeed.conversion_keys import VOCABULARY, ConversionKeys
from reshard.formats.deepspeed.info_entry import exact

if TYPE_CHECKING:
    from reshard.formats.deepspeed.writing.cuts import Cut
    from reshard.formats.deepspeed.writing.options import NativeOptions
    from reshard.formats.deepspeed.writing.source_cuts import Source

ORIGINAL = "original_vocab_size"
PADDED = "padded_vocab_size"


def vocabulary_info(
    info: Mapping[str, object], keys: ConversionKeys, cuts: Mapping[str, Cut]
) -> dict[str, object]:
    """The keys about the vocabulary, which replace those of the source.

    Parameters
    ----------
    info, keys
        The info of the source, as it is and as it is read.
    cuts
        How the target cuts every parameter.

    Raises
    ------
    UsageError
        When tables that are padded cannot be stated in one info.
    """
    padded = {name: cut.map.logical_shape[0] for name, cut in cuts.items() if cut.is_padded}
    new = [name for name in padded if keys.autotp or not keys.is_vocabulary(name)]
    if not new:
        return _heights(info, keys, cuts)
    _require_one_size(padded, keys)
    old = info.get(VOCABULARY)
    patterns = [*(old if isinstance(old, (list, tuple)) else ()), *map(exact, new)]
    return {
        VOCABULARY: patterns,
        ORIGINAL: padded[new[0]],
        PADDED: next(_height(cuts[name]) for name in new),
    }


def vocabulary_note(
    options: NativeOptions, source: Source, cuts: Mapping[str, Cut]
) -> Iterator[str]:
    """Say that a stated multiple pads nothing, because no table is known to be of a vocabulary.

    Parameters
    ----------
    options, source
        Where tables of the vocabulary are stated.
    cuts
        The cut of every parameter.
    """
    keys, layouts = source.keys(options.tp), options.layouts
    known = any(
        (not keys.autotp and keys.is_vocabulary(name))
        or (layouts is not None and layouts.vocabulary_size(name) is not None)
        for name in cuts
    )
    if options.vocab_multiple is not None and not known:
        yield (
            f"--vocab-multiple {options.vocab_multiple} pads nothing: no table is stated to be "
            "padded (original_vocab_size in a layout file, docs/native.md)"
        )


def _require_one_size(padded: Mapping[str, int], keys: ConversionKeys) -> None:
    if keys.autotp:
        raise UsageError(
            "AutoTP pads no vocabulary, and its layout metadata cannot state that rows only pad",
            file=keys.file,
            parameter=", ".join(padded),
            next_step="leave original_vocab_size out of the layout file",
        )
    known = {} if keys.vocabulary_size is None else {keys.file: keys.vocabulary_size}
    if len({*padded.values(), *known.values()}) > 1:
        raise UsageError(
            "vocabularies of different sizes cannot be stated in one checkpoint",
            file=keys.file,
            found=", ".join(f"{rows} of {where}" for where, rows in {**padded, **known}.items()),
            next_step="state one original_vocab_size, or pad one table only",
        )


def _heights(
    info: Mapping[str, object], keys: ConversionKeys, cuts: Mapping[str, Cut]
) -> dict[str, object]:
    """How high the tables of the vocabulary are in the target, where the source says it."""
    if PADDED not in info:
        return {}
    tables = [cut for name, cut in cuts.items() if keys.is_vocabulary(name)]
    heights = set(map(_height, [cut for cut in tables if cut.is_padded] or tables))
    return {PADDED: heights.pop() if len(heights) == 1 else info[PADDED]}


def _height(cut: Cut) -> int:
    if cut.is_padded:
        return sum(shape[0] for shape in cut.shapes.values())
    return cut.map.logical_shape[0]
