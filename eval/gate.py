"""Rules + record -> verdict. It fails closed: whatever is missing, changed, or not a number is a refusal."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from eval.arms import asked_arms
from eval.conditions import speculative_settings
from eval.gate_speed import fast
from eval.incumbent import kept_up
from eval.refusal import below, no
from eval.report import write_report
from eval.summary import MIN_SUBSET, findings, measured, rows_of, speed, unrepeated
from eval.synthetic import controlled, said
from export.figures import Measured
from export.record import (
    CHECKPOINT,
    INCUMBENT,
    INPUTS,
    UNMEASURED,
    Record,
    Refusal,
    Verdict,
    read_record,
    recipe_hash,
    write_verdict,
)
from export.requests import Request, read_requests
from recipes.artifact import damaged, difference, digest, read_manifest
from recipes.faults import GateRefused
from recipes.load import plain
from recipes.schema import Recipe, Rule

COUNTER_TOLERANCE = 0.01
"""relative difference of the engine's counters and the sums over requests, at most"""
CHUNKS_TOLERANCE = {"drafts": 0.0, "draft_tokens": 0.0, "accepted": 0.03}
"""the same where chunks are windows: none may be joined, but what the engine accepted beyond an answer's end is in its
counters and in no chunk"""


def make(recipe: Recipe, run: Path, out: Path) -> dict[str, Any]:
    """Judge the run's record into out/verdict.json and reports, also where it refuses; returns what was decided.

    Raises GateRefused where there is no record to judge.
    """
    require_record(run)
    try:
        record, requests = read_record(run), read_requests(run / "record")
    except ValueError as error:
        raise GateRefused(f"the measurement cannot be read: {error}") from error
    verdict = judge(record, requests, recipe, present(recipe, run), edited_key(recipe, run))
    write_verdict(out, verdict)
    write_report(out, verdict, recipe)
    return {"passed": verdict.passed, "refusals": len(verdict.refusals), "findings": len(verdict.findings)}


def require_record(run: Path) -> None:
    """Raises GateRefused, with what stopped the last attempt, where the run holds no finished measurement."""
    if read_manifest(run / "record") is not None:
        return
    partial = run / "record.partial"
    fault = partial / "fault.txt"
    why = "nothing was measured yet"
    if fault.is_file():
        why = f"the last attempt stopped: {fault.read_text(encoding='utf-8').strip()}"
    elif partial.exists():
        why = "the last attempt was interrupted"
    raise GateRefused(f"no measurement of {run.name}: {why}; run `draftsmith measure`")


def present(recipe: Recipe, run: Path) -> dict[str, str]:
    """Identity, as of now, of all that the record stands for and of the record; a sentence where a stage is unsound."""
    found = {"recipe": recipe_hash(recipe)}
    for stage in (*INPUTS, "record"):
        bad = damaged(run / stage, deep=True)
        try:
            found[stage] = f"{', '.join(bad[:3])} not as its manifest says" if bad else digest(run / stage)
        except ValueError:
            found[stage] = "it is gone"
    return found


def edited_key(recipe: Recipe, run: Path) -> str:
    """The first recipe key that differs from the measured recipe, e.g. `gate.prompts: 60 -> 80`; empty if none does."""
    old = cast(dict[str, Any], (read_manifest(run / "record") or {}).get("recipe") or {})
    new = plain(recipe)
    for key in sorted(set(old) | set(new)):
        if key not in UNMEASURED and old.get(key) != new.get(key):
            return difference(key, old.get(key), new.get(key))
    return ""


def judge(
    record: Record, requests: Sequence[Request], recipe: Recipe, now: Mapping[str, str], edited: str = ""
) -> Verdict:
    """The verdict on a record and its rows under the recipe's rules.

    `now` is :func:`present`'s answer, `edited` :func:`edited_key`'s.
    """
    names = [name for name, domain in recipe.domains.items() if domain.held_out or name in recipe.gate.rules]
    domains = {name: measured(name, recipe, record, requests) for name in names}
    timed = speed(recipe, record, requests)
    refusals = [*_changed(record, now, edited), *_speculation(record, recipe), *_times(record, requests)]
    for name, figures in domains.items():
        refusals += _answered(name, recipe, requests)
        refusals += _counts(name, record, requests, recipe)
        refusals += _reached(name, recipe, figures, requests)
    refusals += [*fast(recipe, timed), *_parity(record, recipe, domains), *controlled(recipe, domains)]
    refusals += kept_up(recipe, domains)
    return Verdict(
        passed=not refusals,
        refusals=refusals,
        made_from={"record": now.get("record", ""), **record.made_from},
        domains=domains,
        speed=timed,
        conditions=record.conditions,
        findings=[*said(recipe, domains), *findings(recipe, requests, domains, timed)],
    )


def _changed(record: Record, now: Mapping[str, str], edited: str) -> list[Refusal]:
    refusals: list[Refusal] = []
    was = {**dict.fromkeys((*INPUTS, "recipe"), ""), **record.made_from, "record": now.get("record", "")}
    for part, old in was.items():
        new = now.get(part, "it is gone")
        if " " in new:  # a sentence, not a digest
            refusals.append(no("unchanged", f"{part}: {new}; run its stage and measure again"))
        elif old != new:
            what = edited if part == "recipe" and edited else f"{old[:12] or 'unrecorded'} -> {new[:12]}"
            refusals.append(no("unchanged", f"{part} changed since the measurement ({what}); measure again"))
    return refusals


def _speculation(record: Record, recipe: Recipe) -> list[Refusal]:
    """Only vLLM's own lossless verification counts, and each arm must have been what it is called."""
    refusals: list[Refusal] = []
    methods = {"the record": record.conditions.rejection_sample_method}
    for arm, command in {**record.conditions.command, "engine.args": list(recipe.engine.args)}.items():
        settings = speculative_settings(command)
        methods[arm] = str(settings.get("rejection_sample_method", "standard"))
        if any("synthetic" in key or value == "unreadable" for key, value in settings.items()):
            methods[arm] = "synthetic or unreadable"
        if arm == "none" and settings:
            refusals.append(no("speculation", "the arm without speculation was started with a speculative config"))
    for where, method in methods.items():
        if method != "standard":
            why = f"{where}: rejection sampler {method!r}, only 'standard' measures acceptance"
            refusals.append(no("rejection_sampler", why))
    heads = {"head": CHECKPOINT, "incumbent": INCUMBENT} if recipe.gate.incumbent else {"head": CHECKPOINT}
    for arm, folder in heads.items():
        drafting = speculative_settings(record.conditions.command.get(arm, []))
        if drafting.get("model") != folder or "method" not in drafting:
            which = "the run's checkpoint" if arm == "head" else "gate.incumbent"
            refusals.append(no("speculation", f"the {arm}'s server was not started with {which}"))
    return refusals


def _times(record: Record, requests: Sequence[Request]) -> list[Refusal]:
    rows = [r for r in requests if not r.error]
    bad = sum(not (r.total_s > 0 and r.ttft_s > 0 and all(g >= 0 and math.isfinite(g) for g in r.gaps_s)
                   and math.isfinite(r.total_s + r.ttft_s)) for r in rows)  # fmt: skip
    batches = sum(not (b.seconds > 0 and math.isfinite(b.seconds)) for b in record.speed)
    lengths = [name for name, s in record.simulated.items() if not math.isfinite(s.length)]
    refusals: list[Refusal] = []
    if bad or batches:
        refusals.append(no("finite", f"{bad} rows and {batches} batches hold times that are no positive numbers"))
    if lengths:
        refusals.append(no("finite", f"training's simulated length is no number on {', '.join(lengths)}"))
    return refusals


def _answered(name: str, recipe: Recipe, requests: Sequence[Request]) -> list[Refusal]:
    refusals: list[Refusal] = []
    failed = [r for r in requests if r.domain == name and r.error]
    if failed:
        first = f"{failed[0].arm}, prompt {failed[0].prompt_id}: {failed[0].error}"
        why = f"{len(failed)} requests failed; the first: {first}"
        refusals.append(no("failed_requests", why, name, float(len(failed)), threshold=0.0))
    for temperature in recipe.gate.temperatures:
        rows = rows_of(requests, "head", name, temperature)
        distinct, least = len({r.prompt_id for r in rows}), recipe.gate.min_requests
        if distinct < least:
            why = f"{distinct} requests measured at T={temperature:g}, gate.min_requests is {least}"
            refusals.append(no("min_requests", why, name, float(distinct), threshold=float(least)))
        if distinct < len(rows):
            refusals.append(no("min_requests", f"{len(rows) - distinct} prompts were counted twice", name))
    return refusals


def _counts(name: str, record: Record, requests: Sequence[Request], recipe: Recipe) -> list[Refusal]:
    """The engine's counters, and each row in itself, must tell the same story."""
    told = recipe.engine.windows == "metrics"
    allowed = {} if told else CHUNKS_TOLERANCE
    refusals: list[Refusal] = []
    for arm in asked_arms(recipe):
        rows = [r for r in requests if (r.arm, r.domain, r.error) == (arm, name, "") and (told or r.phase != "speed")]
        odd = sum(sum(r.per_step_accepted) != r.accepted or len(r.per_step_accepted) != r.drafts
                  or r.accepted > r.draft_tokens for r in rows)  # fmt: skip
        if odd:
            refusals.append(no("counts", f"{arm}: {odd} rows whose windows do not add up", name))
        counted = [r for r in rows if r.counted]
        engine = record.counters.get(arm, {}).get(name)
        if counted and engine is None:
            refusals.append(no("counters", f"{arm}: the engine's counters are missing", name))
        for field in ("drafts", "draft_tokens", "accepted") if engine else ():
            said, summed = float(getattr(engine, field)), float(sum(getattr(r, field) for r in counted))
            if not abs(said - summed) <= allowed.get(field, COUNTER_TOLERANCE) * max(said, summed):
                why = f"{arm}: the engine counted {said:g} {field}, its answers hold {summed:g}"
                refusals.append(no("counters", why, name, summed, threshold=said))
    head = [r for r in requests if r.arm == "head" and r.domain == name and not r.error]
    if head and not any(r.drafts for r in head):
        refusals.append(no("drafts", "no window was verified, so the head drafted nothing", name, 0.0, threshold=1.0))
    if head and not any(r.counted for r in requests if r.arm == "head"):
        refusals.append(no("counters", "no row of the head is covered by the engine's counters; measure again", name))
    return refusals


def _reached(name: str, recipe: Recipe, figures: Measured, requests: Sequence[Request]) -> list[Refusal]:
    """Every temperature that was measured must reach the domain's rule."""
    rule = recipe.gate.rules.get(name, Rule())
    refusals: list[Refusal] = []
    by_temperature = {recipe.gate.temperatures[0]: figures.acceptance}
    by_temperature.update({float(t): figure for t, figure in figures.temperatures.items()})
    for temperature, figure in by_temperature.items():
        at = f" at T={temperature:g}" if len(by_temperature) > 1 else ""
        refusals += below("min_acceptance", name, f"acceptance length{at}", figure, rule.min_acceptance)
    least = rule.min_acceptance_unrepeated
    refusals += below(
        "min_acceptance_unrepeated",
        name,
        "acceptance length of unrepeated answers",
        figures.acceptance_unrepeated,
        least,
    )
    few = len(unrepeated(rows_of(requests, "head", name, recipe.gate.temperatures[0])))
    if least and few < MIN_SUBSET:
        why = f"only {few} answers without a repeated 4-gram, at least {MIN_SUBSET} are needed for the rule"
        refusals.append(no("min_acceptance_unrepeated", why, name, float(few), threshold=float(MIN_SUBSET)))
    return refusals


def _parity(record: Record, recipe: Recipe, domains: Mapping[str, Measured]) -> list[Refusal]:
    """Our replay of the served ids: windows pooled over domains, lengths domain by domain."""
    gate, parity = recipe.gate, record.parity or {}
    refusals = [
        no("parity", "the replay of the served token ids is missing", name) for name in domains if name not in parity
    ]
    windows, equal = (sum(getattr(p, field) for p in parity.values()) for field in ("windows", "equal"))
    share = equal / windows if windows else math.nan
    if parity and not gate.parity_windows <= share <= 1:
        why = f"{equal} of {windows} served windows are reproduced, gate.parity_windows is {gate.parity_windows:.1%}"
        refusals.append(no("parity_windows", why, "", share, threshold=gate.parity_windows))
    beyond = sum(p.unexplained for p in parity.values())
    if windows and beyond / windows > gate.parity_unexplained:
        why = f"{beyond} of {windows} windows differ beyond rounding, allowed {gate.parity_unexplained:.2%}"
        refusals.append(no("parity_unexplained", why, "", beyond / windows, threshold=gate.parity_unexplained))
    for name, p in parity.items():
        apart = abs(p.replayed_length / p.served_length - 1) if p.served_length else math.nan
        if not apart <= gate.parity_length:
            why = f"replayed length {p.replayed_length:.3f}, served {p.served_length:.3f}, more than gate.parity_length"
            refusals.append(no("parity_length", why, name, apart, threshold=gate.parity_length))
    return refusals
