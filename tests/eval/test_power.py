import numpy as np
import pytest
from scipy import stats

from eval.acceptance import Bootstrap, pooled_length
from eval.power import half_width, power_at, requests_needed, requests_to_show, spread
from tests.eval.samples import request


def rows(n: int, seed: int = 0):
    generator = np.random.default_rng(seed)
    return [
        request(
            i, windows=tuple(int(a) for a in generator.binomial(3, generator.beta(2, 4), generator.integers(5, 60)))
        )
        for i in range(n)
    ]


def test_spread_by_hand():
    # R = 6/20; residuals (2 - 3, 4 - 3) / mean 10 windows
    pair = [request(0, windows=(1, 1) + (0,) * 8), request(1, windows=(2, 2) + (0,) * 8)]
    assert spread(pair) == pytest.approx(np.std([-0.1, 0.1], ddof=1))
    assert spread([request(0), request(1)]) == 0.0


def test_spread_tells_the_bootstrap_interval():
    """The same convention as eval.acceptance.interval: its width is what half_width predicts from the same rows."""
    measured = rows(60)
    figure = pooled_length(measured, Bootstrap(samples=10000, confidence=0.95, seed=0))
    assert (figure.high - figure.low) / 2 == pytest.approx(half_width(spread(measured), 60, 0.95), rel=0.03)
    narrow = pooled_length(measured[:12], Bootstrap(samples=10000, confidence=0.95, seed=0))
    assert (narrow.high - narrow.low) / 2 == pytest.approx(half_width(spread(measured[:12]), 12, 0.95), rel=0.08)


def test_half_width_is_that_of_t():
    assert half_width(1.0, 16, 0.95) == pytest.approx(stats.t.ppf(0.975, 15) / 4)
    assert half_width(1.0, 10**6, 0.95) == pytest.approx(1.96e-3, rel=1e-3)


@pytest.mark.parametrize(("of", "wished", "confidence"), [(0.7, 0.2, 0.95), (0.7, 0.05, 0.9), (2.0, 5.0, 0.99)])
def test_requests_needed_are_the_fewest(of, wished, confidence):
    n = requests_needed(of, wished, confidence)
    assert half_width(of, n, confidence) <= wished
    assert n == 2 or half_width(of, n - 1, confidence) > wished


def test_requests_needed_by_table():
    assert requests_needed(1.0, 0.5, 0.95) == 18  # t 2.110: 2.110 / sqrt(18) = 0.497; normal tails would say 16
    assert requests_needed(0.0, 0.1, 0.95) == 2


@pytest.mark.parametrize(("margin", "power"), [(0.1, 0.8), (0.3, 0.9), (1.0, 0.5), (5.0, 0.99)])
def test_requests_to_show_are_the_fewest(margin, power):
    n = requests_to_show(0.7, margin, 0.95, power)
    assert power_at(0.7, margin, n, 0.95) >= power
    assert n == 2 or power_at(0.7, margin, n - 1, 0.95) < power


def test_power_by_table():
    # a one-sample t test, two-sided 5%, effect 0.5 standard deviations: G*Power's figures
    assert requests_to_show(1.0, 0.5, 0.95, 0.8) == 34
    assert requests_to_show(1.0, 0.5, 0.95, 0.9) == 44
    assert power_at(1.0, 0.0, 40, 0.95) == pytest.approx(0.025)
    assert power_at(1.0, -0.2, 40, 0.95) < 0.01
    assert power_at(1.0, 0.02, 10**5, 0.95) == pytest.approx(1.0, abs=1e-4)
    assert (power_at(0.0, 0.1, 5, 0.95), power_at(0.0, -0.1, 5, 0.95)) == (1.0, 0.0)


def test_power_is_what_normal_draws_show():
    drawn = np.random.default_rng(0).normal(0.5, 1, (20000, 20))
    low = drawn.mean(axis=1) - stats.t.ppf(0.975, 19) * drawn.std(axis=1, ddof=1) / np.sqrt(20)
    assert np.mean(low >= 0) == pytest.approx(power_at(1.0, 0.5, 20, 0.95), abs=0.01)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: spread([request()]), "1 rows with 20 windows: .* at least 2 rows .* measure a pilot"),
        (lambda: spread([request(0, windows=()), request(1, windows=())]), "2 rows with 0 windows"),
        (lambda: half_width(-1.0, 9, 0.95), "spread -1: .* at least 0; take eval.power.spread"),
        (lambda: half_width(float("nan"), 9, 0.95), "spread nan"),
        (lambda: half_width(1.0, 1, 0.95), "1 requests: .* at least 2; ask more"),
        (lambda: requests_needed(1.0, 0.0, 0.95), "margin of 0: .* above 0; set a wider one"),
        (lambda: requests_needed(1.0, 0.1, 1.0), r"confidence 1: it lies in \(0.5, 1\); set it as gate.confidence"),
        (lambda: requests_to_show(1.0, -0.1, 0.95, 0.8), "margin of -0.1"),
        (lambda: requests_to_show(1.0, 0.1, 0.95, 1.0), r"power 1: it lies in \[0.5, 1\); 0.8 or 0.9"),
        (lambda: power_at(1.0, 0.1, 0, 0.95), "0 requests"),
    ],
)
def test_what_is_out_of_range_is_said(call, said):
    with pytest.raises(ValueError, match=said):
        call()
