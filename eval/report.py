"""Verdict -> report.md and report.html: the verdict first, then each figure with its interval and its conditions."""

from collections.abc import Mapping
from pathlib import Path

from eval import plots
from eval.page import Block, Page, Plot, Points, Section, Table, markdown, web
from export.record import Figure, Latency, Measured, Speed, Verdict
from recipes.artifact import write_bytes
from recipes.schema import Recipe, Rule

_ARMS = {"none": "no speculation", "head": "head", "ngram": "n-gram"}


def write_report(out: Path, verdict: Verdict, recipe: Recipe) -> None:
    """Write report.md and report.html (one file, loads nothing) into `out`; the same verdict gives the same bytes."""
    page = page_of(verdict, recipe)
    write_bytes(out / "report.md", markdown(page).encode())
    write_bytes(out / "report.html", web(page).encode())


def page_of(verdict: Verdict, recipe: Recipe) -> Page:
    """What the report says."""
    sections = [
        *_refusals(verdict),
        *([Section(title="Findings", blocks=[Points(items=verdict.findings)])] if verdict.findings else []),
        _acceptance(verdict.domains, recipe),
        _positions(verdict.domains),
        _arms(verdict.domains),
        _speed(verdict.speed, recipe),
        _latency(verdict),
        _simulated(verdict.domains),
        _parity(verdict.domains, recipe),
        *_conditions(verdict),
    ]
    return Page(
        title=f"Measurement of {recipe.name}: a draft head for {recipe.target.id}",
        passed=verdict.passed,
        verdict=_sentence(verdict),
        sections=sections,
    )


def _sentence(verdict: Verdict) -> str:
    if verdict.passed:
        best = [f"{name} {f.acceptance.value:.2f}" for name, f in verdict.domains.items() if f.acceptance]
        speed = verdict.speed.speedup if verdict.speed else None
        faster = f"; {speed.value:.2f}x the output tokens/s at one request in flight" if speed else ""
        return f"Passed. Tokens a target step: {', '.join(best)}{faster}."
    n = len(verdict.refusals)
    return f"Refused, for {n} reason{'s' * (n > 1)}. Nothing may be published."


def _refusals(verdict: Verdict) -> list[Section]:
    if not verdict.refusals:
        return []
    rows = [[r.rule, r.why] for r in verdict.refusals]
    return [Section(title="Why it was refused", blocks=[Table(header=["Rule", "Why"], rows=rows, prose=[1])])]


def _acceptance(domains: Mapping[str, Measured], recipe: Recipe) -> Section:
    rows: list[list[str]] = []
    for name, figures in domains.items():
        rule = recipe.gate.rules.get(name, Rule())
        rows.append(
            [
                name, figures.role, str(figures.requests), _figure(figures.acceptance), _bound(rule.min_acceptance),
                _figure(figures.acceptance_unrepeated), _bound(rule.min_acceptance_unrepeated),
                _share(figures.repeated_share),
            ]
        )  # fmt: skip
    header = [
        "Domain",
        "Role",
        "Requests",
        "Acceptance length",
        "must reach",
        "Unrepeated answers",
        "must reach",
        "Repeating",
    ]
    further = [[name, f"T={t}", _figure(figure)] for name, f in domains.items() for t, figure in f.temperatures.items()]
    blocks: list[Block] = [
        (
            "Acceptance length is tokens a target step: 1 + accepted draft tokens / windows, pooled over requests. "
            f"Intervals ({recipe.gate.confidence:.0%}) resample whole requests; the lower end is what must reach the "
            "bound. An answer repeats when it holds a 4-gram of tokens twice; loops are easy to draft and flatter the "
            "length."
        ),
        Table(header=header, rows=rows),
    ]
    if further:
        blocks.append(Table(header=["Domain", "Temperature", "Acceptance length"], rows=further))
    said = [f"{name} {f.acceptance.value:.2f} ({f.acceptance.low:.2f} to {f.acceptance.high:.2f})"
            for name, f in domains.items() if f.acceptance]  # fmt: skip
    if said:
        alt = f"Acceptance length by domain, with interval and threshold: {', '.join(said)}."
        blocks.append(Plot(svg=plots.acceptance(domains, recipe.gate.rules), alt=alt))
    return Section(title="Acceptance by domain", blocks=blocks)


def _positions(domains: Mapping[str, Measured]) -> Section:
    known = {name: f for name, f in domains.items() if f.per_position}
    longest = max((len(f.per_position) for f in known.values()), default=0)
    rows = [[name, *[f"{rate:.3f}" for rate in f.per_position]] for name, f in known.items()]
    blocks: list[Block] = ["Cumulative: windows that accepted at least this many draft tokens / windows."]
    if known:
        said = "; ".join(f"{name} {', '.join(f'{r:.2f}' for r in f.per_position)}" for name, f in known.items())
        blocks += [
            Table(header=["Domain", *[f"position {k}" for k in range(1, longest + 1)]], rows=rows),
            Plot(svg=plots.positions(known), alt=f"Acceptance rate by draft position: {said}."),
        ]
    return Section(title="Acceptance by draft position", blocks=blocks)


def _arms(domains: Mapping[str, Measured]) -> Section:
    rows = [
        [name, f"{f.tokens_per_step.none:.0f}", _figure(f.tokens_per_step.head), _figure(f.tokens_per_step.ngram)]
        for name, f in domains.items()
    ]
    text = (
        "Output tokens / target steps, with steps = output - accepted. This compares arms: n-gram drafts only where it "
        "finds a match, so its own acceptance length counts nothing else. Slightly high for all, since tokens accepted "
        "beyond an answer's end are no output."
    )
    return Section(title="Beside n-gram", blocks=[text, Table(header=["Domain", *_ARMS.values()], rows=rows)])


def _speed(speed: Speed | None, recipe: Recipe) -> Section:
    if speed is None:
        return Section(title="Speed", blocks=["Not measured: the recipe has no speed rule and names no speed domain."])
    least = recipe.gate.rules.get(speed.domain, Rule()).min_speedup
    arms = [arm for arm in _ARMS if any(arm in shown for shown in speed.rounds)]
    rows = [
        [f"round {i + 1}", *[_number(shown.get(arm), 1) for arm in arms], _number(shown.get("ratio"), 3)]
        for i, shown in enumerate(speed.rounds)
    ]
    blocks: list[Block] = [
        (
            f"Output tokens/s on {speed.domain}, one request in flight, the arms taking turns in rounds; answers stop "
            f"by themselves. Head / no speculation, median of the rounds: {_figure(speed.speedup)} (must reach: "
            f"{_bound(least)}). The interval resamples prompts, the same in each arm and round."
        ),
        Table(header=["Round", *[_ARMS[arm] for arm in arms], "head / none"], rows=rows),
    ]
    if rows and "head" in arms:
        said = "; ".join(f"{row[0]}: {', '.join(row[1:-1])}" for row in rows)
        blocks.append(Plot(svg=plots.rounds(speed), alt=f"Output tokens/s ({', '.join(arms)}) by round. {said}."))
    if speed.loads:
        blocks += _loads(speed)
    if speed.same:
        blocks.append(
            f"Greedy answers equal to those without the head: {speed.same.equal} of {speed.same.answers}. Without the "
            f"head, from round to round: {speed.same.none_equal} of {speed.same.none_answers}."
        )
    served = [
        [f"{load} in flight", *[_number(by_arm.get(arm), 1) for arm in ("head", "ngram")]]
        for load, by_arm in speed.served.items()
    ]
    if served:
        blocks += [
            "While acceptance was measured, all domains together, output tokens/s:",
            Table(header=["Load", "head", "n-gram"], rows=served),
        ]
    return Section(title="Speed", blocks=blocks)


def _loads(speed: Speed) -> list[Block]:
    rows = [
        [
            f"{load} in flight", _figure(at.speedup), _figure(at.p99),
            *[_number(at.throughput.get(arm), 1) for arm in _ARMS],
        ]
        for load, at in speed.loads.items()
    ]  # fmt: skip
    rows = [["1 in flight", _figure(speed.speedup), _figure(speed.p99), *["-"] * len(_ARMS)], *rows]
    text = (
        "With more requests in flight: what one answer gains (its tokens / its seconds, head / no speculation, median "
        "of the rounds), the 99th percentile of an answer's seconds (head / no speculation; below 1 is better), and "
        "the output tokens/s of all requests together."
    )
    return [text, Table(header=["Load", "Speed-up", "p99 ratio", *_ARMS.values()], rows=rows)]


def _latency(verdict: Verdict) -> Section:
    rows = [
        [f"{name}, {verdict.conditions.concurrency} in flight", _ARMS[arm], *_milliseconds(figures)]
        for name, f in verdict.domains.items()
        for arm, figures in f.latency.items()
    ]
    if verdict.speed:
        rows += [[f"{verdict.speed.domain}, 1 in flight", _ARMS[arm], *_milliseconds(x)]
                 for arm, x in verdict.speed.latency.items()]  # fmt: skip
        rows += [[f"{verdict.speed.domain}, {load} in flight", _ARMS[arm], *_milliseconds(x)]
                 for load, at in verdict.speed.loads.items() for arm, x in at.latency.items()]  # fmt: skip
    header = [
        "Traffic",
        "Arm",
        *[f"{what} {p}" for what in ("first token", "gap", "per token") for p in ("p50", "p99")],
    ]
    text = (
        "Milliseconds. A speculating engine answers in bursts: the gap is the wait between two chunks, of one or more "
        "tokens; per token is decode time / tokens, what a reader of the whole answer feels."
    )
    return Section(title="Latency", blocks=[text, Table(header=header, rows=rows)])


def _simulated(domains: Mapping[str, Measured]) -> Section:
    rows = [
        [name, _number(f.simulated, 3), _number(f.acceptance.value if f.acceptance else None, 3), _gap(f.simulated_gap)]
        for name, f in domains.items()
    ]
    text = "Training walks the windows on held-out features; vLLM serves. More than 10% apart is a finding (see above)."
    header = ["Domain", "Simulated", "Served", "Simulated / served - 1"]
    return Section(title="Simulated and served", blocks=[text, Table(header=header, rows=rows)])


def _parity(domains: Mapping[str, Measured], recipe: Recipe) -> Section:
    rows = [
        [
            name, f"{p.equal} of {p.windows}", f"{p.equal / p.windows:.2%}" if p.windows else "-",
            f"{p.replayed_length:.3f}", f"{p.served_length:.3f}", str(p.unexplained),
        ]
        for name, f in domains.items()
        if (p := f.parity)
    ]  # fmt: skip
    if not rows:
        return Section(title="Parity", blocks=["The served token ids were not replayed."])
    text = (
        f"Our own forward on the token ids that were served. Needed: {recipe.gate.parity_windows:.1%} of all windows "
        f"equal, lengths within {recipe.gate.parity_length:.1%}. Unexplained: differing windows whose top two logits "
        "lie more than one quantum apart."
    )
    header = ["Domain", "Equal windows", "Share", "Replayed length", "Served length", "Unexplained"]
    return Section(title="Parity", blocks=[text, Table(header=header, rows=rows)])


def _conditions(verdict: Verdict) -> list[Section]:
    c = verdict.conditions
    temperatures = ", ".join(f"{t:g}" for t in c.temperatures)
    rows = [
        ["Engine", f"{c.engine} {c.engine_version}, {c.dtype}{', ' + c.quantization if c.quantization else ''}"],
        ["Machine", f"{c.machine.gpu or c.machine.cpu}, {c.machine.cores} cores, {c.machine.memory_gib:g} GiB"],
        ["Draft tokens a window", str(c.speculative_tokens)],
        ["Sampling", f"rejection {c.rejection_sample_method}, draft {c.draft_sample_method}, T = {temperatures}"],
        ["Answers", f"at most {c.max_tokens} tokens at {c.concurrency} in flight; {c.speed_max_tokens} when timed"],
        ["Date", c.date],
        *[["Environment", f"{name}={value}"] for name, value in c.env.items()],
        *[[f"Command, {_ARMS.get(arm, arm)}", " ".join(argv)] for arm, argv in c.command.items()],
    ]
    hashes = [[part, digest] for part, digest in verdict.made_from.items()]
    return [
        Section(title="Conditions", blocks=[Table(header=["What", "Value"], rows=rows, prose=[1])]),
        Section(title="Made from", blocks=[Table(header=["Part", "Digest"], rows=hashes, prose=[1])]),
    ]


def _figure(figure: Figure | None) -> str:
    return f"{figure.value:.3f} [{figure.low:.3f}, {figure.high:.3f}]" if figure else "not measured"


def _bound(threshold: float) -> str:
    return f"{threshold:g}" if threshold else "-"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _gap(gap: float | None) -> str:
    return "-" if gap is None else f"{gap:+.1%}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _milliseconds(x: Latency) -> list[str]:
    seconds = (x.ttft_p50, x.ttft_p99, x.gap_p50, x.gap_p99, x.per_token_p50, x.per_token_p99)
    return [f"{1000 * s:.1f}" for s in seconds]
