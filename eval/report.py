"""Verdict -> report.md and report.html: the verdict first, then each figure with its interval and its conditions."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from eval import plots
from eval.page import Block, Page, Plot, Points, Section, Table, markdown, web
from eval.report_cells import ARMS, bound, figure, gap, number, share
from eval.report_speed import cost_sections, latency_section, speed_section
from export.figures import Measured
from export.record import Verdict
from recipes.artifact import write_bytes
from recipes.schema import Recipe, Rule


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
        *_contexts(verdict.domains, recipe),
        _arms(verdict.domains),
        *_incumbent(verdict, recipe),
        speed_section(verdict.speed, recipe),
        *cost_sections(verdict.speed, recipe),
        latency_section(verdict),
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
                name, figures.role, str(figures.requests), figure(figures.acceptance), bound(rule.min_acceptance),
                figure(figures.acceptance_unrepeated), bound(rule.min_acceptance_unrepeated),
                share(figures.repeated_share),
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
    further = [[name, f"T={t}", figure(at)] for name, f in domains.items() for t, at in f.temperatures.items()]
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
    rows = [
        [name, kind, *[number(rate, 3) for rate in rates]]
        for name, f in known.items()
        for kind, rates in (("cumulative", f.per_position), ("conditional", _conditional(f.per_position)))
    ]
    text = (
        "Cumulative: windows that accepted at least this many draft tokens / windows. Conditional: the same / windows "
        "that accepted all the positions before."
    )
    blocks: list[Block] = [text]
    if known:
        said = "; ".join(f"{name} {', '.join(f'{r:.2f}' for r in f.per_position)}" for name, f in known.items())
        blocks += [
            Table(header=["Domain", "Rate", *[f"position {k}" for k in range(1, longest + 1)]], rows=rows),
            Plot(svg=plots.positions(known), alt=f"Acceptance rate by draft position: {said}."),
        ]
    return Section(title="Acceptance by draft position", blocks=blocks)


def _conditional(cumulative: Sequence[float]) -> list[float | None]:
    return [rate / before if before else None for before, rate in zip((1.0, *cumulative[:-1]), cumulative, strict=True)]


def _contexts(domains: Mapping[str, Measured], recipe: Recipe) -> list[Section]:
    rows = [[name, at, figure(x), str(x.n)] for name, f in domains.items() for at, x in f.contexts.items()]
    if not rows:
        return []
    text = (
        "Acceptance length of the windows that began with so many tokens of context, prompt and answer so far. "
        f"Training saw rows of up to {recipe.train.pack_tokens} tokens; what is not in the table was not measured."
    )
    header = ["Domain", "Context, tokens", "Acceptance length", "Requests"]
    return [Section(title="Acceptance by context length", blocks=[text, Table(header=header, rows=rows)])]


def _arms(domains: Mapping[str, Measured]) -> Section:
    known = [arm for arm in ARMS if arm != "incumbent" or any(f.over_incumbent for f in domains.values())]
    rows = [
        [name, *["1" if arm == "none" else figure(getattr(f.tokens_per_step, arm)) for arm in known]]
        for name, f in domains.items()
    ]
    text = (
        "Output tokens / target steps, with steps = output - accepted. This compares arms: n-gram drafts only where it "
        "finds a match, so its own acceptance length counts nothing else. Slightly high for all, since tokens accepted "
        "beyond an answer's end are no output."
    )
    return Section(
        title="Beside the other arms", blocks=[text, Table(header=["Domain", *[ARMS[arm] for arm in known]], rows=rows)]
    )


def _incumbent(verdict: Verdict, recipe: Recipe) -> list[Section]:
    """Whether the head is worse than the one now published; nothing where none was set beside it."""
    if not recipe.gate.incumbent:
        return []
    rows: list[list[str]] = []
    for name, f in verdict.domains.items():
        most = recipe.gate.rules.get(name, Rule()).max_below_incumbent
        rows += [[name, f"T={t}", figure(d), "-" if most is None else f"{-most:g}", str(d.n if d else 0)]
                 for t, d in f.over_incumbent.items()]  # fmt: skip
    text = (
        f"Acceptance length of the head less that of the incumbent ({verdict.conditions.incumbent}), pooled over the "
        f"prompts that both answered; above 0 the new head is better. The interval ({recipe.gate.confidence:.0%}) "
        "resamples prompts, the same for both; its lower end must reach the bound."
    )
    header = ["Domain", "Temperature", "Head - incumbent", "must reach", "Prompts"]
    return [Section(title="Beside the head now published", blocks=[text, Table(header=header, rows=rows)])]


def _simulated(domains: Mapping[str, Measured]) -> Section:
    rows = [
        [name, number(f.simulated, 3), number(f.acceptance.value if f.acceptance else None, 3), gap(f.simulated_gap)]
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
        *[[f"Command, {ARMS.get(arm, arm)}", " ".join(argv)] for arm, argv in c.command.items()],
    ]
    hashes = [[part, digest] for part, digest in verdict.made_from.items()]
    return [
        Section(title="Conditions", blocks=[Table(header=["What", "Value"], rows=rows, prose=[1])]),
        Section(title="Made from", blocks=[Table(header=["Part", "Digest"], rows=hashes, prose=[1])]),
    ]
