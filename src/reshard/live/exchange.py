"""The exchange: a plan carried out on this rank, round by round, within its staging budget.

Theory. A message that is one contiguous stretch of memory goes from there and arrives there; any
other is packed into a staging buffer, or unpacked from one. Two rounds are under way at a time, so
that one is packed and unpacked while the other is on the wire; what stays within the rank is
copied after the first has been posted. Each message is followed by its digest, which the receiver
checks before it unpacks. A bad one is remembered, and the rounds go on, because the others wait for
this rank; at the end of the window all ranks hear of it and raise the same error. The source is
only read. With ``release`` its memory is given back when all ranks have said that what was in it
has arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from reshard.errors import TransferError
from reshard.geometry.index_math import numel
from reshard.live.agreement import together
from reshard.live.digests import NBYTES, digest_of
from reshard.live.elements import dtype_of, word_of
from reshard.live.memory import Memory
from reshard.live.plan import (
    IN_FLIGHT,
    Block,
    LivePlan,
    Window,
    blocks_between,
    messages_of,
    own_rounds,
)
from reshard.live.transport import Transport


@dataclass(frozen=True, slots=True)
class Side:
    """One direction of a message: its blocks, the bytes on the wire, whether they were staged."""

    peer: int
    blocks: list[Block]
    payload: torch.Tensor
    direct: bool
    seed: int


@dataclass(slots=True)
class Exchange:
    """A plan being carried out on one rank."""

    plan: LivePlan
    """The same on all ranks."""
    transport: Transport
    """The group."""
    source: Memory
    target: Memory
    """This rank's memory on both sides."""
    sent_bytes: int = 0
    _staging: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)

    def run(self, *, release: bool) -> None:
        """Carry out all windows.

        Raises
        ------
        TransferError
            A rank was lost (on every rank, within the timeout), or a message arrived damaged (the
            same error on all).
        """
        for number, window in enumerate(self.plan.windows):
            keys = [self.plan.moves[move].key for move in window.moves]
            self.target.claim(keys)
            damage = self._window(number, window)
            self._agree(damage)
            if release:
                self.source.release(keys)

    def _agree(self, damage: list[dict[str, object]]) -> None:
        """Tell the others what arrived damaged, and raise alike on all ranks when something did."""
        told = together(self.transport, lambda: damage)
        found = [(rank, one) for rank, all_of in enumerate(told) for one in all_of]
        if found:
            rank, first = found[0]
            raise TransferError(
                f"a message arrived damaged: from rank {first['sender']},"
                f" {first['nbytes']} bytes of {first['tensors']}",
                rank=rank,
                expected=f"digest {first['expected']}",
                found=f"{first['found']} ({len(found)} messages in all)",
                next_step="the source still holds it; look at the network or memory between these"
                " two, then move again",
            )

    def _window(self, number: int, window: Window) -> list[dict[str, object]]:
        rank = self.transport.rank
        out = _Streams(lambda peer: messages_of(self.plan, window, rank, peer))
        into = _Streams(lambda peer: messages_of(self.plan, window, peer, rank))
        damage: list[dict[str, object]] = []
        under_way: deque[Callable[[], None]] = deque()
        local = self._local(window)
        for turn, (to, of) in enumerate(own_rounds(window, rank)):
            slot = turn % IN_FLIGHT
            if len(under_way) == IN_FLIGHT:
                under_way.popleft()()
            under_way.append(
                self._post(
                    None if of is None else self._incoming(window, *into.next(of, number), slot),
                    None if to is None else self._outgoing(window, *out.next(to, number), slot),
                    damage,
                )
            )
            self._copy_some(local)
        for finish in under_way:
            finish()
        for block in local:
            self._copy(block)
        return damage

    # -- one round ---------------------------------------------------------------------------

    def _post(
        self, incoming: Side | None, outgoing: Side | None, damage: list[dict[str, object]]
    ) -> Callable[[], None]:
        receives, sends = [], []
        digest = torch.empty(NBYTES, dtype=torch.uint8, device=self.transport.device)
        if incoming:
            receives = [(incoming.peer, incoming.payload), (incoming.peer, digest)]
        if outgoing:
            told = digest_of(outgoing.payload, _seed(outgoing, self.transport.rank, outgoing.peer))
            sends = [(outgoing.peer, outgoing.payload), (outgoing.peer, told)]
            self.sent_bytes += outgoing.payload.numel()
        wait = self.transport.post(receives, sends)

        def finish() -> None:
            wait()
            if incoming:
                self._arrived(incoming, digest, damage)

        return finish

    def _arrived(self, incoming: Side, told: torch.Tensor, damage: list[dict[str, object]]) -> None:
        seed = _seed(incoming, incoming.peer, self.transport.rank)
        found = digest_of(incoming.payload, seed)
        if not torch.equal(found, told):
            keys = list(dict.fromkeys(self.plan.moves[move].key for move, _, _ in incoming.blocks))
            damage.append(
                {
                    "sender": incoming.peer,
                    "nbytes": incoming.payload.numel(),
                    "tensors": ", ".join(f"{name} ({state})" for name, state in keys[:3]),
                    "expected": _hex(told),
                    "found": _hex(found),
                }
            )
        elif not incoming.direct:
            for block, part in self._parts(incoming):
                self._into(self.target, block, near=True).copy_(part)

    def _outgoing(
        self, window: Window, peer: int, blocks: list[Block], seed: int, slot: int
    ) -> Side:
        direct = self._direct(blocks, self.source, near=False)
        if direct is not None:
            return Side(peer, blocks, direct, direct=True, seed=seed)
        side = Side(
            peer, blocks, self._staged(window, "out", slot, blocks), direct=False, seed=seed
        )
        for block, part in self._parts(side):
            _fill(part, self._into(self.source, block, near=False), block[2])
        return side

    def _incoming(
        self, window: Window, peer: int, blocks: list[Block], seed: int, slot: int
    ) -> Side:
        direct = self._direct(blocks, self.target, near=True)
        if direct is not None:
            return Side(peer, blocks, direct, direct=True, seed=seed)
        return Side(peer, blocks, self._staged(window, "in", slot, blocks), direct=False, seed=seed)

    # -- memory ------------------------------------------------------------------------------

    def _staged(self, window: Window, way: str, slot: int, blocks: list[Block]) -> torch.Tensor:
        held = self._staging.get((way, slot))
        if held is None or held.numel() < window.message_bytes:
            held = torch.empty(
                window.message_bytes, dtype=torch.uint8, device=self.transport.device
            )
            self._staging[way, slot] = held
        return held[: sum(self._nbytes(block) for block in blocks)]

    def _nbytes(self, block: Block) -> int:
        move, link, _ = block
        return numel(n for n, _, _ in link.dims) * self.plan.moves[move].itemsize

    def _parts(self, side: Side) -> Iterator[tuple[Block, torch.Tensor]]:
        """Yield each block of a staged message with its place in the buffer."""
        at = 0
        for block in side.blocks:
            size = self._nbytes(block)
            move = self.plan.moves[block[0]]
            part = side.payload[at : at + size].view(_type_of(move.source_dtype, move.dtype))
            yield block, part.view([n for n, _, _ in block[1].dims])
            at += size

    def _into(self, memory: Memory, block: Block, *, near: bool) -> torch.Tensor:
        """Return a block as a view of this rank's memory."""
        number, link, _ = block
        move = self.plan.moves[number]
        flat = memory.flat(move.key)
        if move.source_dtype == move.dtype and not _scales(block):
            flat = flat.view(word_of(move.dtype))
        shape = [n for n, _, _ in link.dims]
        strides = [s if near else f for _, s, f in link.dims]
        return flat.as_strided(
            shape, strides, flat.storage_offset() + (link.near if near else link.far)
        )

    def _direct(self, blocks: list[Block], memory: Memory, *, near: bool) -> torch.Tensor | None:
        """Return the memory that a message is, where it is one stretch of it as it is."""
        if len(blocks) > 1 or _scales(blocks[0]):
            return None
        move = self.plan.moves[blocks[0][0]]
        dims = blocks[0][1].dims
        step = dims[0][1 if near else 2] if dims else 1
        plain = near or move.source_dtype == move.dtype
        if len(dims) > 1 or step != 1 or not plain:
            return None
        stretch = self._into(memory, blocks[0], near=near)
        if stretch.device != self.transport.device:
            return None
        return stretch.reshape(-1).view(torch.uint8)

    # -- what stays here -----------------------------------------------------------------------

    def _local(self, window: Window) -> Iterator[Block]:
        rank = self.transport.rank
        return blocks_between(self.plan, window, rank, rank)

    def _copy_some(self, local: Iterator[Block]) -> None:
        block = next(local, None)
        if block is not None:
            self._copy(block)

    def _copy(self, block: Block) -> None:
        _fill(
            self._into(self.target, block, near=True),
            self._into(self.source, block, near=False),
            block[2],
        )


class _Streams:
    """The messages to or from each peer, taken one by one, numbered."""

    __slots__ = ("_begun", "_make")

    def __init__(self, make: Callable[[int], Iterator[list[Block]]]) -> None:
        self._make = make
        self._begun: dict[int, Iterator[tuple[int, list[Block]]]] = {}

    def next(self, peer: int, window: int) -> tuple[int, list[Block], int]:
        """Return the peer, its next message and the number of that in the transfer."""
        if peer not in self._begun:
            self._begun[peer] = enumerate(self._make(peer))
        number, blocks = next(self._begun[peer])
        return peer, blocks, window << 32 | number


def _seed(side: Side, sender: int, receiver: int) -> int:
    return (side.seed * 0x9E3779B1 + sender * 0x10001 + receiver) & ((1 << 62) - 1)


def _hex(digest: torch.Tensor) -> str:
    return bytes(digest.cpu().tolist()).hex()


def _scales(block: Block) -> bool:
    return block[2] != 1.0


def _fill(place: torch.Tensor, block: torch.Tensor, scale: float) -> None:
    """Copy a block, times its scale, in its own element type."""
    place.copy_(block if scale == 1.0 else block * scale)


def _type_of(source: str, target: str) -> torch.dtype:
    """Return what a staged element is: its bits, or a number of the target's type."""
    return word_of(target) if source == target else dtype_of(target)
