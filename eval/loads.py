"""Rows of the speed arms -> what happens at a load, and whether the answers stay the same. Pure."""

import math
import statistics
from collections.abc import Sequence

from eval.acceptance import Bootstrap, latency, p99_ratio, speedup
from export.figures import Figure, Latency, Loaded, Same
from export.record import Batch
from export.requests import ARMS, Request


def loaded(rows: Sequence[Request], batches: Sequence[Batch], bootstrap: Bootstrap) -> Loaded:
    """Figures of one load from its rows; `batches` are the record's, whose wall time gives the throughput."""
    figure, _ = speedup(rows, bootstrap)
    load = rows[0].concurrency if rows else 0
    rates = {
        arm: [b.output_tokens / b.seconds for b in batches
              if (b.phase, b.arm, b.concurrency) == ("speed", arm, load) and b.seconds > 0]
        for arm in ARMS
    }  # fmt: skip
    return Loaded(
        speedup=sound(figure),
        p99=sound(p99_ratio(rows, bootstrap)),
        beside=beside(rows, bootstrap),
        throughput={arm: statistics.median(found) for arm, found in rates.items() if found},
        latency=latencies(rows),
    )


def beside(rows: Sequence[Request], bootstrap: Bootstrap) -> dict[str, Figure]:
    """The head's speed-up over each other drafting arm that was timed."""
    found = {arm: sound(speedup(rows, bootstrap, over=arm)[0]) for arm in ("incumbent", "ngram")}
    return {arm: figure for arm, figure in found.items() if figure}


def latencies(rows: Sequence[Request]) -> dict[str, Latency]:
    """Percentiles of each arm that has any."""
    found = {arm: latency([r for r in rows if r.arm == arm]) for arm in ARMS}
    return {arm: figures for arm, figures in found.items() if figures}


def same(rows: Sequence[Request]) -> Same | None:
    """Greedy answers of the arms none and head beside each other; None where one is missing.

    Greedy speculation changes a text only where two tokens tie within the engine's rounding, which a step of another
    batch size breaks otherwise; where an answer has parted, all that follows is another text.
    """
    given = {(r.arm, r.round, r.prompt_id): r.output_ids for r in rows}
    pairs = [(ids, given["none", number, prompt]) for (arm, number, prompt), ids in given.items()
             if arm == "head" and ("none", number, prompt) in given]  # fmt: skip
    if not pairs:
        return None
    first = min(number for _, number, _ in given)
    again = [(ids, given["none", first, prompt]) for (arm, number, prompt), ids in given.items()
             if arm == "none" and number > first and ("none", first, prompt) in given]  # fmt: skip
    parted = [_common(a, b) for a, b in pairs if a != b]
    return Same(
        answers=len(pairs), equal=len(pairs) - len(parted),
        first_difference=float(statistics.median(parted)) if parted else None,
        none_equal=sum(a == b for a, b in again), none_answers=len(again),
    )  # fmt: skip


def sound(figure: Figure | None) -> Figure | None:
    """The figure, None where any part of it is no number."""
    if figure is None or not all(math.isfinite(x) for x in (figure.value, figure.low, figure.high)):
        return None
    return figure


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
