"""A ZeRO-3 checkpoint becomes a folder for ``from_pretrained``; its weights are the masters."""

import os
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import reshard

HERE = Path(__file__).resolve().parent
CKPT = HERE.parents[1] / "tests" / "golden" / "llama_z3_tp2dp2_fp32" / "ckpt"
OUT = Path(os.environ.get("OUT", "out")) / "zero3_to_hf"

report = reshard.convert(CKPT, OUT, to="safetensors", also=HERE, verify=True, overwrite=True)
print(f"{len(report.source.tensors)} weights, verified: {report.sound}")

model = AutoModelForCausalLM.from_pretrained(OUT)
masters = reshard.read(CKPT)
for name, tensor in model.named_parameters():
    if not np.array_equal(tensor.detach().numpy(), masters[name]):
        raise SystemExit(f"{name} is not the master weight")

with torch.no_grad():
    logits = model(torch.arange(8)[None]).logits
print(f"from_pretrained has the master weights; logits {tuple(logits.shape)}")
