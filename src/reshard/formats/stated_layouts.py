r"""Layouts that the user states, for a checkpoint that does not say how it was cut.

Theory. A file maps patterns to layouts, in TOML or JSON::

    waive = ["lm_head.weight"]          # objections that are accepted, each by its name

    [layouts]
    '.*norm\.weight' = "replicated"
    '.*\.(o|down)_proj\.weight' = "row_parallel"
    '.*\.qkv\.weight' = { layout = "sub_param", partition_dim = 0, sub_params = 3 }

or holds a map document (`{"version": 1, "params": {pattern: map}}`), by itself or under
`affine_map`. The words are those of :mod:`~reshard.formats.layout_words`; a word without fields may
stand alone. A pattern of `layouts` must match a whole name, a pattern of a map document matches
from its start, as in a checkpoint.

What is stated is asked first, so it can mend what a checkpoint says wrongly. It is resolved once
and held to the same strictness: a pattern that matches nothing and two that match one parameter are
refused, and every map must be valid and fit the shards. Where it says that ranks hold the same, the
executor compares them.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from reshard.errors import DocumentError, InvalidMapError, LayoutError, MissingFileError, UsageError
from reshard.formats.layout_cuts import CutRule, read_cut, stated_map
from reshard.formats.layout_source import (
    GovernedMap,
    LayoutSource,
    Shape,
    listed,
    located,
    require_fit,
)
from reshard.formats.layout_words import Rule, read_rule
from reshard.formats.parsing import Cursor
from reshard.formats.patterns import compile_pattern, quoted
from reshard.geometry import ParamAffineMap, maps_from_document
from reshard.layouts.autotp import Widths
from reshard.layouts.builders import replicated_map

LARGEST_FILE = 1 << 28
"""Largest file of layouts that is read, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedRule:
    r"""One entry of the file."""

    text: str
    """The pattern as written."""
    pattern: re.Pattern[str]
    r"""Matches from the start of a name; ends with `\Z` where it must match all of it."""
    word: str
    """The layout, for messages."""
    rule: Rule
    """From shapes of shards to the map."""
    cut: CutRule
    """From the shape of a parameter to the map of a target."""
    vocabulary_size: int | None = None
    """Rows of dim 0 that count, None when all do."""


@dataclass(frozen=True, slots=True)
class StatedLayouts(LayoutSource):
    """All rules of a file."""

    rules: tuple[StatedRule, ...]
    """The entries."""
    waived: frozenset[str] = frozenset()
    """Patterns and names to which no objection is made."""
    file: str = ""
    """The file."""

    def _matching(self, name: str) -> list[StatedRule]:
        return [rule for rule in self.rules if rule.pattern.match(name)]

    def covers(self, name: str) -> bool:
        """See :class:`~reshard.formats.layout_source.LayoutSource`."""
        return bool(self._matching(name))

    def map_of(self, name: str, shards: Mapping[int, Shape], degree: int) -> GovernedMap | None:
        """See :class:`~reshard.formats.layout_source.LayoutSource`."""
        matching = self._matching(name)
        if not matching:
            return None
        stated = matching[0]
        if degree == 1 and stated.word not in ("replicated", "map"):
            # What is stated is about more ranks: of the run that the checkpoint is written for.
            found = replicated_map(next(iter(shards.values())), 1)
        else:
            found = self._ruled(stated, name, shards, degree)
        require_fit(name, found, shards, self.file)
        self.require_rows(name, found.logical_shape, exactly=False)
        words = f"stated: {stated.word} for {quoted(stated.text)}"
        return _without_padding(found, stated.vocabulary_size, words)

    def _ruled(
        self, stated: StatedRule, name: str, shards: Mapping[int, Shape], degree: int
    ) -> ParamAffineMap:
        try:
            return stated.rule(shards, degree)
        except LayoutError as error:
            raise located(error, name, self.file) from error

    def cut_of(self, name: str, shape: Shape, widths: Widths) -> ParamAffineMap:
        """How a target cuts a parameter that is covered.

        Parameters
        ----------
        name
            The parameter.
        shape
            Its shape, padding included.
        widths
            How wide the parts of its layer are.

        Raises
        ------
        LayoutError
            When the word does not fit the shape, or does not tell the widths.
        """
        return self._matching(name)[0].cut(shape, widths)

    def vocabulary_size(self, name: str) -> int | None:
        """Rows of a parameter that count, None where nothing is stated about padding."""
        matching = self._matching(name)
        return matching[0].vocabulary_size if matching else None

    def require_rows(self, name: str, shape: Shape, *, exactly: bool) -> None:
        """Refuse a stated size of the vocabulary that a parameter contradicts.

        Parameters
        ----------
        name, shape
            The parameter.
        exactly
            Whether padding has been left out, so that all rows that are there count.

        Raises
        ------
        LayoutError
            When there are fewer rows, or others.
        """
        stated = self.vocabulary_size(name)
        rows = shape[0] if shape else 0
        if stated is None or rows == stated or (rows > stated and not exactly):
            return
        raise LayoutError(
            "original_vocab_size contradicts the rows of the parameter",
            file=self.file,
            parameter=name,
            dim=0,
            expected=f"{stated} rows, by {quoted(self._matching(name)[0].text)}"
            if exactly
            else f"at least {stated} rows, by {quoted(self._matching(name)[0].text)}",
            found=f"{rows} rows",
            next_step="correct original_vocab_size; where the source has padding of its own, "
            "--to universal with this file leaves it out"
            if rows > stated
            else "correct original_vocab_size",
        )

    def require_one_answer(
        self, ties: Mapping[str, str], answer: Callable[[str, str], ParamAffineMap | None]
    ) -> None:
        """Refuse different statements for two names of one parameter.

        Parameters
        ----------
        ties
            Other name -> parameter.
        answer
            From a name and the parameter to the map that is stated for it under that name; None
            where the parameter is not looked at.

        Raises
        ------
        LayoutError
            With both names and both rules.
        """
        for alias, owner in ties.items():
            if not (self.covers(alias) and self.covers(owner)):
                continue
            stated = _answered(answer, owner, owner)
            other = _answered(answer, alias, owner) if stated is not None else None
            same_size = self.vocabulary_size(alias) == self.vocabulary_size(owner)
            if stated is None or (other is not None and same_size and stated.same_elements(other)):
                continue
            raise LayoutError(
                "two names of one parameter are stated to be cut differently",
                file=self.file,
                parameter=f"{alias}, tied to {owner}",
                expected=f"for both {self._said(owner)}, as for {owner}",
                found=f"{self._said(alias)} for {alias}",
                next_step="state the same for both names",
            )

    def _said(self, name: str) -> str:
        rule = self._matching(name)[0]
        rows = rule.vocabulary_size
        size = "" if rows is None else f" with original_vocab_size {rows}"
        return f"{rule.word}{size} by {quoted(rule.text)}"

    def unused(self, names: Collection[str]) -> Iterator[str]:
        """See :class:`~reshard.formats.layout_source.LayoutSource`."""
        for rule in self.rules:
            if not any(map(rule.pattern.match, names)):
                yield f"no parameter matches {quoted(rule.text)} of {self.file}"

    def require_used(self, names: Collection[str]) -> None:
        """Refuse a file that no reader has checked: rules for nothing, or two for one parameter.

        Raises
        ------
        LayoutError
            With all of them.
        """
        objections = [*self.unused(names), *self.unclear({name: {} for name in names})]
        if objections:
            raise LayoutError(
                listed(objections, "; "), file=self.file, next_step="correct the patterns"
            )

    def unclear(self, shapes: Mapping[str, Mapping[int, Shape]]) -> Iterator[str]:
        """See :class:`~reshard.formats.layout_source.LayoutSource`."""
        for name in shapes:
            matching = self._matching(name)
            if len(matching) > 1:
                patterns = " and ".join(quoted(rule.text) for rule in matching)
                yield f"{name} is matched by {patterns} of {self.file}"


def _answered(
    answer: Callable[[str, str], ParamAffineMap | None], name: str, owner: str
) -> ParamAffineMap | None:
    """What is stated under a name, None where it does not fit the parameter."""
    try:
        return answer(name, owner)
    except (LayoutError, InvalidMapError):
        return None


def _without_padding(found: ParamAffineMap, rows: int | None, words: str) -> GovernedMap:
    if rows is None or not found.logical_shape or found.logical_shape[0] <= rows:
        return GovernedMap(found, words)
    return GovernedMap(
        found.narrow(0, 0, rows),
        f"{words}, rows from {rows} on are padding",
        {"vocab_tensor": True},
        padded=found,
    )


# --------------------------------------------------------------------------- the file


def read_stated_layouts(path: str | os.PathLike[str]) -> StatedLayouts:
    """Read a file of layouts.

    Parameters
    ----------
    path
        A TOML file (`.toml`), or a JSON file.

    Raises
    ------
    MissingFileError
        When there is no such file.
    UsageError
        When it is no regular file.
    DocumentError
        When it is neither TOML nor JSON, or a map document in it is malformed.
    LayoutError
        When a word or a field is not known, or a pattern is no regular expression.
    CheckpointError
        When a field is of the wrong kind.
    """
    file = Path(path)
    if not file.exists():
        raise MissingFileError("no such file of layouts", file=file, next_step="check --layout")
    if not file.is_file():
        raise UsageError(
            "a pipe or a folder is no file of layouts",
            file=file,
            expected="a regular file, which can be read again",
            next_step="write the layouts to a file and name that",
        )
    root = Cursor(_parsed(file), str(file))
    if "params" in root.mapping():
        return StatedLayouts(tuple(_maps(root)), frozenset(), str(file))
    unknown = sorted(map(str, set(root.mapping()) - {"waive", "layouts", "affine_map"}))
    if unknown:
        raise DocumentError(
            f"{file}: unknown keys at the top",
            expected="layouts, waive, affine_map; or a map document",
            found=", ".join(unknown),
            next_step="docs/layouts.md shows the form",
        )
    maps, table, waive = (root.maybe(key) for key in ("affine_map", "layouts", "waive"))
    rules = [*(_maps(maps) if maps else ()), *(_rules(table) if table else ())]
    waived = frozenset(entry.text() for entry in waive.each()) if waive else frozenset()
    return StatedLayouts(tuple(rules), waived, str(file))


def _parsed(file: Path) -> object:
    if file.stat().st_size > LARGEST_FILE:
        raise DocumentError(f"{file}: too large for a file of layouts", expected=LARGEST_FILE)
    try:
        text = file.read_text(encoding="utf-8")
        return _toml(text) if file.suffix == ".toml" else _json(text)
    except (ValueError, RecursionError) as error:
        if isinstance(error, (DocumentError, UsageError)):
            raise
        kind = "TOML" if file.suffix == ".toml" else "JSON"
        raise DocumentError(f"{file}: no valid {kind}: {error}") from error


def _json(text: str) -> object:
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object whose keys occur once, as TOML demands too."""
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DocumentError(f"a key is given twice: {twice!r}")
    return made


def _toml(text: str) -> object:
    """Parse TOML: by the standard library from Python 3.11 on, by `tomli` before."""
    try:
        parser = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ModuleNotFoundError as error:
        raise UsageError(
            "reading TOML needs Python 3.11, or the package tomli",
            next_step="pip install tomli, or write the file as JSON",
        ) from error
    parsed: object = parser.loads(text)
    return parsed


def _maps(document: Cursor) -> Iterator[StatedRule]:
    for pattern, stated in maps_from_document(document.value).items():
        yield StatedRule(
            text=pattern,
            pattern=compile_pattern(pattern, document.file),
            word="map",
            rule=_always(stated),
            cut=stated_map(stated),
        )


def _always(stated: ParamAffineMap) -> Rule:
    return lambda _shards, _degree: stated


def _rules(table: Cursor) -> Iterator[StatedRule]:
    for text, entry in table.named():
        compile_pattern(text, table.file)
        word, fields = entry, Cursor({}, entry.file, entry.path)
        if not isinstance(entry.value, str):
            word, fields = entry.at("layout"), entry
        rows = fields.maybe("original_vocab_size")
        yield StatedRule(
            text=text,
            pattern=compile_pattern(rf"(?:{text})\Z", table.file),
            word=word.text(),
            rule=read_rule(word.text(), fields),
            cut=read_cut(word.text(), fields),
            vocabulary_size=None if rows is None else rows.integer(1),
        )
