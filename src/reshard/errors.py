"""Every error that reshard raises, in one place.

Theory. An error is read at night by someone whose run is down. So each one carries, as attributes
and in its text, the five things that person needs: *what* went wrong, *where* (file, rank,
parameter, state, dim), what was *expected*, what was *found*, and the *next step*. The text is one
line, ready to be printed after ``error:``::

    a rank file is missing: zero_pp_rank_1_mp_rank_00_optim_states.pt (rank 1): expected 2 files,
    found 1; next: copy it from the node that wrote it, or name its folder with --also

The hierarchy says who is at fault: the map (:class:`InvalidMapError` and its kin), a file
(:class:`ArchiveError`, :class:`HostileFileError`), the folder (:class:`CheckpointError`), the
layout (:class:`LayoutError`), the destination (:class:`OutputError`), the request
(:class:`UsageError`) or reshard itself (:class:`InternalError`). Each also derives from the
built-in that a caller would expect to catch (``ValueError``, ``FileNotFoundError``, ``OSError``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast


class ReshardError(Exception):
    """Base of all errors of this package.

    Parameters
    ----------
    what
        What went wrong, a clause without a full stop.
    file, rank, parameter, state, dim
        Where; those that are known.
    expected, found
        The two values that disagree, as text or as values with a readable ``str``.
    next_step
        What the reader can do about it.

    Examples
    --------
    >>> print(ReshardError("sizes differ", parameter="w", dim=0, expected=4, found=3))
    sizes differ: parameter w, dim 0: expected 4, found 3
    """

    def __init__(  # noqa: PLR0913 - keyword-only: the places and numbers of the message
        self,
        what: str,
        *,
        file: object = None,
        rank: object = None,
        parameter: str | None = None,
        state: str | None = None,
        dim: int | None = None,
        expected: object = None,
        found: object = None,
        next_step: str | None = None,
    ) -> None:
        self.what = what
        self.file = None if file is None else str(file)
        self.rank = rank
        self.parameter = parameter
        self.state = state
        self.dim = dim
        self.expected = expected
        self.found = found
        self.next_step = next_step
        super().__init__(self._line())

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by text and attributes: constructors of subclasses take other arguments."""
        return _restored, (type(self), self.args), self.__dict__

    def _where(self) -> Iterable[str]:
        if self.file is not None:
            yield self.file
        for word in ("rank", "parameter", "state", "dim"):
            value = getattr(self, word)
            if value is not None:
                yield f"{word} {shown(value)}"

    def _line(self) -> str:
        numbers = ((word, getattr(self, word)) for word in ("expected", "found"))
        said = ", ".join(f"{word} {shown(value)}" for word, value in numbers if value is not None)
        parts = (self.what, ", ".join(self._where()), said)
        line = ": ".join(part for part in parts if part)
        return f"{line}; next: {self.next_step}" if self.next_step else line


LONGEST_VALUE = 2000
"""Characters of a value in a message."""


def shown(value: object) -> str:
    """Return a value as text of bounded length, whatever it is.

    Examples
    --------
    >>> shown(3), shown(10**5000), len(shown("a" * 10**6))
    ('3', 'an integer of 16610 bits', 2001)
    """
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 4096:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = str(value)
    except (ValueError, RecursionError) as error:  # a part that Python does not show
        return f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


def _restored(kind: type[ReshardError], arguments: tuple[object, ...]) -> ReshardError:
    base = cast("type[BaseException]", kind.__base__)  # an OSError is allocated as one
    made = base.__new__(kind)
    made.args = arguments
    return made


class InternalError(ReshardError):
    """An invariant of reshard itself is broken; never the user's fault."""


class UsageError(ReshardError, ValueError):
    """The request cannot be understood or contradicts itself."""


class InvalidMapError(ReshardError, ValueError):
    """A piece or a map breaks one of the properties that every map must have.

    Parameters
    ----------
    what
        What went wrong.
    broken
        Which property: ``"form"`` (a field is malformed), ``"bounds"`` (an element outside its
        tensor or shard), ``"write-once"`` (an element of a shard written twice or not at all),
        ``"P1"`` (coverage), ``"P3"`` (invertibility) or ``"P5"`` (homogeneity).
    ranks
        The ranks concerned, ascending.
    piece
        Index of the piece in its rank's list, when one piece is at fault.
    offset
        The first offending offset, in elements.
    parameter, dim, expected, found, next_step
        As for :class:`ReshardError`.
    """

    def __init__(  # noqa: PLR0913 - keyword-only: the places and numbers of the message
        self,
        what: str,
        *,
        broken: str,
        ranks: Iterable[int] = (),
        piece: int | None = None,
        offset: int | None = None,
        parameter: str | None = None,
        dim: int | None = None,
        expected: object = None,
        found: object = None,
        next_step: str | None = None,
    ) -> None:
        self.broken = broken
        self.ranks = tuple(ranks)
        self.piece = piece
        self.offset = offset
        place = "".join(
            f", {word} {value}"
            for word, value in (
                ("ranks" if len(self.ranks) > 1 else "rank", ", ".join(map(str, self.ranks))),
                ("piece", piece),
                ("offset", offset),
            )
            if value not in (None, "")
        )
        super().__init__(
            f"{what} ({broken}{place})",
            parameter=parameter,
            dim=dim,
            expected=expected,
            found=found,
            next_step=next_step,
        )


class CompositionError(ReshardError, ValueError):
    """Two maps cannot be composed, or a plan does not prove."""


class ReplicaMismatchError(ReshardError, ValueError):
    """Holders that should hold the same elements hold different ones (P2).

    ``ranks`` are the holders that disagree and ``offset`` the first offset, in elements of the
    logical tensor, at which they do.
    """

    def __init__(
        self,
        what: str,
        *,
        ranks: Iterable[int] = (),
        offset: int | None = None,
        file: object = None,
        parameter: str | None = None,
        state: str | None = None,
        found: object = None,
        next_step: str | None = None,
    ) -> None:
        self.ranks = tuple(ranks)
        self.offset = offset
        super().__init__(
            what,
            file=file,
            rank=", ".join(map(str, self.ranks)) or None,
            parameter=parameter,
            state=state,
            found=found,
            next_step=next_step,
        )


class ScaledStateError(ReshardError, NotImplementedError):
    """A scaled optimizer state was asked for; its hyperparameters would have to change too."""


class TraceError(ReshardError, ValueError):
    """A partition function is not a pure view, so no map describes it."""


class DocumentError(ReshardError, ValueError):
    """A JSON document (map, plan, layout) is malformed, hostile or of an unknown version."""


class ArchiveError(ReshardError, ValueError):
    """A file is not what its format says: cut short, zero bytes, not an archive, bad record."""


class HostileFileError(ArchiveError):
    """A file names a global that never belongs in a checkpoint."""


class CheckpointError(ReshardError, ValueError):
    """The files of a checkpoint do not fit together."""


class MissingFileError(CheckpointError, FileNotFoundError):
    """A file that the checkpoint needs is not there."""


class LayoutError(CheckpointError):
    """How a parameter is cut is not known, or the rules that say so contradict the data."""


class UnknownLayoutError(LayoutError):
    """Nobody states how parameters were cut over tensor-parallel ranks.

    ``shards`` has all of them: parameter -> model-parallel rank -> shape of its shard.
    """

    def __init__(
        self,
        what: str,
        *,
        shards: Mapping[str, Mapping[int, tuple[int, ...]]] | None = None,
        file: object = None,
        parameter: str | None = None,
        expected: object = None,
        found: object = None,
        next_step: str | None = None,
    ) -> None:
        self.shards = {name: dict(shapes) for name, shapes in (shards or {}).items()}
        super().__init__(
            what,
            file=file,
            parameter=parameter,
            expected=expected,
            found=found,
            next_step=next_step,
        )


class UnsupportedError(ReshardError, NotImplementedError):
    """The input is sound, and this version of reshard has no exact way to treat it."""


class TransferError(ReshardError, RuntimeError):
    """Ranks of a live transfer contradict each other, one refused or was lost, or a message is bad.

    Where it follows from what all ranks have said it is the same on all of them.
    """


class OutputError(ReshardError, OSError):
    """The destination exists, is the source, cannot be written, or has no room."""

    def __str__(self) -> str:
        return self._line()


def count_text(number: int, noun: str, plural: str | None = None) -> str:
    """Write a number with its noun, in a message.

    Parameters
    ----------
    number
        How many.
    noun, plural
        Of what; the plural where it takes more than an s.

    Examples
    --------
    >>> count_text(1, "byte"), count_text(4096, "byte"), count_text(0, "entry", "entries")
    ('1 byte', '4096 bytes', '0 entries')
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
