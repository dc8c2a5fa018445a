"""The transport: the four things that a transfer asks of a process group.

Theory. Everything above speaks of group ranks, bytes and tensors of bytes. The transport gathers a
byte string from every rank, and posts a batch of receives and sends between pairs; both end within
a time that the user sets, or raise. Receives are posted before sends, and all of a batch at once,
so that NCCL's first exchange of a pair, which behaves like a collective, cannot wait for another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
from torch import distributed

from reshard.errors import TransferError, UsageError

_Answer = TypeVar("_Answer")

Parcel = tuple[int, torch.Tensor]
"""A group rank, and bytes that go to it or come from it (a flat tensor of ``uint8``)."""


class Transport(Protocol):
    """What a transfer asks for; :class:`GroupTransport` is it over ``torch.distributed``."""

    @property
    def rank(self) -> int:
        """Rank of the process in the group."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks of the group."""
        ...

    @property
    def device(self) -> torch.device:
        """Where bytes must lie to be sent."""
        ...

    def gather(self, said: bytes) -> list[bytes]:
        """Return what every rank says, by rank; the same on all."""
        ...

    def post(self, receives: Sequence[Parcel], sends: Sequence[Parcel]) -> Callable[[], None]:
        """Begin to receive and send; the answer waits until both are done."""
        ...


@dataclass(frozen=True, slots=True)
class GroupTransport:
    """A process group of ``torch.distributed``."""

    group: Any
    """The group."""
    timeout: float
    """Seconds that one wait may take."""

    @property
    def rank(self) -> int:
        """Rank of the process in the group."""
        return distributed.get_rank(self.group)

    @property
    def size(self) -> int:
        """Number of ranks of the group."""
        return distributed.get_world_size(self.group)

    @property
    def device(self) -> torch.device:
        """Where bytes must lie to be sent: NCCL takes those of GPUs only."""
        backend = distributed.get_backend(self.group)
        return torch.device("cuda") if backend == "nccl" else torch.device("cpu")

    def gather(self, said: bytes) -> list[bytes]:
        """Return what every rank says, by rank: lengths first, then texts of equal length."""
        device = self.device
        lengths = self._gathered(torch.tensor([len(said)], dtype=torch.int64, device=device))
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        texts = self._gathered(padded.to(device))
        return [
            text[: int(length)].cpu().numpy().tobytes()
            for text, length in zip(texts, lengths, strict=True)
        ]

    def post(self, receives: Sequence[Parcel], sends: Sequence[Parcel]) -> Callable[[], None]:
        """Begin to receive and send in one batch."""
        ops = [
            distributed.P2POp(call, tensor, group=self.group, group_peer=peer)
            for call, parcels in ((distributed.irecv, receives), (distributed.isend, sends))
            for peer, tensor in parcels
        ]
        peers = sorted({peer for peer, _ in (*receives, *sends)})
        begun = self._guarded(lambda: distributed.batch_isend_irecv(ops), peers)

        def wait() -> None:
            self._guarded(lambda: self._done(begun), peers)

        return wait

    def _gathered(self, mine: torch.Tensor) -> list[torch.Tensor]:
        everyone = [torch.empty_like(mine) for _ in range(self.size)]

        def call() -> list[torch.Tensor]:
            work = distributed.all_gather(everyone, mine, group=self.group, async_op=True)
            self._done([work])
            return everyone

        return self._guarded(call, range(self.size))

    def _done(self, begun: Sequence[Any]) -> None:
        for work in begun:
            work.wait(timedelta(seconds=self.timeout))

    def _guarded(self, call: Callable[[], _Answer], peers: Sequence[int]) -> _Answer:
        try:
            return call()
        except RuntimeError as error:
            whom = ", ".join(str(peer) for peer in peers if peer != self.rank)
            raise TransferError(
                "a rank of the group was lost, or did not answer in time",
                rank=self.rank,
                expected=f"ranks {whom} within {self.timeout:g} s",
                found=str(error).strip().split("\n")[0],
                next_step="the source is as it was, save what release=True had given up after it"
                " had arrived; make a group of the ranks that live and move again",
            ) from error


def transport_of(group: object, timeout: float) -> Transport:
    """Return the transport of a group: None stands for all ranks; a transport stands for itself.

    Raises
    ------
    UsageError
        When ``torch.distributed`` has not been initialised, or this process is not in the group.
    """
    if hasattr(group, "gather") and hasattr(group, "post"):
        made: Transport = group  # type: ignore[assignment]
        return made
    if not distributed.is_available() or not distributed.is_initialized():
        raise UsageError(
            "there is no process group",
            next_step="call torch.distributed.init_process_group first",
        )
    whole = distributed.group.WORLD if group is None else group
    if distributed.get_rank(whole) < 0:  # type: ignore[arg-type]
        raise UsageError(
            "this process is not in the group",
            next_step="call this on the ranks of the group only, or give a group of all of them",
        )
    return GroupTransport(whole, timeout)
