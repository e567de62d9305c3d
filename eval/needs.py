"""What a gate would need, told before anything is measured: requests and the chance to pass, from a record."""

from collections.abc import Sequence
from pathlib import Path

from eval.power import half_width, power_at, requests_to_show, spread
from eval.summary import rows_of, speed_domain, unrepeated
from export.requests import Request, read_requests
from recipes.schema import Recipe, Rule

_POWER = 0.9
"""chance to pass that is asked for, where the head is as good as the earlier record says"""
_MOST = 100_000
"""more requests than this are not worth naming"""


def needs(recipe: Recipe, run: Path) -> str:
    """One paragraph a domain: how many prompts are planned, and what its acceptance bounds would need.

    Spread and length come from the run's last record, whatever recipe made it; without one only the plan is told.
    Raises ValueError where that record cannot be read.
    """
    there = (run / "record" / "requests.parquet").is_file()
    pilot = read_requests(run / "record") if there else []
    lines = [
        f"{recipe.name}: what the gate would need, {recipe.gate.confidence:.0%} intervals, nothing is measured now",
        f"learnt from {len(pilot)} rows of the run's record" if there else
        "no record to learn from; `draftsmith measure` with gate.prompts=30 gives one, then ask again",
    ]  # fmt: skip
    for name, domain in recipe.domains.items():
        if domain.held_out or name in recipe.gate.rules:
            lines += _domain(recipe, name, min(recipe.gate.prompts, domain.held_out), pilot)
    return "\n".join([*lines, _speed(recipe)])


def _domain(recipe: Recipe, name: str, planned: int, pilot: Sequence[Request]) -> list[str]:
    gate, rule = recipe.gate, recipe.gate.rules.get(name, Rule())
    short = f"; gate.min_requests is {gate.min_requests}, so it would be refused" if planned < gate.min_requests else ""
    rows = rows_of(pilot, "head", name, gate.temperatures[0])
    bounds = (
        ("min_acceptance", rule.min_acceptance, rows, planned),
        ("min_acceptance_unrepeated", rule.min_acceptance_unrepeated, unrepeated(rows),
         round(planned * len(unrepeated(rows)) / len(rows)) if rows else 0),
    )  # fmt: skip
    lines = [f"{name}: {planned} prompts an arm{short}"]
    lines += [f"  {_bound(key, least, few, n, gate.confidence)}" for key, least, few, n in bounds if least]
    if not rows or rule.min_acceptance:
        return lines
    known = _tells(rows) and planned >= 2
    wide = f"; the interval would be +-{half_width(spread(rows), planned, gate.confidence):.3f}" if known else ""
    return [*lines, f"  no bound on its acceptance length{wide}"]


def _bound(key: str, least: float, rows: Sequence[Request], planned: int, confidence: float) -> str:
    """What a bound would take, and what the plan gives it."""
    if not _tells(rows):
        return f"{key} {least:g}: unknown, the record holds {len(rows)} such answers"
    length, own = 1 + sum(r.accepted for r in rows) / sum(r.drafts for r in rows), spread(rows)
    said = f"{key} {least:g}: {length:.3f} before, from {len(rows)} answers"
    if length <= least:
        return f"{said}; a head like that does not pass, however many are asked"
    if planned < 2:
        return f"{said}; {planned} such answers are planned, too few for an interval"
    chance = power_at(own, length - least, planned, confidence)
    needed = requests_to_show(own, length - least, confidence, _POWER) if own else 2
    count = str(needed) if needed <= _MOST else f"more than {_MOST}"
    return (
        f"{said}; {planned} planned give +-{half_width(own, planned, confidence):.3f} and pass with chance "
        f"{chance:.0%}; "
        f"{_POWER:.0%} needs {count}"
    )


def _tells(rows: Sequence[Request]) -> bool:
    """True where the rows have a spread."""
    return len(rows) >= 2 and any(r.drafts for r in rows)


def _speed(recipe: Recipe) -> str:
    gate, domain = recipe.gate, speed_domain(recipe.gate)
    if not domain:
        return "speed: no rule asks for it, so none is timed"
    loads = ", ".join(map(str, (1, *gate.loads)))
    prompts = min(gate.speed_prompts, recipe.domains[domain].held_out)
    return f"speed: {prompts} prompts of {domain}, {gate.speed_rounds} rounds an arm, at {loads} in flight"
