import numpy as np
import pytest

from eval.acceptance import Bootstrap
from eval.contexts import by_context
from tests.eval.samples import request

QUICK = Bootstrap(samples=1000, confidence=0.95, seed=0)


def test_each_window_counts_where_it_began():
    # contexts at the windows' starts: 5, 7, 8, 11, 12
    found = by_context([request(i, windows=(1, 0, 2, 0, 3)) for i in range(4)], 8, QUICK)
    assert {at: x.value for at, x in found.items()} == {"up to 8": 2.0, "beyond 8": 2.5}
    assert {x.n for x in found.values()} == {4}


def test_all_windows_are_in_one_part_and_an_empty_part_is_not_shown():
    generator = np.random.default_rng(0)
    rows = [
        request(i, windows=tuple(int(a) for a in generator.integers(0, 4, 50)), prompt_tokens=int(n))
        for i, n in enumerate(generator.integers(1, 300, 30))
    ]
    found = by_context(rows, 200, QUICK)
    assert list(found) == ["up to 100", "up to 200", "beyond 200"]
    windows = [[a for a, at in _starts(r) if low < at <= high] for low, high in ((0, 100), (100, 200), (200, 9**9))
               for r in rows]  # fmt: skip
    assert sum(map(len, windows)) == sum(r.drafts for r in rows)
    for part, (low, high) in zip(found.values(), ((0, 100), (100, 200), (200, 9**9)), strict=True):
        inside = [a for r in rows for a, at in _starts(r) if low < at <= high]
        assert part.value == pytest.approx(1 + sum(inside) / len(inside)) and part.low < part.value < part.high
    assert list(by_context(rows, 2000, QUICK)) == ["up to 1000"]


def test_one_request_has_no_interval_and_none_has_no_figure():
    assert by_context([request(0)], 200, QUICK) == {} and by_context([], 200, QUICK) == {}


def _starts(row):
    at = row.prompt_tokens + 1
    for accepted in row.per_step_accepted:
        yield accepted, at
        at += accepted + 1
