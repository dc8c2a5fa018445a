"""Every family of models through Megatron-Core's names and back, into transformers itself.

Tiny models with random weights: what comes back must load without a key too few or too many, and
compute the same logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import reshard

pytestmark = pytest.mark.deepspeed

SMALL: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
    "use_cache": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": SMALL,
    "Mistral": SMALL,
    "Qwen2": SMALL,
    "Qwen3": {**SMALL, "head_dim": 6},
    "Mixtral": {**SMALL, "num_local_experts": 3, "num_experts_per_tok": 2},
    "Qwen3Moe": {
        **SMALL,
        "head_dim": 6,
        "moe_intermediate_size": 12,
        "num_experts": 3,
        "num_experts_per_tok": 2,
    },
    "DeepseekV3": {
        **SMALL,
        "num_key_value_heads": 6,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 12,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 4,
    },
    "GPT2": {
        "vocab_size": 53,
        "n_embd": 24,
        "n_layer": 2,
        "n_head": 6,
        "n_positions": 32,
        "tie_word_embeddings": True,
        "use_cache": False,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_the_same_model(family: str, tmp_path: Path) -> None:
    import transformers

    config = getattr(transformers, f"{family}Config")(**FAMILIES[family], dtype="float32")
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for weights in model.parameters():
        torch.nn.init.normal_(weights, std=0.2)
    model.eval()
    model.save_pretrained(tmp_path / "model")
    there, back = tmp_path / "there", tmp_path / "back"
    there_report = reshard.convert(
        tmp_path / "model",
        there,
        to="safetensors",
        names="preset:transformers-megatron",
        verify=True,
    )
    assert there_report.sound
    assert any("decoder.layers.1." in name for name in reshard.open_checkpoint(there).names)
    assert reshard.convert(
        there,
        back,
        to="safetensors",
        names="preset:megatron-transformers",
        verify=True,
    ).sound
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        back, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    loaded.eval()
    tokens = torch.arange(12).reshape(2, 6) * 4
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=tokens).logits, model(input_ids=tokens).logits)
