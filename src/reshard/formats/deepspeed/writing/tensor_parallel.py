"""Finds how the target cuts every parameter over tensor-parallel ranks.

Theory. The kind of cut is never taken from a parameter's name. Sources of layouts are asked in
turn, and the first that knows decides:

1. what the user states (`--layout FILE`), where the source itself was not cut by it: the kind of
   cut is stated, the widths follow from the numbers of the model (`layout_cuts`);
2. a map of the wanted degree: the source's own cut, as stated or stored, or one that was kept;
3. a map of another degree, rescaled (`rescaling`);
4. the conversion keys, which mean even splits at every degree.

With one tensor rank every parameter is whole, and only a padded vocabulary needs an answer. Where
nobody knows, all parameters concerned are named in one error.

Sources: `module_inject/layers.py`; Megatron-LM (`_vocab_size_with_padding`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from reshard.errors import LayoutError, UsageError, count_text
from reshard.formats.deepspeed.conversion_keys import ConversionKeys
from reshard.formats.deepspeed.writing.contents import Contents
from reshard.formats.deepspeed.writing.cuts import Cut, padded_cut
from reshard.formats.deepspeed.writing.expert_grid import ExpertGrid
from reshard.formats.deepspeed.writing.options import NativeOptions
from reshard.formats.deepspeed.writing.rescaling import AMBIGUOUS, UNEXPLAINED, Known, Rescaling
from reshard.formats.deepspeed.writing.source_cuts import Source
from reshard.formats.layout_source import listed
from reshard.formats.stated_layouts import StatedLayouts
from reshard.geometry import ParamAffineMap
from reshard.layouts.autotp import HEADS_UNSTATED, ModelNumbers, Widths, shard_sizes
from reshard.layouts.builders import contiguous_split_map
from reshard.layouts.ranges import resized

Shape = tuple[int, ...]


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
    """The search for the cuts of one target."""

    contents: Contents
    options: NativeOptions
    """What is written, and for which topology."""
    source: Source
    keys: ConversionKeys
    """What the source says; its keys are read for the target's degree."""
    found: dict[str, Cut] = field(default_factory=dict)
    """Cuts found so far, by parameter."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why parameters have none, where somebody can tell."""

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
        if self.options.tp == 1:
            self._whole(self._left(names))
        else:
            stated = self._stated(self._left(names))
            unstated = [name for name in names if name not in stated]
            self._stored(self._left(unstated))
            self._rescaled(self._left(unstated))
            self._keyed(self._left(unstated))
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

    def _stated(self, names: Sequence[str]) -> set[str]:
        """Cut what the user states and the source was not cut by; those parameters."""
        layouts = self.options.layouts
        if layouts is None:
            return set()
        stated = {name for name in names if layouts.covers(name) and name not in self.source.cuts}
        self._require_same_for_ties(layouts, stated)
        for name in names:
            if name in stated:
                self._state(layouts, name)
        return stated

    def _require_same_for_ties(self, layouts: StatedLayouts, stated: Collection[str]) -> None:
        """Refuse what is stated differently for two names of one parameter."""

        def answer(name: str, owner: str) -> ParamAffineMap:
            widths = Widths.of_parameter(owner, self.options.tp, self._numbers)
            return layouts.cut_of(name, self._padded_shape(owner), widths)

        ties = self.contents.checkpoint.aliases
        layouts.require_one_answer({a: o for a, o in ties.items() if o in stated}, answer)

    def _state(self, layouts: StatedLayouts, name: str) -> None:
        widths = Widths.of_parameter(name, self.options.tp, self._numbers)
        shape = self._padded_shape(name)
        try:
            one = layouts.cut_of(name, shape, widths)
        except LayoutError as error:
            self.reasons[name] = str(error).partition("; next:")[0]
            return
        if one.is_scaled:
            self.reasons[name] = "a parameter that ranks hold by a factor is not written"
        elif one.logical_shape != shape:
            self.reasons[name] = f"what is stated is of shape {one.logical_shape}, not {shape}"
        else:
            self._take(name, one)

    @property
    def _numbers(self) -> ModelNumbers:
        grain = self.contents.config.section("tensor_parallel").get("tp_grain_size")
        known = grain if isinstance(grain, int) and grain > 0 else 1
        return ModelNumbers(kv_heads=self.kv_heads, grain=known)

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
        numbers = self._numbers
        rescaling = Rescaling(self.options.tp, numbers.kv_heads, numbers.grain)
        rescaled, reasons = rescaling.maps(known)
        self.reasons |= reasons
        self.found |= {name: Cut.exact(one) for name, one in rescaled.items()}

    def _keyed(self, names: Sequence[str]) -> None:
        """The conversion keys; AutoTP's own say too little about another degree."""
        if self.source.is_autotp:
            return
        for name in names:
            if not self.keys.covers(name):
                continue
            answers = {
                one.canonical(): one
                for shards in self._possible_shards(name)
                for one in self._keyed_maps(name, shards)
            }
            if len(answers) == 1:
                self._take(name, next(iter(answers.values())))
            else:
                self.reasons[name] = (
                    "what its keys say fits more than one cut"
                    if answers
                    else "what its keys say does "
                    f"not cut shape {self.contents.shape(name)} over {self.options.tp} ranks"
                )

    def _keyed_maps(self, name: str, shards: Mapping[int, Shape]) -> Iterator[ParamAffineMap]:
        """The map that the keys make of shards which make up a parameter."""
        try:
            governed = self.keys.map_of(name, shards, self.options.tp)
        except LayoutError:
            return
        if governed is None or governed.whole.is_scaled:
            return
        if governed.whole.logical_shape == self._padded_shape(name):
            yield governed.whole

    def _possible_shards(self, name: str) -> Iterator[dict[int, Shape]]:
        """Shapes of shards that an even or a nearly even split, or none, would make."""
        shape, degree = self._padded_shape(name), self.options.tp
        yield dict.fromkeys(range(degree), shape)
        for dim, extent in enumerate(shape):
            layer = name.rpartition(".")[0]
            sizes = shard_sizes(extent, degree, kv_heads=self.kv_heads, layer=layer)
            yield {rank: resized(shape, dim, size) for rank, size in enumerate(sizes)}

    def _take(self, name: str, whole: ParamAffineMap) -> None:
        shape = self.contents.shape(name)
        if whole.logical_shape == shape:
            self.found[name] = Cut.exact(whole)
            return
        widths = [whole.shard_shapes[rank][0] for rank in range(self.options.tp)]
        if sum(widths) != whole.logical_shape[0] or not whole.same_elements(
            contiguous_split_map(whole.logical_shape, widths, 0)
        ):
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
        layouts = self.options.layouts
        is_stated = layouts is not None and layouts.vocabulary_size(name) is not None
        if layouts is not None:
            layouts.require_rows(name, self.contents.shape(name), exactly=True)
        if not is_stated and (self.source.is_autotp or not self.keys.is_vocabulary(name)):
            return None
        rows = self.contents.shape(name)[0]
        stated = self.source.info.get("padded_vocab_size")
        multiple = self.options.vocab_multiple or self._client_multiple()
        if multiple is not None:
            step = multiple * self.options.tp
            return -(-rows // step) * step
        if not isinstance(stated, int):
            if is_stated:
                raise self._unpadded(name, f"{rows} rows that count")
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
            raise self._unpadded(name, f"{rows} rows, padded to {padded} on {degree} ranks")
        return heights.pop()

    def _unpadded(self, name: str, found: str) -> LayoutError:
        return LayoutError(
            "how far the target pads its vocabulary is not stated",
            file=self.source.file,
            parameter=name,
            found=found,
            next_step="state the multiple (make-vocab-size-divisible-by) with --vocab-multiple",
        )

    # ----- nobody knows

    def _unknown(self, missing: Sequence[str]) -> LayoutError:
        reasons = list(
            dict.fromkeys(self.reasons[name] for name in missing if name in self.reasons)
        )
        asks = self.kv_heads is None and not {AMBIGUOUS, HEADS_UNSTATED}.isdisjoint(reasons)
        heads = "state the number of key/value heads with --kv-heads, or " if asks else ""
        if self.options.kv_heads is not None and UNEXPLAINED in reasons:
            heads = f"correct --kv-heads ({self.options.kv_heads} does not fit its maps), or "
        even = (
            "; a contiguous_split is even whatever the heads" if HEADS_UNSTATED in reasons else ""
        )
        return LayoutError(
            f"how {count_text(len(missing), 'parameter')} {'is' if len(missing) == 1 else 'are'} "
            f"cut over {self.options.tp} tensor-parallel ranks is not known",
            file=self.source.file,
            parameter=listed(missing),
            expected="stored maps that tell, or a stated layout",
            found=listed(reasons) if reasons else "nothing about them",
            next_step=f"{heads}state their layout with --layout FILE (docs/native.md){even}",
        )
