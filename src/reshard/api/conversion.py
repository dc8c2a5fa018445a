"""Converting a checkpoint: open, select, lay out, plan, execute, compare.

Theory. A conversion is known in full before it begins. What the plan says is what the run does and
what ``dry_run`` reports, so both give the same :class:`ConversionReport` and refuse the same; a dry
run leaves out only what is known when all bytes were read, such as copies that differ. A report
also tells what could not be carried and what was chosen.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from reshard.api.arguments import destination_of, paths_of, size_of, workers_of
from reshard.api.budgets import DEFAULT_MAX_MEMORY_BYTES, Progress
from reshard.api.exports import comparable
from reshard.api.naming import Named, named
from reshard.api.opening import AnyPath, idle_folders, open_checkpoint
from reshard.api.pointing import pointed_to
from reshard.api.replicas import naming_the_rule
from reshard.api.selection import select
from reshard.execution import (
    Comparison,
    ReplicaFinding,
    Report,
    TensorDifference,
    disk_needed,
    execute,
    measured_rate,
    sizes_for,
)
from reshard.execution.destination import check_apart, check_free, check_names, check_pointer
from reshard.formats.checkpoint import Checkpoint, Topology
from reshard.formats.deepspeed.writing import NativeOptions
from reshard.formats.registry import ReadOptions, WriteOptions, is_cut, lay_out, writer_of
from reshard.formats.renaming import Renaming, left_behind, renamed
from reshard.formats.safetensors import SafetensorsOptions
from reshard.formats.safetensors.companions import NAMES
from reshard.formats.soundness import require_sound
from reshard.formats.stated_layouts import read_stated_layouts
from reshard.planning import Estimate, Plan, estimate, plan

NOTHING_TO_RESUME = (
    "there was nothing to resume: no interrupted run had left work for this output, so all of it "
    "was done from the beginning"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport:
    """What a conversion did, or with ``dry_run`` would do."""

    source: Checkpoint
    """The checkpoint that was read, narrowed to what was carried."""
    left_out: int
    """Number of tensor states that the selection left out."""
    format: str
    destination: str
    """Format and folder of the output."""
    pointer: str | None
    """Path of the pointer file, None when the format has none."""
    pointed_to: str | None
    """What the pointer file said before, None when there was none or it said the same."""
    plan: Plan = field(repr=False)
    """What goes where."""
    cost: Estimate
    """Bytes to read, compare and write, and number of files."""
    disk_bytes: int
    disk_free_bytes: int
    """Disk that the output takes, and what is free there."""
    memory_bytes: int
    workers: int
    """Buffers of all workers together, and how many there are."""
    dry_run: bool
    """Whether nothing was written."""
    notes: tuple[str, ...] = ()
    """What the user should know: what could not be carried, and why."""
    kept: int = 0
    kept_bytes: int = 0
    """Tensors that an interrupted run had finished already, and their bytes."""
    seconds: float = 0.0
    """From the call to the published output, comparison not included."""
    expected_seconds: float | None = None
    """With ``dry_run``: how long the run would take, from a short probe of the disks; None when
    nothing could be probed."""
    replicas: str = "refuse"
    """The policy for copies that differ."""
    drift: tuple[ReplicaFinding, ...] = ()
    """Copies that differ and were let through."""
    comparison: Comparison | None = None
    """What comparing the output with the source found, None when that was not asked for."""

    @property
    def topology(self) -> Topology | None:
        """The degrees that the output is for, None where it is the same for all."""
        return self.plan.topology

    @property
    def kind(self) -> str:
        """Format and topology of the output, in words."""
        return f"{self.format}, {self.topology}" if self.topology else self.format

    @property
    def sound(self) -> bool:
        """Whether comparing found nothing but what a policy for replicas brought about."""
        found = self.comparison
        if found is None or found.equal:
            return True
        return not found.values and all(map(self._is_explained, found.differences))

    def _is_explained(self, difference: TensorDifference) -> bool:
        drifted = {finding.key: finding.count for finding in self.drift}
        allowed = drifted.get(difference.key, 0) if self.replicas == "mean" else 0
        return difference.what == "values" and difference.count <= allowed


def convert(  # noqa: PLR0913 - keyword-only, and each is an option of the command
    source: AnyPath,
    destination: AnyPath,
    *,
    to: str = "universal",
    workers: int | None = None,
    max_memory: int | str = DEFAULT_MAX_MEMORY_BYTES,
    fsync: bool = True,
    include: Sequence[str] | str = (),
    exclude: Sequence[str] | str = (),
    states: Sequence[str] | str = (),
    trainable: bool = False,
    rename: Renaming | None = None,
    names: Sequence[AnyPath] | AnyPath = (),
    names_states: str = "all",
    dry_run: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    verify: bool = False,
    replicas: str = "refuse",
    also: Sequence[AnyPath] | AnyPath = (),
    layout: AnyPath | None = None,
    reading: ReadOptions | None = None,
    options: WriteOptions | None = None,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert a checkpoint to another format, bit for bit.

    Parameters
    ----------
    source, also, layout, reading
        As for :func:`~reshard.api.open_checkpoint`.
    destination
        The folder to write. It appears complete or not at all.
    to
        Format to write.
    workers, max_memory
        Copies under way at a time, by default one a CPU; hard cap on the buffers of all of them
        together: bytes, or a text like ``"2GB"``.
    fsync
        Whether the output is on the disk for good before it gets its name.
    include, exclude, states, trainable
        As for :func:`~reshard.api.select`; of no state named, ``"safetensors"`` carries ``fp32``.
    rename, names, names_states
        Other names, moments included; files of rules: :func:`~reshard.api.naming.named`.
    dry_run
        Report, with the time that it would take, and write nothing.
    resume, overwrite
        Continue what an interrupted run of the same conversion left; replace an existing output.
    verify
        Compare the output with the source afterwards.
    replicas
        Where copies differ: ``"refuse"``, ``"first"`` (the lowest rank's) or ``"mean"``.
    options
        What to choose about the output, of its format's type; ``"deepspeed"`` needs some.
    progress
        Told ``(done, total, phase)`` in bytes, about ten times a second.

    Raises
    ------
    ReshardError
        It cannot be read, converted exactly or written; nothing is left behind.
    """
    start = time.perf_counter()
    memory = size_of(max_memory)
    final, states = destination_of(destination), states or writer_of(to).states
    folders = paths_of("also", also)
    whole = _served(_opened(source, also, layout, reading, options), to, folders)
    picked = select(whole, include=include, exclude=exclude, states=states, trainable=trainable)
    chosen = renamed(picked, rename or Renaming(), whole)
    lost = () if writer_of(to).states else left_behind(picked, chosen)
    spelled = named(chosen, names, states=names_states, also=folders)
    chosen = spelled.checkpoint
    complete = _completed(options or writer_of(to).default, folders, layout)
    carried, target = lay_out(chosen, to=to, tag=final.name, options=complete)
    job = plan(carried, target, replicas=replicas)
    threads = workers_of(workers)
    told = (*require_sound(picked, replicas), *lost)  # evidence speaks of the names in the files
    report = _forecast(spelled, job, final, len(whole.tensors), threads, memory)
    if dry_run:
        _check(job, final, overwrite=overwrite or resume)
        return _timed(_told(report, *told), job, fsync=fsync)
    with naming_the_rule(chosen):
        done = execute(
            job,
            final,
            workers=threads,
            max_memory=memory,
            fsync=fsync,
            resume=resume,
            overwrite=overwrite,
            progress=progress,
        )
    told = told if done.continued or not resume else (*told, NOTHING_TO_RESUME)
    report = _done(_told(report, *told), done, time.perf_counter() - start)
    if not verify:
        return report
    pair = comparable(chosen, open_checkpoint(final)).rounded_by(job)
    found = pair.compared(workers=threads, max_memory=memory, progress=progress)
    return replace(report, comparison=found)


def _opened(
    source: AnyPath,
    also: Sequence[AnyPath] | AnyPath,
    layout: AnyPath | None,
    reading: ReadOptions | None,
    options: WriteOptions | None,
) -> Checkpoint:
    """Open the source; of whole tensors the layout is the target's alone, and is checked here."""
    folders = paths_of("also", also)
    if layout is None or not isinstance(options, NativeOptions) or is_cut(source, also=folders):
        return open_checkpoint(source, also=also, layout=layout, reading=reading)
    whole = open_checkpoint(source, also=also, reading=reading)
    read_stated_layouts(layout).require_used(whole.names)
    return whole


def _served(whole: Checkpoint, to: str, also: Sequence[str]) -> Checkpoint:
    """The source without the reproach to folders out of which files beside the weights come."""
    if not isinstance(writer_of(to).default, SafetensorsOptions):
        return whole
    idle = [
        problem
        for folder in also
        if any((Path(folder) / name).is_file() for name in NAMES)
        for problem in idle_folders(whole, (folder,))
    ]
    return replace(whole, problems=tuple(p for p in whole.problems if p not in idle))


def _timed(forecast: ConversionReport, job: Plan, *, fsync: bool) -> ConversionReport:
    """A forecast with the time that it would take; some of the source is copied to nowhere."""
    rate = measured_rate(job, forecast.destination, fsync=fsync)
    return replace(forecast, expected_seconds=forecast.cost.seconds(rate) if rate else None)


def _told(report: ConversionReport, *notes: str) -> ConversionReport:
    return replace(report, notes=(*report.notes, *notes))


def _done(forecast: ConversionReport, done: Report, seconds: float) -> ConversionReport:
    return replace(
        forecast,
        dry_run=False,
        kept=done.kept,
        kept_bytes=done.kept_nbytes,
        seconds=seconds,
        drift=done.replicas,
    )


def _check(job: Plan, final: Path, *, overwrite: bool) -> None:
    """Make the checks of the destination that a run makes first."""
    check_names(job)
    check_apart(job, final)
    check_pointer(job, final)
    check_free(final, overwrite=overwrite)


def _completed(
    options: WriteOptions | None, also: Sequence[str], layout: AnyPath | None
) -> WriteOptions | None:
    """The options with what the call says elsewhere: layouts, and folders to look in."""
    if isinstance(options, NativeOptions) and layout is not None:
        return replace(options, layouts=read_stated_layouts(layout))
    if isinstance(options, SafetensorsOptions) and also:
        return replace(options, beside=(*options.beside, *also))
    return options


def _forecast(
    spelled: Named, job: Plan, final: Path, whole: int, workers: int, max_memory: int
) -> ConversionReport:
    sizes, source = sizes_for(max_memory, workers), spelled.checkpoint
    return ConversionReport(
        source=replace(source, problems=(*source.problems, *source.unproved)),
        left_out=whole - spelled.carried,
        format=job.format,
        destination=str(final),
        pointer=str(final.parent / job.pointer[0]) if job.pointer else None,
        pointed_to=pointed_to(final, job),
        plan=job,
        cost=estimate(job),
        disk_bytes=disk_needed(job),
        disk_free_bytes=_free_bytes(final),
        memory_bytes=sizes.total,
        workers=sizes.workers,
        dry_run=True,
        notes=(*spelled.notes, *job.notes),
        replicas=job.replicas,
    )


def _free_bytes(folder: Path) -> int:
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    found = os.statvfs(existing)
    return found.f_bavail * found.f_frsize
