"""transformers loads what was exported, and it computes what the trained model computed.

The recorded losses are the judge: ``next_losses[0]`` is the loss that the live engine had on the
next batch, before it took another step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.formats.safetensors.options import SafetensorsOptions, dtype_rules
from tests.truth import Case, case_named

pytestmark = pytest.mark.deepspeed

SERVED = (
    "golden/llama_z3_tp2dp2_fp32",
    "golden/llama_z2_tp2dp2_bf16",
    "golden/llama_z1_tp2_tied_bias",
    "golden/llama_z3_tp2dp2_frozen",
    "0.19.8/llama_z3_dp2_bf16",
    "0.19.8/llama_z3_dp2_fp32",
)
STEP, ROWS, COLUMNS = 3, 4, 8
"""The step after the checkpoint, and the size of its fixed data."""

TOLERANCE = {"fp32": 2e-6, "bf16": 1e-2}
"""Ranks add up in another order than one process."""


def config_of(case: Case) -> Any:
    """The configuration of the case's model, in the shape that its weights have."""
    from transformers import LlamaConfig

    truth = case.truth()
    shapes = {name: tuple(states["fp32"].shape) for name, states in truth.full.items()}
    shapes |= {name: tuple(tensor.shape) for name, tensor in truth.frozen.items()}
    vocab, hidden = shapes["model.embed_tokens.weight"]
    heads = 4
    head_dim = shapes["model.layers.0.self_attn.q_proj.weight"][0] // heads
    layers = sum(name.endswith("input_layernorm.weight") for name in shapes)
    return LlamaConfig(
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=shapes["model.layers.0.self_attn.k_proj.weight"][0] // head_dim,
        head_dim=head_dim,
        intermediate_size=shapes["model.layers.0.mlp.up_proj.weight"][0],
        num_hidden_layers=layers,
        vocab_size=vocab,
        max_position_embeddings=32,
        tie_word_embeddings="lm_head.weight" not in shapes,
        attention_bias="model.layers.0.self_attn.q_proj.bias" in shapes,
        mlp_bias="model.layers.0.mlp.up_proj.bias" in shapes,
        use_cache=False,
        dtype={"fp32": "float32", "bf16": "bfloat16"}[case.dtype],
    )


def served(case: Case, folder: Path, **options: Any) -> Any:
    """Export a case with its configuration beside it, and load it with transformers."""
    from transformers import AutoModelForCausalLM

    config_of(case).save_pretrained(folder / "beside")
    report = reshard.convert(
        case.path,
        folder / "out",
        to="safetensors",
        also=[folder / "beside"],
        options=SafetensorsOptions(max_shard_size=4000, **options),
        verify=True,
    )
    assert report.sound
    return AutoModelForCausalLM.from_pretrained(
        folder / "out", attn_implementation="eager", output_loading_info=True
    )


def expected(case: Case, dtype: torch.dtype) -> Any:
    """The model with the truth as its weights, rounded by torch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        config_of(case), attn_implementation="eager", dtype=dtype
    )
    weights = {name: states["fp32"] for name, states in case.truth().full.items()}
    weights |= case.truth().frozen
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}  # tied
    return model


def next_batch(vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The data of the step after the checkpoint, for all data ranks (as ``engine.batch``)."""
    generator = torch.Generator().manual_seed(1000 + STEP)
    input_ids = torch.randint(0, vocab, (ROWS, COLUMNS), generator=generator)
    return input_ids, torch.randint(0, vocab, (ROWS, COLUMNS), generator=generator)


@pytest.mark.parametrize("name", SERVED)
def test_it_computes_what_the_trained_model_computed(name: str, tmp_path: Path) -> None:
    case = case_named(name)
    model, info = served(case, tmp_path)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    dtype = torch.bfloat16 if case.dtype == "bf16" else torch.float32
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    input_ids, labels = next_batch(model.config.vocab_size)
    with torch.no_grad():
        found = model(input_ids=input_ids, labels=labels)
        wanted = expected(case, dtype)(input_ids=input_ids)
    assert torch.equal(found.logits, wanted.logits)
    recorded = case.topology["next_losses"][0]
    assert found.loss.item() == pytest.approx(recorded, abs=TOLERANCE[case.dtype])


def test_masters_can_be_served_instead(tmp_path: Path) -> None:
    case = case_named("golden/llama_z2_tp2dp2_bf16")
    model, _ = served(case, tmp_path, dtypes=dtype_rules(["fp32"]))
    weights = model.state_dict()
    for name, states in case.truth().full.items():
        assert torch.equal(weights[name].float(), states["fp32"].to(weights[name].dtype).float())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    numel = sum(states["fp32"].numel() for states in case.truth().full.values())
    assert index["metadata"] == {"total_parameters": numel, "total_size": 4 * numel}
