"""The JSON documents that ``--json`` prints.

Theory. A document is for programs, so it is a promise: it names its schema and version, its keys
stay, new keys may be added, sizes are whole bytes, times are seconds, and numbers that JSON lacks
(NaN, infinities) are text. Each is one JSON object.

``reshard.inspect/1``
    `path`, `tag`, `format`, `versions`, `topology` {`stage`, `dp`, `tp`, `pp`, `ep`};
    `parameters` {role: number}, `numel`, `nbytes`; `files` [{`path`, `nbytes`, `kind`}]; `states`
    [{`state`, `tensors`, `numel`, `dtypes`, `nbytes`}]; `scalars` [{`name`, `state`, `value`,
    `dtype`, `source`}]; `aliases` {name: owner}; `extras` [{`key`, `file`}]; `inert` [{`where`,
    `what`, `file`}]; `problems` [{`what`, `file`, `parameter`, `next_step`}]; `tensors` [{`name`,
    `state`, `shape`, `dtype`, `nbytes`, `holders`, `role`, `provenance`}], those that
    ``--tensors`` names.

``reshard map --json`` prints the entry of the map as checkpoints hold it (`logical_shape`,
`ranks`), which :meth:`reshard.ParamAffineMap.from_dict` reads. With ``--files`` it is
``reshard.map/1``:
    `name`, `state`, `dtype`, `map` (that entry), `ranges` [{`holder`, `piece`, `file`, `start`,
    `stop`, `run_nbytes`, `runs`}], `piece` being its index in the holder's list.

``reshard.doctor/1``
    `path`, `healthy`; `faults`, `notes` [as `problems` above; a fault is to be mended, as its
    `next_step` says];
    `folders` [{`path`, `whole`, `topology`, `files` [{`path`, `kind`, `dp`, `mp`, `presence`,
    `nbytes`}]}].

``reshard.convert/1`` and ``reshard.verify/1`` are told in :mod:`reshard.cli.outcomes`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from reshard.cli.values import plain_value

if TYPE_CHECKING:
    from reshard.api import Diagnosis, Inspection, PieceRange
    from reshard.formats.checkpoint import Checkpoint, Problem, StoredTensor, Topology
    from reshard.names.translation import Translation

Document = dict[str, object]


def write(document: object, stream: TextIO) -> None:
    """Write one document."""
    json.dump(document, stream, indent=2, allow_nan=False)
    stream.write("\n")


def inspection_document(inspection: Inspection) -> Document:
    """Return the ``reshard.inspect/1`` document."""
    checkpoint = inspection.checkpoint
    return {
        "schema": "reshard.inspect/1",
        **_head(checkpoint),
        "parameters": {role.value: number for role, number in inspection.roles.items()},
        "numel": inspection.numel,
        "nbytes": checkpoint.nbytes,
        "files": [
            {"path": file.path, "nbytes": file.nbytes, "kind": file.kind}
            for file in checkpoint.files
        ],
        "states": [
            {
                "state": state.state,
                "tensors": state.tensors,
                "numel": state.numel,
                "dtypes": list(state.dtypes),
                "nbytes": state.nbytes,
            }
            for state in inspection.states
        ],
        "scalars": _scalars(checkpoint),
        "aliases": dict(checkpoint.aliases),
        "extras": [{"key": key, "file": extra.file} for key, extra in checkpoint.extras.items()],
        "inert": [
            {"where": record.where, "what": record.what, "file": record.file}
            for record in inspection.inert
        ],
        "problems": problem_documents(checkpoint),
        "tensors": [tensor_document(tensor) for tensor in inspection.listed],
    }


def names_document(translations: Sequence[Translation]) -> Document:
    """Return what ``--names`` adds to the ``reshard.inspect/1`` document; nothing without it."""
    if not translations:
        return {}
    return {
        "names": [
            {
                "rules": one.rules.source,
                "side": one.target_side,
                "made": [
                    {
                        "name": made.name,
                        "shape": list(made.join.map.logical_shape),
                        "from": list(made.sources),
                        "rule": made.rule.text,
                    }
                    for made in one.solution.made
                ],
                "left_out": list(one.solution.dropped),
                "unused": [rule.text for rule in one.solution.unused],
            }
            for one in translations
        ]
    }


def diagnosis_document(found: Diagnosis) -> Document:
    """Return the ``reshard.doctor/1`` document."""
    return {
        "schema": "reshard.doctor/1",
        "path": found.path,
        "healthy": found.healthy,
        "faults": _problems(found.faults),
        "notes": _problems(found.notes),
        "folders": [
            {
                "path": path,
                "whole": survey.whole,
                "topology": None if survey.topology is None else topology_document(survey.topology),
                "files": [
                    {
                        "path": file.file,
                        "kind": file.kind,
                        "dp": file.dp,
                        "mp": file.mp,
                        "presence": file.presence.value,
                        "nbytes": file.nbytes,
                    }
                    for file in survey.files
                ],
            }
            for path, survey in found.folders
        ],
    }


def map_document(tensor: StoredTensor, ranges: Sequence[PieceRange] | None) -> Document:
    """Return the entry of a map, or with `ranges` the ``reshard.map/1`` document."""
    entry = tensor.map.to_dict()
    if ranges is None:
        return entry
    return {
        "schema": "reshard.map/1",
        "name": tensor.name,
        "state": tensor.state,
        "dtype": str(tensor.dtype),
        "map": entry,
        "ranges": [
            {
                "holder": part.holder,
                "piece": part.index,
                "file": part.file,
                "start": part.start,
                "stop": part.stop,
                "run_nbytes": part.run_nbytes,
                "runs": part.runs,
            }
            for part in ranges
        ],
    }


def tensor_document(tensor: StoredTensor) -> Document:
    """Return what identifies a tensor and says how it is stored, without its map."""
    return {
        "name": tensor.name,
        "state": tensor.state,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype),
        "nbytes": tensor.nbytes,
        "holders": len(tensor.regions),
        "role": tensor.role.value,
        "provenance": tensor.provenance,
    }


def topology_document(topology: Topology) -> Document:
    """Return the degrees of a topology."""
    return {
        "stage": topology.stage,
        "dp": topology.dp,
        "tp": topology.tp,
        "pp": topology.pp,
        "ep": topology.ep,
    }


def problem_documents(checkpoint: Checkpoint) -> list[Document]:
    """Return what the reader found wrong."""
    return _problems(checkpoint.problems)


def _problems(problems: Iterable[Problem]) -> list[Document]:
    return [
        {
            "what": problem.what,
            "file": problem.file,
            "parameter": problem.parameter,
            "next_step": problem.next_step,
        }
        for problem in problems
    ]


def _head(checkpoint: Checkpoint) -> Document:
    return {
        "path": checkpoint.path,
        "tag": Path(checkpoint.path).name,
        "format": checkpoint.format,
        "versions": dict(checkpoint.versions),
        "topology": topology_document(checkpoint.topology),
    }


def _scalars(checkpoint: Checkpoint) -> list[Document]:
    return [
        {
            "name": name,
            "state": state,
            "value": plain_value(scalar.value),
            "dtype": None if scalar.dtype is None else str(scalar.dtype),
            "source": scalar.source,
        }
        for (name, state), scalar in checkpoint.scalars.items()
    ]
