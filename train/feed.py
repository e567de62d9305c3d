"""Packs made ready before the trainer needs them: read from disk or captured just then, copied to the GPU meanwhile."""

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from data.ahead import in_order
from train.pack import Pack, Steps, to_device
from train.places import each

Load = Callable[[Sequence[int]], Pack]
Fed = tuple[list[Pack], float]
"""packs of one optimiser step, and the seconds that the trainer waited for them"""
AHEAD = 6
"""optimiser steps that are made ready before they are needed"""


def feed(ready: Iterator[Fed], device: torch.device) -> Iterator[Fed]:
    """The same packs on `device`; on a GPU the copy runs on a stream of its own, beside the step before."""
    return _copied(ready, device) if device.type == "cuda" else ready


def from_disk(load: Load, steps: Steps) -> Iterator[Fed]:
    """Packs of each optimiser step, in order, read ahead."""
    return _timed(in_order((partial(_read, load, numbers) for numbers in steps), AHEAD))


@contextmanager
def from_capture(packs: Iterable[list[Pack]]) -> Generator[Iterator[Fed], None, None]:
    """Packs of each optimiser step from a running capture, through a queue of AHEAD steps; raises its errors."""
    made: queue.Queue[list[Pack] | BaseException | None] = queue.Queue(AHEAD)
    stopped = threading.Event()

    def fill() -> None:
        try:
            for one in packs:
                if not _put(made, one, stopped):
                    return
            _put(made, None, stopped)
        except BaseException as error:
            _put(made, error, stopped)

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    try:
        yield _timed(_taken(made))
    finally:
        stopped.set()
        thread.join()


def _put(made: "queue.Queue[Any]", one: Any, stopped: threading.Event) -> bool:
    """True once the queue took it; False where the trainer has stopped."""
    while not stopped.is_set():
        try:
            made.put(one, timeout=0.1)
        except queue.Full:
            continue
        return True
    return False


def _taken(made: "queue.Queue[list[Pack] | BaseException | None]") -> Iterator[list[Pack]]:
    while (one := made.get()) is not None:
        if isinstance(one, BaseException):
            raise one
        yield one


def _timed(packs: Iterator[list[Pack]]) -> Iterator[Fed]:
    while True:
        started = time.perf_counter()
        one = next(packs, None)
        if one is None:
            return
        yield one, time.perf_counter() - started


def _copied(read: Iterator[Fed], device: torch.device) -> Iterator[Fed]:
    """The same one step later, so that a copy runs on its own stream beside the step before."""
    side = torch.cuda.Stream(device)
    ready: tuple[list[Pack], float, Any] | None = None
    for packs, waited in read:
        with torch.cuda.stream(side):
            moved = [to_device(one, device) for one in packs]
        following = (moved, waited, side.record_event())
        if ready is not None:
            yield _use(*ready)
        ready = following
    if ready is not None:
        yield _use(*ready)


def _read(load: Load, numbers: list[list[int]]) -> list[Pack]:
    return [load(one) for one in numbers]


def _use(packs: list[Pack], waited: float, copied: Any) -> Fed:
    """Order the trainer's stream after the copy, and tell the allocator that it reads what was copied."""
    stream = torch.cuda.current_stream()
    stream.wait_event(copied)

    def recorded(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_cuda:
            tensor.record_stream(stream)
        return tensor

    return [each(one, recorded) for one in packs], waited
