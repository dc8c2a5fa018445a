"""What a number of key/value heads decides about a target, and that it is said.

Theory. The files of a source rarely tell how many key/value heads a model has: two ranks with eight
rows each may have one head of eight rows or four of two. So the number is stated, or read from a
``config.json``, and nothing in the files contradicts a wrong one; DeepSpeed notices when it loads
the output into the model. What can be done is done here: a stated number that fits no extent is
refused, and a number that decided something is in the report, with where it came from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from reshard.errors import UsageError
from reshard.layouts.autotp import follows_heads, shard_sizes

if TYPE_CHECKING:
    from reshard.formats.deepspeed.writing.cuts import Cut
    from reshard.formats.deepspeed.writing.options import NativeOptions
    from reshard.formats.deepspeed.writing.source_cuts import Source


def require_fitting_heads(options: NativeOptions, source: Source, cuts: Mapping[str, Cut]) -> None:
    """Refuse a stated number of heads that divides nothing that heads decide about.

    Parameters
    ----------
    options, source
        Where the number is stated, and the file to name.
    cuts
        The cut of every parameter.

    Raises
    ------
    UsageError
        When no extent of a cut parameter is a multiple of it.
    """
    heads = options.kv_heads
    extents = {extent for _, cut in _by_heads(cuts) for extent in cut.map.logical_shape}
    if heads is None or options.tp == 1 or not extents:
        return
    if all(extent % heads for extent in extents):
        raise UsageError(
            "the stated number of key/value heads divides no extent of a parameter that is cut",
            file=source.file,
            expected=f"a divisor of one of {', '.join(map(str, sorted(extents)))}",
            found=f"--kv-heads {heads}",
            next_step="take num_key_value_heads of the model's config.json",
        )


def heads_note(options: NativeOptions, source: Source, cuts: Mapping[str, Cut]) -> Iterator[str]:
    """Say for how many heads the attention is cut, and who said so.

    Parameters
    ----------
    options, source
        Where the number comes from.
    cuts
        The cut of every parameter.
    """
    heads = options.kv_heads or source.kv_heads
    if heads is None or options.tp == 1:
        return
    if any(_decided(cut, heads, options.tp) for _, cut in _by_heads(cuts)):
        shares = "+".join(map(str, shard_sizes(heads, options.tp)))
        told = "--kv-heads" if options.kv_heads else source.heads_told_by
        yield (
            f"the attention is cut for {heads} key/value heads ({told}), {shares} of them on the "
            f"{options.tp} tensor ranks; a model with another number cannot load it"
        )


def _by_heads(cuts: Mapping[str, Cut]) -> Iterator[tuple[str, Cut]]:
    """The parameters that are cut and of whose widths AutoTP lets heads decide."""
    for name, cut in cuts.items():
        whole, layer = cut.map.logical_shape, name.rpartition(".")[0]
        if follows_heads(layer) and any(shape != whole for shape in cut.shapes.values()):
            yield name, cut


def _decided(cut: Cut, heads: int, degree: int) -> bool:
    """Whether the parts of a parameter are those that so many heads make."""
    for dim, extent in enumerate(cut.map.logical_shape):
        parts = tuple(shape[dim] for shape in cut.shapes.values() if len(shape) > dim)
        if extent % heads == 0 and set(parts) != {extent}:
            return parts == shard_sizes(extent, degree, kv_heads=heads)
    return False
