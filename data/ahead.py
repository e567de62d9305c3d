"""Tasks that run in threads before their results are needed, beside a GPU."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def in_order(tasks: Iterable[Callable[[], T]], count: int) -> Iterator[T]:
    """Results in the tasks' order, up to `count` tasks begun before the one whose result is due.

    Without a GPU each runs when its turn comes: the work is the CPU's, and a second thread's OpenMP team would take the
    cores from it (a quarter of the training's speed on two cores, LOG.md).
    """
    if not torch.cuda.is_available():
        yield from (task() for task in tasks)
        return
    with ThreadPoolExecutor(count) as pool:
        begun: deque[Future[T]] = deque()
        for task in tasks:
            begun.append(pool.submit(task))
            if len(begun) > count:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
