"""All that is asked, in order: acceptance by temperature, domain, look and arm, then the rounds of the speed arms.

Pure: the recipe and the prompts say all of it before the first request. A look (gate.looks) is a part of a domain's
prompts; when all arms have answered it, eval.looks may find that the rest need not be asked.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from data.prompts import Prompt
from eval.arms import asked_arms, timed_arms
from eval.ledger import Job
from eval.sequential import evenly
from eval.summary import speed_domain
from eval.traffic import Load
from export.requests import Arm
from recipes.schema import Gate, Recipe, Rule


def jobs(recipe: Recipe, prompts: Sequence[Prompt]) -> list[Job]:
    """All that is asked where no domain ends early."""
    held_out: dict[str, list[Prompt]] = {name: [] for name, domain in recipe.domains.items() if domain.held_out}
    for prompt in prompts:
        if prompt.split == "held_out" and prompt.domain in held_out:
            held_out[prompt.domain].append(prompt)
    return [*_acceptance(recipe, held_out), *_speed(recipe, held_out)]


def looks(recipe: Recipe, work: Sequence[Job]) -> dict[str, list[int]]:
    """Domain -> the head's requests asked by each look, at each temperature; the last are all that may be asked."""
    found: dict[str, list[int]] = {}
    for job in work:
        mine = (job.load.phase, job.load.arm, job.load.temperature) == (
            "acceptance",
            "head",
            recipe.gate.temperatures[0],
        )
        if mine and job.prompts:
            asked = found.setdefault(job.domain, [])
            asked.append((asked[-1] if asked else 0) + len(job.prompts))
    return found


def _acceptance(recipe: Recipe, held_out: Mapping[str, Sequence[Prompt]]) -> list[Job]:
    gate = recipe.gate
    return [
        _job(name, taken[first : min(last, _asked(gate, arm))], Load(
            arm=arm, phase="acceptance", round=look, concurrency=gate.concurrency, temperature=temperature,
            max_tokens=gate.max_tokens, **_windows(recipe, arm),
        ))
        for temperature in gate.temperatures
        for name, taken in held_out.items()
        for look, (first, last) in enumerate(pairwise((0, *_looks(gate, name, min(gate.prompts, len(taken))))))
        for arm in asked_arms(recipe)
        if first < _asked(gate, arm)
    ]  # fmt: skip


def _speed(recipe: Recipe, held_out: Mapping[str, Sequence[Prompt]]) -> list[Job]:
    """The arms take turns in rounds, first with one request in flight, then with more."""
    gate, arms = recipe.gate, timed_arms(recipe)
    timed = held_out.get(speed_domain(gate), [])[: gate.speed_prompts]
    work: list[Job] = []
    for load in (1, *gate.loads) if timed else ():
        for number in range(gate.speed_rounds):
            turn = number % len(arms)
            work += [
                _job(speed_domain(gate), timed, Load(
                    arm=arm, phase="speed", round=number, concurrency=load, temperature=gate.temperatures[0],
                    max_tokens=gate.speed_max_tokens, unseen=recipe.engine.windows == "chunks" and arm != "none",
                ))
                for arm in (*arms[turn:], *arms[:turn])
            ]  # fmt: skip
    return work


def _looks(gate: Gate, domain: str, asked: int) -> tuple[int, ...]:
    """One look at all where the domain cannot end early: nothing of its rule can be decided, or it compares heads.

    The interval beside the incumbent is one of a fixed number of prompts, which a look would break.
    """
    rule = gate.rules.get(domain, Rule())
    bound = rule.min_acceptance or rule.min_acceptance_unrepeated
    if gate.looks == 1 or not bound or rule.max_below_incumbent is not None or asked < _least(gate):
        return (asked,)
    return evenly(asked, gate.looks, gate.min_requests)


def _least(gate: Gate) -> int:
    return max(2 * gate.looks, gate.min_requests)


def _windows(recipe: Recipe, arm: Arm) -> dict[str, Any]:
    """The load's fields that say how an answer's windows are told."""
    if recipe.engine.windows == "metrics" or arm == "none":
        return {}
    return {"chunk_drafts": recipe.export.speculative_tokens}


def _asked(gate: Gate, arm: Arm) -> int:
    """Prompts a domain."""
    return min(gate.prompts, gate.ngram_prompts or gate.prompts) if arm == "ngram" else gate.prompts


def _job(domain: str, prompts: Sequence[Prompt], load: Load) -> Job:
    key = f"{load.phase}/{domain}/{load.arm}/T{load.temperature:g}/{load.round}"
    if load.phase == "speed" and load.concurrency > 1:
        key += f"/{load.concurrency}"
    return Job(key=key, domain=domain, prompts=tuple(prompts), load=load)
