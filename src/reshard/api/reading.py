"""Reading tensors into memory: the weights of a checkpoint as a state dict.

Theory. What a program wants of a checkpoint is often a few whole tensors, whatever the ranks that
hold their pieces. They come as NumPy arrays, of the bits that the files hold; element types that
NumPy has not (bfloat16, fp8) are those of ``ml_dtypes``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from reshard.api.arguments import size_of, text_of, texts_of, workers_of
from reshard.api.budgets import DEFAULT_MAX_MEMORY_BYTES
from reshard.api.opening import AnyPath, open_checkpoint
from reshard.api.selection import select
from reshard.execution.reading import read_tensors
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.dtypes import spelled_dtype
from reshard.formats.soundness import require_sound


def read(  # noqa: PLR0913 - keyword-only, and each is an option of the verbs
    source: AnyPath | Checkpoint,
    names: str | Sequence[str] = (),
    *,
    state: str = "fp32",
    dtype: str | None = None,
    replicas: str = "refuse",
    also: Sequence[AnyPath] = (),
    layout: AnyPath | None = None,
    workers: int | None = None,
    max_memory: int = DEFAULT_MAX_MEMORY_BYTES,
) -> dict[str, NDArray[np.generic]]:
    """Read tensors of a checkpoint whole, as arrays.

    Parameters
    ----------
    source
        A checkpoint, or the path of one (with `also` and `layout` as for
        :func:`~reshard.api.open_checkpoint`).
    names
        Names of parameters, or glob patterns; all when empty.
    state
        Which state: ``"fp32"`` are the weights, ``"exp_avg"`` … what the optimizer keeps.
    dtype
        Element type that floating-point tensors are rounded to, to nearest, ties to even; None
        keeps what is stored.
    replicas
        Where copies differ: ``"refuse"``, ``"first"`` or ``"mean"``, as for
        :func:`~reshard.api.convert`.
    workers
        Copies under way at a time; by default one a CPU.
    max_memory
        Hard cap on the buffers of all workers, in bytes; the arrays come on top.

    Returns
    -------
    dict
        Name -> array. A tied name has the array of its owner.

    Raises
    ------
    ReshardError
        The checkpoint is not whole and sound, or a name is not there.

    Examples
    --------
    >>> import numpy as np, pathlib, reshard, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> head = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    >>> data = np.array([1, 2], "<f4").tobytes()
    >>> file = folder / "model.safetensors"
    >>> _ = file.write_bytes(len(head).to_bytes(8, "little") + head + data)
    >>> reshard.read(folder, "w")
    {'w': array([1., 2.], dtype=float32)}
    """
    checkpoint = (
        source
        if isinstance(source, Checkpoint)
        else open_checkpoint(source, also=also, layout=layout)
    )
    patterns, states = texts_of("names", names), (text_of("state", state),)
    kept = None if dtype is None else spelled_dtype(text_of("dtype", dtype))
    chosen = select(checkpoint, include=patterns, states=states)
    require_sound(chosen, replicas)
    arrays = read_tensors(
        chosen,
        list(chosen.tensors),
        workers=workers_of(workers),
        max_memory=size_of(max_memory),
        dtype=kept,
        replicas=replicas,
    )
    held = {name: array for (name, _), array in arrays.items()}
    return held | {a: held[owner] for a, owner in chosen.aliases.items() if owner in held}
