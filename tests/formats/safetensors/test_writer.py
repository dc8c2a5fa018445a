"""Writing sets: the truth, read by the ``safetensors`` library, under every option."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.api import ConversionReport
from reshard.errors import CheckpointError, UsageError
from reshard.formats.renaming import renaming_of
from reshard.formats.safetensors.options import SafetensorsOptions, Tied, dtype_rules
from tests.truth import Case, by_name, case_named, cases, dense, golden

library = pytest.importorskip("safetensors.torch")

States = dict[str, torch.Tensor]
BF16 = "golden/odd_z2_dp2_bf16"
TIED = "golden/llama_z1_tp2_tied_bias"
OWNER, ALIAS = "model.embed_tokens.weight", "lm_head.weight"


def export(case: Case | str, out: Path, **more: Any) -> ConversionReport:
    """Export a case, and have it verified."""
    source = case_named(case) if isinstance(case, str) else case
    report = reshard.convert(source.path, out, to="safetensors", fsync=False, verify=True, **more)
    assert report.sound
    return report


def options(*dtypes: str, **more: Any) -> SafetensorsOptions:
    """Options with element types as on the command line."""
    return SafetensorsOptions(dtypes=dtype_rules(dtypes), **more)


def loaded(folder: Path, stem: str = "model") -> States:
    """Everything in a set, as the library reads it."""
    found: States = {}
    for path in sorted(folder.glob(f"{stem}*.safetensors")):
        part = library.load_file(path)
        assert not part.keys() & found.keys()
        found |= part
    return found


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are equal to the last bit."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    flat = (t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right))
    return torch.equal(*flat)


# --------------------------------------------------------------------------- values


OTHERS = ("pipe_pp2dp2_z1_bf16", "mixtral_ep2_z3_fp32", "plain_z0_dp2_fp32", "plain_z3_dp2_bf16")


@pytest.mark.parametrize(
    "case", by_name([*dense(golden()), *(c for c in cases() if c.folder.name in OTHERS)])
)
def test_masters_frozen_weights_and_buffers_are_the_truth(case: Case, tmp_path: Path) -> None:
    truth = case.truth()
    export(case, tmp_path / "out", options=options("fp32"))
    found = loaded(tmp_path / "out")
    wanted = {name: states["fp32"] for name, states in truth.full.items()}
    wanted |= {name: tensor.float() for name, tensor in truth.frozen.items()}
    assert wanted
    for name, tensor in wanted.items():
        assert same(found[name], tensor.float()), name
    for name in found.keys() - wanted.keys():
        owner = reshard.open_checkpoint(case.path).aliases.get(name)
        expected = truth.buffers[name] if owner is None else wanted[owner]
        assert same(found[name], expected), name


@pytest.mark.parametrize("name", [BF16, "golden/odd_z3_dp4_bf16", "golden/llama_z2_tp2dp2_bf16"])
def test_by_default_weights_have_the_type_that_was_trained(name: str, tmp_path: Path) -> None:
    case = case_named(name)
    export(case, tmp_path / "out")
    found = loaded(tmp_path / "out")
    for owner, states in case.truth().full.items():
        assert same(found[owner], states["fp32"].to(torch.bfloat16)), owner
    for buffer, tensor in case.truth().buffers.items():
        if buffer in found:
            assert same(found[buffer], tensor), buffer


def test_experts_in_files_of_their_own_have_the_type_of_the_model(tmp_path: Path) -> None:
    """The state dict does not list them, and old versions do not store the configuration."""
    case = case_named("0.12.6/native_moe_ep2_z2_bf16")
    export(case, tmp_path / "out")
    found = loaded(tmp_path / "out")
    assert any("experts" in name for name in found)
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


def test_what_is_served_is_what_the_module_held(tmp_path: Path) -> None:
    """The state dict that DeepSpeed saved beside its masters, read by torch."""
    case = case_named(BF16)
    export(case, tmp_path / "out")
    found = loaded(tmp_path / "out")
    saved = torch.load(case.tag_path / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    assert found.keys() == saved.keys()
    for name, tensor in saved.items():
        assert same(found[name], tensor), name


def test_element_types_are_chosen_by_pattern_and_the_last_counts(tmp_path: Path) -> None:
    case = case_named(BF16)
    chosen = options("fp16", "norm.*=fp32", "down.weight=fp8_e4m3")
    report = export(case, tmp_path / "out", options=chosen)
    found = loaded(tmp_path / "out")
    kinds = {"norm.weight": torch.float32, "down.weight": torch.float8_e4m3fn}
    for name, states in case.truth().full.items():
        kind = kinds.get(name, torch.float32 if name.startswith("norm.") else torch.float16)
        assert same(found[name], states["fp32"].to(kind)), name
    assert any("from float32 to float8_e4m3fn" in note for note in report.notes)


def test_states_become_sets_of_their_own(tmp_path: Path) -> None:
    case = case_named(BF16)
    out = tmp_path / "out"
    export(case, out, states=["fp32", "exp_avg", "exp_avg_sq"])
    for state in ("exp_avg", "exp_avg_sq"):
        found = library.load_file(out / f"{state}.safetensors")
        for name, states in case.truth().full.items():
            assert same(found[name], states[state]), (name, state)
    read = reshard.open_checkpoint(out)
    assert {state for _, state in read.tensors} == {"fp32", "exp_avg", "exp_avg_sq"}


# --------------------------------------------------------------------------- files


@pytest.mark.parametrize("limit", [1, 700, 3000, 10**9])
def test_shards_and_index_are_those_of_transformers(limit: int, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    case, out = case_named(TIED), tmp_path / "out"
    export(case, out, options=options("fp32", max_shard_size=limit))
    found = loaded(out)
    part = torch.load(case.tag_path / "mp_rank_00_model_states.pt", weights_only=False)
    ordered = {name: found[name] for name in part["module"]}
    assert ordered.keys() == found.keys()
    split = hub.split_torch_state_dict_into_shards(ordered, max_shard_size=limit)
    assert {path.name for path in out.glob("*.safetensors")} == set(split.filename_to_tensors)
    for file, names in split.filename_to_tensors.items():
        wanted = library.save({name: ordered[name] for name in names}, {"format": "pt"})
        assert (out / file).read_bytes() == wanted
    index = out / "model.safetensors.index.json"
    assert index.exists() == split.is_sharded
    if split.is_sharded:
        said = json.loads(index.read_text())
        assert said["weight_map"] == split.tensor_to_filename
        assert said["metadata"]["total_size"] == split.metadata["total_size"]
        assert index.read_text() == json.dumps(said, indent=2, sort_keys=True) + "\n"


def test_a_small_memory_cap_and_many_workers_change_nothing(tmp_path: Path) -> None:
    source = case_named(TIED).path
    ways: dict[str, dict[str, Any]] = {"a": {}, "b": {"max_memory": 256 * 1024, "workers": 3}}
    for name, more in ways.items():
        reshard.convert(source, tmp_path / name, to="safetensors", fsync=False, **more)
    for path in (tmp_path / "a").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_files_beside_the_source_are_carried(tmp_path: Path) -> None:
    """From the tag folder, from the trainer's folder around it, and from where the user says."""
    trainer, more = tmp_path / "trainer", tmp_path / "more"
    more.mkdir()
    trainer.mkdir()
    tag = trainer / "step3"
    tag.symlink_to(case_named(BF16).tag_path)
    (trainer / "latest").write_text("step3")
    (trainer / "config.json").write_text('{"model_type": "odd"}')
    (more / "config.json").write_text("not this one")
    (more / "tokenizer.json").write_bytes(bytes(range(256)))
    (more / "merges.txt").write_bytes(b"")
    (more / "notes.md").write_text("not carried")
    out = tmp_path / "out"
    report = reshard.convert(trainer, out, to="safetensors", also=[more], fsync=False)
    assert (out / "config.json").read_text() == '{"model_type": "odd"}'
    assert (out / "tokenizer.json").read_bytes() == bytes(range(256))
    assert (out / "merges.txt").read_bytes() == b""
    assert not (out / "notes.md").exists()
    assert not any("no config.json" in note for note in report.notes)


def test_a_link_that_leads_out_of_the_folder_is_told(tmp_path: Path) -> None:
    more, far = tmp_path / "more", tmp_path / "far.json"
    more.mkdir()
    far.write_text("{}")
    (more / "config.json").symlink_to(far)
    (more / "real.txt").write_text("a b")
    (more / "merges.txt").symlink_to("real.txt")
    report = export(TIED, tmp_path / "out", also=[more])
    told = [note for note in report.notes if "link" in note]
    assert told == [f"copied from outside of the folder, where a link leads: config.json ({far})"]
    copied = tmp_path / "out" / "config.json"
    assert (copied.read_text(), copied.is_symlink()) == ("{}", False)


def test_a_configuration_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    text = b'\xef\xbb\xbf{"tie_word_embeddings": true}'
    (tmp_path / "config.json").write_bytes(text)
    export(TIED, tmp_path / "out", also=[tmp_path])
    assert ALIAS not in loaded(tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_bytes() == text


def test_a_configuration_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="the configuration beside the checkpoint is no"):
        export(TIED, tmp_path / "out", also=[tmp_path])
    assert not (tmp_path / "out").exists()


# --------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("config", "tied", "kept"),
    [
        (None, None, True),
        ({"tie_word_embeddings": False}, None, True),
        ({"tie_word_embeddings": True}, None, False),
        ({"tie_word_embeddings": True}, Tied.KEEP, True),
        (None, Tied.DROP, False),
    ],
)
def test_tied_names(config: Any, tied: Tied | None, *, kept: bool, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    export(TIED, tmp_path / "out", options=options("fp32", tied=tied), also=[tmp_path])
    found = loaded(tmp_path / "out")
    assert (ALIAS in found) == kept
    assert same(found[OWNER], case_named(TIED).truth().full[OWNER]["fp32"])
    if kept:
        assert same(found[ALIAS], found[OWNER])


def test_names_are_changed_by_rules(tmp_path: Path) -> None:
    rename = renaming_of([r"^model\.=", r"^layers\.(\d+)\.=h\1_"])
    export(TIED, tmp_path / "out", rename=rename, options=options("fp32"))
    found, truth = loaded(tmp_path / "out"), case_named(TIED).truth().full
    assert found.keys() >= {"embed_tokens.weight", "h0_mlp.up_proj.weight", "lm_head.weight"}
    assert same(found["h0_mlp.up_proj.weight"], truth["model.layers.0.mlp.up_proj.weight"]["fp32"])


def test_names_are_changed_by_a_table(tmp_path: Path) -> None:
    table = tmp_path / "names.json"
    table.write_text(json.dumps({OWNER: "wte"}))
    export(TIED, tmp_path / "out", rename=renaming_of((), table))
    assert "wte" in loaded(tmp_path / "out")


def test_one_tensor_can_be_taken_out(tmp_path: Path) -> None:
    export(TIED, tmp_path / "out", include=[OWNER])
    assert loaded(tmp_path / "out").keys() == {OWNER, ALIAS}


def test_only_what_is_trained_can_be_taken(tmp_path: Path) -> None:
    name = "golden/llama_z3_tp2dp2_frozen"
    export(name, tmp_path / "out", trainable=True)
    assert loaded(tmp_path / "out").keys() == case_named(name).truth().full.keys()
    with pytest.raises(UsageError, match=r"nothing is selected: .*--trainable leave"):
        export(name, tmp_path / "more", trainable=True, include=["*q_proj*"])


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (["nope*=fp16"], r"a pattern for an element type matches no .*--dtype nope\*=float16"),
        (
            ["int8"],
            "weights are not rounded to this element type: .*fp8_e4m3, .*int8; next: ",
        ),
        (["float31"], "no such element type: .*found float31"),
    ],
)
def test_a_rule_that_means_nothing_is_refused(chosen: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        export(BF16, tmp_path / "out", options=options(*chosen))
    assert not (tmp_path / "out").exists()
