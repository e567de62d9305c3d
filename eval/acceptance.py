"""Figures and their intervals, as pure functions of request rows.

Every interval resamples whole requests, because windows of one answer are alike (a loop accepts everything). The tails
of the percentile interval are widened as Hesterberg does ("What Teachers Should Know About the Bootstrap", 2015,
arXiv 1411.5279): a plain percentile interval is too narrow by sqrt((n-1)/n) and by normal for t.
On simulated traffic of known truth (60 requests, loops, heavy-tailed lengths) it covers 94-95% of the time, where BCa
covers 90-94%: BCa estimates its acceleration from the very few requests that carry the tail.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from export.figures import Figure, Latency
from export.requests import ARMS, Request

Reals = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """How intervals are made."""

    samples: int
    confidence: float
    seed: int


def has_repeated_4gram(ids: Sequence[int]) -> bool:
    """True where four token ids in a row occur twice in the answer: it loops, and loops are easy to draft."""
    seen = set(zip(ids, ids[1:], ids[2:], ids[3:], strict=False))
    return len(seen) < len(ids) - 3


def pooled_length(rows: Sequence[Request], bootstrap: Bootstrap) -> Figure | None:
    """Acceptance length: 1 + accepted / windows, both summed over the rows. None where no window was verified."""
    return ratio([r.accepted for r in rows], [r.drafts for r in rows], bootstrap, offset=1.0)


def tokens_per_step(rows: Sequence[Request], bootstrap: Bootstrap) -> Figure | None:
    """Output tokens / target steps, the steps being output - accepted: fair to arms that do not draft at each step.

    Slightly high: what the engine accepted beyond an answer's end is no output, at most one window a request.
    """
    return ratio([r.output_tokens for r in rows], [r.output_tokens - r.accepted for r in rows], bootstrap)


def length_difference(rows: Sequence[Request], others: Sequence[Request], bootstrap: Bootstrap) -> Figure | None:
    """Pooled acceptance length of `rows` less that of `others`, over the prompts that both answered.

    The interval resamples prompts, the same ones on both sides. None where either verified no window on them.
    """
    mine, theirs = ({r.prompt_id: r for r in side} for side in (rows, others))
    shared = sorted(mine.keys() & theirs.keys())
    table = np.array(
        [[side[prompt].accepted, side[prompt].drafts] for side in (mine, theirs) for prompt in shared], dtype=np.float64
    ).reshape(2, len(shared), 2)
    if not len(shared) or not (table[:, :, 1].sum(axis=1) > 0).all():
        return None
    sums = _weights(len(shared), bootstrap.samples, bootstrap.seed) @ table  # [side, resample, (accepted, drafts)]
    with np.errstate(divide="ignore", invalid="ignore"):
        lengths = sums[:, :, 0] / sums[:, :, 1]
    replicates = lengths[0] - lengths[1]
    low, high = interval(replicates[np.isfinite(replicates)], len(shared), bootstrap.confidence)
    (own, other) = table[:, :, 0].sum(axis=1) / table[:, :, 1].sum(axis=1)
    return Figure(value=float(own - other), low=low, high=high, n=len(shared))


def ratio(
    above: Sequence[float], below: Sequence[float], bootstrap: Bootstrap, *, offset: float = 0.0
) -> Figure | None:
    """offset + sum(above) / sum(below) with the interval over resampled rows; None where sum(below) is not above 0."""
    top, bottom = np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)
    if not bottom.sum() > 0:
        return None
    weights = _weights(len(top), bootstrap.samples, bootstrap.seed)
    with np.errstate(divide="ignore", invalid="ignore"):  # a resample may hold no window at all
        replicates = (weights @ top) / (weights @ bottom)
    low, high = interval(replicates[np.isfinite(replicates)], len(top), bootstrap.confidence)
    return Figure(value=offset + float(top.sum() / bottom.sum()), low=offset + low, high=offset + high, n=len(top))


def interval(replicates: Reals, n: int, confidence: float) -> tuple[float, float]:
    """The widened percentile interval of bootstrap replicates of a figure from n rows; one row tells nothing (NaN)."""
    if n < 2 or not len(replicates):
        return float("nan"), float("nan")
    tail = (1 - confidence) / 2
    widened = float(cast(Any, stats.norm).cdf(cast(Any, stats.t).ppf(tail, n - 1) * np.sqrt(n / (n - 1))))
    low, high = np.quantile(replicates, [widened, 1 - widened])
    return float(low), float(high)


def per_position(rows: Iterable[Request], positions: int) -> list[float]:
    """Cumulative rates: windows that accepted at least 1, 2, ... `positions` draft tokens / windows."""
    accepted = np.array([a for r in rows for a in r.per_step_accepted], dtype=np.int64)
    if not len(accepted):
        return []
    return [float((accepted >= k).mean()) for k in range(1, positions + 1)]


def tail_share(rows: Sequence[Request]) -> float:
    """Share of the accepted draft tokens that lie beyond their answer's end, so that nobody got them.

    For an arm that drafts at each step: the first token plus each window's accepted + 1, less what was returned.
    """
    beyond = sum(max(0, 1 + r.drafts + r.accepted - r.output_tokens) for r in rows if r.drafts)
    return beyond / max(1, sum(r.accepted for r in rows))


def without_last_window(rows: Iterable[Request]) -> float | None:
    """Pooled acceptance length when each answer's last window, which may cross its end, is left out."""
    whole = [r.per_step_accepted[:-1] for r in rows]
    windows = sum(len(w) for w in whole)
    return 1 + sum(sum(w) for w in whole) / windows if windows else None


def speedup(
    rows: Sequence[Request], bootstrap: Bootstrap, *, over: str = "none"
) -> tuple[Figure | None, list[dict[str, float]]]:
    """Median over rounds of head / `over` in output tokens/s, and each round's tokens/s by arm with its ratio.

    The interval resamples prompts, the same ones in each arm and round: the arms are paired, and rounds ask the same
    prompts again, so they are no further sample of the traffic. None where an arm is missing.
    """
    table = _speed_table(rows)
    rounds = sorted({number for number, _ in table})
    arms = [arm for arm in ARMS if all((number, arm) in table for number in rounds)]
    shown = [{arm: _rate(table[number, arm]) for arm in arms} for number in rounds]
    if not rounds or over not in arms or "head" not in arms:
        return None, shown
    n = len(table[rounds[0], "head"])
    weights = _weights(n, bootstrap.samples, bootstrap.seed)
    replicates = np.median(
        [_rates(table[i, "head"], weights) / _rates(table[i, over], weights) for i in rounds], axis=0
    )
    shown = [{**by_arm, "ratio": by_arm["head"] / by_arm[over]} for by_arm in shown]
    low, high = interval(replicates, n, bootstrap.confidence)
    return Figure(value=float(np.median([s["ratio"] for s in shown])), low=low, high=high, n=n), shown


def p99_ratio(rows: Sequence[Request], bootstrap: Bootstrap) -> Figure | None:
    """p99 of an answer's seconds from sending to end, head / none, over all rounds' answers.

    The interval resamples prompts, the same ones in both arms. None where an arm is missing.
    """
    table = _speed_table([r for r in rows if r.arm in ("none", "head")])
    seconds = {arm: [cell[:, 1] for (_, of), cell in sorted(table.items()) if of == arm] for arm in ("none", "head")}
    if not seconds["none"] or not seconds["head"]:
        return None
    n = len(seconds["head"][0])
    drawn = np.concatenate([np.ones((1, n)), _weights(n, bootstrap.samples, bootstrap.seed)])
    ratios = _p99(seconds["head"], drawn) / _p99(seconds["none"], drawn)
    low, high = interval(ratios[1:], n, bootstrap.confidence)
    return Figure(value=float(ratios[0]), low=low, high=high, n=n)


def latency(rows: Sequence[Request]) -> Latency | None:
    """Percentiles in seconds: first token and time per token over requests, gaps over all chunks.

    None without rows, or where a time is no number.
    """
    decoded = [r for r in rows if r.output_tokens > 1 and r.gaps_s]
    if not decoded or not np.isfinite([t for r in rows for t in (r.ttft_s, *r.gaps_s)]).all():
        return None
    first = np.percentile([r.ttft_s for r in rows], [50, 99])
    gaps = np.percentile([gap for r in rows for gap in r.gaps_s], [50, 99])
    each = [sum(r.gaps_s) / (r.output_tokens - 1) for r in decoded]
    token = np.percentile(each, [50, 99])
    return Latency(
        ttft_p50=float(first[0]), ttft_p99=float(first[1]), gap_p50=float(gaps[0]), gap_p99=float(gaps[1]),
        per_token_p50=float(token[0]), per_token_p99=float(token[1]),
        per_token=[float(q) for q in np.percentile(each, np.arange(0, 101, 5))],
    )  # fmt: skip


def spread(rounds: Sequence[dict[str, float]]) -> float:
    """How far the rounds' ratios lie apart: largest / smallest - 1; 0 without rounds."""
    ratios = [r["ratio"] for r in rounds if "ratio" in r]
    return max(ratios) / min(ratios) - 1 if ratios else 0.0


def _speed_table(rows: Sequence[Request]) -> dict[tuple[int, str], Reals]:
    """(round, arm) -> [prompts, (output tokens, seconds)], over the prompts that every arm and round answered."""
    cells: dict[tuple[int, str], dict[str, tuple[float, float]]] = {}
    for r in rows:
        cells.setdefault((r.round, r.arm), {})[r.prompt_id] = (r.output_tokens, r.total_s)
    shared = sorted(set[str].intersection(*(set(c) for c in cells.values()))) if cells else []
    if not shared:
        return {}
    return {key: np.array([cell[prompt] for prompt in shared], dtype=np.float64) for key, cell in cells.items()}


def _rate(cell: Reals) -> float:
    return float(cell[:, 0].sum() / seconds) if (seconds := cell[:, 1].sum()) > 0 else float("nan")


def _rates(cell: Reals, weights: Reals) -> Reals:
    return (weights @ cell[:, 0]) / (weights @ cell[:, 1])


def _p99(rounds: Sequence[Reals], weights: Reals) -> Reals:
    """The smallest time that 99% of the drawn answers do not exceed, for each draw of prompts [draws, prompts]."""
    times = np.concatenate(rounds)
    order = np.argsort(times)
    heaped = np.cumsum(np.tile(weights, len(rounds))[:, order], axis=1)
    return times[order][(heaped >= 0.99 * heaped[:, -1:]).argmax(axis=1)]


@lru_cache(maxsize=4)
def _weights(n: int, samples: int, seed: int) -> Reals:
    """How often each of n rows is drawn in each resample [samples, n]; figures of equal n share their resamples."""
    generator = np.random.default_rng([seed, n])
    return generator.multinomial(n, np.full(n, 1 / n), size=samples).astype(np.float64)
