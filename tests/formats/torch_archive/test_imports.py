"""Reading and writing costs no heavy import."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["torch_archive", "dtypes"])
def test_imports_neither_torch_nor_numpy(module: str) -> None:
    program = (
        f"import sys; sys.path[:0] = {sys.path!r}; import reshard.formats.{module};"
        "heavy = {'torch', 'numpy', 'ml_dtypes', 'deepspeed', 'zipfile'};"
        "heavy &= {*sys.modules};"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert run.returncode == 0, run.stderr
