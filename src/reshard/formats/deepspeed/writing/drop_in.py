"""A whole trainer's folder for the target: the checkpoint, and the trainer's own files beside it.

Theory. Trainers (Hugging Face's among them) save into a folder of their own: DeepSpeed's tag folder
with ``latest``, and beside it schedulers, trainer state, tokenizer, configuration. A run resumes
from the whole folder, so a drop-in has all of it: the tag folder is written anew, ``latest`` names
it, and every other file is carried byte for byte. What is left out, such as files that belong to
ranks of another topology (RNG states, one a process), is named: :mod:`trainer_folder`.

A carried file is no different from a tensor: bytes of a source region that go to a target region.
So it is added to the checkpoint as a one-dimensional tensor of bytes, and travels with the plan,
its memory bound, its digests and its crash safety.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from reshard.errors import UsageError
from reshard.formats.checkpoint import Checkpoint, Region, Role, SourceFile, StoredTensor
from reshard.formats.deepspeed.writing.options import NativeOptions
from reshard.formats.deepspeed.writing.trainer_folder import survey_trainer_folder
from reshard.formats.deepspeed.writing.writer import POINTER, lay_out_deepspeed
from reshard.formats.dtypes import DTYPES
from reshard.formats.target import Fill, OutputFile, Slot, Target
from reshard.layouts.builders import replicated_map

FILE_STATE = "file"
"""State under which a carried file is a tensor; its name is the path."""

BYTE = DTYPES["uint8"]


def lay_out_drop_in(checkpoint: Checkpoint, options: NativeOptions) -> tuple[Checkpoint, Target]:
    """Lay out a trainer's folder.

    Parameters
    ----------
    checkpoint
        A checkpoint in a trainer's folder.
    options
        The topology to write for.

    Returns
    -------
    checkpoint, target
        The source with the trainer's files added, to plan from, and the folder to be. The folder
        has the pointer file inside, so there is none beside it.

    Raises
    ------
    UsageError
        When no pointer file beside the checkpoint names it.
    """
    tag = Path(checkpoint.path).name
    folder = Path(checkpoint.path).parent
    _require_trainer_folder(folder, tag)
    native = lay_out_deepspeed(checkpoint, tag=tag, options=options)
    beside = survey_trainer_folder(folder, tag, same_ranks=_same_world(checkpoint, options))
    tensors = {tensor.key: tensor for tensor in map(_as_tensor, beside.carried)}
    files = [replace(file, path=f"{tag}/{file.path}") for file in native.files]
    files.append(_literal_file(POINTER, tag.encode()))
    files += (_carried_file(path, folder) for path in beside.carried)
    target = replace(native, files=tuple(files), pointer=None, notes=(*native.notes, *beside.notes))
    return _with_files(checkpoint, tensors), target


def _require_trainer_folder(folder: Path, tag: str) -> None:
    pointer = folder / POINTER
    if not pointer.is_file() or pointer.read_text(errors="replace").strip() != tag:
        raise UsageError(
            "the checkpoint lies in no trainer's folder",
            file=folder,
            expected=f"a file {POINTER!r} that names {tag!r}",
            next_step="leave out --drop-in",
        )


def _same_world(checkpoint: Checkpoint, options: NativeOptions) -> bool:
    source = checkpoint.topology
    return (source.dp, source.tp, source.pp) == (options.dp, options.tp, options.pp)


def _as_tensor(path: Path) -> StoredTensor:
    nbytes = path.stat().st_size
    return StoredTensor(
        str(path),
        FILE_STATE,
        BYTE,
        replicated_map((nbytes,), 1),
        {0: Region(str(path), 0, nbytes)},
        Role.BUFFER,
        "a file of the trainer",
    )


def _with_files(checkpoint: Checkpoint, tensors: dict[tuple[str, str], StoredTensor]) -> Checkpoint:
    sources = tuple(
        SourceFile(tensor.name, tensor.numel, "file of the trainer") for tensor in tensors.values()
    )
    return replace(
        checkpoint,
        tensors={**checkpoint.tensors, **tensors},
        files=(*checkpoint.files, *sources),
    )


def _carried_file(path: Path, folder: Path) -> OutputFile:
    name = path.relative_to(folder).as_posix()
    nbytes = path.stat().st_size
    if not nbytes:
        return OutputFile(name, 0, ())
    fill = Fill((str(path), FILE_STATE), BYTE, replicated_map((nbytes,), 1), 0)
    return OutputFile(name, nbytes, (), (Slot(0, nbytes, (fill,)),))


def _literal_file(name: str, content: bytes) -> OutputFile:
    return OutputFile(name, len(content), ((0, content),))
