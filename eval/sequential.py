"""Looking at a measurement while it runs, and stopping early without paying for it in false verdicts.

A plain 95% interval that is looked at five times misses the truth in one of seven measurements, not in one of twenty.
Here each look has a critical value of its own, so that all looks together err no more often than one would: alpha
spending after O'Brien and Fleming (Lan and DeMets, "Discrete Sequential Boundaries for Clinical Trials", Biometrika 70,
1983, their alpha_1*), found by recursive numerical integration (Armitage, McPherson and Rowe, J. R. Stat. Soc. A 132,
1969; Jennison and Turnbull, "Group Sequential Methods", 2000, ch. 19). The interval is their repeated confidence
interval (ibid., ch. 9): it holds at every look at once, so it stays valid whatever made the measurement stop.

The rows of a look must be the first so many prompts that were asked, all of them answered. The first so many answers to
come back would be the short ones, and loops are long.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from export.figures import Figure
from export.requests import Request

Reals = NDArray[np.float64]
Verdict = Literal["pass", "fail", "go on"]

FARTHEST = 8.0
"""largest critical value: beyond it lies 6e-16 of a normal, less than the integration resolves"""
NODES = 300
_NORMAL = cast(Any, stats.norm)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """When to look, fixed before the first request; a plan made up afterwards controls nothing."""

    looks: tuple[int, ...]
    """requests asked by each look, rising; the last are all"""
    confidence: float
    """of the interval over all looks together, two-sided"""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What one look says."""

    verdict: Verdict
    """pass: the interval's lower end reaches the threshold; fail: its upper end is below; at the last look `go on`
    means that neither could be shown"""
    figure: Figure | None
    """pooled acceptance length with its repeated interval; None where no window was verified"""


def evenly(requests: int, looks: int, least: int = 2) -> tuple[int, ...]:
    """Request counts of so many looks, equally far apart, the last at all `requests`; none below `least`.

    `least` is gate.min_requests where a pass with fewer would be refused. Raises ValueError where no look is left, or
    looks are less than two requests apart.
    """
    if looks < 1 or requests < max(2 * looks, least):
        raise ValueError(
            f"{looks} looks at {requests} requests, none before {least}: at least 1 look, 2 requests a look and "
            f"{least} in all are needed; ask more or look less often"
        )
    return tuple(n for k in range(1, looks + 1) if (n := -(-requests * k // looks)) >= least)


def decide(rows: Sequence[Request], plan: Plan, threshold: float, asked: int | None = None) -> Decision:
    """Whether the pooled acceptance length (tokens a target step) is at least `threshold`, as far as `rows` tell.

    `rows` are all that was measured so far, in the order of asking; `asked` as in :func:`repeated_interval`. A false
    pass or a false fail, over all looks together, has a chance of (1 - confidence) / 2 each, for large samples.
    """
    figure = repeated_interval(rows, plan, asked)
    if figure is None or not np.isfinite([figure.low, figure.high]).all():
        return Decision(verdict="go on", figure=figure)
    verdict: Verdict = "pass" if figure.low >= threshold else "fail" if figure.high < threshold else "go on"
    return Decision(verdict=verdict, figure=figure)


def repeated_interval(rows: Sequence[Request], plan: Plan, asked: int | None = None) -> Figure | None:
    """Pooled acceptance length (tokens a target step) with its repeated confidence interval at this look.

    `asked` says how many requests were asked by now where `rows` are only some of them, e.g. the unrepeated answers.
    The ends are NaN before the first look and where one request holds every window. None where no window was verified.
    """
    accepted, drafts = (np.array([[getattr(r, field) for r in rows]], dtype=np.float64)
                        for field in ("accepted", "drafts"))  # fmt: skip
    if not drafts.sum() > 0:
        return None
    z = critical(len(rows) if asked is None else asked, plan)
    value, low, high = (float(1 + end[0]) for end in ends(accepted, drafts, z))
    return Figure(value=value, low=low, high=high, n=len(rows))


def critical(asked: int, plan: Plan) -> float:
    """The critical value (z) when so many requests were asked; NaN before the first look.

    Between two looks it is the earlier one's, which is larger: lost requests may widen an interval, never narrow it.
    """
    look = bisect_right(plan.looks, asked) - 1
    fractions = tuple(n / plan.looks[-1] for n in plan.looks)
    return bounds(fractions, 1 - plan.confidence, 2)[look] if look >= 0 else float("nan")


def ends(above: Reals, below: Reals, z: float) -> tuple[Reals, Reals, Reals]:
    """sum(above) / sum(below) with both ends of its interval, of each row of two arrays [measurements, requests].

    The standard error is the ratio's sandwich with leave-one-out residuals, (above - ratio * below) / (1 - share of
    below) (HC3: MacKinnon and White, J. Econometrics 29, 1985): one long answer drags the ratio towards itself and
    hides its own residual, so the plain sandwich and the jackknife cover less. The width is the t quantile with n - 1
    degrees that leaves the tail of `z`. The lower end is ratio - width, the upper end ratio * exp(width / ratio): each
    is the farther one of the plain and the logarithmic interval. Loops are long and accept much, so a sample that lacks
    them shows too low a ratio and too small an error at once, and it is the upper end that misses the truth.
    tests/eval/test_simulated_truth.py shows how often. Both ends are NaN where one row holds all of `below`.
    """
    n, total = above.shape[1], below.sum(axis=1)
    value = above.sum(axis=1) / total
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        residuals = (above - value[:, None] * below) / (1 - below / total[:, None])
        t = cast(Any, stats.t).isf(_NORMAL.sf(z), n - 1)
        half = t * np.sqrt(np.square(residuals).sum(axis=1)) / total
        high = np.where(value > 0, value * np.exp(half / value), value + half)
    known = np.isfinite(high)
    return value, np.where(known, value - half, np.nan), np.where(known, high, np.nan)


@lru_cache(maxsize=64)
def bounds(fractions: tuple[float, ...], alpha: float, sides: int) -> tuple[float, ...]:
    """Critical z at each look, so that a normal process without drift crosses any of them with chance `alpha`.

    `fractions` of the information (here: of the requests) at each look, rising, in (0, 1]; `alpha` over both sides
    where `sides` is 2, and above only where it is 1. Raises ValueError where they are not so.
    """
    _check(fractions, alpha, sides)
    spent = _spent(np.asarray(fractions), alpha / sides)
    nodes, density = np.zeros(1), np.ones(1)
    found: list[float] = []
    for (before, now), added in zip(pairwise((0.0, *fractions)), np.diff(spent, prepend=0.0), strict=True):
        found.append(_crossing(nodes * np.sqrt(before), density, (before, now), float(added)))
        low, high = (-found[-1] if sides == 2 else -FARTHEST), found[-1]
        nodes, density = _carried(nodes * np.sqrt(before), density, (before, now), (low, high))
    return tuple(found)


def _check(fractions: tuple[float, ...], alpha: float, sides: int) -> None:
    if not fractions or not all(0 <= a < b <= 1 for a, b in pairwise((0.0, *fractions))):
        raise ValueError(f"fractions {fractions}: each must be above the one before, in (0, 1], e.g. (0.5, 1.0)")
    if not 0 < alpha < 0.5 or sides not in (1, 2):
        raise ValueError(f"alpha {alpha}, sides {sides}: alpha lies in (0, 0.5), sides is 1 or 2; set them so")


def _spent(fractions: Reals, alpha: float) -> Reals:
    """What one side may have erred by each look: Lan and DeMets' alpha_1*, 2 - 2 Phi(z_(alpha/2) / sqrt(t))."""
    return 2 * _NORMAL.sf(_NORMAL.isf(alpha / 2) / np.sqrt(fractions))


def _crossing(sums: Reals, density: Reals, times: tuple[float, float], added: float) -> float:
    """The z above which the process, not stopped before, lies with chance `added`; `density` holds the node weights."""
    before, now = times

    def surplus(z: float) -> float:
        return float(density @ _NORMAL.sf((z * np.sqrt(now) - sums) / np.sqrt(now - before))) - added

    return FARTHEST if surplus(FARTHEST) >= 0 else float(cast(Any, optimize).brentq(surplus, 0.0, FARTHEST, xtol=1e-10))


def _carried(sums: Reals, density: Reals, times: tuple[float, float], kept: tuple[float, float]) -> tuple[Reals, Reals]:
    """z nodes between `kept` and the weight of each: the density of what goes on times Gauss-Legendre's weights."""
    before, now = times
    unit, weights = cast(Any, np.polynomial.legendre).leggauss(NODES)
    half = (kept[1] - kept[0]) / 2
    nodes = (kept[0] + kept[1]) / 2 + half * unit
    step = np.sqrt(now - before)
    moved = _NORMAL.pdf((nodes[:, None] * np.sqrt(now) - sums) / step) * np.sqrt(now) / step
    return nodes, (moved @ density) * half * weights
