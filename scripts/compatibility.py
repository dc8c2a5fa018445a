"""Measures the table of docs/compatibility.md: every real checkpoint, converted and compared.

Theory. The checkpoints are those of the tests: the golden ones, and those of
``$RESHARD_CHECKPOINTS`` with the older versions beside them. Each is converted to a universal
folder with ``verify``; what comes out is *converted*, or *refused* with the class of the error.
Whether a converted checkpoint holds the truth is what ``tests/conversion`` and ``tests/formats``
assert, case by case.

``python -m scripts.compatibility``
"""

from __future__ import annotations

import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import reshard
from tests.truth import Case, cases


def kind_of(case: Case) -> str:
    """Return the row that a checkpoint is in."""
    mixtures = {"native_moe": "DeepSpeed's own MoE", "mixtral": "AutoEP", "qwen3moe": "AutoEP"}
    if case.model in mixtures:
        return mixtures[case.model]
    if case.is_pipeline:
        return "pipelines"
    if case.model == "megatron":
        return "Megatron-style tensor parallel"
    if case.tp > 1:
        return "AutoTP"
    if "bf16opt" in case.name:
        return "BF16_Optimizer"
    return f"ZeRO-{case.stage}, data parallel"


def outcome(case: Case) -> str:
    """Convert and compare; say what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            report = reshard.convert(case.path, Path(folder) / "out", fsync=False, verify=True)
        except reshard.ReshardError as refused:
            return type(refused).__name__
    return "converted" if report.sound else "DIFFERENT"


def main() -> None:
    """Print the table."""
    table: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    versions = set()
    for case in cases():
        version = "golden (0.19.8)" if case.name.startswith("golden/") else case.name.split("/")[0]
        versions.add(version)
        table[kind_of(case)][version][outcome(case)] += 1
    columns = sorted(versions, reverse=True)
    print("| |", " | ".join(columns), "|")
    print("|---|" + "---|" * len(columns))
    for kind, row in sorted(table.items()):
        cells = (
            ", ".join(f"{count} {what}" for what, count in sorted(row[version].items())) or "–"
            for version in columns
        )
        print(f"| {kind} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
