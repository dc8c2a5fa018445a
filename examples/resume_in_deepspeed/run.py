"""A universal folder is resumed by a real DeepSpeed engine, in another stage and topology."""

import importlib
import os
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
for name, value in {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": str(20000 + os.getpid() % 40000),  # another one for each run
}.items():
    os.environ.setdefault(name, value)

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from transformers import LlamaConfig, LlamaForCausalLM

import reshard

# On the CPU DeepSpeed compiles an op for shared memory, which one process does not need.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

HERE = Path(__file__).resolve().parent
CKPT = HERE.parent / "llama_tp2dp2_zero1"
OUT = Path(os.environ.get("OUT", "out")) / "resume_in_deepspeed"

# 1. Convert. The pointer file latest_universal lands in OUT.
report = reshard.convert(CKPT, OUT / "step3_universal", verify=True, overwrite=True)
print(f"converted {len(report.source.tensors)} tensors, verified: {report.sound}")

# 2. An engine as the run had it, but in one process and ZeRO-2.
torch.manual_seed(7)  # another start than the run's: nothing may be right by luck
model = LlamaForCausalLM(
    LlamaConfig(
        hidden_size=16,
        intermediate_size=14,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        num_hidden_layers=2,
        vocab_size=97,
        max_position_embeddings=32,
        use_cache=False,
    )
)
groups = [
    {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
    {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
]
config = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "checkpoint": {"load_universal": True},
    "zero_force_ds_cpu_optimizer": False,
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)

# 3. Load, and compare with what the checkpoint holds.
engine.load_checkpoint(str(OUT))
masters, moments = reshard.read(CKPT), reshard.read(CKPT, state="exp_avg")
for name, parameter in engine.module.named_parameters():
    if not torch.equal(safe_get_full_fp32_param(parameter), torch.from_numpy(masters[name])):
        raise SystemExit(f"{name}: the master weights differ")
first = "model.embed_tokens.weight"
state = safe_get_full_optimizer_state(dict(engine.module.named_parameters())[first], "exp_avg")
if not torch.equal(state, torch.from_numpy(moments[first])):
    raise SystemExit(f"{first}: exp_avg differs")
print(f"resumed at step {engine.global_steps} with equal master weights and moments")

# 4. Go on.
tokens = torch.arange(4 * 8).reshape(4, 8) % 97
loss = engine(input_ids=tokens, labels=tokens).loss
engine.backward(loss)
engine.step()
print(f"step {engine.global_steps}, loss {loss.item():.2f}")
