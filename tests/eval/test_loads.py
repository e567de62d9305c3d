from dataclasses import replace

import numpy as np
import pytest

from eval.acceptance import Bootstrap, p99_ratio
from eval.loads import loaded, same
from export.record import Batch
from tests.eval.samples import request

QUICK = Bootstrap(samples=1000, confidence=0.95, seed=0)


def timed(arm: str, number: int, seconds, concurrency: int = 8, tokens: int = 60):
    return [
        request(i, arm=arm, phase="speed", round=number, concurrency=concurrency, total_s=float(s),
                windows=() if arm == "none" else (1,) * 30, output_ids=tuple(range(tokens)),
                gaps_s=(0.02,) * (tokens - 1))
        for i, s in enumerate(seconds)
    ]  # fmt: skip


def test_a_load_has_its_speedup_p99_and_throughput():
    times = np.linspace(1.0, 3.0, 40)
    rows = [r for number in range(3) for r in (*timed("none", number, times), *timed("head", number, times / 2))]
    batches = [
        Batch(phase="speed", domain="chat", round=n, arm=arm, temperature=0.0, concurrency=load, output_tokens=2400,
              seconds=seconds, requests=40)
        for load, n, arm, seconds in ((8, 0, "none", 10.0), (8, 1, "none", 12.0), (8, 2, "none", 30.0),
                                      (8, 0, "head", 6.0), (1, 0, "head", 60.0), (8, 1, "head", 0.0))
    ]  # fmt: skip
    found = loaded(rows, batches, QUICK)
    assert found.speedup.value == pytest.approx(2) and found.p99.value == pytest.approx(0.5)
    assert [found.p99.low, found.p99.high] == pytest.approx([0.5, 0.5]), "the arms are paired by prompt"
    assert found.throughput == {"none": 200.0, "head": 400.0}
    assert set(found.latency) == {"none", "head"}


def test_a_load_that_was_not_measured_has_no_figures():
    found = loaded([], [], QUICK)
    assert (found.speedup, found.p99, found.throughput, found.latency) == (None, None, {}, {})
    alone = loaded(timed("head", 0, [1.0] * 12), [], QUICK)
    assert alone.speedup is None and alone.p99 is None


def test_p99_of_one_slow_answer():
    """One answer of 40 takes ten times as long with the head: p99 shows it, and the interval that it is one prompt."""
    times = np.full(40, 1.0)
    slow = np.where(np.arange(40) == 7, 10.0, 0.5)
    rows = [r for n in range(3) for r in (*timed("none", n, times), *timed("head", n, slow))]
    figure = p99_ratio(rows, QUICK)
    assert figure.value == 10 and figure.low == 0.5 and figure.high == 10 and figure.n == 40


def test_p99_agrees_with_numpy_and_covers_the_truth():
    generator, covered = np.random.default_rng(0), 0
    times = generator.lognormal(0, 0.5, 300)
    rows = [*timed("none", 0, np.ones(300)), *timed("head", 0, times)]
    assert p99_ratio(rows, QUICK).value == np.quantile(times, 0.99, method="inverted_cdf")
    truth = np.exp(0.5 * 2.326348)
    for _ in range(200):
        rows = [*timed("none", 0, np.ones(600)), *timed("head", 0, generator.lognormal(0, 0.5, 600))]
        figure = p99_ratio(rows, Bootstrap(samples=400, confidence=0.95, seed=0))
        covered += figure.low <= truth <= figure.high
    assert 0.88 <= covered / 200 <= 0.99  # a tail quantile's interval from 600 answers


def test_answers_are_compared_within_a_round():
    rows = [r for n in range(2) for arm in ("none", "head") for r in timed(arm, n, [1.0] * 4, concurrency=1)]
    assert same(rows).equal == same(rows).answers == 8 and same(rows).first_difference is None
    assert same(rows).none_equal == same(rows).none_answers == 4

    def changed(r, arm, number, at):
        if (r.arm, r.round, r.prompt_id) != (arm, number, f"{1:016x}"):
            return r
        return replace(r, output_ids=(*r.output_ids[:at], 999, *r.output_ids[at + 1 :]))

    parted = same([changed(r, "head", 0, 17) for r in rows])
    assert (parted.equal, parted.answers, parted.first_difference, parted.none_equal) == (7, 8, 17.0, 4)
    noisy = same([changed(r, "none", 1, 5) for r in rows])
    assert (noisy.equal, noisy.none_equal, noisy.none_answers) == (7, 3, 4)
    shorter = same([replace(r, output_ids=r.output_ids[:30]) if r.arm == "head" else r for r in rows])
    assert (shorter.equal, shorter.first_difference) == (0, 30.0)
    assert same([r for r in rows if r.arm == "none"]) is None
