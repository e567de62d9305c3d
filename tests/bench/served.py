"""Acceptance of several heads on one run's held-out prompts, served side by side, and how they compare.

    python -m tests.bench.served RUN NAME=FOLDER [NAME=FOLDER ...] [--prompts N] [--set key=value ...] [--out FILE]

Prompts, engine, concurrency and answer length are those of the run's recipe (with --set changes), greedy. All servers
start together; each domain is asked of one head after the other. One JSON line a head and domain, and "all":
acceptance length with its interval over requests, rates by position, and whether the rows add up to the engine's own
counters. Then a line for each other head: (length - 1) of the first over (length - 1) of that one, on the prompts that
both answered, with an interval over resampled prompts. --out keeps the lines, and the counts behind them.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from omegaconf import OmegaConf

from data.engine import Server, serving
from data.prompts import Prompt, read_prompts
from data.target import served_path
from eval.acceptance import Bootstrap, interval, per_position, pooled_length
from eval.traffic import Load, difference, read_counters, send, total
from export.figures import Figure
from export.record import Counters
from export.requests import Request
from recipes.artifact import read_manifest, write_bytes
from recipes.load import build
from recipes.schema import Recipe

ALL = "all"
BOOTSTRAP = Bootstrap(samples=10_000, confidence=0.95, seed=0)
ATTEMPTS = 4
"""at a set whose chunks must be windows"""
WARM_UP_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Answered:
    """One head on one set of prompts: a row a request, failed ones too, and what its engine counted meanwhile."""

    rows: tuple[Request, ...]
    counters: Counters


def paired_ratio(ours: Sequence[Request], theirs: Sequence[Request], bootstrap: Bootstrap = BOOTSTRAP) -> Figure | None:
    """(our length - 1) / (theirs - 1), each pooled over the prompts that both answered, with an interval over these.

    A resample draws prompts, the same ones on both sides. None where a side drafted or theirs accepted nothing.
    """
    sides = [{(r.domain, r.prompt_id): (r.accepted, r.drafts) for r in rows if not r.error} for rows in (ours, theirs)]
    shared = sorted(sides[0].keys() & sides[1].keys())
    counts = np.array([(*sides[0][key], *sides[1][key]) for key in shared], dtype=np.float64).reshape(-1, 4)
    accepted, drafts, their_accepted, their_drafts = counts.sum(0)
    if not (drafts > 0 and their_drafts > 0 and their_accepted > 0):
        return None
    n = len(shared)
    drawn = np.random.default_rng([bootstrap.seed, n]).multinomial(n, np.full(n, 1 / n), size=bootstrap.samples)
    sums = drawn @ counts
    with np.errstate(divide="ignore", invalid="ignore"):  # a resample may hold nothing that they accepted
        replicates = (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3])
    low, high = interval(replicates[np.isfinite(replicates)], n, bootstrap.confidence)
    return Figure(value=float((accepted / drafts) / (their_accepted / their_drafts)), low=low, high=high, n=n)


def pooled(sets: Sequence[Answered]) -> Answered:
    """Several sets as one."""
    counters = sets[0].counters
    for one in sets[1:]:
        counters = total(counters, one.counters)
    return Answered(rows=tuple(row for one in sets for row in one.rows), counters=counters)


def agrees(recipe: Recipe, one: Answered) -> bool:
    """True where the rows add up to the engine's counters.

    Of chunks only the windows can: the answer's end cuts what its last window accepted.
    """
    rows, counted = one.rows, one.counters
    exact = recipe.engine.windows == "chunks" or sum(r.accepted for r in rows) == counted.accepted
    return exact and sum(r.drafts for r in rows) == counted.drafts


def figures(recipe: Recipe, one: Answered) -> dict[str, Any]:
    """A line's figures."""
    sound, counted = [row for row in one.rows if not row.error], one.counters
    return {
        "requests": len(sound), "failed": len(one.rows) - len(sound), "length": shown(pooled_length(sound, BOOTSTRAP)),
        "by_position": [round(rate, 4) for rate in per_position(sound, recipe.export.speculative_tokens)],
        "windows": sum(r.drafts for r in sound), "output_tokens": sum(r.output_tokens for r in sound),
        "engine": {"windows": counted.drafts, "length": round(1 + counted.accepted / max(1, counted.drafts), 4)},
        "agrees": agrees(recipe, one),
    }  # fmt: skip


def shown(figure: Figure | None) -> dict[str, float] | None:
    """A figure for a line; None where there is none or it is no number."""
    if figure is None or not np.isfinite([figure.value, figure.low, figure.high]).all():
        return None
    return {name: round(value, 4) for name, value in asdict(figure).items()}


def options(recipe: Recipe, folder: Path) -> list[str]:
    """Engine options that serve the target with the head in `folder`."""
    tokens = recipe.export.speculative_tokens
    config = {"model": str(folder.resolve()), "method": "eagle3", "num_speculative_tokens": tokens}
    metrics = ("--per-request-spec-decode-metrics", "detailed") if recipe.engine.windows == "metrics" else ()
    return ["--no-enable-prefix-caching", "--speculative-config", json.dumps(config), *metrics]


@contextmanager
def servers(recipe: Recipe, run: Path, heads: dict[str, Path], logs: Path) -> Generator[dict[str, Server], None, None]:
    """One server a head, started at the same time. Raises EnvironmentFault where one does not start."""
    path = served_path(run)
    contexts = {
        name: serving(recipe.engine, run=run, target=recipe.target, path=path, log=logs / f"served-{name}.log",
                      extra=options(recipe, folder))
        for name, folder in heads.items()
    }  # fmt: skip
    with ThreadPoolExecutor(len(heads)) as pool, ExitStack() as stack:
        starting = {name: pool.submit(stack.enter_context, context) for name, context in contexts.items()}
        wait(starting.values())  # all of them, so that none is left behind by another's fault
        yield {name: started.result() for name, started in starting.items()}


def load_of(recipe: Recipe) -> Load:
    """How every set is asked."""
    chunked = recipe.engine.windows == "chunks"
    return Load(
        arm="head", phase="acceptance", concurrency=recipe.gate.concurrency, temperature=0.0,
        max_tokens=recipe.gate.max_tokens, chunk_drafts=recipe.export.speculative_tokens if chunked else 0,
    )  # fmt: skip


async def ask(recipe: Recipe, server: Server, prompts: Sequence[Prompt]) -> Answered:
    """Every prompt's row, after one that is not counted; asked again where the server joined steps in one chunk."""
    load = load_of(recipe)
    await _once(server, prompts[:1], replace(load, concurrency=1, max_tokens=WARM_UP_TOKENS))
    answered = await _once(server, prompts, load)
    for _ in range(ATTEMPTS - 1):
        if agrees(recipe, answered) or not load.chunk_drafts:
            break
        answered = await _once(server, prompts, load)
    return answered


async def _once(server: Server, prompts: Sequence[Prompt], load: Load) -> Answered:
    before, rows = await read_counters(server), list[Request]()
    async with aclosing(send(server, prompts, load)) as answers:
        async for row in answers:
            rows.append(row)
    return Answered(rows=tuple(rows), counters=difference(await read_counters(server), before))


def held_out(recipe: Recipe, run: Path, count: int) -> dict[str, list[Prompt]]:
    """The first `count` held-out prompts of each measured domain. Raises ValueError where there is none."""
    found: dict[str, list[Prompt]] = {name: [] for name, domain in recipe.domains.items() if domain.held_out}
    for prompt in read_prompts(run / "prompts"):
        if prompt.split == "held_out" and prompt.domain in found:
            found[prompt.domain].append(prompt)
    asked = {name: prompts[:count] for name, prompts in found.items() if prompts}
    if not asked:
        raise ValueError(f"{run}: no prompt is held out")
    return asked


def changed(plain: dict[str, Any], overrides: Sequence[str]) -> Recipe:
    """A plain recipe under dotted overrides. Raises ValueError that lists what is wrong with it."""
    merged = OmegaConf.merge(OmegaConf.create(plain), OmegaConf.from_dotlist(list(overrides)))
    return build(cast(dict[str, Any], OmegaConf.to_container(merged, resolve=True)))


def recipe_of(run: Path, overrides: Sequence[str]) -> Recipe:
    """The recipe of the run's checkpoint, else of its head or features, changed. Raises ValueError without any."""
    for stage in ("checkpoint", "head", "features"):
        manifest = read_manifest(run / stage)
        if manifest is not None:
            return changed(manifest["recipe"], overrides)
    raise ValueError(f"{run}: has no finished checkpoint, head or features")


def measure(
    recipe: Recipe, run: Path, heads: dict[str, Path], asked: dict[str, list[Prompt]], logs: Path
) -> Generator[tuple[str, str, Answered], None, None]:
    """(head, domain, what it answered), a domain after the other, each of all heads in turn."""
    with servers(recipe, run, heads, logs) as up:
        for domain, prompts in asked.items():
            for name, server in up.items():
                yield name, domain, asyncio.run(ask(recipe, server, prompts))


def compared(found: dict[str, dict[str, Answered]]) -> list[dict[str, Any]]:
    """The first head against each other one, by domain and over all."""
    first, *others = found
    return [
        {
            "ratio_of": first,
            "to": other,
            **{name: shown(paired_ratio(one.rows, found[other][name].rows)) for name, one in found[first].items()},
        }
        for other in others
    ]


def counts(found: dict[str, dict[str, Answered]]) -> list[dict[str, Any]]:
    """What the figures are computed from: of each head its requests' domain, prompt, windows, accepted, error."""
    return [
        {
            "head": name,
            "rows": [[r.domain, r.prompt_id, r.drafts, r.accepted, r.error] for r in sets[ALL].rows],
        }
        for name, sets in found.items()
    ]


def main(argv: list[str] | None = None) -> int:
    """Measure and print; 2 where rows do not add up to an engine's counters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("heads", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--prompts", type=int, default=0, help="a domain; default: the recipe's gate.prompts")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe")
    parser.add_argument("--logs", type=Path, help="the servers' logs; default: RUN/logs")
    parser.add_argument("--out", type=Path, help="write the lines here too, with each request's counts")
    given = parser.parse_args(argv)
    heads = {name: Path(folder) for name, _, folder in (text.partition("=") for text in given.heads)}
    missing = [name for name, folder in heads.items() if not (folder / "config.json").is_file()]
    if missing or len(heads) < len(given.heads):
        raise SystemExit(f"heads: {', '.join(missing) or 'a name twice'}; give NAME=FOLDER, each with a config.json")
    recipe = recipe_of(given.run, given.set)
    asked = held_out(recipe, given.run, given.prompts or recipe.gate.prompts)
    lines, found = list[dict[str, Any]](), {name: dict[str, Answered]() for name in heads}

    def say(line: dict[str, Any]) -> None:
        lines.append(line)
        print(json.dumps(line), flush=True)

    for name, domain, answered in measure(recipe, given.run, heads, asked, given.logs or given.run / "logs"):
        found[name][domain] = answered
        say({"head": name, "domain": domain, **figures(recipe, answered)})
    for name, sets in found.items():
        sets[ALL] = pooled(list(sets.values()))
        say({"head": name, "domain": ALL, **figures(recipe, sets[ALL])})
    for line in compared(found):
        say(line)
    if given.out:
        write_bytes(given.out, "".join(json.dumps(line) + "\n" for line in [*lines, *counts(found)]).encode())
    return 0 if all(line.get("agrees", True) for line in lines) else 2


if __name__ == "__main__":
    sys.exit(main())
