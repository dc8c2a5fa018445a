"""How a tensor's dims are made of named axes, as in ``(g r d) h``, and what follows for extents.

Theory. Codes that keep the same numbers in different tensors agree on *axes*: groups of heads,
heads of a group, the width of a head. A dim of a tensor is a product of axes, the outermost first.
A tensor that joins others may *chain* in one place what each of them has left, in brackets:
``(g [q k v]) h`` has, for every ``g``, first the axes of ``q`` that the joint tensor does not name
itself, then those of ``k``, then those of ``v``. So an extent is a product of extents of axes with
perhaps one sum in it; where all of them but one are known, the last one is what the extent leaves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from reshard.errors import UsageError

Token = str | tuple[str, ...]
"""An axis, or the labels of the tensors that are chained here."""

_WORD = re.compile(r"\s*([A-Za-z_]\w*|[()\[\]])")


@dataclass(frozen=True, slots=True)
class Spelling:
    """The axes of each dim of a tensor.

    Examples
    --------
    >>> Spelling.of("(g [q k v]) h")
    Spelling(dims=(('g', ('q', 'k', 'v')), ('h',)))
    """

    dims: tuple[tuple[Token, ...], ...]
    """Of each dim its tokens, the outermost first."""

    @staticmethod
    def of(text: str) -> Spelling:
        """Read a spelling.

        Raises
        ------
        UsageError
            It is malformed, names an axis twice, or chains in two places.
        """
        made = Spelling(tuple(_dims(_words(text), text)))
        tokens = [token for dim in made.dims for token in dim]
        labels = [label for token in tokens if isinstance(token, tuple) for label in token]
        chains = len(tokens) - len(made.axes)
        names = (*made.axes, *labels)
        if len(set(names)) != len(names) or chains > 1:
            raise _malformed(text, "each axis once, and brackets once")
        return made

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that it names, in order."""
        return tuple(token for dim in self.dims for token in dim if isinstance(token, str))

    @property
    def labels(self) -> tuple[str, ...]:
        """The tensors that it chains, in order."""
        chained = [token for dim in self.dims for token in dim if isinstance(token, tuple)]
        return chained[0] if chained else ()


def _words(text: str) -> list[str]:
    words, at = [], 0
    while text[at:].strip():
        found = _WORD.match(text, at)
        if found is None:
            raise _malformed(text, "names of axes, ( ) and [ ]")
        words.append(found[1])
        at = found.end()
    return words


def _dims(words: list[str], text: str) -> Iterator[tuple[Token, ...]]:
    rest = iter(words)
    for word in rest:
        yield tuple(_tokens(rest, ")", text)) if word == "(" else (_token(word, rest, text),)


def _tokens(rest: Iterator[str], end: str, text: str) -> Iterator[Token]:
    for word in rest:
        if word == end:
            return
        yield _token(word, rest, text)
    raise _malformed(text, f"a {end} for each {'(' if end == ')' else '['}")


def _token(word: str, rest: Iterator[str], text: str) -> Token:
    if word != "[":
        if word in "()]":
            raise _malformed(text, "the name of an axis")
        return word
    labels = tuple(_tokens(rest, "]", text))
    if not labels or not all(isinstance(label, str) for label in labels):
        raise _malformed(text, "labels in the brackets")
    return tuple(str(label) for label in labels)


def _malformed(text: str, expected: str) -> UsageError:
    return UsageError("not a spelling of dims", expected=expected, found=repr(text))


def inner_axes(whole: Spelling, part: Spelling) -> tuple[str, ...]:
    """Return the axes of a part that the whole does not name itself, in the part's order."""
    named = set(whole.axes)
    return tuple(axis for axis in part.axes if axis not in named)


def extents(
    spelling: Spelling, parts: Mapping[str, Spelling], sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """Return the shape of a tensor.

    Parameters
    ----------
    spelling
        Of the tensor.
    parts
        Of the tensors that it chains, by label.
    sizes
        Extent of every axis.

    Examples
    --------
    >>> parts = {"q": Spelling.of("(g r d) h"), "k": Spelling.of("(g d) h")}
    >>> extents(Spelling.of("(g [q k]) h"), parts, {"g": 2, "r": 3, "d": 4, "h": 8})
    (32, 8)
    """

    def extent(token: Token) -> int:
        if isinstance(token, str):
            return sizes[token]
        inner = (inner_axes(spelling, parts[label]) for label in token)
        return sum(prod(sizes[axis] for axis in axes) for axes in inner)

    return tuple(prod(map(extent, dim)) for dim in spelling.dims)


def solved(
    shapes: Sequence[tuple[Spelling, Sequence[int]]],
    parts: Mapping[str, Spelling],
    known: Mapping[str, int],
) -> dict[str, int]:
    """Return the extent of every axis that shapes and known extents leave no choice for.

    Parameters
    ----------
    shapes
        Tensors by their spellings, with their shapes.
    parts
        Spellings of the tensors that these chain, by label.
    known
        Extents that are known beforehand.

    Raises
    ------
    UsageError
        A shape cannot be what its spelling says.

    Examples
    --------
    >>> whole, parts = Spelling.of("[gate up] h"), {"gate": Spelling.of("f h")}
    >>> solved([(whole, (8, 3))], parts | {"up": Spelling.of("f h")}, {})
    {'f': 4, 'h': 3}
    """
    sizes = dict(known)
    for spelling, shape in shapes:
        if len(spelling.dims) != len(shape):
            raise UsageError(
                "a tensor has another number of dims than its spelling",
                expected=len(spelling.dims),
                found=f"shape {tuple(shape)}",
            )
    while any(_solve(spelling, shape, parts, sizes) for spelling, shape in shapes):
        pass
    return sizes


def _solve(
    spelling: Spelling, shape: Sequence[int], parts: Mapping[str, Spelling], sizes: dict[str, int]
) -> bool:
    """Solve the dims of one tensor that have one unknown axis; whether there were any."""
    found = False
    for dim, extent in sorted(
        zip(spelling.dims, shape, strict=True), key=lambda pair: len(pair[0])
    ):
        unknown = {axis for axis in _axes_of(dim, spelling, parts) if axis not in sizes}
        if len(unknown) == 1:
            (axis,) = unknown
            value = _value(dim, extent, spelling, parts, sizes, axis)
            if value is not None:
                sizes[axis] = value
                found = True
    return found


def _axes_of(
    dim: Sequence[Token], spelling: Spelling, parts: Mapping[str, Spelling]
) -> Iterator[str]:
    for token in dim:
        if isinstance(token, str):
            yield token
        else:
            for label in token:
                yield from inner_axes(spelling, parts[label])


def _value(
    dim: tuple[Token, ...],
    extent: int,
    spelling: Spelling,
    parts: Mapping[str, Spelling],
    sizes: Mapping[str, int],
    axis: str,
) -> int | None:
    """The extent of the one unknown axis of a dim; None where it does not decide it.

    As a function of that axis the extent is ``a·x + b``, unless it is a power of it.
    """
    alone = Spelling((dim, tuple(a for a in spelling.axes if a not in dim)))
    others = dict.fromkeys(alone.axes, 1) | dict(sizes)
    at = [extents(alone, parts, others | {axis: x})[0] for x in (0, 1, 2)]
    slope = at[1] - at[0]
    if not slope or at[2] - at[1] != slope:
        return None
    value, rest = divmod(extent - at[0], slope)
    if rest or value < 0:
        raise UsageError(
            "an extent is not what the spelling of its dim says",
            expected=f"{at[0]} + {slope} × {axis}" if at[0] else f"a multiple of {slope}",
            found=extent,
        )
    return value
