"""Executing a plan: from source files to a published output.

Theory. The order of things decides what a crash can leave behind::

    check destination, names, room      nothing has been written
    lock the staging folder             a second run on the same output is kept out
    journal: plan and sources           whoever continues knows whether it is the same work
    verify what an earlier run kept     digests against bytes; what fails is done again
    fill the files                      the journal follows the bytes
    sources unchanged?                  bytes of a file that changed are worth nothing
    manifest, sync, "complete"          from here on the output is whole
    publish                             rename, pointer file, clean up

A run that stops before "complete" has written to its staging folder only. Where nothing is finished
yet, or the input itself was refused, the folder is removed; otherwise it waits for ``resume``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from reshard import __version__
from reshard.errors import (
    OutputError,
    ReplicaMismatchError,
    ReshardError,
    UnsupportedError,
    count_text,
)
from reshard.execution import destination as place
from reshard.execution.audit import changes_in
from reshard.execution.blocks import Task, reading_order
from reshard.execution.buffers import LARGEST_BLOCK, Workspace, workspaces
from reshard.execution.crew import Crew, Progress
from reshard.execution.durable import SYNC_THREADS, sync_file, sync_folder
from reshard.execution.filling import Filler, RouteIndexes
from reshard.execution.gather import Gatherer
from reshard.execution.journal import Identity, Journal, JournalContent, Records
from reshard.execution.manifest import manifest_text, read_manifest
from reshard.execution.output import Builder, Output, output_error
from reshard.execution.queue import FileQueue
from reshard.execution.refusal import FirstMismatch
from reshard.execution.replicas import ReplicaFinding
from reshard.execution.resuming import kept_records
from reshard.execution.sources import SourceFiles
from reshard.execution.staging import Staging
from reshard.formats.manifest import MANIFEST_NAME

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.planning.plan import Plan

Stage = Callable[[str], None]
Fingerprints = Sequence[tuple[str, int, str]]


@dataclass(frozen=True, slots=True)
class Report:
    """What an execution did."""

    destination: str
    """The output folder."""
    files: int
    """Files in it."""
    tensors: int
    """Tensor shards written or kept."""
    kept: int
    """Of these, how many an interrupted run had finished."""
    nbytes: int
    kept_nbytes: int
    """Bytes of the output, and of these, tensor bytes that an interrupted run had written."""
    replicas: tuple[ReplicaFinding, ...]
    """Copies that differ and were let through, by name and state."""
    continued: bool
    """Whether there was an interrupted run, and this one went on from what it had left."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How an execution may spend: threads, bytes of buffers, and whether it waits for the disk."""

    workers: int
    max_memory: int
    fsync: bool


def execute(  # noqa: PLR0913 - keyword-only, and each is a decision of the caller
    plan: Plan,
    destination: str | os.PathLike[str],
    *,
    workers: int,
    max_memory: int,
    fsync: bool = True,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    stage: Stage | None = None,
) -> Report:
    """Carry out a plan and publish the result.

    Parameters
    ----------
    plan
        What to write.
    destination
        The output folder; it appears complete or not at all.
    workers
        Threads; they change speed only.
    max_memory
        Hard cap over all buffers of all workers, in bytes.
    fsync
        Whether the output is durable before it gets its name.
    resume
        Continue what an interrupted run of the same plan left; an output that it had finished is
        checked against its manifest, and gets its pointer file.
    overwrite
        Replace an existing output, and discard what an interrupted run left.
    progress
        Told how far it is, from the calling thread.
    stage
        Told the name of each stage that was reached; for tests of crashes.

    Returns
    -------
    Report
        What was done.

    Raises
    ------
    OutputError
        The destination is taken, is the input, is being written, or has no room.
    ReplicaMismatchError
        Holders differ and the policy of the plan is to refuse.
    CheckpointError
        A source file is gone, cannot be read, or changed.
    """
    final = place.resolved(destination)
    place.check_names(plan)
    place.check_apart(plan, final)
    place.check_pointer(plan, final)
    if not resume:  # what a resumed run finds is looked at under the lock
        place.check_free(final, overwrite=overwrite)
    budget = Budget(workers, max_memory, fsync)
    crew = Crew(workspaces(max_memory, workers), progress)
    with SourceFiles(plan.sources) as sources, Staging(final, fsync=fsync) as staging:
        run = _Run(plan, sources, staging, crew, budget, stage or _no_stage)
        return run.all(resume=resume, overwrite=overwrite)


def _manifest_bytes(folder: Path) -> bytes | None:
    """The manifest in a folder as it is, None where none can be read."""
    try:
        return (folder / MANIFEST_NAME).read_bytes()
    except OSError:
        return None


def _no_stage(name: str) -> None:
    """Ignore a stage."""


class _Run:
    """One execution, with the staging folder locked and the sources open."""

    def __init__(
        self,
        plan: Plan,
        sources: SourceFiles,
        staging: Staging,
        crew: Crew,
        budget: Budget,
        stage: Stage,
    ) -> None:
        self.plan = plan
        self.sources = sources
        self.staging = staging
        self.crew = crew
        self.budget = budget
        self.stage = stage
        self.indexes = RouteIndexes()
        self.names = [source.name for source in plan.sources]

    def all(self, *, resume: bool, overwrite: bool) -> Report:
        """Every stage, from what an earlier run left to the published output."""
        fingerprints = self.sources.fingerprints()
        sources = xxhash.xxh3_128_hexdigest(repr(fingerprints).encode())
        identity = Identity(self.plan.digest(), sources, self.sources.stamps)
        found = self._found(identity, resume=resume, overwrite=overwrite)
        try:
            if resume:
                finished = self._finished(found, fingerprints, overwrite=overwrite)
                if finished is not None:
                    self.staging.finish(self.plan.pointer, stage=self.stage)
                    return finished
            self._check_free(found, overwrite=overwrite)
            return self._fresh(identity, found, fingerprints, overwrite=overwrite)
        except OSError as error:
            if isinstance(error, ReshardError):
                raise
            raise output_error(error, self.staging.destination) from error

    def _check_free(self, found: JournalContent | None, *, overwrite: bool) -> None:
        try:
            place.check_free(self.staging.destination, overwrite=overwrite)
        except OutputError:
            if found is None:
                self.staging.remove()
            raise

    def _found(self, identity: Identity, *, resume: bool, overwrite: bool) -> JournalContent | None:
        """What is to be continued; anything else an earlier run left is gone afterwards."""
        found = self.staging.found()
        if found is not None and resume:
            if found.identity.same_work(identity):
                return found
            if not overwrite:
                raise OutputError(
                    "the interrupted run did something else: its input or its options differ",
                    file=self.staging.folder,
                    next_step="repeat its options, or start over with --overwrite",
                )
        elif found is not None and not overwrite and (found.records.slots or found.marks):
            raise OutputError(
                "an interrupted run has left finished work",
                file=self.staging.folder,
                found=count_text(len(found.records.slots), "finished tensor"),
                next_step="continue it with --resume, or start over with --overwrite",
            )
        self.staging.discard()
        return None

    def _finished(
        self, found: JournalContent | None, fingerprints: Fingerprints, *, overwrite: bool
    ) -> Report | None:
        """What an interrupted run did when all it left undone was to point at it and clean up."""
        if found is not None:
            if not self._is_published(found):
                return None
            kept = len(found.records.slots)
            findings = read_manifest(self.staging.destination).findings
            return self._report(kept, kept, self._nbytes(found.records), findings, continued=True)
        # Its journal is the first that goes when it cleans up, so the manifest must speak.
        try:
            manifest = read_manifest(self.staging.destination)
        except (ReshardError, OSError):
            return None
        if (manifest.plan, manifest.sources) != (self.plan.digest(), tuple(fingerprints)):
            return None
        changes = changes_in(self.staging.destination, self.crew)
        if changes and overwrite:
            return None
        if changes:
            self.staging.remove()
            raise OutputError(
                "the finished output is no longer what was written",
                file=self.staging.destination / changes[0].file,
                found=changes[0].said,
                next_step="start over with --overwrite",
            )
        slots = [slot for file in self.plan.files for slot in file.slots]
        nbytes = sum(slot.nbytes for slot in slots)
        return self._report(len(slots), len(slots), nbytes, manifest.findings, continued=True)

    def _is_published(self, found: JournalContent) -> bool:
        """Whether the interrupted run had already given the output its name.

        An older output of the same plan and sources has the same manifest. So where the staging
        folder holds a second one, the bytes of the one that has the name decide: they may be
        damaged, and that be the reason why it was to be replaced.
        """
        named, staged = map(_manifest_bytes, (self.staging.destination, self.staging.data))
        if named is None or f"complete {xxhash.xxh3_128_hexdigest(named)}" not in found.marks:
            return False
        return staged != named or not changes_in(self.staging.destination, self.crew)

    def _fresh(
        self,
        identity: Identity,
        found: JournalContent | None,
        fingerprints: Fingerprints,
        *,
        overwrite: bool,
    ) -> Report:
        try:
            records = self._kept(found, identity)
            kept, kept_nbytes = len(records.slots), self._nbytes(records)
            path, fsync = self.staging.journal_path, self.budget.fsync
            with closing(Journal(path, identity, records, fsync=fsync)) as journal:
                self.stage("journal")
                self._prepare(found)
                self._fill(journal, records)
                self.stage("filled")
                findings = self._findings(records)
                self.sources.check_unchanged()
                self._complete(journal, records, fingerprints, findings)
        except BaseException as error:
            self._clean_up(error)
            raise
        # Since the first look somebody may have put something else there.
        place.check_free(self.staging.destination, overwrite=overwrite)
        self.staging.publish(self.plan.pointer, overwrite=overwrite, stage=self.stage)
        done, continued = len(records.slots), found is not None
        return self._report(done, kept, kept_nbytes, findings, continued=continued)

    def _nbytes(self, records: Records) -> int:
        """Bytes of the slots that are finished."""
        return sum(self.plan.files[file].slots[slot].nbytes for file, slot in records.slots)

    def _kept(self, found: JournalContent | None, identity: Identity) -> Records:
        """What of an earlier run is still as its journal says."""
        if found is None:
            return Records()
        touched = found.identity.stamps != identity.stamps
        return kept_records(
            self.plan,
            self.staging.data,
            found.records,
            self.crew,
            self._filler if touched else None,
        )

    def _filler(self, space: Workspace) -> Filler:
        gatherer = Gatherer(self.sources, space.scratch)
        return Filler(gatherer, space, self.indexes, self.plan.replicas, self.names)

    def _prepare(self, found: JournalContent | None) -> None:
        """See that there is room and that names stay apart, and make the folders."""
        place.check_case(self.plan, self.staging.folder)
        data = self.staging.data
        present = 0
        if found is not None and data.exists():
            present = place.allocated(data / file.path for file in self.plan.files)
        place.check_room(self.plan, self.staging.folder, present)
        data.mkdir(exist_ok=True)
        for folder in place.folders_of(self.plan):
            (data / folder).mkdir(exist_ok=True)
        self.stage("folders")

    def _fill(self, journal: Journal, records: Records) -> None:
        sizes = len(self.crew.spaces[0].block)
        output = Output(
            self.plan,
            str(self.staging.data),
            journal,
            records,
            small=min(sizes, LARGEST_BLOCK),
            fsync=self.budget.fsync,
        )

        order = reading_order(self.plan)
        first = FirstMismatch(order)

        def work_for(space: Workspace) -> Callable[[Task], int]:
            return first.guard(Builder(output, self._filler(space), space).do)

        total = sum(slot.nbytes for file in self.plan.files for slot in file.slots)
        done = self._nbytes(records)
        try:
            queue = FileQueue(order, first.begin(output.begin))
            self.crew.run(queue.take, work_for, total=total - done, what="convert")
            first.tell()
        finally:
            output.abandon()

    def _complete(
        self,
        journal: Journal,
        records: Records,
        fingerprints: Fingerprints,
        findings: Sequence[ReplicaFinding],
    ) -> None:
        """Write the manifest, make everything durable, and say so in the journal."""
        text = manifest_text(self.plan, records, fingerprints, findings, __version__).encode()
        (self.staging.data / MANIFEST_NAME).write_bytes(text)
        self.stage("manifest")
        if self.budget.fsync:
            self._sync()
        self.stage("synced")
        journal.mark(f"complete {xxhash.xxh3_128_hexdigest(text)}")
        self.stage("complete")

    def _sync(self) -> None:
        data = self.staging.data
        paths = [data / file.path for file in self.plan.files]
        total = sum(file.size for file in self.plan.files)
        self.crew.each(paths, sync_file, threads=SYNC_THREADS, total=total, what="sync")
        sync_file(data / MANIFEST_NAME)
        for folder in (*(data / name for name in place.folders_of(self.plan)), data):
            sync_folder(folder)
        sync_folder(self.staging.folder)

    def _clean_up(self, error: BaseException) -> None:
        """After an error: keep what can be continued, remove the rest."""
        found = self.staging.found()
        refused = isinstance(error, ReplicaMismatchError | UnsupportedError)
        if found is None or refused or not found.records.slots:
            self.staging.remove()

    def _report(
        self,
        tensors: int,
        kept: int,
        kept_nbytes: int,
        findings: tuple[ReplicaFinding, ...],
        *,
        continued: bool,
    ) -> Report:
        return Report(
            destination=str(self.staging.destination),
            files=len(self.plan.files) + 1,
            tensors=tensors,
            kept=kept,
            nbytes=sum(file.size for file in self.plan.files),
            kept_nbytes=kept_nbytes,
            replicas=findings,
            continued=continued,
        )

    def _findings(self, records: Records) -> tuple[ReplicaFinding, ...]:
        """Replicas that were let through, by name and state.

        An output may have the same elements several times, or in part, so what was found on the way
        is not added up: such a tensor is read once more, as a whole.
        """
        drifted = {one.key for record in records.slots.values() for one in record.findings}
        filler = self._filler(self.crew.spaces[0])
        return tuple(filler.surveyed(fill) for fill in self.plan.copied if fill.key in drifted)
