"""Packs in order, read ahead, with errors where they are due."""

import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import torch

from tests.train.test_pack import features
from train.feed import AHEAD, feed, from_capture, from_disk
from train.pack import Pack, pack

CPU = torch.device("cpu")


def one(number: int) -> Pack:
    return pack([features([0, 1, 1, 1], 100 * number)])


@pytest.fixture(autouse=True, params=[False, True], ids=["inline", "threads"])
def _ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of reading: as on a CPU, and as beside a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param)


def first_ids(fed: Iterator[tuple[list[Pack], float]]) -> list[list[int]]:
    return [[int(p.input_ids_S[0]) for p in packs] for packs, _ in fed]


def test_disk_packs_come_in_order_though_later_ones_are_read_sooner() -> None:
    def load(numbers: Sequence[int]) -> Pack:
        (number,) = numbers
        time.sleep(0.02 * (number % 3 == 0))
        return one(number)

    steps = [[[n], [n + 1]] for n in range(0, 40, 2)]
    assert first_ids(feed(from_disk(load, steps), CPU)) == [[100 * n, 100 * n + 100] for n in range(0, 40, 2)]


def test_a_damaged_pack_is_raised_when_its_turn_comes() -> None:
    def load(numbers: Sequence[int]) -> Pack:
        if list(numbers) == [3]:
            raise ValueError("features-00001.safetensors: damaged")
        return one(0)

    fed = from_disk(load, [[[n]] for n in range(6)])
    for _ in range(3):
        next(fed)
    with pytest.raises(ValueError, match="damaged"):
        next(fed)


def test_the_capture_waits_while_the_queue_is_full_and_ends_with_the_trainer() -> None:
    made: list[int] = []

    def packs() -> Iterator[list[Pack]]:
        for number in range(1000):
            made.append(number)
            yield [one(number)]

    with from_capture(packs()) as fed:
        assert first_ids(iter([next(fed), next(fed)])) == [[0], [100]]
        time.sleep(0.3)
        assert len(made) <= AHEAD + 4
    assert threading.active_count() < 20 and len(made) < 1000


def test_an_error_of_the_capture_reaches_the_trainer_after_what_was_made() -> None:
    def packs() -> Iterator[list[Pack]]:
        yield [one(1)]
        raise RuntimeError("the worker died")

    with from_capture(packs()) as fed:
        assert first_ids(iter([next(fed)])) == [[100]]
        with pytest.raises(RuntimeError, match="the worker died"):
            next(fed)
