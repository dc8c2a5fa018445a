"""Opening the files of the grid: which there must be, and which may be absent.

Theory. Model-state files come first, because they state the degrees; then every cell of the grid is
demanded. Optimizer files are all there or all absent. They may be absent by right (ZeRO-0 keeps the
optimizer in the model-state file), and for checkpoints with experts by DeepSpeed's best-effort
rule: weights are delivered, states are reported as absent. Anything else is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from reshard.errors import CheckpointError, MissingFileError
from reshard.formats.deepspeed.expert_reading import Cell, Experts
from reshard.formats.deepspeed.grid import (
    Degrees,
    Inventory,
    require_grid,
    require_one_value,
)
from reshard.formats.deepspeed.names import FileKind
from reshard.formats.deepspeed.optimizer_records import OptimizerStates, read_optimizer_states
from reshard.formats.deepspeed.records import ModelStates, read_model_states

MOST_RANKS = 1 << 20
"""No run has more ranks; a file that states more is damaged or hostile."""


def open_models(inventory: Inventory) -> dict[Cell, ModelStates]:
    """Every model-state file, of the one kind that the checkpoint has."""
    kinds = [k for k in (FileKind.MODEL, FileKind.ZERO3_MODEL) if inventory.of_kind(k)]
    if not kinds:
        raise MissingFileError(
            "no model-state file",
            file=inventory.folder.path,
            expected="mp_rank_*_model_states.pt or zero_pp_rank_*_model_states.pt",
            found=", ".join(path.name for path in inventory.files.values()) or "no files",
        )
    if len(kinds) > 1:
        raise CheckpointError(
            "model-state files of ZeRO-3 and of another stage lie in one folder",
            file=next(iter(inventory.of_kind(FileKind.ZERO3_MODEL).values())),
            next_step="one set is left over from another run; move it away",
        )
    return {
        (name.dp, name.mp): read_model_states(str(path), name.dp, name.mp)
        for name, path in inventory.of_kind(kinds[0]).items()
    }


def require_models(inventory: Inventory, degrees: Degrees) -> None:
    """Demand the model-state file of every rank that writes one."""
    if inventory.of_kind(FileKind.ZERO3_MODEL):
        require_grid(inventory, FileKind.ZERO3_MODEL, _cells(degrees))
    else:
        require_grid(inventory, FileKind.MODEL, [(0, mp) for mp in range(degrees.mp)])


def _cells(degrees: Degrees) -> list[tuple[int, int]]:
    if degrees.dp * degrees.mp > MOST_RANKS:
        raise CheckpointError(
            "the files state more ranks than any run has",
            expected=f"at most {MOST_RANKS}",
            found=f"{degrees.dp} x {degrees.mp}",
        )
    return [(dp, mp) for dp in range(degrees.dp) for mp in range(degrees.mp)]


def open_ranks(
    inventory: Inventory, degrees: Degrees, models: dict[Cell, ModelStates], experts: Experts
) -> dict[Cell, OptimizerStates]:
    """Every optimizer file; empty for a checkpoint that has none by right."""
    if not inventory.of_kind(FileKind.OPTIMIZER):
        _require_no_zero(models, experts)
        return {}
    zero3 = bool(inventory.of_kind(FileKind.ZERO3_MODEL))
    cells = _cells(degrees)
    paths = require_grid(inventory, FileKind.OPTIMIZER, cells)
    ranks = {cell: read_optimizer_states(str(paths[cell]), *cell) for cell in cells}
    require_one_value({rank.file: rank.flavour for rank in ranks.values()}, "the ZeRO stage")
    if zero3 != (ranks[0, 0].stage == 3):
        raise CheckpointError(
            "the optimizer files are of another ZeRO stage than the model-state files",
            file=ranks[0, 0].file,
            found=ranks[0, 0].flavour,
            next_step="one set is left over from another run; move it away",
        )
    return ranks


def _require_no_zero(models: dict[Cell, ModelStates], experts: Experts) -> None:
    """Without optimizer files the optimizer must be in the model-state file.

    Experts are the exception that DeepSpeed documents: their weights are delivered from the expert
    files, and the states are reported as absent.
    """
    for model in models.values():
        root = model.archive.root
        has_optimizer = isinstance(root, Mapping) and bool(root.get("optimizer"))
        by_right = experts.autoep is not None and not experts.autoep.partitioned
        if not has_optimizer and not (model.param_shapes is not None and by_right):
            raise MissingFileError(
                "the optimizer states are nowhere: no *_optim_states.pt file, and no `optimizer` "
                "in the model-state file",
                file=model.file,
                next_step="copy the optimizer files here or name their folder with --also; "
                "DeepSpeed 0.17.6 to 0.18.4 never saved them for bf16 with fp32 accumulation",
            )
