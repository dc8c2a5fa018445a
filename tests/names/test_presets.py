"""Every built-in file, there and back, against dense arrays that are joined by hand."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from reshard.names.files import preset, presets
from reshard.names.rules import Rules
from reshard.names.sizes import known_sizes
from reshard.names.solving import Made, Solution, side_of, solve

Arrays = dict[str, NDArray[np.int64]]

HEADS, GROUPS, WIDTH, HIDDEN, INNER, EXPERTS, VOCAB = 6, 2, 4, 12, 10, 3, 17
CONFIG = {
    "vocab_size": VOCAB,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": WIDTH,
    "hidden_size": HIDDEN,
    "n_head": HEADS,
}
LAYERS = 2


def layer(**shapes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {name.replace("__", "."): shape for name, shape in shapes.items()}


ATTENTION = layer(
    self_attn__q_proj__weight=(HEADS * WIDTH, HIDDEN),
    self_attn__k_proj__weight=(GROUPS * WIDTH, HIDDEN),
    self_attn__v_proj__weight=(GROUPS * WIDTH, HIDDEN),
    self_attn__o_proj__weight=(HIDDEN, HEADS * WIDTH),
    input_layernorm__weight=(HIDDEN,),
    post_attention_layernorm__weight=(HIDDEN,),
)
BIASES = layer(
    self_attn__q_proj__bias=(HEADS * WIDTH,),
    self_attn__k_proj__bias=(GROUPS * WIDTH,),
    self_attn__v_proj__bias=(GROUPS * WIDTH,),
    self_attn__q_norm__weight=(WIDTH,),
    self_attn__k_norm__weight=(WIDTH,),
)
DENSE = layer(
    mlp__gate_proj__weight=(INNER, HIDDEN),
    mlp__up_proj__weight=(INNER, HIDDEN),
    mlp__down_proj__weight=(HIDDEN, INNER),
)
LATENT = layer(
    self_attn__q_a_proj__weight=(5, HIDDEN),
    self_attn__q_a_layernorm__weight=(5,),
    self_attn__q_b_proj__weight=(HEADS * WIDTH, 5),
    self_attn__kv_a_proj_with_mqa__weight=(7, HIDDEN),
    self_attn__kv_a_layernorm__weight=(7,),
    self_attn__kv_b_proj__weight=(HEADS * WIDTH, 7),
    self_attn__o_proj__weight=(HIDDEN, HEADS * WIDTH),
    input_layernorm__weight=(HIDDEN,),
    post_attention_layernorm__weight=(HIDDEN,),
)
ENDS = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (VOCAB, HIDDEN),
}


def moe(gate: str, names: tuple[str, str, str]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {gate: (EXPERTS, HIDDEN)}
    for expert in range(EXPERTS):
        for name, shape in zip(
            names, ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)), strict=True
        ):
            shapes[name.format(expert)] = shape
    return shapes


MIXTRAL = moe(
    "block_sparse_moe.gate.weight",
    tuple(f"block_sparse_moe.experts.{{}}.{w}.weight" for w in ("w1", "w3", "w2")),  # type: ignore[arg-type]
)
QWEN = moe(
    "mlp.gate.weight",
    tuple(f"mlp.experts.{{}}.{p}_proj.weight" for p in ("gate", "up", "down")),  # type: ignore[arg-type]
)
AUTOEP = {
    "mlp.router.gate.weight": (EXPERTS, HIDDEN),
    "mlp.experts.w1": (EXPERTS, INNER, HIDDEN),
    "mlp.experts.w3": (EXPERTS, INNER, HIDDEN),
    "mlp.experts.w2": (EXPERTS, HIDDEN, INNER),
}
SHARED = layer(
    mlp__gate__e_score_correction_bias=(EXPERTS,),
    mlp__shared_experts__gate_proj__weight=(INNER, HIDDEN),
    mlp__shared_experts__up_proj__weight=(INNER, HIDDEN),
    mlp__shared_experts__down_proj__weight=(HIDDEN, INNER),
)
GPT2 = layer(
    ln_1__weight=(HIDDEN,),
    ln_1__bias=(HIDDEN,),
    attn__c_attn__weight=(HIDDEN, 3 * HEADS * WIDTH),
    attn__c_attn__bias=(3 * HEADS * WIDTH,),
    attn__c_proj__weight=(HEADS * WIDTH, HIDDEN),
    attn__c_proj__bias=(HIDDEN,),
    ln_2__weight=(HIDDEN,),
    ln_2__bias=(HIDDEN,),
    mlp__c_fc__weight=(HIDDEN, INNER),
    mlp__c_fc__bias=(INNER,),
    mlp__c_proj__weight=(INNER, HIDDEN),
    mlp__c_proj__bias=(HIDDEN,),
)
GPT2_ENDS = {
    "transformer.wte.weight": (VOCAB, HIDDEN),
    "transformer.wpe.weight": (9, HIDDEN),
    "transformer.ln_f.weight": (HIDDEN,),
    "transformer.ln_f.bias": (HIDDEN,),
}


def model(
    layers: list[dict[str, tuple[int, ...]]], ends: dict[str, tuple[int, ...]], prefix: str
) -> Arrays:
    """Return a model whose elements all differ."""
    shapes = {
        f"{prefix}.{n}.{name}": s for n, each in enumerate(layers) for name, s in each.items()
    }
    start, made = 0, {}
    for name, shape in (shapes | ends).items():
        count = int(np.prod(shape))
        made[name] = np.arange(start, start + count).reshape(shape)
        start += count
    return made


MODELS: dict[str, Arrays] = {
    "llama": model([ATTENTION | BIASES | DENSE] * LAYERS, ENDS, "model.layers"),
    "mixtral": model([ATTENTION | MIXTRAL] * LAYERS, ENDS, "model.layers"),
    "qwen3_moe": model([ATTENTION | BIASES | QWEN] * LAYERS, ENDS, "model.layers"),
    "deepseek_v3": model([LATENT | DENSE, LATENT | QWEN | SHARED], ENDS, "model.layers"),
    "gpt2": model([GPT2] * LAYERS, GPT2_ENDS, "transformer.h"),
    "autoep_mixtral": model([ATTENTION | AUTOEP] * LAYERS, ENDS, "model.layers"),
    "autoep_qwen3_moe": model([ATTENTION | BIASES | AUTOEP] * LAYERS, ENDS, "model.layers"),
    "megatron_stacked": {},
}


def solution(rules: Rules, arrays: Arrays) -> Solution:
    shapes = {name: array.shape for name, array in arrays.items()}
    return solve(rules, side_of(rules, shapes), shapes, known_sizes(rules.sizes, CONFIG))


def made(one: Made, arrays: Arrays) -> NDArray[np.int64]:
    shards = {rank: arrays[name] for rank, name in enumerate(one.sources)}
    return np.asarray(one.join.map.rebuild(shards))


def there(rules: Rules, arrays: Arrays) -> Arrays:
    return {one.name: made(one, arrays) for one in solution(rules, arrays).made}


MODELS["megatron_stacked"] = there(preset("llama"), MODELS["llama"])


def test_every_preset_has_a_model() -> None:
    assert set(MODELS) == set(presets())


@pytest.mark.parametrize("name", presets())
def test_there_and_back_is_the_identity(name: str) -> None:
    rules, arrays = preset(name), MODELS[name]
    found = there(rules, arrays)
    assert sum(array.size for array in found.values()) == sum(a.size for a in arrays.values())
    back = there(rules, found)
    assert set(back) == set(arrays)
    for key, array in arrays.items():
        assert np.array_equal(back[key], array), key


def by_groups(
    q: NDArray[np.int64], k: NDArray[np.int64], v: NDArray[np.int64]
) -> list[NDArray[np.int64]]:
    """Rows of a fused matrix, by plain loops."""
    rows: list[NDArray[np.int64]] = []
    share = HEADS // GROUPS * WIDTH
    for group in range(GROUPS):
        rows += list(q[group * share : (group + 1) * share])
        rows += list(k[group * WIDTH : (group + 1) * WIDTH])
        rows += list(v[group * WIDTH : (group + 1) * WIDTH])
    return rows


def test_llama_is_what_megatron_has() -> None:
    arrays = MODELS["llama"]
    found = there(preset("llama"), arrays)
    at, to = "model.layers.1", "decoder.layers.1"
    for kind in ("weight", "bias"):
        parts = (arrays[f"{at}.self_attn.{p}_proj.{kind}"] for p in "qkv")
        assert np.array_equal(
            found[f"{to}.self_attention.linear_qkv.{kind}"], np.stack(by_groups(*parts))
        )
    gate, up = (arrays[f"{at}.mlp.{p}_proj.weight"] for p in ("gate", "up"))
    assert np.array_equal(found[f"{to}.mlp.linear_fc1.weight"], np.concatenate([gate, up]))


def test_experts_are_stacked() -> None:
    arrays = MODELS["mixtral"]
    found = there(preset("mixtral"), arrays)
    at = "model.layers.0.block_sparse_moe.experts"
    stacked = [
        np.concatenate([arrays[f"{at}.{e}.w1.weight"], arrays[f"{at}.{e}.w3.weight"]])
        for e in range(EXPERTS)
    ]
    fused = found["decoder.layers.0.mlp.experts.experts.linear_fc1.weight"]
    assert np.array_equal(fused, np.stack(stacked))


def test_gpt2_is_transposed_and_its_heads_interleaved() -> None:
    arrays = MODELS["gpt2"]
    found = there(preset("gpt2"), arrays)
    fused = arrays["transformer.h.0.attn.c_attn.weight"].T.reshape(3, HEADS, WIDTH, HIDDEN)
    rows = [fused[c, head] for head in range(HEADS) for c in range(3)]
    assert np.array_equal(
        found["decoder.layers.0.self_attention.linear_qkv.weight"], np.concatenate(rows)
    )


def test_padding_of_the_vocabulary_is_left_out() -> None:
    found = there(preset("llama"), MODELS["llama"])
    whole = found["embedding.word_embeddings.weight"]
    padded = found | {"embedding.word_embeddings.weight": np.pad(whole, ((0, 7), (0, 0)))}
    solved = solution(preset("llama"), padded)
    assert [one.left_out for one in solved.made if one.left_out] == [7 * HIDDEN]
    back = there(preset("llama"), padded)
    assert np.array_equal(back["model.embed_tokens.weight"], whole)


def test_stacked_layers() -> None:
    numbered = MODELS["megatron_stacked"]
    found = there(preset("megatron_stacked"), numbered)
    name = "mlp.linear_fc2.weight"
    layers = [numbered[f"decoder.layers.{n}.{name}"] for n in range(LAYERS)]
    assert np.array_equal(found[f"decoder.layers.{name}"], np.stack(layers))
