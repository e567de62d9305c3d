"""The gate's own control: vLLM accepts drafts at random, at a set acceptance length; what is measured must equal it.

vLLM's `rejection_sample_method: synthetic` draws each window's accepted count with rates that give
`synthetic_acceptance_length` in the mean, whatever the head drafts. The answers are no longer the target's.
"""

from collections.abc import Mapping
from typing import Any

from eval.refusal import no
from export.figures import Measured
from export.record import Refusal
from recipes.schema import Engine, Recipe

TOLERANCE = 0.01
"""a set length outside the measured interval may lie this far off, relatively: the interval misses one in twenty"""


def synthetic(engine: Engine) -> dict[str, Any]:
    """What the control adds to the head's speculative config; empty without one."""
    if not engine.synthetic_length:
        return {}
    return {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": engine.synthetic_length}


def synthetic_faults(recipe: Recipe, *, cpu: bool) -> list[str]:
    """Why a control cannot be run, before a server is started."""
    length, most = recipe.engine.synthetic_length, recipe.export.speculative_tokens + 1
    faults: list[str] = []
    if length and cpu:
        faults.append(
            f"engine.synthetic_length: {length:g}, but vLLM on a CPU dies at the first request with synthetic "
            "acceptance; run the control on a GPU, or set 0"
        )
    if length and not 1 <= length <= most:
        faults.append(
            f"engine.synthetic_length: {length:g}; with export.speculative_tokens {most - 1} it may be 1 to {most}"
        )
    return faults


def controlled(recipe: Recipe, domains: Mapping[str, Measured]) -> list[Refusal]:
    """A refusal for each domain whose measured length is not the one that was set."""
    wanted = recipe.engine.synthetic_length
    refusals: list[Refusal] = []
    for name, figures in domains.items() if wanted else ():
        found = figures.acceptance
        if found is None:
            refusals.append(no("synthetic_length", f"set to {wanted:g}, nothing was measured", name, threshold=wanted))
        elif not (found.low <= wanted <= found.high or abs(found.value / wanted - 1) <= TOLERANCE):
            why = f"set to {wanted:g}, measured {found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"
            refusals.append(no("synthetic_length", why, name, found.value, threshold=wanted))
    return refusals


def said(recipe: Recipe, domains: Mapping[str, Measured]) -> list[str]:
    """What a control measured, one sentence a domain."""
    wanted = recipe.engine.synthetic_length
    return [
        f"{name}: synthetic acceptance was set to {wanted:g} and measured as {f.value:.3f} [{f.low:.3f}, {f.high:.3f}]"
        for name, figures in domains.items()
        if wanted and (f := figures.acceptance)
    ]
