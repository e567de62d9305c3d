"""The report's sections on speed, cost and latency."""

from eval import plots
from eval.cost import served
from eval.page import Block, Plot, Section, Table
from eval.report_cells import ARMS, bound, figure, milliseconds, number
from export.figures import Speed
from export.record import Verdict
from recipes.price import read_prices
from recipes.schema import Recipe, Rule


def speed_section(speed: Speed | None, recipe: Recipe) -> Section:
    """Rounds, loads, and greedy answers with and without the head."""
    if speed is None:
        return Section(title="Speed", blocks=["Not measured: the recipe has no speed rule and names no speed domain."])
    least = recipe.gate.rules.get(speed.domain, Rule()).min_speedup
    arms = [arm for arm in ARMS if any(arm in shown for shown in speed.rounds)]
    rows = [
        [f"round {i + 1}", *[number(shown.get(arm), 1) for arm in arms], number(shown.get("ratio"), 3)]
        for i, shown in enumerate(speed.rounds)
    ]
    blocks: list[Block] = [
        (
            f"Output tokens/s on {speed.domain}, one request in flight, the arms taking turns in rounds; answers stop "
            f"by themselves. Head / no speculation, median of the rounds: {figure(speed.speedup)} (must reach: "
            f"{bound(least)}). The interval resamples prompts, the same in each arm and round."
        ),
        Table(header=["Round", *[ARMS[arm] for arm in arms], "head / none"], rows=rows),
    ]
    if rows and "head" in arms:
        said = "; ".join(f"{row[0]}: {', '.join(row[1:-1])}" for row in rows)
        blocks.append(Plot(svg=plots.rounds(speed), alt=f"Output tokens/s ({', '.join(arms)}) by round. {said}."))
    if speed.loads:
        blocks += _loads(speed)
    blocks += _beside(speed)
    if speed.same:
        blocks.append(
            f"Greedy answers equal to those without the head: {speed.same.equal} of {speed.same.answers}. Without the "
            f"head, from round to round: {speed.same.none_equal} of {speed.same.none_answers}."
        )
    asked = [arm for arm in ARMS if any(arm in by_arm for by_arm in speed.served.values())]
    served = [
        [f"{load} in flight", *[number(by_arm.get(arm), 1) for arm in asked]] for load, by_arm in speed.served.items()
    ]
    if served:
        blocks += [
            "While acceptance was measured, all domains together, output tokens/s:",
            Table(header=["Load", *[ARMS[arm] for arm in asked]], rows=served),
        ]
    return Section(title="Speed", blocks=blocks)


def cost_sections(speed: Speed | None, recipe: Recipe) -> list[Section]:
    """Cost beside list prices; nothing where the recipe names no price. Raises ValueError as read_prices does."""
    cost = recipe.cost
    if speed is None or not cost.usd_per_hour:
        return []
    rows = [
        [ARMS[x.arm], str(x.load), f"{x.tokens_per_s:.1f}", number(x.token_p99_ms, 1), f"{x.usd:.4g}"]
        for x in served(speed, cost)
    ]
    allowed = f"at most {cost.max_token_ms:g} ms a token at p99" if cost.max_token_ms else "any latency"
    text = (
        f"{cost.gpus} x {cost.usd_per_hour:g} USD an hour ({cost.source or 'source not named'}) / output tokens/s, "
        f"each arm at its cheapest measured load with {allowed}. The engine was this busy all the time; an idle hour "
        "costs as much. Input and output share those seconds here, while list prices charge both."
    )
    prices = [[p.name, f"{p.input:g}", f"{p.output:g}", p.date, p.source] for p in read_prices(cost)]
    return [
        Section(
            title="Cost of a million output tokens",
            blocks=[
                text if rows else f"No arm keeps to {allowed} at a measured load.",
                Table(header=["Arm", "In flight", "tokens/s", "p99 ms a token", "USD per 1M output tokens"], rows=rows),
                "List prices, USD per 1M tokens, as they were on their date:",
                Table(header=["Model", "Input", "Output", "Checked", "Source"], rows=prices, prose=[4]),
            ],
        )
    ]


def _beside(speed: Speed) -> list[Block]:
    """The head against the other arms that draft."""
    by_load = {load: at.beside for load, at in speed.at.items()}
    arms = [arm for arm in ARMS if any(arm in figures for figures in by_load.values())]
    if not arms:
        return []
    rows = [[f"{load} in flight", *[figure(x.get(arm)) for arm in arms]] for load, x in by_load.items()]
    text = "The head's output tokens/s an answer against the other ways to draft (above 1: the head is faster)."
    return [text, Table(header=["Load", *[f"head / {ARMS[arm]}" for arm in arms]], rows=rows)]


def _loads(speed: Speed) -> list[Block]:
    arms = [arm for arm in ARMS if any(arm in at.throughput for at in speed.loads.values())]
    rows = [
        [
            f"{load} in flight", figure(at.speedup), figure(at.p99),
            *[number(at.throughput.get(arm), 1) for arm in arms],
        ]
        for load, at in speed.loads.items()
    ]  # fmt: skip
    rows = [["1 in flight", figure(speed.speedup), figure(speed.p99), *["-"] * len(arms)], *rows]
    text = (
        "With more requests in flight: what one answer gains (its tokens / its seconds, head / no speculation, median "
        "of the rounds), the 99th percentile of an answer's seconds (head / no speculation; below 1 is better), and "
        "the output tokens/s of all requests together."
    )
    return [text, Table(header=["Load", "Speed-up", "p99 ratio", *[ARMS[arm] for arm in arms]], rows=rows)]


def latency_section(verdict: Verdict) -> Section:
    """Percentiles by traffic, load and arm."""
    rows = [
        [f"{name}, {verdict.conditions.concurrency} in flight", ARMS[arm], *milliseconds(figures)]
        for name, f in verdict.domains.items()
        for arm, figures in f.latency.items()
    ]
    if verdict.speed:
        rows += [[f"{verdict.speed.domain}, {load} in flight", ARMS[arm], *milliseconds(x)]
                 for load, at in verdict.speed.at.items() for arm, x in at.latency.items()]  # fmt: skip
    header = [
        "Traffic",
        "Arm",
        *[f"{what} {p}" for what in ("first token", "gap", "per token") for p in ("p50", "p99")],
    ]
    drawn = _drawn(verdict.speed) if verdict.speed else []
    text = (
        "Milliseconds. A speculating engine answers in bursts: the gap is the wait between two chunks, of one or more "
        "tokens; per token is decode time / tokens, what a reader of the whole answer feels."
    )
    return Section(title="Latency", blocks=[text, Table(header=header, rows=rows), *drawn])


def _drawn(speed: Speed) -> list[Block]:
    """The distribution of the time a token, alone and at the highest load, and what a load costs each answer."""
    loads = speed.at
    blocks: list[Block] = []
    for load in dict.fromkeys(("1", max(loads, key=int))):
        known = {arm: x for arm, x in loads[load].latency.items() if x.per_token}
        if known:
            said = "; ".join(
                f"{ARMS[arm]} p50 {1000 * x.per_token_p50:.1f}, p99 {1000 * x.per_token_p99:.1f}"
                for arm, x in known.items()
            )
            alt = f"Distribution over answers of ms a token, {load} in flight: {said}."
            blocks.append(Plot(svg=plots.token_times(known, f"t{load}"), alt=alt))
    points = _frontier(speed)
    if speed.loads and points:
        said = "; ".join(
            f"{ARMS[arm]} {', '.join(f'{load}: {x:.0f} and {y:.0f}' for load, x, y in shown)}"
            for arm, shown in points.items()
        )
        alt = f"Tokens/s of one answer and of all together, by requests in flight: {said}."
        blocks.append(Plot(svg=plots.frontier(points), alt=alt))
    return blocks


def _frontier(speed: Speed) -> dict[str, list[tuple[str, float, float]]]:
    """Arm -> (requests in flight, tokens/s of one answer, output tokens/s together) at each load that was timed."""
    found: dict[str, list[tuple[str, float, float]]] = {}
    for load, at in speed.at.items():
        for arm in at.throughput.keys() & at.latency.keys():
            if at.latency[arm].per_token_p50 > 0:
                found.setdefault(arm, []).append((load, 1 / at.latency[arm].per_token_p50, at.throughput[arm]))
    return {arm: found[arm] for arm in ARMS if arm in found}
