"""Digests that many workers can make of one tensor.

Theory. A plain hash must see its input in order, which would tie a tensor to one worker. So a
tensor is cut into *leaves* of 4 MiB, each leaf has an xxh3-128 digest, and the digest of the tensor
is the xxh3-128 of its leaves' digests in order. The leaf size is part of the definition and depends
on neither workers nor memory, so digests of equal bytes are always equal.

It detects accidents (a bad disk, a truncated copy, a changed file); it is no defence against a
forger.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

LEAF_NBYTES = 4 << 20
DIGEST_NAME = "xxh3-128 of the xxh3-128 digests of 4 MiB leaves"


def digest_of(leaves: Iterable[bytes]) -> str:
    """Digest (hexadecimal) of a tensor from those of its leaves, in order.

    Examples
    --------
    >>> len(digest_of([xxhash.xxh3_128_digest(b"ab")]))
    32
    """
    return xxhash.xxh3_128_hexdigest(b"".join(leaves))
