"""Reading `universal_checkpoint_info`: foreign data becomes rules.

Theory. The info is a dictionary that a training program wrote, by hand or by AutoTP. Lists may be
tuples, sub-parameters plain dictionaries or pickled `SubparamShape` objects, sizes lists or tuples;
all spellings are read to the same rules. What is not a known key is the client's and ignored.

Versions: below 0.4 the entry at the partition dim may be a *number* of equal sub-parameters and
there are no widths, so the split was even; from 0.4 on `sub_param_shard_widths` has the widths of
every rank. Nothing else depends on the version, and maps are recognised by their presence.
"""

from __future__ import annotations

from collections.abc import Iterator

from reshard.formats.deepspeed.conversion_keys import VOCABULARY, ConversionKeys, KeyRule
from reshard.formats.deepspeed.key_lowering import Branch, SubParams
from reshard.formats.parsing import Cursor
from reshard.formats.patterns import PatternTable
from reshard.formats.torch_archive import SubparamShape

WIDTHS_SINCE = 0.4
"""The version from which the widths of sub-parameters are stated."""

AUTOTP_MARK = "autotp_unsupported_parameter_patterns"
"""The key that AutoTP always writes, and nobody else."""


def read_conversion_keys(
    info: Cursor | None, degree: int, waived: frozenset[str] = frozenset()
) -> ConversionKeys:
    """Read the pattern keys of an info.

    Parameters
    ----------
    info
        `universal_checkpoint_info`, None when there is none.
    degree
        Number of tensor ranks.
    waived
        Patterns and names to which no objection is made.

    Raises
    ------
    CheckpointError
        When a key holds something else than it should; the text has the path to it.
    LayoutError
        When a pattern is no regular expression.
    """
    if info is None:
        return ConversionKeys(waived=waived, degree=degree)
    size = info.maybe("original_vocab_size")
    return ConversionKeys(
        rules=PatternTable.of(
            ((rule.text, rule) for branch in Branch for rule in _rules(info, branch)), info.file
        ),
        vocabulary=PatternTable.of(
            ((text, KeyRule(None, text)) for text in _texts(info, VOCABULARY)), info.file
        ),
        vocabulary_size=None if size is None else size.integer(1),
        unsupported=PatternTable.of(_unsupported(info), info.file),
        experts=PatternTable.of(
            ((text, None) for text in _texts(info, "expert_parameter_patterns")), info.file
        ),
        autotp=info.maybe(AUTOTP_MARK) is not None,
        waived=waived,
        degree=degree,
        file=info.file,
    )


def _rules(info: Cursor, branch: Branch) -> Iterator[KeyRule]:
    if branch is not Branch.SUB_PARAMS:
        for text in _texts(info, branch.value):
            yield KeyRule(branch, text)
        return
    entries = info.maybe(branch.value)
    for entry in entries.each() if entries else ():
        parts = _fields(entry)
        for pattern in parts.at("patterns").each():
            text = pattern.text()
            yield KeyRule(branch, text, _sub_params(info, parts, text))


def _texts(info: Cursor, key: str) -> Iterator[str]:
    found = info.maybe(key)
    for pattern in found.each() if found else ():
        yield pattern.text()


def _unsupported(info: Cursor) -> Iterator[tuple[str, str]]:
    found = info.maybe(AUTOTP_MARK)
    for pattern, reason in found.named() if found else ():
        yield pattern, reason.text()


def _fields(entry: Cursor) -> Cursor:
    """The three fields of an entry, which may be a dictionary or a pickled object."""
    if isinstance(entry.value, SubparamShape):
        return Cursor(entry.value.fields, entry.file, entry.path)
    entry.mapping()
    return entry


def _sub_params(info: Cursor, parts: Cursor, pattern: str) -> SubParams:
    shape, dim = parts.at("shape"), parts.at("partition_dim").integer()
    return SubParams(
        patterns=tuple(text.text() for text in parts.at("patterns").each()),
        entries=tuple(_extent(entry) for entry in shape.each()),
        partition_dim=dim,
        widths=_widths(info, pattern),
        even=_version(info) < WIDTHS_SINCE,
        is_list=isinstance(shape.value, list),
    )


def _extent(entry: Cursor) -> int | tuple[int, ...]:
    if isinstance(entry.value, (list, tuple)):
        return tuple(size.integer(1) for size in entry.each())
    return entry.integer(-1)


def _widths(info: Cursor, pattern: str) -> tuple[tuple[int, ...], ...] | None:
    table = info.maybe("sub_param_shard_widths")
    rows = None if table is None else table.maybe(pattern)
    if rows is None:
        return None
    return tuple(tuple(width.integer() for width in row.each()) for row in rows.each())


def _version(info: Cursor) -> float:
    version = info.maybe("universal_checkpoint_version")
    value = 0.0 if version is None else version.value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise info.at("universal_checkpoint_version").unexpected("a number")
    return float(value)
