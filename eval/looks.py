"""Whether a domain's acceptance is decided already, so that the rest of its prompts need not be asked."""

import math
from collections.abc import Sequence

from eval.ledger import Job, Session, latest, remaining
from eval.sequential import Plan, decide
from eval.summary import MIN_SUBSET, unrepeated
from export.requests import Request
from recipes.schema import Gate, Recipe, Rule


def kept(work: Sequence[Job], sessions: Sequence[Session], recipe: Recipe) -> list[Job]:
    """`work` without the looks that come after a decided one. Depends on nothing but the arguments."""
    ended: dict[tuple[str, float], int] = {}
    heads = [job for job in work if (job.load.phase, job.load.arm) == ("acceptance", "head")]
    for domain, temperature in {_place(job) for job in heads}:
        mine = [job for job in heads if _place(job) == (domain, temperature)]
        look = _decided(mine, sessions, recipe.gate, recipe.gate.rules.get(domain, Rule()))
        if look is not None:
            ended[domain, temperature] = look
    return [job for job in work
            if job.load.phase != "acceptance" or job.load.round <= ended.get(_place(job), math.inf)]  # fmt: skip


def _place(job: Job) -> tuple[str, float]:
    return job.domain, job.load.temperature


def _decided(mine: Sequence[Job], sessions: Sequence[Session], gate: Gate, rule: Rule) -> int | None:
    """The first look of the head's jobs that decides; None where none does, or an answer of it is still missing."""
    counts: list[int] = []
    for job in mine:
        counts.append(len(job.prompts) + (counts[-1] if counts else 0))
    rows: list[Request] = []
    for job in mine[:-1]:
        if remaining(job, sessions):
            return None
        answered = latest(job, sessions)
        rows += [answered[prompt.id] for prompt in job.prompts]
        if _over(rows, Plan(looks=tuple(counts), confidence=gate.confidence), rule):
            return job.load.round
    return None


def _over(rows: Sequence[Request], plan: Plan, rule: Rule) -> bool:
    """One rule that fails is enough for a no; a yes needs all that the domain's rule asks."""
    single = unrepeated(rows)
    asked = [(rows, rule.min_acceptance)] * bool(rule.min_acceptance)
    asked += [(single, rule.min_acceptance_unrepeated)] * bool(rule.min_acceptance_unrepeated)
    found = [decide(of, plan, bound, len(rows)).verdict for of, bound in asked]
    if rule.min_acceptance_unrepeated and len(single) < MIN_SUBSET:
        found[-1] = "go on"
    return "fail" in found or all(verdict == "pass" for verdict in found)
