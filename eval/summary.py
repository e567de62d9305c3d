"""Record and rows -> the figures of a verdict, and what is worth saying about them. Pure."""

import math
from collections.abc import Mapping, Sequence

from eval.acceptance import (
    Bootstrap,
    length_difference,
    p99_ratio,
    per_position,
    pooled_length,
    speedup,
    spread,
    tail_share,
    tokens_per_step,
    without_last_window,
)
from eval.contexts import by_context
from eval.loads import beside, latencies, loaded, same, sound
from eval.sequential import Plan, repeated_interval
from export.figures import Figure, Measured, Speed, Steps
from export.record import Record
from export.requests import Request
from recipes.schema import Gate, Recipe

GAP = 0.1
"""simulated and served lengths further apart than this are a finding"""
NOISE = 0.15
"""rounds whose ratios lie further apart than this are a finding"""
MIN_SUBSET = 10
"""fewer unrepeated answers than this have no interval worth a rule"""


def speed_domain(gate: Gate) -> str:
    """Whose prompts the speed arms answer: the recipe's, else the first with a speed rule; empty = none is timed."""
    return gate.speed_domain or next((name for name, rule in gate.rules.items() if rule.on_speed), "")


def bootstrap_of(gate: Gate) -> Bootstrap:
    """How the recipe wants its intervals."""
    return Bootstrap(samples=gate.bootstrap, confidence=gate.confidence, seed=gate.seed)


def rows_of(requests: Sequence[Request], arm: str, domain: str, temperature: float) -> list[Request]:
    """An arm's sound acceptance rows on a domain."""
    return [
        r
        for r in requests
        if (r.phase, r.arm, r.domain, r.temperature) == ("acceptance", arm, domain, temperature) and not r.error
    ]


def measured(name: str, recipe: Recipe, record: Record, requests: Sequence[Request]) -> Measured:
    """A domain's figures, at the recipe's first temperature."""
    bootstrap, temperatures = bootstrap_of(recipe.gate), recipe.gate.temperatures
    rows = rows_of(requests, "head", name, temperatures[0])
    ngram = rows_of(requests, "ngram", name, temperatures[0])
    other = rows_of(requests, "incumbent", name, temperatures[0])
    looks = record.looks.get(name, [])
    acceptance = _length(rows, len(rows), looks, recipe.gate)
    simulated = record.simulated.get(name)
    length = simulated.length if simulated and math.isfinite(simulated.length) else None
    parity = (record.parity or {}).get(name)
    return Measured(
        role=recipe.domains[name].role,
        requests=len(rows),
        acceptance=acceptance,
        acceptance_unrepeated=_length(unrepeated(rows), len(rows), looks, recipe.gate),
        repeated_share=sum(r.repeated_4gram for r in rows) / len(rows) if rows else None,
        per_position=per_position(rows, record.conditions.speculative_tokens),
        tokens_per_step=Steps(
            head=sound(tokens_per_step(rows, bootstrap)),
            ngram=sound(tokens_per_step(ngram, bootstrap)),
            incumbent=sound(tokens_per_step(other, bootstrap)),
        ),
        simulated=length,
        simulated_gap=length / acceptance.value - 1 if length and acceptance else None,
        parity=parity if parity and math.isfinite(parity.replayed_length + parity.served_length) else None,
        latency=latencies([*rows, *other, *ngram]),
        temperatures={
            f"{t:g}": _length(at, len(at), looks, recipe.gate)
            for t in temperatures[1:]
            for at in [rows_of(requests, "head", name, t)]
        },
        looks=looks,
        contexts=by_context(rows, recipe.train.pack_tokens, bootstrap),
        over_incumbent=_over_incumbent(name, recipe.gate, requests),
    )


def _length(rows: Sequence[Request], asked: int, looks: Sequence[int], gate: Gate) -> Figure | None:
    """Pooled acceptance length; where it was looked at more than once, its interval holds at all looks together."""
    if len(looks) < 2:
        return sound(pooled_length(rows, bootstrap_of(gate)))
    return sound(repeated_interval(rows, Plan(looks=tuple(looks), confidence=gate.confidence), asked))


def _over_incumbent(name: str, gate: Gate, requests: Sequence[Request]) -> dict[str, Figure | None]:
    if not gate.incumbent:
        return {}
    return {
        f"{t:g}": sound(
            length_difference(
                rows_of(requests, "head", name, t), rows_of(requests, "incumbent", name, t), bootstrap_of(gate)
            )
        )
        for t in gate.temperatures
    }


def speed(recipe: Recipe, record: Record, requests: Sequence[Request]) -> Speed | None:
    """The speed arms' figures; None where none was timed."""
    every = [r for r in requests if r.phase == "speed" and not r.error]
    rows = [r for r in every if r.concurrency == 1]
    if not rows:
        return None
    bootstrap = bootstrap_of(recipe.gate)
    figure, rounds = speedup(rows, bootstrap)
    served: dict[str, dict[str, tuple[int, float]]] = {}
    for batch in record.speed:
        if batch.phase == "acceptance" and batch.temperature == recipe.gate.temperatures[0]:
            arms = served.setdefault(str(batch.concurrency), {})
            tokens, seconds = arms.get(batch.arm, (0, 0.0))
            arms[batch.arm] = tokens + batch.output_tokens, seconds + batch.seconds
    return Speed(
        domain=speed_domain(recipe.gate),
        concurrency=1,
        speedup=sound(figure),
        rounds=[{name: value for name, value in shown.items() if math.isfinite(value)} for shown in rounds],
        served={
            load: {arm: tokens / seconds for arm, (tokens, seconds) in arms.items() if seconds > 0}
            for load, arms in served.items()
        },
        latency=latencies(rows),
        p99=sound(p99_ratio(rows, bootstrap)),
        beside=beside(rows, bootstrap),
        loads={
            str(load): loaded([r for r in every if r.concurrency == load], record.speed, bootstrap)
            for load in recipe.gate.loads
        },
        same=same(rows) if recipe.gate.temperatures[0] == 0 else None,
    )


def unrepeated(rows: Sequence[Request]) -> list[Request]:
    """The rows whose answers hold no repeated 4-gram."""
    return [r for r in rows if not r.repeated_4gram]


def findings(
    recipe: Recipe, requests: Sequence[Request], domains: Mapping[str, Measured], timed: Speed | None
) -> list[str]:
    """Plain sentences on what a reader should know before trusting the figures."""
    said: list[str] = []
    for name, figures in domains.items():
        rows = rows_of(requests, "head", name, recipe.gate.temperatures[0])
        said += [*_looked(name, figures), *_simulation(name, recipe, figures, rows), *_comparison(name, figures)]
    if timed and spread(timed.rounds) > NOISE:
        said.append(
            f"speed: the rounds' ratios lie {spread(timed.rounds):.0%} apart; the machine was not quiet, so trust the "
            "interval less"
        )
    said += _slower(timed)
    texts = timed.same if timed else None
    if texts and texts.equal < texts.answers:
        said.append(
            f"speed: {texts.answers - texts.equal} of {texts.answers} greedy answers differ from those without the "
            f"head, after {texts.first_difference:g} tokens in the median; without the head "
            f"{texts.none_answers - texts.none_equal} of {texts.none_answers} differ from round to round"
        )
    uncounted = sum(not r.counted for r in requests if not r.error)
    if uncounted:
        said.append(
            f"{uncounted} of {len(requests)} rows are from batches that were interrupted; the engine's counters do not "
            "cover them"
        )
    return said


def _slower(timed: Speed | None) -> list[str]:
    """The loads at which no speculation is the better choice: those whose whole interval says so."""
    if timed is None:
        return []
    by_load = {load: at.speedup for load, at in timed.at.items()}
    slow = [
        f"{load} in flight {x.value:.2f} [{x.low:.2f}, {x.high:.2f}]" for load, x in by_load.items() if x and x.high < 1
    ]
    return (
        [f"speed: slower than no speculation at {', '.join(slow)}; serve such loads without the head"] if slow else []
    )


def _looked(name: str, figures: Measured) -> list[str]:
    if len(figures.looks) < 2:
        return []
    which = sum(n <= figures.requests for n in figures.looks)
    early = figures.requests < figures.looks[-1]
    return [
        f"{name}: looked at after {', '.join(map(str, figures.looks[:which]))} of {figures.looks[-1]} prompts"
        f"{', and ended there, decided' if early else ''}; the interval of its acceptance length holds at all "
        f"{len(figures.looks)} planned looks together, the other intervals as if the number had been fixed"
    ]


def _simulation(name: str, recipe: Recipe, figures: Measured, rows: Sequence[Request]) -> list[str]:
    """Whether training's figure and the served one agree, and, as far as the rows show, why not."""
    if figures.acceptance is None:
        return []
    if figures.simulated is None or figures.simulated_gap is None:
        return [f"{name}: training gave no simulated length, so nothing is set beside the served one"]
    if abs(figures.simulated_gap) <= GAP:
        return []
    n = recipe.answers.held_out
    apart = f"({figures.simulated_gap:+.0%}), more than {GAP:.0%} apart"
    parts = [f"{name}: simulated length {figures.simulated:.3f} against served {figures.acceptance.value:.3f} {apart}"]
    same = rows[:n]
    if 0 < len(same) < len(rows) and sum(r.drafts for r in same):
        on_same = 1 + sum(r.accepted for r in same) / sum(r.drafts for r in same)
        parts.append(f"on the first {len(same)} prompts, the ones simulated, served is {on_same:.3f}")
    trimmed = without_last_window(rows)
    if trimmed:
        parts.append(
            f"without each answer's last window it is {trimmed:.3f} ({tail_share(rows):.1%} of accepted tokens lie "
            "beyond the answers' ends)"
        )
    if figures.acceptance_unrepeated and figures.repeated_share:
        parts.append(
            f"{figures.repeated_share:.0%} of the answers repeat a 4-gram, the others reach "
            f"{figures.acceptance_unrepeated.value:.3f}"
        )
    if recipe.answers.max_tokens != recipe.gate.max_tokens:
        parts.append(f"answers were cut at {recipe.answers.max_tokens} tokens there, {recipe.gate.max_tokens} here")
    if figures.acceptance.low <= figures.simulated <= figures.acceptance.high:
        parts.append("the simulated length lies within the served interval, so the sample may be all of it")
    return ["; ".join(parts)]


def _comparison(name: str, figures: Measured) -> list[str]:
    said: list[str] = []
    head, ngram = figures.tokens_per_step.head, figures.tokens_per_step.ngram
    if head and ngram and ngram.value >= head.value:
        said.append(
            f"{name}: n-gram speculation, which needs no head, gives {ngram.value:.2f} tokens a target step, "
            f"the head {head.value:.2f}"
        )
    if figures.parity and figures.parity.unexplained:
        said.append(
            f"{name}: {figures.parity.unexplained} windows differ from our replay where the head's top two logits "
            "lie more than one quantum apart; rounding does not explain them"
        )
    return said
