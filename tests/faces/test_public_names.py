"""`import reshard`: the names that are promised, each found on first use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import reshard
from reshard import errors

ROOT = Path(__file__).parents[2]
PROMISED = [
    "AffinePiece",
    "DcpOptions",
    "NativeOptions",
    "ParamAffineMap",
    "ReshardError",
    "SafetensorsOptions",
    "TransferPlan",
    "__version__",
    "annotate",
    "block_gather_map",
    "compose",
    "contiguous_split_map",
    "convert",
    "diagnose",
    "dtype_rules",
    "expert_map",
    "inspect",
    "open_checkpoint",
    "replicated_map",
    "segmented_map",
    "select",
    "sub_param_map",
    "trace_map",
    "verify",
]


@pytest.mark.parametrize("name", PROMISED)
def test_a_promised_name_is_public(name: str) -> None:
    assert name in reshard.__all__


def test_every_public_name_is_there() -> None:
    for name in reshard.__all__:
        assert getattr(reshard, name) is not None


def test_every_error_is_public() -> None:
    kinds = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.ReshardError)
    }
    assert kinds <= set(reshard.__all__)


def test_dir_is_what_is_public() -> None:
    assert dir(reshard) == sorted(reshard.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'reshard' has no attribute 'reshrad'"):
        _ = reshard.reshrad  # type: ignore[attr-defined]


def test_the_same_object_is_found_in_its_home() -> None:
    from reshard import api, geometry

    assert reshard.convert is api.convert
    assert reshard.compose is geometry.compose


def test_the_package_is_typed() -> None:
    assert (ROOT / "src" / "reshard" / "py.typed").is_file()


def test_python_dash_m_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "reshard", "--version"],
        env={"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"reshard {reshard.__version__}\n"


FIRST_USES = """
import random, sys, threading
import numpy
import reshard

seed = int(sys.argv[1])
names = [name for name in reshard.__all__ if name not in vars(reshard)]
names += ["api.inspect", "api.read"]
asked = random.Random(seed).choices(names, k=8)
together, failed = threading.Barrier(8), []
sys.setswitchinterval(1e-6)

def ask(name):
    together.wait()
    try:
        value = reshard
        if name.startswith("api."):
            import reshard.api as value
        getattr(value, name.rpartition(".")[2])
    except BaseException as error:
        failed.append((name, repr(error)))

threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in asked]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(30)
print(failed, [thread.is_alive() for thread in threads].count(True))
"""


@pytest.mark.parametrize("seed", range(10))
def test_names_may_first_be_used_by_several_threads_at_once(seed: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST_USES, str(seed)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "[] 0\n"
