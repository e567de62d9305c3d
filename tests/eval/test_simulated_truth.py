"""Simulated traffic of known truth: how often intervals cover it, and how often a verdict is false, stopping included.

2,000 measurements of 30, 60 and 200 requests of four kinds. `cut` and `pareto` are what the gate meets; `stretched` and
`rare` are worse than that on purpose: what no interval can do on them is written down as numbers here, not left out.
"""

from functools import lru_cache

import numpy as np
import pytest
from numpy.random import Generator

from eval.acceptance import Bootstrap, ratio
from eval.power import power_at, requests_to_show, spread
from eval.sequential import Plan, critical, decide, ends, evenly, repeated_interval
from tests.eval.samples import request

REPEATS = 2000
SIZES = (30, 60, 200)
LOOKS = 5
BOOTSTRAP = Bootstrap(samples=1000, confidence=0.95, seed=0)
Z = 1.959964


def cut(generator: Generator, shape: tuple[int, ...]):
    """(acceptance rate, windows): lognormal answers, a fifth loop; all are cut at 200 tokens, and loops get there."""
    looping = generator.random(shape) < 0.2
    rate = np.where(looping, generator.beta(40, 2, shape), generator.beta(4, 8, shape))
    return _windows(rate, np.where(looping, 200, np.minimum(200, np.exp(generator.normal(4.5, 0.8, shape)))))


def pareto(generator: Generator, shape: tuple[int, ...]):
    """Nothing is cut: lengths with a Pareto tail (2.5), rates of their own, so that some requests hold much traffic."""
    return _windows(generator.beta(4, 8, shape), 40 * (1 + generator.pareto(2.5, shape)))


def stretched(generator: Generator, shape: tuple[int, ...]):
    """Nothing is cut, lognormal answers; a tenth loop and are twice as long."""
    looping = generator.random(shape) < 0.1
    rate = np.where(looping, generator.beta(40, 2, shape), generator.beta(4, 8, shape))
    return _windows(rate, np.exp(generator.normal(4.5, 0.8, shape)) * np.where(looping, 2, 1))


def rare(generator: Generator, shape: tuple[int, ...]):
    """One in twenty loops up to a cut of 2048 tokens and holds a quarter of them: 30 requests may hold none."""
    looping = generator.random(shape) < 0.05
    rate = np.where(looping, generator.beta(40, 2, shape), generator.beta(4, 8, shape))
    return _windows(rate, np.where(looping, 2048, np.minimum(2048, np.exp(generator.normal(5.3, 1.0, shape)))))


def _windows(rate: np.ndarray, tokens: np.ndarray):
    return rate, np.maximum(1, np.round(np.ceil(tokens) / (1 + 3 * rate)))


@lru_cache
def truth(kind) -> tuple[float, float]:
    """(accepted / windows, standard deviation a request) of 5 million requests, by their rates: no draws in windows."""
    generator = np.random.default_rng(99)
    rate, windows = (
        np.concatenate(parts) for parts in zip(*(kind(generator, (10**6,)) for _ in range(5)), strict=True)
    )
    of = float((3 * windows * rate).mean() / windows.mean())
    variance = np.mean(np.square((3 * rate - of) * windows) + 3 * windows * rate * (1 - rate))
    return of, float(np.sqrt(variance) / windows.mean())


@lru_cache
def traffic(kind, n: int) -> tuple[np.ndarray, np.ndarray]:
    """(accepted, windows) [REPEATS, n]."""
    generator = np.random.default_rng([5, n])
    rate, windows = kind(generator, (REPEATS, n))
    return generator.binomial((3 * windows).astype(int), rate).astype(float), windows


@lru_cache
def bootstrapped(kind, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Both ends of what eval.acceptance says of each measurement."""
    figures = [ratio(a, w, BOOTSTRAP) for a, w in zip(*traffic(kind, n), strict=True)]
    return np.array([f.low for f in figures]), np.array([f.high for f in figures])


def stopped(kind, n: int, threshold: float, z=None) -> tuple[np.ndarray, ...]:
    """(low, high, requests) where each measurement stops: the first look at which it passes or fails, or the last.

    As :func:`eval.sequential.decide` does, but for all measurements at once; `z` puts one critical value in all looks.
    """
    accepted, windows = traffic(kind, n)
    plan = Plan(looks=evenly(n, LOOKS), confidence=0.95)
    low, high, used = (np.full(REPEATS, np.nan) for _ in range(3))
    going = np.ones(REPEATS, dtype=bool)
    for look in plan.looks:
        _, below, above = ends(accepted[going, :look], windows[going, :look], z or critical(look, plan))
        low[going], high[going], used[going] = below, above, look
        going &= ~((low >= threshold) | (high < threshold))
    return low, high, used


def covered(low: np.ndarray, high: np.ndarray, of: float) -> float:
    return float(np.mean((low <= of) & (of <= high)))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", [cut, pareto])
def test_intervals_cover_the_truth(kind, n):
    of, _ = truth(kind)
    low, high = bootstrapped(kind, n)
    assert 0.93 <= covered(low, high, of) <= 0.97
    assert np.mean(low > of) <= 0.05
    _, low, high = ends(*traffic(kind, n), Z)
    assert 0.93 <= covered(low, high, of) <= 0.97


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", [cut, pareto, stretched, rare])
def test_a_truth_at_the_threshold_hardly_ever_passes(kind, n):
    """The gate's own promise, on every kind: false passes, over five looks and with one."""
    of, _ = truth(kind)
    assert np.mean(bootstrapped(kind, n)[0] >= of) <= 0.05
    assert np.mean(stopped(kind, n, of)[0] >= of) <= 0.05


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", [cut, pareto])
@pytest.mark.parametrize("share", [1.0, 0.9, 1.2])
def test_interval_covers_where_a_measurement_stopped(kind, n, share):
    """Also at the threshold itself, the worst case: there stopping early and missing the truth are one thing."""
    of, _ = truth(kind)
    low, high, _ = stopped(kind, n, share * of)
    assert covered(low, high, of) >= 0.93
    if share != 1.0:
        assert np.mean(low >= share * of if share > 1 else high < share * of) <= 0.05


LIMITS = [
    # n, and the least coverage: eval.acceptance, one look of eval.sequential, where five looks stopped at the threshold
    (stretched, 30, 0.91, 0.93, 0.92),
    (stretched, 60, 0.91, 0.93, 0.92),
    (stretched, 200, 0.93, 0.93, 0.93),
    (rare, 30, 0.81, 0.83, 0.78),
    (rare, 60, 0.92, 0.93, 0.87),
    (rare, 200, 0.93, 0.93, 0.93),
]


@pytest.mark.parametrize(("kind", "n", "bootstrap", "one_look", "stopping"), LIMITS)
def test_known_limits_of_coverage(kind, n, bootstrap, one_look, stopping):
    """Where a few loops hold the tokens, a small sample that lacks them looks poor and sure of it: false fails.

    The other side holds (test_a_truth_at_the_threshold_hardly_ever_passes), and more requests cure it.
    """
    of, _ = truth(kind)
    assert covered(*bootstrapped(kind, n), of) >= bootstrap
    _, low, high = ends(*traffic(kind, n), Z)
    assert covered(low, high, of) >= one_look
    low, high, _ = stopped(kind, n, of)
    assert covered(low, high, of) >= stopping
    assert np.mean(low >= of) < np.mean(high < of)


@pytest.mark.parametrize("n", SIZES)
def test_peeking_at_a_plain_interval_would_pass_too_often(n):
    of, _ = truth(pareto)
    assert np.mean(stopped(pareto, n, of, Z)[0] >= of) > 0.06


@pytest.mark.parametrize("kind", [cut, pareto])
def test_clear_cases_end_early_and_the_others_lose_little(kind):
    of, _ = truth(kind)
    for n, most in ((30, 0.95), (60, 0.8), (200, 0.5)):
        assert stopped(kind, n, 0.7 * of)[2].mean() <= most * n
        assert stopped(kind, n, 1.5 * of)[2].mean() <= most * n
    for n in SIZES:
        at_once = np.mean(ends(*traffic(kind, n), Z)[1] >= 0.8 * of)
        assert np.mean(stopped(kind, n, 0.8 * of)[0] >= 0.8 * of) >= at_once - 0.04


def rows(kind, n: int, of: int):
    accepted, windows = (part[of] for part in traffic(kind, n))
    return [request(i, accepted=int(a), drafts=int(w)) for i, (a, w) in enumerate(zip(accepted, windows, strict=True))]


@pytest.mark.parametrize("share", [0.7, 1.0, 1.5])
def test_decide_is_what_was_simulated(share):
    threshold = share * truth(pareto)[0]
    low, high, used = stopped(pareto, 60, threshold)
    plan = Plan(looks=evenly(60, LOOKS), confidence=0.95)
    for i in range(30):
        asked = rows(pareto, 60, i)
        at = next((n for n in plan.looks if decide(asked[:n], plan, 1 + threshold).verdict != "go on"), 60)
        figure = repeated_interval(asked[:at], plan)
        assert (at, figure.low, figure.high) == pytest.approx((used[i], 1 + low[i], 1 + high[i]))


@pytest.mark.parametrize(("n", "allowed"), [(30, 0.08), (60, 0.06), (200, 0.06)])
@pytest.mark.parametrize("kind", [cut, pareto])
@pytest.mark.parametrize("promised", [0.8, 0.9])
def test_power_is_as_promised(kind, n, allowed, promised):
    """And where it is not, it promised too little: a ratio's error shrinks with the ratio.

    The bootstrap's interval is narrower below than t is, and shows up to 0.13 more.
    """
    of, deviation = truth(kind)
    margin = next(m for m in np.arange(0.01, 2, 0.01) if power_at(deviation, m, n, 0.95) >= promised)
    predicted = power_at(deviation, margin, n, 0.95)
    assert -0.02 <= np.mean(ends(*traffic(kind, n), Z)[1] >= of - margin) - predicted <= allowed
    assert -0.02 <= np.mean(bootstrapped(kind, n)[0] >= of - margin) - predicted <= 0.13


@pytest.mark.parametrize(("kind", "margin", "least"), [(cut, 0.4, 0.9), (pareto, 0.2, 0.82), (stretched, 0.4, 0.85)])
def test_requests_that_a_pilot_of_60_asks_for_show_it(kind, margin, least):
    """A pilot of heavy-tailed answers mostly holds too few long ones, asks for a third too little, and still does."""
    of, deviation = truth(kind)
    said = np.array([requests_to_show(spread(rows(kind, 60, i)), margin, 0.95, 0.9) for i in range(200)])
    accepted, windows = traffic(kind, 200)
    sizes, times = np.unique(said.clip(max=200), return_counts=True)
    shown = [np.mean(ends(accepted[:, :n], windows[:, :n], Z)[1] >= of - margin) for n in sizes]
    assert np.average(shown, weights=times) >= least
    assert 0.6 <= np.median(said) / requests_to_show(deviation, margin, 0.95, 0.9) <= 1.1
