"""Batches on a device, in three stages with a stream each: copies of one batch overlap the computation of another.

The stages of a batch run in order. Only the streams order the stages of different batches, so batches that run at the
same time must not share buffers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock
from typing import NamedTuple, Protocol

import torch

Work = Callable[[], None]
"""Enqueues operations on the current stream, and never waits for the device."""


class Stages(NamedTuple):
    """The work of one batch."""

    upload: Work
    compute: Work
    download: Work


class StageSeconds(NamedTuple):
    """The device time of each stage, excluding the wait before it."""

    upload: float
    compute: float
    download: float


class RunningBatch(Protocol):
    """A batch whose stages are enqueued."""

    def wait(self) -> StageSeconds:
        """Wait until the last stage has ended; raises RuntimeError if the device fails."""
        ...


class Pipeline(Protocol):
    """Enqueues batches; thread-safe."""

    def enqueue(self, stages: Stages) -> RunningBatch:
        """Enqueue the stages of one batch."""
        ...


class _EndedBatch(NamedTuple):
    seconds: StageSeconds

    def wait(self) -> StageSeconds:
        return self.seconds


class SerialPipeline:
    """Runs the stages immediately, one batch after another, as on a CPU."""

    def __init__(self) -> None:
        self._lock = Lock()

    def enqueue(self, stages: Stages) -> RunningBatch:
        """Run the stages."""
        with self._lock:
            at_s = [time.perf_counter()]
            for work in stages:
                work()
                at_s.append(time.perf_counter())
        return _EndedBatch(StageSeconds(at_s[1] - at_s[0], at_s[2] - at_s[1], at_s[3] - at_s[2]))


class _BatchOnStreams:
    def __init__(self) -> None:
        self.events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(3)]

    def wait(self) -> StageSeconds:
        self.events[-1][1].synchronize()
        return StageSeconds(*(begin.elapsed_time(end) / 1e3 for begin, end in self.events))


class CudaPipeline:
    """Enqueues each stage on its stream, after the event of the previous stage.

    streams  of the three stages
    """

    def __init__(self, device: torch.device) -> None:
        self.streams = [torch.cuda.Stream(device) for _ in range(3)]
        self._lock = Lock()  # no other batch may enqueue work between a stage's two events

    def enqueue(self, stages: Stages) -> RunningBatch:
        """Enqueue the stages without waiting for the device."""
        batch = _BatchOnStreams()
        before: torch.cuda.Event | None = None
        with self._lock:
            for stream, work, (begin, end) in zip(self.streams, stages, batch.events, strict=True):
                with torch.cuda.stream(stream):
                    if before is not None:
                        stream.wait_event(before)
                    begin.record(stream)
                    work()
                    end.record(stream)
                before = end
        return batch


def pipeline_of(device: torch.device) -> Pipeline:
    """Return the pipeline of a device."""
    return CudaPipeline(device) if device.type == "cuda" else SerialPipeline()
