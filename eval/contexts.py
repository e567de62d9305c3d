"""Acceptance by how long the context already is: a head trained on short rows may lose its way beyond them. Pure."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from eval.acceptance import Bootstrap, ratio
from eval.loads import sound
from export.figures import Figure
from export.requests import Request


def by_context(rows: Sequence[Request], trained: int, bootstrap: Bootstrap) -> dict[str, Figure]:
    """Context in tokens -> acceptance length of the windows that began there; only where any window did.

    `trained` is the longest row that training saw: short is up to half of it, near up to all of it, then beyond.
    """
    edges = (0, trained // 2, trained, None)
    found: dict[str, Figure] = {}
    for low, high in pairwise(edges):
        inside = [kept for r in rows if (kept := _windows(r, low or 0, high))]
        figure = sound(ratio([float(sum(w)) for w in inside], [float(len(w)) for w in inside], bootstrap, offset=1.0))
        if figure:
            found[f"up to {high}" if high else f"beyond {low}"] = figure
    return found


def _windows(row: Request, low: int, high: int | None) -> list[int]:
    """Accepted counts of the windows whose context, prompt and answer so far, is above `low` and at most `high`."""
    # The first token comes from the prefill; each window then adds what it accepted and the target's own token.
    starts = accumulate((a + 1 for a in row.per_step_accepted), initial=row.prompt_tokens + 1)
    return [
        a for a, at in zip(row.per_step_accepted, starts, strict=False) if low < at and (high is None or at <= high)
    ]
