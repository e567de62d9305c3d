"""What a million output tokens costs on the measured machine, arm by arm, beside dated list prices. Nothing here is
compared without the date of its price.

USD per 1M output tokens = GPUs x USD an hour / (3600 x output tokens/s) x 1e6; the input is served by the same GPUs in
the same seconds and has no price of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from export.figures import Speed
from export.requests import ARMS
from recipes.schema import Cost


@dataclass(frozen=True, kw_only=True)
class Served:
    """An arm at the load where it is cheapest among those that the service allows."""

    arm: str
    load: int
    """requests in flight"""
    tokens_per_s: float
    token_p99_ms: float | None
    usd: float
    """per 1M output tokens"""


def served(speed: Speed, cost: Cost) -> list[Served]:
    """Each arm at its cheapest allowed load; an arm that is over cost.max_token_ms at every load is left out."""
    found: list[Served] = []
    for arm in ARMS:
        loads = {load: at for load, at in _loads(speed, arm).items() if _allowed(at[1], cost.max_token_ms)}
        if not loads:
            continue
        load, (rate, token) = max(loads.items(), key=lambda item: item[1][0])
        usd = cost.gpus * cost.usd_per_hour / (3600 * rate) * 1e6
        found.append(Served(arm=arm, load=load, tokens_per_s=rate, token_p99_ms=token, usd=usd))
    return found


def _loads(speed: Speed, arm: str) -> dict[int, tuple[float, float | None]]:
    """Requests in flight -> output tokens/s, p99 of an answer's milliseconds per token."""
    return {
        int(load): (at.throughput[arm], _token_ms(at.latency, arm))
        for load, at in speed.at.items()
        if at.throughput.get(arm)
    }


def _token_ms(latency: Mapping[str, Any], arm: str) -> float | None:
    return 1000 * cast(float, latency[arm].per_token_p99) if arm in latency else None


def _allowed(token_ms: float | None, most: float) -> bool:
    """Unknown is not allowed where a bound is set."""
    return not most or (token_ms is not None and token_ms <= most)
