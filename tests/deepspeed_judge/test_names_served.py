"""transformers loads what was written under its names, and computes what the source's weights do.

Every key must be met, none left over; the logits are those of a model that holds the truth.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from tests.deepspeed_judge.test_served_weights import config_of, expected, next_batch
from tests.truth import Case, case_named, cases

pytestmark = pytest.mark.deepspeed

LLAMA = "golden/llama_z3_tp2dp2_fp32"
EXPERTS = {
    "0.19.8/mixtral_ep2_z1_fp32": ("Mixtral", "preset:autoep_mixtral"),
    "0.19.8/mixtral_ep2_z3_fp32": ("Mixtral", "preset:autoep-transformers"),
    "0.19.8/qwen3moe_ep2_z3_fp32": ("Qwen3Moe", "preset:autoep_qwen3_moe"),
}
HEADS = 2
THERE = [name for name in EXPERTS if name in {case.name for case in cases()}]


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def test_llama_through_megatrons_names_and_back(tmp_path: Path) -> None:
    case = case_named(LLAMA)
    config_of(case).save_pretrained(tmp_path / "beside")
    beside = [tmp_path / "beside"]
    there, back = tmp_path / "there" / "step3", tmp_path / "back"
    names = "preset:transformers-megatron"
    assert reshard.convert(case.path, there, names=names, also=beside, verify=True).sound
    names = "preset:megatron-transformers"
    report = reshard.convert(there, back, to="safetensors", names=names, also=beside, verify=True)
    assert report.sound
    input_ids, _ = next_batch(config_of(case).vocab_size)
    with torch.no_grad():
        found = loaded(back)(input_ids=input_ids).logits
        wanted = expected(case, torch.float32)(input_ids=input_ids).logits
    assert torch.equal(found, wanted)


def mixture(case: Case, kind: str) -> Any:
    """The configuration of a model of experts, from the shapes of its weights."""
    import transformers

    shapes = {name: tuple(kept["fp32"].shape) for name, kept in case.truth().full.items()}
    layers = sum(name.endswith("input_layernorm.weight") for name in shapes)
    vocab, hidden = shapes["model.embed_tokens.weight"]
    experts, inner, _ = shapes["model.layers.0.mlp.experts.w1"]
    size = {"num_local_experts": experts} if kind == "Mixtral" else {"num_experts": experts}
    width = {"intermediate_size": inner} if kind == "Mixtral" else {"moe_intermediate_size": inner}
    return getattr(transformers, f"{kind}Config")(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=shapes["model.layers.0.self_attn.q_proj.weight"][0] // HEADS,
        num_experts_per_tok=2,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        use_cache=False,
        dtype="float32",
        **size,
        **width,
    )


@pytest.mark.parametrize("name", THERE)
def test_experts_of_autoep_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    case = case_named(name)
    kind, rules = EXPERTS[name]
    mixture(case, kind).save_pretrained(tmp_path / "beside")
    out = tmp_path / "out"
    report = reshard.convert(
        case.path, out, to="safetensors", names=rules, also=[tmp_path / "beside"], verify=True
    )
    assert report.sound
    model, truth = loaded(out), case.truth().full
    held = model.state_dict()
    for layer in range(model.config.num_hidden_layers):
        at = f"model.layers.{layer}.mlp"
        weights = {w: truth[f"{at}.experts.{w}"]["fp32"] for w in ("w1", "w2", "w3")}
        assert torch.equal(
            held[f"{at}.experts.gate_up_proj"], torch.cat([weights["w1"], weights["w3"]], dim=1)
        )
        assert torch.equal(held[f"{at}.experts.down_proj"], weights["w2"])
        assert torch.equal(held[f"{at}.gate.weight"], truth[f"{at}.router.gate.weight"]["fp32"])
    for tensor in ("model.norm.weight", "lm_head.weight"):
        assert torch.equal(held[tensor], truth[tensor]["fp32"])
    input_ids, labels = next_batch(model.config.vocab_size)
    with torch.no_grad():
        loss = model(input_ids=input_ids, labels=labels).loss.item()
    assert loss == pytest.approx(case.topology["next_losses"][0], abs=2e-6)
