"""What a source says about how its parameters are cut over tensor ranks.

Theory. A source may say it twice: by maps, of its own degree or of others, and by conversion keys.
Maps of other degrees are there when reshard wrote the source: a conversion through one tensor rank
would otherwise forget how the model is cut. They are under :data:`KEPT` in
`universal_checkpoint_info`, beside the number of heads; DeepSpeed ignores keys that it does not
know.

Sources: `checkpoint/constants.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from reshard.formats.deepspeed.conversion_keys import ConversionKeys
from reshard.formats.deepspeed.info import AUTOTP_MARK, read_conversion_keys
from reshard.formats.deepspeed.writing.contents import Contents
from reshard.formats.deepspeed.writing.model_numbers import configured_heads
from reshard.formats.deepspeed.writing.settings import INFO
from reshard.formats.layout_source import literal_name
from reshard.formats.parsing import Cursor
from reshard.geometry import ParamAffineMap, maps_from_document

KEPT = "reshard_maps"
"""Key of the info under which maps of other degrees are kept: degree -> map document."""

KEPT_HEADS = "reshard_kv_heads"
"""Key of the info under which the number of key/value heads is kept."""


@dataclass(frozen=True)
class Source:
    """What the source says about cuts."""

    info: Mapping[str, object]
    """`universal_checkpoint_info`, empty when there is none."""
    degree: int
    """Its own number of tensor ranks."""
    file: str
    """For messages."""
    configured_heads: int | None = None
    """Number of key/value heads in the trainer's ``config.json``."""
    cuts: Mapping[str, ParamAffineMap] = field(default_factory=dict)
    """Its own cuts, where the user stated them: they stand instead of stored maps."""

    @cached_property
    def documents(self) -> dict[int, object]:
        """Map documents by degree, degrees of at least 2."""
        kept = self.info.get(KEPT)
        found: dict[int, object] = {}
        if isinstance(kept, Mapping):
            found |= {int(str(degree)): document for degree, document in kept.items()}
        if "affine_map" in self.info and self.degree > 1:
            found[self.degree] = self.info["affine_map"]
        return found

    @cached_property
    def maps(self) -> dict[str, dict[int, ParamAffineMap]]:
        """Parameter -> degree -> map; maps made from empty placeholders are left out."""
        found: dict[str, dict[int, ParamAffineMap]] = {}
        for degree, document in self.documents.items():
            for pattern, one in maps_from_document(document, validate=True).items():
                name = literal_name(pattern)
                if name is not None and one.numel:
                    found.setdefault(name, {})[degree] = one
        return found | {name: {self.degree: one} for name, one in self.cuts.items()}

    @cached_property
    def untouched(self) -> frozenset[str]:
        """Parameters whose map was made from an empty placeholder: AutoTP never cut them."""
        names = {
            literal_name(pattern)
            for document in self.documents.values()
            for pattern, one in maps_from_document(document).items()
            if not one.numel
        }
        return frozenset(name for name in names if name is not None)

    @property
    def kv_heads(self) -> int | None:
        """Number of key/value heads, as kept by an earlier conversion or by the trainer."""
        kept = self.info.get(KEPT_HEADS)
        return kept if isinstance(kept, int) else self.configured_heads

    @property
    def heads_told_by(self) -> str:
        """Where that number is from, in words."""
        kept = isinstance(self.info.get(KEPT_HEADS), int)
        return "kept by an earlier conversion" if kept else "config.json"

    @property
    def is_autotp(self) -> bool:
        """Whether AutoTP made the cuts."""
        return AUTOTP_MARK in self.info

    @property
    def is_explicit(self) -> bool:
        """Whether its pattern keys describe cuts of every degree."""
        return not self.is_autotp and self.keys(2).explicit

    def keys(self, degree: int) -> ConversionKeys:
        """The conversion keys."""
        return read_conversion_keys(Cursor(dict(self.info), self.file), degree)


def source_of(contents: Contents) -> Source:
    """What a checkpoint says about cuts."""
    extra = contents.checkpoint.extras.get(INFO)
    value = extra.value if extra is not None else None
    info = {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else {}
    file = extra.file if extra is not None and extra.file else contents.checkpoint.path
    heads = configured_heads(Path(contents.checkpoint.path))
    checkpoint = contents.checkpoint
    return Source(info, checkpoint.topology.tp, file, heads, checkpoint.cuts)
