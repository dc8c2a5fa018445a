"""The JSON documents of ``convert`` and ``verify``.

``reshard.convert/1``
    `source` {`path`, `format`, `topology`}, `destination`, `format`,
    `topology` (of the output, null where it is the same for all), `pointer`,
    `pointed_to` (what the pointer said before, null when the same or nothing), `dry_run`;
    `tensors` [as in ``reshard.inspect/1``], `left_out`, `kept`, `kept_nbytes`;
    `read_nbytes`, `compared_nbytes`, `strided_nbytes`, `write_nbytes`, `files`, `seconds`;
    `expected_seconds` (null unless it is a dry run and a probe of the disks succeeded);
    `disk_nbytes`, `disk_free_nbytes`, `memory_nbytes`, `workers`;
    `replicas` {`policy`, `differ` [{`name`, `state`, `count`, `first`, `largest`, `files`}]};
    `notes` [text], `problems` [as in ``reshard.inspect/1``];
    `verified` (true, false, or null when it was not asked for);
    `comparison` (null, or what ``reshard.verify/1`` holds).

``reshard.verify/1``
    `left`, `right`, `equal`; `tensors`, `nbytes`, `scalars`, `extras`: how many were compared;
    `states` [{`state`, `tensors`, `differing`, `count`, `largest`}];
    `differences` [{`name`, `state`, `what`, `left`, `right`, `count`, `numel`, `index`,
    `largest`}];
    `values` [{`what`, `left`, `right`}];
    `replicas` [{`side`, `name`, `state`, `count`, `first`, `largest`, `files`}];
    `casts` [{`left`, `right`, `tensors`}]: element types that were compared after rounding;
    `not_held` {state: count}: what exported weights go without, which was not compared;
    `changes` [{`side`, `file`, `what`, `name`, `state`}]: files unlike the manifest beside them;
    `policy`: what was chosen for copies that differ, and `accepted`: whether exit code 0 followed.

``reshard.annotate/1``
    `destination`, `pointer` (null when none was written), `dry_run`, `write_nbytes`, `files`;
    `maps` {parameter: where its map is from}.

`largest` is the largest difference in value; null when none can be computed (equal values, NaN).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from reshard.cli.documents import (
    Document,
    problem_documents,
    tensor_document,
    topology_document,
)
from reshard.cli.values import plain_value

if TYPE_CHECKING:
    from reshard.api import AnnotationReport, Comparison, ConversionReport, ReplicaFinding


def conversion_document(report: ConversionReport) -> Document:
    """Return the ``reshard.convert/1`` document."""
    source, cost = report.source, report.cost
    compared = None if report.comparison is None else _comparison(report.comparison)
    return {
        "schema": "reshard.convert/1",
        "source": {
            "path": source.path,
            "format": source.format,
            "topology": topology_document(source.topology),
        },
        "destination": report.destination,
        "format": report.format,
        "topology": None if report.topology is None else topology_document(report.topology),
        "pointer": report.pointer,
        "pointed_to": report.pointed_to,
        "dry_run": report.dry_run,
        "tensors": [tensor_document(tensor) for tensor in source.tensors.values()],
        "left_out": report.left_out,
        "kept": report.kept,
        "kept_nbytes": report.kept_bytes,
        "read_nbytes": cost.read_nbytes,
        "compared_nbytes": cost.compared_nbytes,
        "strided_nbytes": cost.strided_nbytes,
        "write_nbytes": cost.write_nbytes,
        "files": cost.files,
        "seconds": report.seconds,
        "expected_seconds": report.expected_seconds,
        "disk_nbytes": report.disk_bytes,
        "disk_free_nbytes": report.disk_free_bytes,
        "memory_nbytes": report.memory_bytes,
        "workers": report.workers,
        "replicas": {
            "policy": report.replicas,
            "differ": [_finding(finding) for finding in report.drift],
        },
        "notes": list(report.notes),
        "problems": problem_documents(source),
        "verified": report.sound if report.comparison is not None else None,
        "comparison": compared,
    }


def comparison_document(found: Comparison, left: str, right: str) -> Document:
    """Return the ``reshard.verify/1`` document."""
    return {
        "schema": "reshard.verify/1",
        "left": left,
        "right": right,
        **_comparison(found),
    }


def annotation_document(report: AnnotationReport) -> Document:
    """Return the ``reshard.annotate/1`` document."""
    return {
        "schema": "reshard.annotate/1",
        "destination": report.destination,
        "pointer": report.pointer,
        "dry_run": report.dry_run,
        "write_nbytes": report.nbytes,
        "files": report.files,
        "maps": dict(report.sources),
    }


def _comparison(found: Comparison) -> Document:
    return {
        "equal": found.equal,
        "tensors": found.tensors,
        "nbytes": found.nbytes,
        "scalars": found.scalars,
        "extras": found.extras,
        "states": [
            {
                "state": total.state,
                "tensors": total.tensors,
                "differing": total.differing,
                "count": total.count,
                "largest": _largest(total.largest),
            }
            for total in found.states
        ],
        "differences": [
            {
                "name": difference.key[0],
                "state": difference.key[1],
                "what": difference.what,
                "left": difference.left,
                "right": difference.right,
                "count": difference.count,
                "numel": difference.numel,
                "index": list(difference.index),
                "largest": _largest(difference.largest),
            }
            for difference in found.differences
        ],
        "values": [
            {"what": value.what, "left": value.left, "right": value.right} for value in found.values
        ],
        "replicas": [{"side": side, **_finding(finding)} for side, finding in found.replicas],
        "casts": [
            {"left": left, "right": right, "tensors": count}
            for (left, right), count in found.casts.items()
        ],
        "not_held": dict(found.not_held),
        "changes": [
            {
                "side": side,
                "file": change.file,
                "what": change.what,
                "name": change.name,
                "state": change.state,
            }
            for side, change in found.changes
        ],
    }


def _finding(finding: ReplicaFinding) -> Document:
    return {
        "name": finding.key[0],
        "state": finding.key[1],
        "count": finding.count,
        "first": finding.first,
        "largest": _largest(finding.largest),
        "files": list(finding.files),
    }


def _largest(value: float) -> object:
    return None if math.isnan(value) else plain_value(value)
