from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from eval.power import half_width, spread
from eval.sequential import Plan, bounds, critical, decide, ends, evenly, repeated_interval
from tests.eval.samples import request

PLAN = Plan(looks=(15, 30, 45, 60), confidence=0.95)


def rows(n: int, seed: int = 0):
    generator = np.random.default_rng(seed)
    return [request(i, windows=tuple(int(a) for a in generator.choice(4, size=40, p=[0.4, 0.3, 0.2, 0.1])))
            for i in range(n)]  # fmt: skip


@pytest.mark.parametrize(
    ("looks", "alpha", "sides", "published"),
    [
        (5, 0.05, 2, (4.877, 3.357, 2.680, 2.290, 2.031)),
        (4, 0.05, 2, (4.333, 2.963, 2.359, 2.014)),
        (3, 0.05, 2, (3.710, 2.511, 1.993)),
        (2, 0.05, 2, (2.963, 1.969)),
        (1, 0.05, 2, (1.960,)),
        (5, 0.05, 1, (4.229, 2.888, 2.298, 1.962, 1.740)),
        (1, 0.05, 1, (1.645,)),
    ],
)
def test_bounds_are_the_published_ones(looks, alpha, sides, published):
    """Lan and DeMets' alpha_1* at equal looks, as printed for their program and by R's ldbounds and gsDesign."""
    assert bounds(tuple(k / looks for k in range(1, looks + 1)), alpha, sides) == pytest.approx(published, abs=0.001)


@pytest.mark.parametrize(("fractions", "sides"), [((0.5, 0.55, 0.9, 1.0), 2), ((0.3, 1.0), 1), ((0.2, 0.4, 0.6), 2)])
def test_a_process_without_drift_crosses_with_chance_alpha(fractions, sides):
    alpha = 0.1
    times = np.array(fractions)
    steps = np.random.default_rng(0).normal(size=(200_000, len(times))) * np.sqrt(np.diff(times, prepend=0))
    z = steps.cumsum(axis=1) / np.sqrt(times)
    crossed = ((np.abs(z) if sides == 2 else z) > bounds(fractions, alpha, sides)).any(axis=1).mean()
    spent = sides * 2 * stats.norm.sf(stats.norm.isf(alpha / sides / 2) / np.sqrt(times[-1]))  # less than alpha at 0.6
    assert crossed == pytest.approx(spent, abs=0.002)


def test_very_early_looks_are_never_crossed():
    assert bounds((0.01, 1.0), 0.05, 2) == pytest.approx((8.0, 1.96), abs=0.001)


@pytest.mark.parametrize(
    ("fractions", "alpha", "sides", "said"),
    [
        ((), 0.05, 2, r"fractions \(\): each must be above the one before, in \(0, 1\], e.g."),
        ((0.5, 0.5), 0.05, 2, "above the one before"),
        ((0.0, 1.0), 0.05, 2, "above the one before"),
        ((0.5, 1.2), 0.05, 2, "above the one before"),
        ((1.0,), 0.0, 2, r"alpha 0.0, sides 2: alpha lies in \(0, 0.5\)"),
        ((1.0,), 0.05, 3, "alpha 0.05, sides 3: .* sides is 1 or 2; set them so"),
    ],
)
def test_bounds_say_what_is_wrong(fractions, alpha, sides, said):
    with pytest.raises(ValueError, match=said):
        bounds(fractions, alpha, sides)


def test_looks_lie_evenly_and_not_before_the_least():
    assert evenly(60, 4) == (15, 30, 45, 60)
    assert evenly(60, 4, 30) == (30, 45, 60)
    assert evenly(30, 4) == (8, 15, 23, 30)
    assert evenly(7, 1) == (7,)
    for wrong in ((60, 0, 2), (7, 4, 2), (20, 4, 30)):
        with pytest.raises(ValueError, match=f"{wrong[1]} looks at {wrong[0]} requests, none before {wrong[2]}: .*ask"):
            evenly(*wrong)


def test_critical_values_fall_and_hold_between_looks():
    values = [critical(n, PLAN) for n in PLAN.looks]
    assert values == pytest.approx([4.333, 2.963, 2.359, 2.014], abs=0.001)
    assert critical(44, PLAN) == critical(30, PLAN) and critical(61, PLAN) == critical(60, PLAN)
    assert np.isnan(critical(14, PLAN))


def test_interval_at_one_look_is_the_t_interval_of_the_ratio():
    measured = rows(60)
    figure = repeated_interval(measured, Plan(looks=(60,), confidence=0.95))
    assert figure.value == pytest.approx(1 + sum(r.accepted for r in measured) / (60 * 40)) and figure.n == 60
    # answers of equal length: leaving one out widens by sqrt(60 / 59)
    half = half_width(spread(measured), 60, 0.95) * np.sqrt(60 / 59)
    assert figure.value - figure.low == pytest.approx(half)
    assert figure.high - figure.value > figure.value - figure.low


def test_interval_narrows_from_look_to_look_and_the_last_is_hardly_wider():
    measured = rows(60)
    figures = [repeated_interval(measured[:n], PLAN) for n in PLAN.looks]
    assert all(a.high - a.low > b.high - b.low for a, b in pairwise(figures))
    plain = repeated_interval(measured, Plan(looks=(60,), confidence=0.95))
    assert figures[-1].high - figures[-1].low == pytest.approx(1.03 * (plain.high - plain.low), rel=0.01)


def test_ends_by_hand():
    above, below = np.array([[2.0, 4.0, 3.0]]), np.array([[10.0, 10.0, 20.0]])
    residuals = (above - 9 / 40 * below) / (1 - below / 40)
    half = stats.t.ppf(0.975, 2) * np.sqrt((residuals**2).sum()) / 40
    value, low, high = (end[0] for end in ends(above, below, stats.norm.ppf(0.975)))
    assert (value, low, high) == pytest.approx((0.225, 0.225 - half, 0.225 * np.exp(half / 0.225)))


def test_a_subset_is_judged_at_the_look_of_the_whole():
    measured = rows(30)
    figure = repeated_interval(measured[::2], PLAN, asked=30)
    assert figure.n == 15
    early = repeated_interval(measured[::2], PLAN)
    assert early.low < figure.low and figure.high < early.high


@pytest.mark.parametrize(
    ("threshold", "verdict"), [(1.0, "pass"), (1.5, "pass"), (1.95, "go on"), (2.05, "go on"), (3.0, "fail")]
)
def test_decision_follows_the_interval(threshold, verdict):
    decision = decide(rows(30), PLAN, threshold)
    assert decision.verdict == verdict
    assert decision.figure == repeated_interval(rows(30), PLAN)


def test_a_threshold_at_an_end_passes_below_and_does_not_fail_above():
    figure = repeated_interval(rows(30), PLAN)
    assert decide(rows(30), PLAN, figure.low).verdict == "pass"
    assert decide(rows(30), PLAN, figure.high).verdict == "go on"


def test_what_tells_nothing_goes_on():
    assert decide([], PLAN, 1.0).verdict == "go on" and decide([], PLAN, 1.0).figure is None
    assert decide([request(i, windows=()) for i in range(30)], PLAN, 1.0).figure is None
    early = decide(rows(14), PLAN, 0.5)
    assert early.verdict == "go on" and np.isnan([early.figure.low, early.figure.high]).all()
    lonely = [request(0), *(request(i, windows=()) for i in range(1, 30))]
    alone = decide(lonely, PLAN, 0.5)
    assert alone.verdict == "go on" and np.isnan([alone.figure.low, alone.figure.high]).all()
    assert np.isnan(repeated_interval([request()], PLAN, asked=60).low)


def test_a_head_that_accepts_nothing_fails_at_the_first_look():
    useless = [request(i, windows=(0,) * 20) for i in range(15)]
    decision = decide(useless, PLAN, 1.2)
    assert decision.verdict == "fail" and decision.figure.high == 1.0
