"""The number of key/value heads, from the model configuration that a trainer keeps.

Theory. AutoTP decides widths by the number of heads, and takes it from the configuration of the
model: the first of a list of attributes that is there (in `text_config`, where there is one). A
trainer's folder has the same configuration as ``config.json``, beside the tag folder or in it, so
the same number is read by the same rule. Where there is no such file nothing is concluded.

Source: `module_inject/tp_shard.py` (`_KV_HEAD_ATTRS`, `from_model_config`), DeepSpeed 0.19.8.
"""

from __future__ import annotations

import json
from pathlib import Path

HEAD_KEYS = (
    "num_key_value_heads",
    "num_kv_heads",
    "multi_query_group_num",
    "n_head_kv",
    "kv_n_heads",
    "num_attention_heads",
    "n_heads",
    "attention_heads",
)
"""Names of the number, in the order in which AutoTP looks for them."""

CONFIG = "config.json"
LARGEST_CONFIG = 1 << 22
"""Largest ``config.json`` that is read, in bytes."""


def configured_heads(folder: Path) -> int | None:
    """The number of key/value heads that a ``config.json`` in or above a tag folder states.

    Parameters
    ----------
    folder
        The tag folder.
    """
    for place in (folder, folder.parent):
        path = place / CONFIG
        if path.is_file() and path.stat().st_size <= LARGEST_CONFIG:
            return _heads_in(path)
    return None


def _heads_in(path: Path) -> int | None:
    try:
        config = json.loads(path.read_bytes())
    except ValueError:
        return None
    if not isinstance(config, dict):
        return None
    inner = config.get("text_config")
    stated = inner if isinstance(inner, dict) else config
    found = next((stated[key] for key in HEAD_KEYS if stated.get(key) is not None), None)
    is_count = isinstance(found, int) and not isinstance(found, bool) and found > 0
    return found if is_count else None
