"""What the options of the commands state about a source that its files leave open.

Theory. A DCP folder is a tree of a training loop's own making. Where the tree does not say which of
two models is meant, or which tensors are frozen, the user does; a source of another format, which
says it all, refuses these options.
"""

from __future__ import annotations

from dataclasses import dataclass

from reshard.formats.dcp.options import DcpReading, Keys
from reshard.formats.registry import ReadOptions


@dataclass(frozen=True, slots=True)
class ReadingFlags:
    """The options as given; None and an empty tuple mean that one was not."""

    model_key: str | None = None
    optimizer_key: str | None = None
    frozen: tuple[str, ...] = ()

    def options(self) -> ReadOptions | None:
        """What they state, None when none was given."""
        if self == ReadingFlags():
            return None
        return DcpReading(keys=Keys(self.model_key, self.optimizer_key), frozen=self.frozen)
