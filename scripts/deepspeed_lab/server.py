"""A process that imports torch, DeepSpeed and transformers once, and forks workers for each job.

Started by :mod:`scripts.deepspeed_lab.client` with the number of an open socket; it ends when the
other end closes it, and its workers end with it.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

os.environ.update(
    DS_ACCELERATOR="cpu",
    OMP_NUM_THREADS="1",
    DS_SKIP_CUDA_CHECK="1",
    TOKENIZERS_PARALLELISM="false",
    TORCHINDUCTOR_COMPILE_THREADS="1",
    LOCAL_SIZE="1",
)

LAZY_MODULES = (
    "deepspeed.checkpoint.ds_to_universal",
    "deepspeed.runtime.bf16_optimizer",
    "deepspeed.runtime.fp16.fused_optimizer",
    "deepspeed.runtime.fp16.unfused_optimizer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.module_inject.tp_plan_converter",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch._inductor.compile_fx",
    "transformers.models.llama.modeling_llama",
    "transformers.models.codegen.modeling_codegen",
    "transformers.models.gpt_bigcode.modeling_gpt_bigcode",
)
"""What workers would otherwise import one by one, each for itself."""


def main() -> None:
    """Serve jobs until the other end is closed."""
    from scripts.deepspeed_lab.workers import die_with_parent, run_job

    die_with_parent()
    connection = Connection(int(sys.argv[1]))
    prepare()
    connection.send(("ready", os.getpid()))
    while True:
        try:
            name, arguments, world, timeout = connection.recv()
        except EOFError:
            return
        from scripts.deepspeed_lab import jobs

        with tempfile.TemporaryDirectory(prefix="deepspeed_lab_") as folder:
            try:
                result = run_job(
                    getattr(jobs, name),
                    arguments,
                    world=world,
                    folder=Path(folder),
                    timeout=timeout,
                )
            except Exception as error:  # noqa: BLE001  # the client raises it
                connection.send(("failed", str(error)))
            else:
                connection.send(("done", result))


def prepare() -> None:
    """Import everything and apply the patches that these versions need."""
    import torch

    torch.set_num_threads(1)
    for name in (*LAZY_MODULES, "scripts.deepspeed_lab.jobs"):
        importlib.import_module(name)
    # Gloo needs no shared-memory op: building it takes a compiler, and each process that is killed
    # would leave 66 MB in /dev/shm.
    comm = importlib.import_module("deepspeed.comm.torch")
    comm.build_shm_op = lambda: None  # type: ignore[attr-defined]
    _give_registry_a_default()


def _give_registry_a_default() -> None:
    """DeepSpeed 0.19.8 calls ``get(key, default)`` on a transformers 5 registry that takes one."""
    capturing = importlib.import_module("transformers.utils.output_capturing")
    registry = capturing._CanRecordRegistry

    def get(self: dict[str, object], model: object, default: object = None) -> object:
        key = model if isinstance(model, str) else str(model.__class__)
        found = dict.get(self, key)
        return ({} if default is None else default) if found is None else found

    registry.get = get


if __name__ == "__main__":
    main()
