"""Digests of messages: 64 bits that tell a damaged, cut, or exchanged one.

Theory. Where bytes lie on the CPU, xxh3 reads them at memory speed. Elsewhere they are summed where
they lie, as 64-bit words each times an odd number of its own: a change of any one word changes the
sum, for an odd factor has an inverse. The seed is the message's place in the transfer, so that a
message that arrives in another's place is told too.
"""

from __future__ import annotations

import torch
import xxhash

NBYTES = 8
"""Bytes of a digest."""
_FACTOR = 0x1E3779B97F4A7C15


def digest_of(payload: torch.Tensor, seed: int) -> torch.Tensor:
    """Return the digest of a flat tensor of bytes, as a tensor of :data:`NBYTES` bytes beside it.

    >>> digest_of(torch.zeros(3, dtype=torch.uint8), 1).shape
    torch.Size([8])
    """
    if payload.device.type == "cpu":
        number = xxhash.xxh3_64_intdigest(payload.numpy().data, seed)
        signed = torch.tensor([number - (1 << 64 if number >> 63 else 0)], dtype=torch.int64)
    else:
        signed = summed(payload, seed)
    return signed.view(torch.uint8)


def summed(payload: torch.Tensor, seed: int) -> torch.Tensor:
    """Return the sum of a flat tensor's words by weights, on its own device.

    >>> zeros = torch.zeros(9, dtype=torch.uint8)
    >>> bool(summed(zeros, 1) == summed(zeros, 2))
    False
    """
    count = payload.numel() // 8 * 8
    tail = torch.zeros(8, dtype=torch.uint8, device=payload.device)
    tail[: payload.numel() - count] = payload[count:]
    aligned = payload[:count] if payload.storage_offset() % 8 == 0 else payload[:count].clone()
    total = torch.full((1,), seed * 2 + payload.numel(), dtype=torch.int64, device=payload.device)
    at = seed
    for words in (aligned.view(torch.int64), tail.view(torch.int64)):
        place = torch.arange(at, at + words.numel(), dtype=torch.int64, device=payload.device)
        total += (words * (place * _FACTOR | 1)).sum()
        at += words.numel()
    return total
