"""`RunSaving` writes the checkpoints of a run, and brings a run to the state of one.

Models are copied on their devices, in the order of the run's other work; everything is written to disk while
the run continues. The data of samples is copied before anything of it may be freed.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hflow.base.durable_files import FileChecksum, WriteError, write_error
from hflow.data_plane.locations import DataLocations
from hflow.graph.ir import Level
from hflow.graph.queries import saved_models
from hflow.metrics import declare
from hflow.planner.plan.schedule import scheduled_updates
from hflow.runtime.execution.batch_runner import SampleRelease
from hflow.runtime.execution.node_execution import NodeExecution, streamed_outputs
from hflow.runtime.execution.run_context import RunContext
from hflow.runtime.records.trace import CONTROLLER
from hflow.runtime.saving.saved_run import SAMPLES, ResumePoint, SavedRun
from hflow.runtime.state.snapshot import RunSnapshot
from hflow.workers.interface import NotSaved, SampleReady, SavedJournals, Span, samples_file

SAVE_STALL = declare("time/save_stall", "s", "time that training waited until models were copied for saving")


class RunSaving:
    """Saves and restores one run.

    Attributes:
        saved_at: when the last checkpoint was taken, or the run began, as `time.monotonic()`.
    """

    def __init__(self, run: RunContext, node_execution: NodeExecution, release: SampleRelease) -> None:
        self._run = run
        self._node_execution = node_execution
        self._release = release
        plan = run.plan
        self._streams = {stream.name: stream for stream in plan.schedule.streams}
        self._models = saved_models(plan.graph)
        self._streaming_nodes = frozenset(
            node.name for node in plan.schedule.nodes if node.level is not Level.BATCH and node.groups
        )
        self._finished: dict[str, dict[int, SampleReady]] = {name: {} for name in self._streams}
        """Stream -> samples that are in no batch yet."""
        self._copied: dict[int, dict[str, str]] = defaultdict(dict)
        """Steps -> model -> the directory to which its copy is being written."""
        self._failures: dict[int, OSError] = {}
        """Steps -> why the directory of a model could not be made."""
        self._writing = asyncio.Lock()
        self._directory = ""
        """The directory of the samples of the checkpoint that the run continues from."""
        self._file_of: dict[tuple[str, int], str] = {}
        """Root stream and sample of that checkpoint -> the name of its file."""
        self._extra_updates: dict[str, int] = {}
        """The extra updates of that checkpoint."""
        self._was_taken = asyncio.Event()
        self.saved_at = time.monotonic()

    # What the run tells
    def add_finished(self, sample: SampleReady) -> None:
        """Note a sample whose source is done."""
        self._finished[sample.stream][sample.sample] = sample

    def forget(self, stream: str, samples: Iterable[int]) -> None:
        """Note samples that are in a batch, or have left the run."""
        finished = self._finished[stream]
        for sample in samples:
            finished.pop(sample, None)

    # Saving
    async def copy_model(self, model: str, steps: int) -> None:
        """Copy a model as it is after `steps` completed steps. Training waits for this only."""
        try:
            directory = str(self._run.checkpoints.begin(steps, model))
        except OSError as error:
            self._failures[steps] = error  # reported when the checkpoint is to be written
            return
        start = time.monotonic()
        await self._run.workers.save(model, directory)
        self._run.metrics.sum_values(steps - 1, {SAVE_STALL.name: time.monotonic() - start})
        self._copied[steps][model] = directory

    def take(
        self,
        snapshot: RunSnapshot,
        reports: Sequence[asyncio.Task[None]],
        samplers: Mapping[str, str],
        *,
        is_last: bool,
    ) -> Coroutine[Any, Any, None]:
        """Begin a checkpoint of this moment; the result is awaited while the run continues.

        Args:
            reports: tasks that report the metrics of what is complete in it. A run that continues from the
                checkpoint does not report these again, so the checkpoint is not complete before they are.
            samplers: stream -> JSON of what its sampler of rows knows.
            is_last: whether the run ends with it. If another one cannot be written, the run continues.
        """
        homes = {
            (s.stream, member.sample): self._run.placer.home(s.stream, group.number)
            for s in snapshot.streams
            for group in s.groups
            if self._run.placer.is_placed(s.stream, group.number)
            for member in group.members
        }
        saved = SavedRun(
            snapshot,
            self._run.ledger.position(),
            dict(self._node_execution.states),
            tuple(self._finished[s.stream][sample] for s in snapshot.streams for sample in s.finished),
            tuple((stream, sample, samples_file(worker)) for (stream, sample), worker in homes.items()),
            {
                model: num + self._extra_updates.get(model, 0)
                for model, num in scheduled_updates(self._run.plan, snapshot.steps).items()
            },
            streamed_outputs(self._run.plan),
            samplers,
        )
        self._release.hold()
        self.saved_at = time.monotonic()
        self._was_taken.set()
        return self._save(saved, homes, reports, is_last=is_last)

    async def wait_until_taken(self) -> None:
        """Wait until the next checkpoint is taken."""
        self._was_taken.clear()
        await self._was_taken.wait()

    async def _save(
        self,
        saved: SavedRun,
        homes: Mapping[tuple[str, int], int],
        reports: Sequence[asyncio.Task[None]],
        *,
        is_last: bool,
    ) -> None:
        steps, start = saved.snapshot.steps, time.time()
        try:
            try:
                directory = self._run.checkpoints.begin(steps, SAMPLES)
                workers = await self._copy_samples(saved.snapshot, homes, str(directory))
            finally:
                self._release.go_on()
            for model in self._models:
                if model not in self._copied[steps]:
                    await self.copy_model(model, steps)
            if reports:
                await asyncio.wait(reports)
            if failure_before := self._failures.pop(steps, None):
                raise failure_before
            async with self._writing:
                await self._write(saved, workers)
        except (WriteError, OSError) as failure:
            unfinished = self._run.checkpoints.unfinished(steps)
            error = write_error(unfinished, failure) if isinstance(failure, OSError) else failure
            with suppress(WriteError):  # so that nothing is written after the directory is removed
                await self._finish_models(steps)
            self._run.checkpoints.drop(steps)
            if is_last:
                raise error or failure from failure
            last = self._run.checkpoints.describe()
            self._run.observer.on_warning(
                f"step {steps} was not saved: {error}; the last checkpoint is {last}"
            )
        else:
            span = Span(f"save step {steps}", "checkpoints", start, time.time(), {"steps": steps})
            self._run.observer.on_span(CONTROLLER, span)

    async def _copy_samples(
        self, snapshot: RunSnapshot, homes: Mapping[tuple[str, int], int], directory: str
    ) -> list[int]:
        """Let workers copy the snapshot's samples that they hold to files; return these workers.

        `homes` has the worker of each (stream, sample) when the snapshot was made.
        """
        finished: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        unfinished: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for stream in snapshot.streams:
            name, source = stream.stream, self._streams[stream.stream].source
            for sample in stream.finished:
                finished[homes[name, sample]][name].append(sample)
            for sample in stream.unfinished:
                if (name, sample) in homes:
                    unfinished[homes[name, sample]][source].append(sample)
        workers = sorted({*finished, *unfinished})
        await asyncio.gather(
            *(self._run.workers.save_samples(w, directory, finished[w], unfinished[w]) for w in workers)
        )
        return workers

    async def _write(self, saved: SavedRun, workers: Sequence[int]) -> None:
        """Wait until everything is on disk, and complete the checkpoint."""
        steps = saved.snapshot.steps
        directory = self._run.checkpoints.unfinished(steps)
        files: dict[str, FileChecksum] = {}
        for model, written in (await self._finish_models(steps)).items():
            files |= {f"{model}/{name}": checksum for name, checksum in written.items()}
        lost: list[NotSaved] = []
        for worker in workers:
            samples = await self._run.workers.finish_samples(worker, str(directory / SAMPLES))
            files |= {f"{SAMPLES}/{name}": checksum for name, checksum in samples.files.items()}
            lost += samples.not_saved
        if lost:
            self._warn_of_lost(steps, lost)
            stream_of = {stream.source: stream.name for stream in self._run.plan.schedule.streams}
            saved = saved.without((stream_of[sample.source], sample.sample) for sample in lost)
        saved.write(directory)
        await asyncio.to_thread(self._run.checkpoints.finish, steps, files, self._run.plan.digest)

    async def _finish_models(self, steps: int) -> dict[str, Mapping[str, FileChecksum]]:
        """Wait until no worker writes a model of a checkpoint, and return model -> its files.

        Raises:
            RunError: when one of them cannot be written.
        """
        copied = self._copied.pop(steps, {})
        finishing = (self._run.workers.finish_save(model, directory) for model, directory in copied.items())
        answers = await asyncio.gather(*finishing, return_exceptions=True)
        written: dict[str, Mapping[str, FileChecksum]] = {}
        for model, answer in zip(copied, answers, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            written[model] = answer
        return written

    def _warn_of_lost(self, steps: int, lost: Sequence[NotSaved]) -> None:
        first = lost[0]
        self._run.observer.on_warning(
            f"the checkpoint of step {steps} lacks {len(lost)} samples of {first.source}, which a run that "
            f"continues from it loses: {first.reason}"
        )

    # Restoring
    async def restore(self, point: ResumePoint, locations: Mapping[str, DataLocations]) -> None:
        """Place the groups of a checkpoint on workers, and let these read the data of finished samples."""
        saved, self._directory = point.saved, str(point.path / SAMPLES)
        self._extra_updates = saved.extra_updates(self._run.plan)
        self._file_of = {(stream, sample): name for stream, sample, name in saved.files}
        lengths = {(s.stream, s.sample): s.length for s in saved.samples}
        reads: dict[int, dict[str, dict[str, list[int]]]] = defaultdict(
            lambda: defaultdict(lambda: defaultdict(list))
        )
        for stream in saved.snapshot.streams:
            name = stream.stream
            for group in stream.groups:
                if (name, group.members[0].sample) not in self._file_of:
                    continue  # the dataset has no row for it
                worker = self._run.placer.place(name, group.number, len(group.members))
                for member in group.members:
                    if not member.done:
                        continue
                    sample = member.sample
                    reads[worker][self._file_of[name, sample]][name].append(sample)
                    locations[name].add_sample(sample, worker, lengths[name, sample])
                    self._add_outputs(locations[name], (*member.done, *group.done), sample, worker)
                    self._run.placer.finished(name, group.number)
        for report in saved.samples:
            self.add_finished(report)
            self._run.metrics.add_sample(report, is_trained=self._streams[report.stream].batch is not None)
        await asyncio.gather(
            *(self._run.workers.restore_samples(w, self._directory, files) for w, files in reads.items())
        )

    def journals(self, stream: str, samples: Sequence[int]) -> SavedJournals | None:
        """Return the files of the journals with which samples of a checkpoint continue.

        Where running samples are never interrupted, all their tokens are of one version. So they begin again.
        So do those of a worker that had nothing to save.
        """
        if not self._run.plan.schedule.settings.interrupt:
            return None
        files = {sample: self._file_of[stream, sample] for sample in samples}
        is_there = {name: (Path(self._directory) / f"{name}.json").is_file() for name in set(files.values())}
        return SavedJournals(self._directory, {s: name for s, name in files.items() if is_there[name]})

    def _add_outputs(self, locations: DataLocations, nodes: Iterable[str], sample: int, worker: int) -> None:
        """Note where the outputs of nodes with devices of their own are: on the sample's home worker."""
        for node in nodes:
            if node in self._streaming_nodes:
                locations.add_outputs(self._node_execution.output_fields(node), (sample,), worker)
