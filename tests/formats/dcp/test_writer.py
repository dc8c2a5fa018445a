"""Writing DCP folders: stock torch is the judge of every byte."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import reshard
from reshard.errors import CheckpointError, UnsupportedError
from reshard.formats.dcp.options import TREES, DcpOptions
from reshard.formats.dtypes import DTYPES
from tests.formats.dcp.folders import Net, load, opened, save, state_dicts, trained
from tests.truth import GOLDEN

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def convert(source: Path, out: Path, **chosen: Any) -> Path:
    """Convert to DCP, and compare what was written with its source."""
    report = reshard.convert(source, out, to="dcp", options=DcpOptions(**chosen))
    if "dtype" not in chosen:
        found = reshard.verify(source, out)
        assert found.equal, found
    assert report.format == "dcp"
    return out


def zeroed(lr: float = 0.5) -> tuple[Net, torch.optim.AdamW]:
    """The same model and optimizer with other numbers everywhere."""
    net, optimizer = trained(lr=lr)
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            tensor.zero_()
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.7
    return net, optimizer


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that stock DCP saved, to be written anew."""
    model, nested = state_dicts(*trained())
    return save({"model": model, "optim": nested}, tmp_path_factory.mktemp("dcp") / "ckpt")


def same(left: Any, right: Any) -> bool:
    """Whether two state dicts hold the same, tensors bit for bit."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("limit", [4 << 30, 2000, 1])
def test_stock_dcp_loads_it_into_another_model(
    source: Path, tmp_path: Path, tree: str, limit: int
) -> None:
    out = convert(source, tmp_path / "out", tree=TREES[tree], max_shard_bytes=limit)
    net, optimizer = zeroed()
    options = FLAT if TREES[tree].flattened else None
    model: dict[str, Any] = dict(get_model_state_dict(net))
    optim: dict[str, Any] = dict(get_optimizer_state_dict(net, optimizer, options=options))
    if tree == "torchtitan":
        whole = load({**model, "optimizer": optim}, out)
        model, optim = {key: whole[key] for key in model}, whole["optimizer"]
    else:
        whole = load({"model": model, "optim": optim}, out)
        model, optim = whole["model"], whole["optim"]
    set_model_state_dict(net, model)
    set_optimizer_state_dict(net, optimizer, optim, options=options)
    assert same(state_dicts(net, optimizer), state_dicts(*trained()))


def test_files_keep_to_the_limit_and_tensors_are_cut_along_rows(
    source: Path, tmp_path: Path
) -> None:
    out = convert(source, tmp_path / "out", max_shard_bytes=2000)
    sizes = [path.stat().st_size for path in out.glob("*.distcp")]
    assert len(sizes) > 5
    # One row of `up.weight` in its archive is below the limit, so no file is above it.
    assert max(sizes) <= 2000
    out = convert(source, tmp_path / "tiny", max_shard_bytes=2048 + 24)
    index = pickle.loads((out / ".metadata").read_bytes())
    chunks = index.state_dict_metadata["model.up.weight"].chunks
    assert [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks] == [
        ((0, 0), (2, 3)),
        ((2, 0), (2, 3)),
        ((4, 0), (1, 3)),
    ]


def test_the_index_is_what_torch_itself_would_have_saved(source: Path, tmp_path: Path) -> None:
    out = convert(source, tmp_path / "out")
    ours, theirs = (pickle.loads((folder / ".metadata").read_bytes()) for folder in (out, source))
    assert isinstance(ours, Metadata)
    assert ours.version == theirs.version
    assert ours.state_dict_metadata.pop("reshard") is not None
    assert ours.planner_data.pop("reshard") == ("reshard",)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    assert {key for key in ours.storage_data if key.fqn != "reshard"} == set(theirs.storage_data)


def test_two_runs_give_equal_bytes(source: Path, tmp_path: Path) -> None:
    first, second = (convert(source, tmp_path / name) for name in ("a", "b"))
    assert {path.name: path.read_bytes() for path in first.iterdir()} == {
        path.name: path.read_bytes() for path in second.iterdir()
    }


def test_weights_are_rounded_as_torch_rounds_them(source: Path, tmp_path: Path) -> None:
    out = convert(source, tmp_path / "out", dtype=DTYPES["bfloat16"])
    net, optimizer = trained()
    expected = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in net.state_dict().items()
    }
    # What no group trains may be a buffer here, which keeps its element type.
    expected["gate"] = net.gate.detach()
    model = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    _, optim = state_dicts(*zeroed())
    loaded = load({"model": model, "optim": optim}, out)
    assert same(loaded["model"], expected)
    assert same(loaded["optim"], state_dicts(net, optimizer)[1])


class TestFromDeepSpeed:
    """Names that DeepSpeed ties, freezes and keeps as buffers; settings it does not state."""

    CASE = GOLDEN / "odd_z1_dp2_fp32"

    def test_tied_names_share_their_bytes_and_come_back_as_ties(self, tmp_path: Path) -> None:
        out = convert(self.CASE / "ckpt", tmp_path / "out")
        truth = torch.load(self.CASE / "truth.pt", weights_only=False)
        template = {"model": {name: torch.zeros(97, 7) for name in ("embed.weight", "head.weight")}}
        loaded = load(template, out)["model"]
        assert torch.equal(loaded["head.weight"], loaded["embed.weight"])
        assert loaded["embed.weight"].abs().sum() > 0
        assert truth is not None
        places = pickle.loads((out / ".metadata").read_bytes()).storage_data
        tied = {
            (info.relative_path, info.offset)
            for key, info in places.items()
            if key.fqn in ("model.embed.weight", "model.head.weight")
        }
        assert len(tied) == 1
        assert opened(out).aliases == {"head.weight": "embed.weight"}

    def test_what_dcp_has_no_word_for_comes_back(self, tmp_path: Path) -> None:
        written = opened(convert(self.CASE / "ckpt", tmp_path / "out"))
        source = opened(self.CASE / "ckpt")
        assert {t.name: t.role for t in written.tensors.values()} == {
            t.name: t.role for t in source.tensors.values()
        }
        for key in ("param_groups", "groups", "global_steps", "client_state"):
            assert written.extras[key].value == source.extras[key].value, key
        assert written.problems == ()


def test_settings_that_torch_has_and_the_source_has_not_are_supplied_and_said(
    tmp_path: Path,
) -> None:
    """As DeepSpeed's own Adam does not, and as torch before 2.7 does not."""
    model, nested = state_dicts(*trained())
    full = nested["param_groups"][0]
    for group in nested["param_groups"]:
        for key in set(group) - {"params", "lr", "betas", "eps", "weight_decay"}:
            del group[key]
    source = save({"model": model, "optim": nested}, tmp_path / "ckpt")
    with pytest.raises(UnsupportedError) as caught:
        reshard.convert(source, tmp_path / "out", to="dcp")
    assert str(caught.value) == (
        "the source does not say whether its optimizer is Adam or AdamW, and it decays weights: "
        f"{source}; next: say it with --adam adamw or --adam adam"
    )
    options = DcpOptions(adam="adamw")
    report = reshard.convert(source, tmp_path / "out", to="dcp", options=options)
    (note,) = report.notes
    assert note == (
        "settings of torch's AdamW that the source does not state, written with its defaults: "
        "amsgrad, capturable, decoupled_weight_decay, differentiable, foreach, fused, maximize"
    )
    template = copy.deepcopy(torch.optim.AdamW([torch.zeros(1)]).state_dict()["param_groups"])
    loaded = load({"optim": {"param_groups": template}}, tmp_path / "out")
    defaults = torch.optim.AdamW([torch.zeros(1)]).state_dict()["param_groups"][0]
    assert loaded["optim"]["param_groups"][0] == {**defaults, **full}
    assert reshard.verify(source, tmp_path / "out").equal
    assert opened(tmp_path / "out").extras["param_groups"] == opened(source).extras["param_groups"]


@pytest.mark.parametrize(("adam", "decoupled"), [("adamw", True), ("adam", False)])
def test_the_user_says_which_adam_it_is(tmp_path: Path, adam: str, decoupled: bool) -> None:
    model, nested = state_dicts(*trained())
    for group in nested["param_groups"]:
        del group["decoupled_weight_decay"]
    source = save({"model": model, "optim": nested}, tmp_path / "ckpt")
    reshard.convert(source, tmp_path / "out", to="dcp", options=DcpOptions(adam=adam))
    template = {"optim": {"param_groups": [{"decoupled_weight_decay": None}]}}
    loaded = load(template, tmp_path / "out")
    assert loaded["optim"]["param_groups"][0]["decoupled_weight_decay"] is decoupled


def test_a_setting_that_is_a_tensor_stays_one(tmp_path: Path) -> None:
    """`lr` of a captured optimizer is a tensor, and so it is in the loader's tree."""
    model, nested = state_dicts(*trained())
    for group in nested["param_groups"]:
        group["lr"] = torch.tensor(0.25)
    source = save({"model": model, "optim": nested}, tmp_path / "ckpt")
    out = convert(source, tmp_path / "out")
    template = {"optim": {"param_groups": [{"lr": torch.tensor(0.0)}, {"lr": torch.tensor(0.0)}]}}
    loaded = load(template, out)["optim"]["param_groups"]
    assert [group["lr"].item() for group in loaded] == [0.25, 0.25]


def test_states_without_their_groups_are_refused(tmp_path: Path) -> None:
    universal = tmp_path / "universal"
    reshard.convert(GOLDEN / "odd_z1_dp2_fp32/ckpt", universal)
    (universal / "zero" / "optimizer_state.pt").unlink()
    (universal / "reshard_manifest.json").unlink()  # which would tell of the lost file first
    with pytest.raises(CheckpointError) as caught:
        reshard.convert(universal, tmp_path / "out", to="dcp")
    assert caught.value.what == (
        "the source does not keep the hyperparameters of every optimizer group"
    )
    assert not (tmp_path / "out").exists()


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    model, nested = state_dicts(*trained())
    model["lone \ud800"] = torch.zeros(3)
    source = save({"model": model, "optim": nested}, tmp_path / "ckpt")
    with pytest.raises(CheckpointError) as caught:
        reshard.convert(source, tmp_path / "out", to="dcp")
    assert str(caught.value) == (
        r"a name cannot stand in a DCP folder: parameter 'model.lone \ud800': found a lone "
        "surrogate, which is no text; next: leave it out with --exclude"
    )
    assert not (tmp_path / "out").exists()
    reshard.convert(source, tmp_path / "out", to="dcp", exclude=("lone*",))


def test_weights_alone(tmp_path: Path) -> None:
    report = reshard.convert(
        GOLDEN / "odd_z1_dp2_fp32/ckpt", tmp_path / "out", to="dcp", states=("fp32",)
    )
    assert "no optimizer state: the folder holds the model alone" in report.notes
    index = pickle.loads((tmp_path / "out" / ".metadata").read_bytes())
    assert {name.split(".")[0] for name in index.state_dict_metadata} == {"model", "reshard"}


class TestTiesAcrossFormats:
    """torch saves a tied name as a tensor of its own; DeepSpeed as an alias."""

    @pytest.fixture
    def pair(self, tmp_path: Path) -> tuple[Path, Path]:
        """A run of DeepSpeed, and the same state as torch itself would save it."""
        source, out = GOLDEN / "odd_z1_dp2_fp32" / "ckpt", tmp_path / "ours"
        reshard.convert(source, out, to="dcp")
        index = pickle.loads((out / ".metadata").read_bytes())
        tree: dict[str, Any] = {"model": {}, "optim": {"state": {}, "param_groups": []}}
        for name, entry in index.state_dict_metadata.items():
            path = index.planner_data[name]
            if path[:2] == ("optim", "param_groups"):
                while len(tree["optim"]["param_groups"]) <= path[2]:
                    tree["optim"]["param_groups"].append({})
                tree["optim"]["param_groups"][path[2]][path[3]] = None
            elif path[0] != "reshard":
                inner = tree
                for key in path[:-1]:
                    inner = inner.setdefault(key, {})
                inner[path[-1]] = torch.zeros(entry.size, dtype=entry.properties.dtype)
        return source, save(load(tree, out), tmp_path / "theirs")

    def test_they_are_equal(self, pair: tuple[Path, Path]) -> None:
        source, theirs = pair
        assert ("head.weight", "fp32") in opened(theirs).tensors
        assert opened(theirs).aliases == {}
        assert reshard.verify(source, theirs).equal
        assert reshard.verify(theirs, source).equal

    def test_a_tied_copy_that_differs_is_a_difference(self, pair: tuple[Path, Path]) -> None:
        source, theirs = pair
        tensor = opened(theirs).tensors["head.weight", "fp32"]
        region = tensor.regions[0]
        raw = bytearray(Path(region.file).read_bytes())
        raw[region.offset + 5] ^= 1
        Path(region.file).write_bytes(raw)
        (found,) = reshard.verify(source, theirs).differences
        assert (found.key, found.what, found.count, found.index) == (
            ("head.weight", "fp32"),
            "values",
            1,
            (0, 1),
        )
