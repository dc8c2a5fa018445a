"""The writer of native DeepSpeed checkpoints: any source, laid out for any topology.

Theory. A native checkpoint is what the ranks of one run wrote, each its own files. So the writer
plays all the ranks of a run that never was: it asks how that run would have cut every parameter
over tensor ranks (`tensor_parallel`), laid the shards end to end and cut them over data ranks
(`flat_groups`), and what each rank would then have put into its files (`optimizer_files`,
`model_files`). The answer is a :class:`~reshard.formats.target.Target`; DeepSpeed's ordinary
``load_checkpoint`` cannot tell it from its own, and each rank reads its own files only.

What decides the layout beside the degrees is the configuration of the run (`run_config`): the
options of ``zero_optimization`` that reorder, align or split the flat buffers. They are taken from
the source's ``ds_config``, because the run that resumes has the same file with other degrees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.first_use import looked_up
from reshard.formats.deepspeed.writing.options import MODEL_DTYPES, NativeOptions

if TYPE_CHECKING:
    from reshard.formats.deepspeed.writing.writer import lay_out_deepspeed

__all__ = ["MODEL_DTYPES", "NativeOptions", "lay_out_deepspeed"]


def __getattr__(name: str) -> object:
    """Import the writer when it is first asked for: the options are needed by every conversion."""
    homes = {"lay_out_deepspeed": "reshard.formats.deepspeed.writing.writer"}
    return looked_up(name, homes, globals())
