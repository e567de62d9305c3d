"""How many requests a wished-for interval of the pooled acceptance length needs, from a few that were measured before.

The pooled length is a ratio of sums, so a request counts through its linearised residual (Cochran, "Sampling
Techniques", 3rd ed. 1977, theorem 2.5: a ratio varies as the mean of y - R x does, over the mean of x). The interval is
the one that eval.acceptance makes: its widened tails (Hesterberg 2015, arXiv 1411.5279) come to t with n - 1 degrees
times spread / sqrt(n). Looking early (eval.sequential) takes two or three in a hundred more for the same power.

What a pilot says is an estimate, not a promise: one of 60 requests with heavy-tailed lengths mostly asks for a third
too few, and 90% power came out as 84-92% (tests/eval/test_simulated_truth.py).
"""

from collections.abc import Sequence
from math import ceil, isfinite, sqrt
from typing import Any, cast

import numpy as np
from scipy import stats

from export.requests import Request

_T, _NORMAL, _NONCENTRAL = cast(Any, stats.t), cast(Any, stats.norm), cast(Any, stats.nct)


def spread(rows: Sequence[Request]) -> float:
    """Standard deviation a request of the pooled acceptance length, tokens a target step: its error is this / sqrt(n).

    Raises ValueError where fewer than two rows, or none with a window, are given.
    """
    accepted, drafts = (np.array([getattr(r, field) for r in rows], dtype=np.float64)
                        for field in ("accepted", "drafts"))  # fmt: skip
    if len(rows) < 2 or not drafts.sum() > 0:
        raise ValueError(
            f"{len(rows)} rows with {drafts.sum():g} windows: a spread needs at least 2 rows and a window; "
            "measure a pilot with the head first"
        )
    residuals = (accepted - accepted.sum() / drafts.sum() * drafts) / drafts.mean()
    return float(np.std(residuals, ddof=1))


def half_width(spread: float, n: int, confidence: float) -> float:
    """Half of the interval that n requests give, tokens a target step. Raises ValueError on what is out of range."""
    _check(spread=spread, n=n, confidence=confidence)
    return _t(n, confidence) * spread / sqrt(n)


def requests_needed(spread: float, wished: float, confidence: float) -> int:
    """The fewest requests whose interval is no wider than +- `wished` tokens a target step.

    Raises ValueError on what is out of range.
    """
    _check(spread=spread, above_zero=wished, confidence=confidence)
    n = max(2, ceil((_z(confidence) * spread / wished) ** 2))  # normal tails: never too many
    while half_width(spread, n, confidence) > wished:
        n += 1
    return n


def power_at(spread: float, margin: float, n: int, confidence: float) -> float:
    """Chance that the interval of n requests reaches, with its lower end, a threshold `margin` below the true length.

    That is the power of a t test (noncentral t); margin in tokens a target step. At margin 0 it is the chance of a
    false pass, (1 - confidence) / 2. Raises ValueError on what is out of range.
    """
    _check(spread=spread, n=n, confidence=confidence)
    if not spread:
        return float(margin >= 0)
    return float(_NONCENTRAL.sf(_t(n, confidence), n - 1, margin * sqrt(n) / spread))


def requests_to_show(spread: float, margin: float, confidence: float, power: float) -> int:
    """The fewest requests with which :func:`power_at` is at least `power`.

    Raises ValueError on what is out of range.
    """
    _check(spread=spread, above_zero=margin, confidence=confidence)
    if not 0.5 <= power < 1:
        raise ValueError(f"power {power:g}: it lies in [0.5, 1); 0.8 or 0.9 are usual")
    reach = _z(confidence) + float(_NORMAL.ppf(power))
    n = max(2, ceil((reach * spread / margin) ** 2))  # normal tails: never too many
    while power_at(spread, margin, n, confidence) < power:
        n += 1
    return n


def _check(*, spread: float, confidence: float, n: int = 2, above_zero: float = 1.0) -> None:
    if not (spread >= 0 and isfinite(spread)):
        raise ValueError(f"spread {spread:g}: it is a finite number, at least 0; take eval.power.spread of pilot rows")
    if not 0.5 < confidence < 1:
        raise ValueError(f"confidence {confidence:g}: it lies in (0.5, 1); set it as gate.confidence, e.g. 0.95")
    if n < 2:
        raise ValueError(f"{n} requests: an interval needs at least 2; ask more")
    if not (above_zero > 0 and isfinite(above_zero)):
        raise ValueError(f"a half width or margin of {above_zero:g}: it is a finite number above 0; set a wider one")


def _t(n: int, confidence: float) -> float:
    return float(_T.isf((1 - confidence) / 2, n - 1))


def _z(confidence: float) -> float:
    return float(_NORMAL.isf((1 - confidence) / 2))
