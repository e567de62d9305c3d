from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from eval.acceptance import (
    Bootstrap,
    has_repeated_4gram,
    interval,
    latency,
    length_difference,
    per_position,
    pooled_length,
    ratio,
    speedup,
    spread,
    tail_share,
    tokens_per_step,
    without_last_window,
)
from tests.eval.samples import request

QUICK = Bootstrap(samples=1000, confidence=0.95, seed=0)


def loops(generator: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """(accepted, windows) of requests as greedy small models make them: a third loops, lengths are cut at 200."""
    looping = generator.random(shape) < 0.35
    rate = np.where(looping, generator.beta(6, 3, shape), generator.beta(2, 6, shape))
    tokens = np.minimum(200, np.ceil(np.exp(generator.normal(5, 0.8, shape))))
    windows = np.maximum(1, np.round(tokens / (1 + 3 * rate)))
    return generator.binomial((3 * windows).astype(int), rate), windows


def pareto(generator: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Lengths with a Pareto tail (2.5), rates of their own: a few requests hold much of the traffic."""
    rate = generator.beta(1.5, 5, shape)
    windows = np.ceil(10 * (1 + generator.pareto(2.5, shape)))
    return generator.binomial((3 * windows).astype(int), rate), windows


@pytest.mark.parametrize("kind", [loops, pareto])
def test_interval_covers_the_truth(kind):
    accepted, windows = kind(np.random.default_rng(1), (1500, 60))
    everything = kind(np.random.default_rng(2), (4000, 500))
    truth = everything[0].sum() / everything[1].sum()
    figures = [ratio(a, w, QUICK) for a, w in zip(accepted, windows, strict=True)]
    low, high = (np.array([getattr(f, end) for f in figures]) for end in ("low", "high"))
    covered = np.mean((low <= truth) & (truth <= high))
    assert 0.93 <= covered <= 0.97
    assert np.mean(truth < low) < 0.05  # what the gate relies on


def test_plain_percentiles_would_be_narrower():
    replicates = np.random.default_rng(0).normal(size=100_000)
    low, high = interval(replicates, 12, 0.95)
    assert low < -2.1 and high > 2.1  # 1.96 for a plain percentile interval; t with 11 degrees has 2.2
    assert interval(replicates, 100_000, 0.95) == pytest.approx((-1.96, 1.96), abs=0.03)


def test_pooled_length_is_a_ratio_of_sums():
    rows = [request(0, windows=(3,) * 10), request(1, windows=(0,) * 90)]
    figure = pooled_length(rows, QUICK)
    assert figure.value == pytest.approx(1 + 30 / 100)  # the mean of requests would be 1 + (3 + 0) / 2
    assert figure.n == 2 and figure.low < figure.value < figure.high


def test_figures_depend_on_the_seed_alone():
    rows = [request(i, windows=(i % 4, 1, 0) * 5) for i in range(20)]
    assert pooled_length(rows, QUICK) == pooled_length(rows, QUICK)
    assert pooled_length(rows, QUICK) != pooled_length(rows, Bootstrap(samples=1000, confidence=0.95, seed=1))


def test_no_window_is_no_figure():
    assert pooled_length([request(windows=())], QUICK) is None
    assert pooled_length([], QUICK) is None


def test_one_request_has_no_interval():
    figure = pooled_length([request()], QUICK)
    assert figure.value == pytest.approx(1.8) and np.isnan(figure.low) and np.isnan(figure.high)


def test_tokens_per_step_counts_steps_without_drafts():
    # 11 tokens: 1 from the prompt, 10 steps of which 4 drafted nothing, 3 windows that accepted 0
    row = request(windows=(1, 0, 2), output_ids=tuple(range(11)))
    assert tokens_per_step([row, row], QUICK).value == pytest.approx(11 / 8)


def test_per_position_is_cumulative():
    rows = [request(windows=(3, 0, 1)), request(windows=(2,))]
    assert per_position(rows, 3) == [0.75, 0.5, 0.25]
    assert per_position([request(windows=())], 3) == []


def test_tail_is_what_lies_beyond_the_answers_end():
    cut = request(windows=(1, 3), output_ids=tuple(range(5)))  # 1 + 2 + 4 were made, 5 returned
    assert tail_share([cut]) == pytest.approx(2 / 4)
    assert without_last_window([cut]) == 2.0
    assert tail_share([request(windows=(1, 3))]) == 0.0
    assert without_last_window([request(windows=(3,))]) is None


@pytest.mark.parametrize(
    ("ids", "repeats"),
    [([], False), ([1, 2, 3, 4], False), ([1, 2, 3, 4, 1, 2, 3, 4], True), ([5] * 5, True), ([5] * 4, False),
     ([1, 2, 3, 9, 1, 2, 3, 8], False), ([9, 1, 2, 3, 4, 7, 1, 2, 3, 4], True)],
)  # fmt: skip
def test_repeated_4gram(ids, repeats):
    assert has_repeated_4gram(ids) is repeats


def timed(arm: str, number: int, seconds: list[float], tokens: int = 60):
    return [request(i, arm=arm, phase="speed", round=number, total_s=s, output_ids=tuple(range(tokens)))
            for i, s in enumerate(seconds)]  # fmt: skip


def test_speedup_is_the_median_of_the_rounds():
    rows = []
    for number, head in enumerate((1.0, 2.0, 0.5)):
        rows += timed("none", number, [2.0] * 12) + timed("head", number, [head] * 12)
    figure, rounds = speedup(rows, QUICK)
    assert figure.value == pytest.approx(2.0) and figure.n == 12
    assert [r["ratio"] for r in rounds] == pytest.approx([2.0, 1.0, 4.0])
    assert rounds[0]["none"] == pytest.approx(30.0) and "ngram" not in rounds[0]
    assert spread(rounds) == pytest.approx(3.0)


def test_speedup_pairs_the_prompts():
    """Prompts of very different speed widen an unpaired interval, not a paired one: the ratio is 2 on each prompt."""
    seconds = list(np.random.default_rng(0).uniform(1, 20, 12))
    rows = [r for n in range(3) for r in timed("none", n, seconds) + timed("head", n, [s / 2 for s in seconds])]
    figure, _ = speedup(rows, QUICK)
    assert figure.low == pytest.approx(2.0) and figure.high == pytest.approx(2.0)


def test_speedup_uses_prompts_that_every_round_answered():
    rows = [r for n in range(3) for r in timed("none", n, [2.0] * 12) + timed("head", n, [1.0] * 12)]
    figure, _ = speedup(
        [r for r in rows if not (r.arm == "head" and r.round == 1 and r.prompt_id.endswith("3"))], QUICK
    )
    assert figure.n == 11


def test_speedup_needs_both_arms():
    figure, rounds = speedup(timed("head", 0, [1.0] * 12), QUICK)
    assert figure is None and rounds == [{"head": 60.0}]
    assert speedup([], QUICK) == (None, [])


def test_speedup_interval_covers_the_truth():
    generator = np.random.default_rng(3)
    hits = 0
    for _ in range(300):
        rows = []
        gain = generator.normal(1.6, 0.25, 12).clip(1.05)  # of each prompt, the same in every round
        for number in range(3):
            noise = generator.normal(1, 0.02, (2, 12))
            rows += timed("none", number, list(2 * noise[0])) + timed("head", number, list(2 / gain * noise[1]))
        figure, _ = speedup(rows, QUICK)
        hits += (
            figure.low <= 1 / np.mean(1 / np.random.default_rng(9).normal(1.6, 0.25, 10**5).clip(1.05)) <= figure.high
        )
    assert 0.9 <= hits / 300 <= 0.99


def test_latency_tells_gaps_from_time_per_token():
    rows = [request(i, windows=(2,) * 10, gaps_s=(0.03,) * 10) for i in range(5)]
    figures = latency(rows)
    assert figures.gap_p50 == pytest.approx(0.03)
    assert figures.per_token_p50 == pytest.approx(0.01)  # each chunk brings three tokens
    assert figures.ttft_p99 == pytest.approx(0.05)


def test_latency_of_nothing_or_of_no_number_is_none():
    assert latency([]) is None
    assert latency([request(ttft_s=float("nan"))]) is None


def test_a_difference_is_paired_by_prompt_and_its_interval_resamples_prompts():
    generator = np.random.default_rng(4)
    mine = [request(i, windows=tuple(int(w) for w in generator.choice(4, size=9))) for i in range(40)]
    theirs = [replace(r, accepted=r.accepted - 2) for r in reversed(mine[:30])]
    found = length_difference(mine, theirs, QUICK)
    assert found.n == 30 and found.value == pytest.approx(2 / 9)
    assert found.low == pytest.approx(2 / 9) and found.high == pytest.approx(2 / 9), "each pair differs by the same"
    noisy = [replace(r, accepted=r.accepted + int(generator.integers(-3, 4))) for r in mine]
    found = length_difference(mine, noisy, replace(QUICK, samples=4000))
    gaps = np.array([a.accepted - b.accepted for a, b in zip(mine, noisy, strict=True)]) / 9
    wide = stats.t.ppf(0.975, 39) * gaps.std(ddof=1) / 40**0.5
    assert found.value == pytest.approx(gaps.mean())
    assert found.high - found.low == pytest.approx(2 * wide, rel=0.08), "the t interval of the mean gap"
    assert length_difference(mine, [], QUICK) is None
    assert length_difference([replace(r, drafts=0) for r in mine], mine, QUICK) is None
