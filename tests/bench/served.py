"""Acceptance of several heads on one run's held-out prompts, served side by side, and how they compare.

    python -m tests.bench.served RUN NAME=FOLDER [NAME=FOLDER ...] [--prompts N] [--set key=value ...]

Prompts, engine, concurrency and answer length are those of the run's recipe (with --set changes), greedy. One JSON line
a head: requests, acceptance length with its interval over requests, by domain and for all; then one line for each other
head: (ours - 1) / (theirs - 1) of the first one against it, with an interval over prompts that both answered.
"""

import argparse
import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

import numpy as np

from data.engine import Server, serving
from data.prompts import Prompt, read_prompts
from data.target import served_path
from eval.traffic import Load, difference, read_counters, send
from export.record import Counters
from export.requests import Request
from recipes.artifact import read_manifest
from recipes.load import build
from recipes.schema import Recipe

RESAMPLES = 10_000


def length(rows: Sequence[Request]) -> float:
    """1 + accepted / drafts, pooled."""
    return 1 + sum(r.accepted for r in rows) / max(1, sum(r.drafts for r in rows))


def interval(rows: Sequence[Request]) -> list[float]:
    """95% of the pooled length over resampled requests."""
    accepted, drafts = (np.array([getattr(r, name) for r in rows], float) for name in ("accepted", "drafts"))
    drawn = np.random.default_rng(0).integers(0, len(rows), (RESAMPLES, len(rows)))
    return [round(x, 3) for x in np.quantile(1 + accepted[drawn].sum(1) / drafts[drawn].sum(1), (0.025, 0.975))]


def ratio(ours: Sequence[Request], theirs: Sequence[Request]) -> dict[str, Any]:
    """(our length - 1) / (theirs - 1), pooled over prompts that both answered, and its 95% interval over them."""
    other = {(r.domain, r.prompt_id): r for r in theirs}
    pairs = [(r, other[r.domain, r.prompt_id]) for r in ours if (r.domain, r.prompt_id) in other]
    counts = np.array([[a.accepted, a.drafts, b.accepted, b.drafts] for a, b in pairs], float)
    drawn = np.random.default_rng(0).integers(0, len(pairs), (RESAMPLES, len(pairs)))
    sums = np.concatenate([counts.sum(0)[None], counts[drawn].sum(1)])
    found = (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3])
    low, high = np.quantile(found[1:], (0.025, 0.975))
    return {"prompts": len(pairs), "ratio": round(found[0], 4), "low": round(low, 4), "high": round(high, 4)}


def by_domain(rows: Sequence[Request]) -> dict[str, list[Request]]:
    """Rows of each domain, and all of them."""
    found: dict[str, list[Request]] = {}
    for row in rows:
        found.setdefault(row.domain, []).append(row)
    return found | {"all": list(rows)}


def options(recipe: Recipe, folder: Path) -> list[str]:
    """Engine options that serve the target with the head in `folder`."""
    config = {
        "model": str(folder.resolve()), "method": "eagle3", "num_speculative_tokens": recipe.export.speculative_tokens,
    }  # fmt: skip
    metrics = ("--per-request-spec-decode-metrics", "detailed") if recipe.engine.windows == "metrics" else ()
    return ["--no-enable-prefix-caching", "--speculative-config", json.dumps(config), *metrics]


async def ask(server: Server, prompts: Sequence[Prompt], recipe: Recipe) -> tuple[list[Request], Counters]:
    """Every prompt's row, and what the engine counted meanwhile."""
    chunked = recipe.engine.windows == "chunks"
    load = Load(
        arm="head", phase="acceptance", concurrency=recipe.gate.concurrency, temperature=0.0,
        max_tokens=recipe.gate.max_tokens, chunk_drafts=recipe.export.speculative_tokens if chunked else 0,
    )  # fmt: skip
    before, rows = await read_counters(server), list[Request]()
    async with aclosing(send(server, prompts, load)) as answered:
        async for row in answered:
            rows.append(row)
    return rows, difference(await read_counters(server), before)


def measure(recipe: Recipe, run: Path, heads: dict[str, Path], count: int) -> dict[str, list[Request]]:
    """Rows of each head, and its line printed."""
    held_out: dict[str, list[Prompt]] = {}
    for prompt in read_prompts(run / "prompts"):
        if prompt.split == "held_out":
            held_out.setdefault(prompt.domain, []).append(prompt)
    prompts = [p for taken in held_out.values() for p in taken[:count]]
    path, found = served_path(run), dict[str, list[Request]]()
    with ThreadPoolExecutor(len(heads)) as pool, ExitStack() as stack:
        contexts = {
            name: serving(recipe.engine, run=run, target=recipe.target, path=path,
                          log=run / "logs" / f"served-{name}.log", extra=options(recipe, folder))
            for name, folder in heads.items()
        }  # fmt: skip
        starting = {name: pool.submit(stack.enter_context, one) for name, one in contexts.items()}
        for name, started in starting.items():
            rows, counted = asyncio.run(ask(started.result(), prompts, recipe))
            found[name] = [r for r in rows if not r.error]
            figures = {
                domain: {"requests": len(own), "length": round(length(own), 4), "interval": interval(own)}
                for domain, own in by_domain(found[name]).items()
            }  # fmt: skip
            engine = {"drafts": counted.drafts, "length": round(1 + counted.accepted / max(1, counted.drafts), 4)}
            failed = len(rows) - len(found[name])
            print(json.dumps({"head": name, "failed": failed, "engine": engine, **figures}), flush=True)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("heads", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--prompts", type=int, default=120, help="a domain")
    parser.add_argument("--set", action="append", default=[], metavar="key=value")
    given = parser.parse_args()
    manifest = read_manifest(given.run / "features")
    if manifest is None:
        raise SystemExit(f"{given.run}: has no features; `draftsmith capture` first")
    recipe = build(changed(manifest["recipe"], given.set))
    heads = {name: Path(folder) for name, _, folder in (text.partition("=") for text in given.heads)}
    found = measure(recipe, given.run, heads, given.prompts)
    first, *others = found
    for other in others:
        sides = by_domain(found[first]), by_domain(found[other])
        compared = {domain: ratio(rows, sides[1][domain]) for domain, rows in sides[0].items()}
        print(json.dumps({"ratio of": first, "to": other, **compared}), flush=True)


def changed(plain: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A plain recipe under dotted overrides."""
    from omegaconf import OmegaConf

    merged = OmegaConf.merge(OmegaConf.create(plain), OmegaConf.from_dotlist(list(overrides)))
    held = OmegaConf.to_container(merged, resolve=True)
    assert isinstance(held, dict)
    return {str(key): value for key, value in held.items()}


if __name__ == "__main__":
    main()
