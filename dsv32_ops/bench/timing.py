"""How long a call takes: on the device, and on the host until it returns."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

Call = Callable[[], Any]

# Up to here repeated launches on the same buffers are what serving does too: the activations were
# just written and sit in L2.
SAME_BUFFERS_MAX = 512
# Above it do_bench flushes the cache; below, its launches are so short that a slow host shows.
GRAPH_MAX = 16_384
GRAPH_LAUNCHES = 20
GRAPH_REPLAYS = 30
# Rotating buffers must not fit the L2 cache (60 MB on an H200, 126 MB on a B200).
ROTATE_BYTES = 512 << 20


class Timing(NamedTuple):
    """Microseconds per call: median, 20th and 80th percentile, and how they were taken."""

    us: float
    p20: float
    p80: float
    method: str


def num_copies(num_tokens: int, nbytes: int) -> int:
    """Sets of buffers that a measurement rotates over, for calls that move ``nbytes``."""
    if num_tokens <= SAME_BUFFERS_MAX or num_tokens > GRAPH_MAX:
        return 1
    return max(2, min(GRAPH_LAUNCHES, -(-ROTATE_BYTES // max(nbytes, 1))))


def device_time(calls: Sequence[Call], num_tokens: int, device: torch.device) -> Timing:
    """Time ``calls``, which do the same on different buffers, by the method for ``num_tokens``.

    ====================  =================================================================
    tokens                method
    ====================  =================================================================
    up to 512             20 launches in one CUDA graph on the same buffers, replay time / 20
    513 to 16,384         the same, rotating over the buffer sets in ``calls``
    more                  ``triton.testing.do_bench``: cache flushed before each launch
    any, on a CPU         wall clock
    ====================  =================================================================
    """
    if device.type == "cpu":
        return wall_time(calls[0])
    if num_tokens > GRAPH_MAX:
        return _flushed(calls[0])
    return _replayed(calls)


def _replayed(calls: Sequence[Call]) -> Timing:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    launches = max(GRAPH_LAUNCHES, len(calls))
    graph = torch.cuda.CUDAGraph()
    # Outputs that are still held cannot share memory with the next call's: with rotating inputs
    # they have to rotate too, or the writes would stay in L2.
    held: deque[Any] = deque(maxlen=len(calls) - 1)
    with torch.cuda.graph(graph, stream=stream):
        for i in range(launches):
            held.append(calls[i % len(calls)]())
        held.clear()
    samples = []
    for _ in range(GRAPH_REPLAYS + 2):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / launches)
    return _summary(samples[2:], "graph")


def _flushed(call: Call) -> Timing:
    from triton.testing import do_bench

    us, p20, p80 = (1e3 * ms for ms in do_bench(call, warmup=10, rep=40, quantiles=[0.5, 0.2, 0.8]))
    return Timing(us, p20, p80, "do_bench")


def wall_time(call: Call, seconds: float = 1.0, most: int = 20) -> Timing:
    """Wall clock of whole calls, for devices without events: at least 1, at most ``most``."""
    samples: list[float] = []
    while not samples or (len(samples) < most and sum(samples) < seconds * 1e6):
        start = time.perf_counter()
        call()
        samples.append((time.perf_counter() - start) * 1e6)
    return _summary(samples, "wall clock")


def host_times(
    calls: Sequence[Call], device: torch.device, repeats: int = 20, batches: int = 10
) -> list[float]:
    """Median microseconds until each eager call returns; the device is idle before each batch.

    Batches take turns between the calls: a host may be half as fast for a tenth of a second, and
    then all of them are.
    """
    samples: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(batches):
        for call, times in zip(calls, samples, strict=True):
            if device.type != "cpu":
                torch.cuda.synchronize()
            for _ in range(repeats):
                start = time.perf_counter_ns()
                call()
                times.append((time.perf_counter_ns() - start) * 1e-3)
    return [statistics.median(times) for times in samples]


def _summary(samples: list[float], method: str) -> Timing:
    if len(samples) < 2:
        return Timing(samples[0], samples[0], samples[0], method)
    fifths = statistics.quantiles(samples, n=5, method="inclusive")
    return Timing(statistics.median(samples), fifths[0], fifths[3], method)


def copy_bandwidth(device: torch.device, nbytes: int = 2 << 30) -> float:
    """GB/s of a device-to-device copy of ``nbytes``, counting bytes read and bytes written."""
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = device_time([lambda: target.copy_(source)], GRAPH_MAX + 1, device)
    return 2 * nbytes / timing.us * 1e-3
