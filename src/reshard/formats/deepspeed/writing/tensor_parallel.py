"""Finds how the target cuts every parameter over tensor-parallel ranks.

Theory. Nothing is taken from a parameter's name. Sources of layouts are asked in turn, and the
first that knows decides:

1. what the user states (`--layout FILE`): its words hold for every degree;
2. a stored map of the wanted degree;
3. a stored map of another degree, rescaled (`rescaling`);
4. the conversion keys, which mean even splits at every degree.

A stored map is that of the source's own degree, or one that reshard kept when it wrote the source
for another degree: a conversion through one tensor rank would otherwise forget how the model is
cut. Those are under :data:`KEPT` in `universal_checkpoint_info`, beside the number of heads;
DeepSpeed ignores keys that it does not know.

With one tensor rank every parameter is whole, and only a padded vocabulary needs an answer. Where
nobody knows, all parameters concerned are named in one error.

Sources: `checkpoint/constants.py`, `module_inject/layers.py`; Megatron-LM
(`_vocab_size_with_padding`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from reshard.errors import LayoutError, UsageError
from reshard.formats.deepspeed.conversion_keys import ConversionKeys
from reshard.formats.deepspeed.info import AUTOTP_MARK, read_conversion_keys
from reshard.formats.deepspeed.writing.contents import Contents
from reshard.formats.deepspeed.writing.cuts import Cut, padded_cut
from reshard.formats.deepspeed.writing.expert_grid import ExpertGrid
from reshard.formats.deepspeed.writing.model_numbers import configured_heads
from reshard.formats.deepspeed.writing.options import NativeOptions
from reshard.formats.deepspeed.writing.rescaling import AMBIGUOUS, Known, Rescaling
from reshard.formats.deepspeed.writing.settings import INFO
from reshard.formats.layout_source import GovernedMap, LayoutSource, listed, literal_name
from reshard.formats.parsing import Cursor
from reshard.geometry import ParamAffineMap, maps_from_document
from reshard.layouts.autotp import shard_sizes
from reshard.layouts.builders import contiguous_split_map
from reshard.layouts.ranges import resized

KEPT = "reshard_maps"
"""Key of the info under which maps of other degrees are kept: degree -> map document."""

KEPT_HEADS = "reshard_kv_heads"
"""Key of the info under which the number of key/value heads is kept."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """What the source says about cuts.

    Parameters
    ----------
    info
        `universal_checkpoint_info`, empty when there is none.
    degree
        Its own number of tensor ranks.
    file
        For messages.
    configured_heads
        Number of key/value heads in the trainer's ``config.json``.
    """

    info: Mapping[str, object]
    degree: int
    file: str
    configured_heads: int | None = None

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
        return found

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
    return Source(info, contents.checkpoint.topology.tp, file, heads)


# --------------------------------------------------------------------------- the search


def cuts_of(
    contents: Contents, options: NativeOptions, source: Source, experts: ExpertGrid | None
) -> dict[str, Cut]:
    """How the target cuts every parameter and buffer over tensor-parallel ranks.

    Parameters
    ----------
    contents, options
        What is written, and for which topology.
    source
        What the source says about cuts.
    experts
        Where the experts are; their parameters are cut over EP ranks instead, or beside that.

    Raises
    ------
    LayoutError
        With all parameters of which nobody knows how they are cut.
    """
    finder = CutFinder(contents, options, source, source.keys(options.tp))
    if experts is None:
        return finder.cuts()
    if experts.is_cut:
        found = finder.cuts()
        return found | experts.cuts(found)
    finder.found |= experts.cuts({})
    return finder.cuts()


@dataclass(slots=True)
class CutFinder:
    """The search for the cuts of one target.

    Parameters
    ----------
    contents, options
        What is written, and for which topology.
    source, keys
        What the source says; its keys are read for the target's degree.
    found
        Cuts found so far, by parameter.
    reasons
        Why parameters have none, where somebody can tell.
    """

    contents: Contents
    options: NativeOptions
    source: Source
    keys: ConversionKeys
    found: dict[str, Cut] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def kv_heads(self) -> int | None:
        """The number of heads that the user or the source states.

        Raises
        ------
        UsageError
            When both do, and not the same.
        """
        stated, known = self.options.kv_heads, self.source.kv_heads
        if None not in (stated, known) and stated != known:
            raise UsageError(
                "the source has another number of key/value heads than was stated",
                file=self.source.file,
                expected=f"{known}, of its config.json or of an earlier conversion",
                found=f"--kv-heads {stated}",
                next_step="leave --kv-heads out, or correct it",
            )
        return stated or known

    def cuts(self) -> dict[str, Cut]:
        """The cut of every parameter and buffer.

        Raises
        ------
        LayoutError
            With all parameters of which nobody knows how they are cut.
        """
        contents = self.contents
        names = [*contents.held, *contents.frozen]
        if self.options.layouts is not None:
            self._ask(self.options.layouts, self._left(names))
        if self.options.tp == 1:
            self._whole(self._left(names))
        else:
            self._stored(self._left(names))
            self._rescaled(self._left(names))
            self._keyed(self._left(names))
        missing = self._left(names)
        if missing:
            raise self._unknown(missing)
        for name in self._left(contents.buffers):
            self.found[name] = Cut.whole(contents.shape(name), self.options.tp)
        return self.found

    def _left(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name not in self.found]

    def _whole(self, names: Sequence[str]) -> None:
        """One tensor rank: everything is whole, and a table of the vocabulary may be padded."""
        for name in names:
            shape = self.contents.shape(name)
            rows = self._padded_rows(name)
            padded = rows is not None and rows > shape[0]
            self.found[name] = padded_cut(shape, (rows or 0,)) if padded else Cut.whole(shape, 1)

    def _stored(self, names: Sequence[str]) -> None:
        for name in names:
            maps = self.source.maps.get(name, {})
            if self.options.tp in maps and self._fits(name, maps[self.options.tp]):
                self.found[name] = Cut.exact(maps[self.options.tp])

    def _fits(self, name: str, one: ParamAffineMap) -> bool:
        return one.logical_shape == self.contents.shape(name) and not one.is_scaled

    def _rescaled(self, names: Sequence[str]) -> None:
        known = {}
        for name in names:
            shape = self.contents.shape(name)
            maps = self.source.maps.get(name, {})
            fitting = {degree: one for degree, one in maps.items() if one.logical_shape == shape}
            if fitting:
                known[name] = Known.of(name, shape, fitting)
            elif name in self.source.untouched:
                self.found[name] = Cut.whole(shape, self.options.tp)
        if not known:
            return
        grain = self.contents.config.section("tensor_parallel").get("tp_grain_size")
        rescaling = Rescaling(
            self.options.tp, self.kv_heads, grain if isinstance(grain, int) and grain > 0 else 1
        )
        rescaled, reasons = rescaling.maps(known)
        self.reasons |= reasons
        self.found |= {name: Cut.exact(one) for name, one in rescaled.items()}

    def _keyed(self, names: Sequence[str]) -> None:
        """The conversion keys; AutoTP's own say too little about another degree."""
        if not self.source.is_autotp:
            self._ask(self.keys, names)

    # ----- sources that know words, not extents

    def _ask(self, source: LayoutSource, names: Sequence[str]) -> None:
        """Ask a source that turns shards into maps for the shards that make up a parameter."""
        for name in names:
            if not source.covers(name):
                continue
            answers = {
                governed.whole.canonical(): governed
                for shards in self._possible_shards(name)
                for governed in self._answer(source, name, shards)
            }
            if len(answers) == 1:
                self._take(name, next(iter(answers.values())))
            else:
                self.reasons[name] = (
                    "what is stated fits more than one cut"
                    if answers
                    else "what is stated does "
                    f"not cut shape {self.contents.shape(name)} over {self.options.tp} ranks"
                )

    def _answer(
        self, source: LayoutSource, name: str, shards: Mapping[int, Shape]
    ) -> Iterator[GovernedMap]:
        try:
            governed = source.map_of(name, shards, self.options.tp)
        except LayoutError:
            return
        if governed is None or governed.whole.is_scaled:
            return
        wanted = self._padded_shape(name)
        if governed.whole.logical_shape == wanted:
            yield governed

    def _possible_shards(self, name: str) -> Iterator[dict[int, Shape]]:
        """Shapes of shards that an even or a nearly even split, or none, would make."""
        shape, degree = self._padded_shape(name), self.options.tp
        yield dict.fromkeys(range(degree), shape)
        for dim, extent in enumerate(shape):
            layer = name.rpartition(".")[0]
            sizes = shard_sizes(extent, degree, kv_heads=self.kv_heads, layer=layer)
            yield {rank: resized(shape, dim, size) for rank, size in enumerate(sizes)}

    def _take(self, name: str, governed: GovernedMap) -> None:
        shape, whole = self.contents.shape(name), governed.whole
        if whole.logical_shape == shape:
            self.found[name] = Cut.exact(whole)
            return
        widths = [whole.shard_shapes[rank][0] for rank in range(self.options.tp)]
        if whole.canonical() != contiguous_split_map(whole.logical_shape, widths, 0).canonical():
            self.reasons[name] = "a padded table that is not split along dim 0"
            return
        self.found[name] = padded_cut(shape, widths)

    # ----- a padded vocabulary

    def _padded_shape(self, name: str) -> Shape:
        shape = self.contents.shape(name)
        rows = self._padded_rows(name)
        return shape if rows is None else resized(shape, 0, max(rows, shape[0]))

    def _padded_rows(self, name: str) -> int | None:
        """Rows that the target's model has of a table, None when it is no padded table."""
        if self.source.is_autotp or not self.keys.is_vocabulary(name):
            return None
        rows = self.contents.shape(name)[0]
        stated = self.source.info.get("padded_vocab_size")
        multiple = self.options.vocab_multiple or self._client_multiple()
        if multiple is not None:
            step = multiple * self.options.tp
            return -(-rows // step) * step
        if not isinstance(stated, int):
            return None
        return self._agreed_rows(name, rows, stated)

    def _client_multiple(self) -> int | None:
        """``make_vocab_size_divisible_by`` among Megatron's arguments in the client state."""
        extra = self.contents.checkpoint.extras.get("client_state")
        value = extra.value if extra is not None else None
        arguments = value.get("args") if isinstance(value, Mapping) else None
        fields = getattr(arguments, "fields", None)
        found = fields.get("make_vocab_size_divisible_by") if isinstance(fields, Mapping) else None
        return found if isinstance(found, int) and found > 0 else None

    def _agreed_rows(self, name: str, rows: int, padded: int) -> int:
        """The height that every multiple gives which explains the source's own height."""
        degree = self.source.degree
        heights = {
            -(-rows // (multiple * self.options.tp)) * multiple * self.options.tp
            for multiple in range(1, padded // degree + 1)
            if -(-rows // (multiple * degree)) * multiple * degree == padded
        }
        if len(heights) != 1:
            raise LayoutError(
                "how far the target pads its vocabulary is not stated",
                file=self.source.file,
                parameter=name,
                found=f"{rows} rows, padded to {padded} on {degree} ranks",
                next_step="state the multiple (make-vocab-size-divisible-by) with --vocab-multiple",
            )
        return heights.pop()

    # ----- nobody knows

    def _unknown(self, missing: Sequence[str]) -> LayoutError:
        reasons = list(
            dict.fromkeys(self.reasons[name] for name in missing if name in self.reasons)
        )
        asks = AMBIGUOUS in reasons and self.kv_heads is None
        heads = "state the number of key/value heads with --kv-heads, or " if asks else ""
        return LayoutError(
            f"how {len(missing)} parameters are cut over {self.options.tp} tensor-parallel ranks "
            "is not known",
            file=self.source.file,
            parameter=listed(missing),
            expected="stored maps that tell, or a stated layout",
            found=listed(reasons) if reasons else "nothing about them",
            next_step=f"{heads}state their layout with --layout FILE",
        )
