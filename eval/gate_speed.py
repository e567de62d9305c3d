"""The speed rules of the gate: one request in flight, and the recipe's loads. What was not measured is a refusal."""

import math

from eval.refusal import above, below, no
from eval.summary import speed_domain
from export.figures import Figure, Speed
from export.record import Refusal
from recipes.schema import Gate, Recipe, Rule


def fast(recipe: Recipe, timed: Speed | None) -> list[Refusal]:
    """Every domain's speed rules; only the speed domain can keep one."""
    refusals: list[Refusal] = []
    for name, rule in recipe.gate.rules.items():
        mine = timed if timed and speed_domain(recipe.gate) == name else None
        if rule.on_speed:
            refusals += [*_alone(name, rule, recipe.gate, mine), *_loaded(name, rule, recipe.gate, mine)]
    return refusals


def _alone(name: str, rule: Rule, gate: Gate, timed: Speed | None) -> list[Refusal]:
    refusals = below("min_speedup", name, "speed-up at concurrency 1", timed and timed.speedup, rule.min_speedup)
    median = timed.speedup.value if timed and timed.speedup else math.nan
    if rule.min_median_speedup and not median >= rule.min_median_speedup:
        why = f"median speed-up of the rounds {median:.3f}, it must reach {rule.min_median_speedup:g}"
        refusals.append(no("min_median_speedup", why, name, median, threshold=rule.min_median_speedup))
    if timed and timed.speedup and (timed.speedup.n < gate.speed_prompts or len(timed.rounds) < gate.speed_rounds):
        wants = f"the recipe wants {gate.speed_prompts} in {gate.speed_rounds}"
        refusals.append(
            no("min_speedup", f"timed {timed.speedup.n} prompts in {len(timed.rounds)} rounds, {wants}", name)
        )
    return refusals


def _loaded(name: str, rule: Rule, gate: Gate, timed: Speed | None) -> list[Refusal]:
    """At each load, and p99 at one request in flight too."""
    refusals: list[Refusal] = []
    by_load = timed.loads if timed else {}
    slow: dict[str, Figure | None] = {"1": timed.p99 if timed else None}
    for load in map(str, gate.loads):
        at = by_load.get(load)
        slow[load] = at and at.p99
        least = rule.min_speedup_at.get(load, 0.0)
        refusals += below("min_speedup_at", name, f"speed-up at concurrency {load}", at and at.speedup, least)
        if least and at and at.speedup and at.speedup.n < gate.speed_prompts:
            why = f"timed {at.speedup.n} prompts at concurrency {load}, the recipe wants {gate.speed_prompts}"
            refusals.append(no("min_speedup_at", why, name))
    for load, figure in slow.items():
        what = f"p99 of an answer's seconds at concurrency {load}, against no speculation,"
        refusals += above("max_p99", name, what, figure, rule.max_p99)
    return refusals
