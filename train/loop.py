"""The visible training loop: fetch, forward, backward, clip, step, check, log, save.

Shapes: K TTT steps, M positions that draft, D draft vocabulary, V target vocabulary, H hidden size.
"""

import copy
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from tqdm import tqdm

from data.target import embedding, final_norm, output_matrix, served_path
from data.tokens import read_vocab
from recipes.schema import Recipe, Train
from train.eagle3 import Eagle3, initialise
from train.feed import feed
from train.head import head_config, open_head, save_head
from train.optim import make_optimizers, set_rate, share
from train.pack import Pack, load_pack, rows_of, to_device
from train.replay import drafts, summary, walk
from train.shard import joining, shared, whole, whole_head
from train.source import packs_of, steps_of, training_rows
from train.state import checkpoints, cut_metrics, load_state, save_state
from train.step import Frozen, Step, mark, taught_count
from train.track import Tracker


@dataclass(frozen=True, kw_only=True)
class Queued:
    """An optimiser step whose figures may still be on their way: reading them waits for the device."""

    step: int
    lr: float
    tokens: int
    waited: float
    """seconds for the disk"""
    started: float
    figures: dict[str, torch.Tensor]


def make(recipe: Recipe, run: Path, out: Path) -> dict[str, Any]:
    """Train a head on run/features into `out`, going on from its newest checkpoint. Of several processes all train and
    the first one writes. Raises ValueError on a non-finite loss or gradient, and where a warm start has another
    vocabulary map. Returns what was done; seconds_waited_for_data are this process's, since it was started.
    """
    settings, features = recipe.train, run / "features"
    _choose_kernels(settings)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    frozen = _frozen(recipe, run, accelerator.device)
    head = _new_head(recipe, run, frozen).to(accelerator.device)
    rows = training_rows(recipe, run)
    steps = steps_of(recipe, rows, accelerator.num_processes)
    model = shared(accelerator, Step(head, frozen, settings))
    optimizers = make_optimizers(head, settings)
    first, seen = load_state(out, head, optimizers)
    main, queued, idle = accelerator.is_main_process, cast("Queued | None", None), 0.0
    if main:
        cut_metrics(out / "metrics.jsonl", first)
    tracker = Tracker(recipe, run, out / "metrics.jsonl", main=main)
    mine = [step[accelerator.process_index :: accelerator.num_processes] for step in steps[first:]]
    bar = tqdm(total=len(steps), initial=first, desc="train", unit="step", disable=None if main else True)
    with packs_of(recipe, run, rows, mine, frozen.embed_VH.is_cuda) as ready:
        for step, (packs, waited) in enumerate(feed(ready, accelerator.device), first + 1):
            started, factor, idle = time.perf_counter(), share(settings, step - 1, len(steps)), idle + waited
            set_rate(optimizers, factor)
            figures = optimise(accelerator, model, optimizers, packs, frozen, settings)
            seen = _report(tracker, queued, seen)
            queued = Queued(
                step=step, lr=settings.lr * factor, waited=waited, started=started, figures=figures,
                tokens=sum(len(rows[n].input_ids) for one in steps[step - 1] for n in one),
            )  # fmt: skip
            if step % settings.checkpoint_steps == 0:
                seen, queued = _report(tracker, queued, seen), None
                save_state(out, head, optimizers, step, seen, write=main)
            if settings.simulate_steps and step % settings.simulate_steps == 0:
                full = whole_head(head)
                if main:
                    tracker.note(step, simulate(full, features, frozen, settings.ttt_steps))
            bar.update()
    bar.close()
    seen = _report(tracker, queued, seen)
    full = whole_head(head)
    simulated = simulate(full, features, frozen, settings.ttt_steps) if main else {}
    tracker.close(len(steps), simulated)
    if main:
        save_head(out, full, frozen.d2t_D, frozen.t2d_V, simulated)
        for left in checkpoints(out):
            left.unlink()
    return {
        "steps": len(steps), "supervised_tokens_seen": seen, "parameters_trained": _size(head),
        "seconds_waited_for_data": round(idle, 1),
        "simulated": {d: round(s["length"], 4) for d, s in simulated.items()},
    }  # fmt: skip


def simulate(head: Eagle3, features: Path, frozen: Frozen, steps: int) -> dict[str, dict[str, Any]]:
    """Simulated acceptance by domain on held-out features, in bf16 as served; targets outside the vocabulary miss."""
    windows: dict[str, list[Any]] = {}
    served, embed_VH = copy.deepcopy(head).to(torch.bfloat16).eval(), frozen.embed_VH.bfloat16()
    for shard, entry in rows_of(features, "held_out"):
        pack = to_device(load_pack(features, [(shard, entry)], [0]), frozen.d2t_D.device)
        if len(pack.at.kept_M):
            found = walk(drafts(served, pack, embed_VH, frozen.d2t_D, steps), pack)
            windows.setdefault(entry.domain, []).extend(found)
    return {domain: summary(found, steps) for domain, found in sorted(windows.items())}


def optimise(
    accelerator: Accelerator, model: Any, optimizers: list[torch.optim.Optimizer], packs: list[Pack], frozen: Frozen,
    settings: Train,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """One optimiser step; its loss, grad_norm, count and accuracy [K], left on the device.

    The loss is divided by the taught positions of all packs and processes together.
    """
    device = frozen.embed_VH.device
    local = (
        torch.stack([taught_count(pack, frozen) for pack in packs]).sum() if packs else torch.zeros((), device=device)
    )
    count = _sum(accelerator, local.float())
    total, hits, judged = torch.zeros((), device=device), *torch.zeros(2, settings.ttt_steps, device=device)
    for number, pack in enumerate(packs):
        with joining(accelerator, model, last=number + 1 == len(packs)):
            parts = model(mark(pack))
            # DDP and FSDP2 average over processes, so undo their division.
            accelerator.backward(parts["loss"] * accelerator.num_processes / count.clamp_min(1))
        total, hits, judged = total + parts["loss"].detach(), hits + parts["hits"], judged + parts["judged"]
    norm = whole(torch.as_tensor(accelerator.clip_grad_norm_(model.parameters(), settings.clip)))
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    loss = _sum(accelerator, total) / count.clamp_min(1)
    accuracy = _sum(accelerator, hits) / _sum(accelerator, judged).clamp_min(1)
    return {"loss": loss, "grad_norm": norm, "count": count, "accuracy": accuracy}


def _report(tracker: Tracker, queued: Queued | None, seen: int) -> int:
    """Log a step's figures; supervised tokens seen with it. One step late, so that the device is never waited for.

    Raises ValueError where the step diverged; its checkpoint was not written then.
    """
    if queued is None:
        return seen
    loss, norm, count = (float(queued.figures[name]) for name in ("loss", "grad_norm", "count"))
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise ValueError(f"training diverged: loss {loss}, gradient norm {norm}; lower train.lr and run again")
    accuracy = [round(a, 4) for a in queued.figures["accuracy"].tolist()]
    result = {
        "loss": loss, "grad_norm": norm, "accuracy": accuracy, "count": int(count), "tokens": queued.tokens,
        "lr": queued.lr,
    }  # fmt: skip
    speed = {"tokens_per_s": queued.tokens / (time.perf_counter() - queued.started), "wait_s": queued.waited}
    tracker.log(queued.step, seen + int(count), result, speed)
    return seen + int(count)


def _choose_kernels(settings: Train) -> None:
    """Deterministic ones where asked for; cuBLAS wants its workspace fixed before its first call."""
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(settings.deterministic)


def _frozen(recipe: Recipe, run: Path, device: torch.device) -> Frozen:
    folder = served_path(run)
    d2t_D, t2d_V = read_vocab(run / "tokens")
    kept_D = torch.arange(len(d2t_D)) + d2t_D
    dtype = torch.bfloat16 if recipe.train.precision == "bf16" else torch.float32
    return Frozen(
        embed_VH=embedding(folder).to(device, dtype),
        teacher_DH=output_matrix(folder)[kept_D].to(device, dtype),
        d2t_D=d2t_D.to(device),
        t2d_V=t2d_V.to(device),
    )


def _new_head(recipe: Recipe, run: Path, frozen: Frozen) -> Eagle3:
    config = head_config(recipe)
    if recipe.train.warm_start:
        head, d2t_D, _ = open_head(Path(recipe.train.warm_start))
        if head.config != config:
            raise ValueError(f"train.warm_start: {recipe.train.warm_start} has other settings than the recipe's head")
        if not torch.equal(d2t_D, frozen.d2t_D.cpu()):
            raise ValueError(
                f"train.warm_start: {recipe.train.warm_start} has another draft vocabulary than this run's; its "
                "lm_head rows would mean other tokens. Use the run whose vocabulary it was trained with"
            )
    else:
        head = Eagle3(config)
        norm = final_norm(served_path(run), recipe.target.facts.norm)
        initialise(head, norm, frozen.teacher_DH.float().cpu(), recipe.head.norm_scale, recipe.train.seed)
    head.lm_head.weight.requires_grad_(recipe.head.train_lm_head)
    return head


def _sum(accelerator: Accelerator, value: torch.Tensor) -> torch.Tensor:
    """Over all processes."""
    return cast(torch.Tensor, accelerator.reduce(value, "sum"))


def _size(head: Eagle3) -> int:
    return sum(p.numel() for p in head.parameters() if p.requires_grad)
