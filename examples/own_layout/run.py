"""A way of cutting that nobody knows becomes a map, and shards move by it."""

import json

import numpy as np

import reshard

HEADS, ROWS, WIDTH = 8, 6, 4  # each head has 2 rows of Q, 2 of K, 2 of V


def cut(full, rank, ranks):
    """Deal heads out like cards: rank r has heads r, r + ranks, ..."""
    return full.reshape(HEADS, ROWS, WIDTH)[rank::ranks].reshape(-1, WIDTH)


def map_for(ranks):
    """Find the map of that cut at a degree."""
    return reshard.trace_map(
        lambda full, rank: cut(full, rank, ranks), (HEADS * ROWS, WIDTH), range(ranks)
    )


two, four = map_for(2), map_for(4)
two.validate("attn.qkv.weight")
print(two)

# From two ranks to four, without the whole weight.
plan = reshard.compose(four, two)
plan.verify()
print(plan)

full = np.random.default_rng(0).standard_normal((HEADS * ROWS, WIDTH)).astype(np.float32)
moved = plan.apply({rank: cut(full, rank, 2) for rank in range(2)})
for rank in range(4):
    if not np.array_equal(moved[rank], cut(full, rank, 4)):
        raise SystemExit(f"rank {rank} holds something else")

# What to put into client_state when saving; reshard and DeepSpeed's converter read it.
info = reshard.deepspeed_info({"attn.qkv.weight": two})
print(json.dumps(info["affine_map"]["params"], default=str)[:72], "...")
print("moved from 2 ranks to 4, equal to the last bit")
