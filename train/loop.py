"""The visible training loop: fetch, forward, backward, clip, check, step, log, save.

Shapes: K TTT steps, M positions that draft, D draft vocabulary, V target vocabulary, H hidden size.
"""

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from tqdm import tqdm

from data.store import Entry, Shard
from data.target import embedding, final_norm, output_matrix, served_path
from data.tokens import read_rows, read_vocab
from recipes.schema import Recipe, Train
from train import losses
from train.eagle3 import Eagle3, initialise
from train.head import head_config, open_head, save_head
from train.optim import make_optimizers, set_rate, share
from train.pack import Pack, Steps, load_pack, rows_of, schedule, to_device
from train.replay import drafts, embeddings, summary, walk
from train.state import checkpoints, cut_metrics, load_state, save_state
from train.track import Tracker

Rows = list[tuple[Shard, Entry]]


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """What training reads and never changes: target embedding, teacher's rows, vocabulary map."""

    embed_VH: torch.Tensor
    teacher_DH: torch.Tensor
    d2t_D: torch.Tensor
    t2d_V: torch.Tensor


def make(recipe: Recipe, run: Path, out: Path) -> dict[str, Any]:
    """Train a head on run/features into `out`, going on from its newest checkpoint. Raises ValueError on a non-finite
    loss or gradient, and where a warm start has another vocabulary map.
    """
    settings = recipe.train
    accelerator = Accelerator(mixed_precision="bf16" if settings.precision == "bf16" else "no")
    frozen = _frozen(recipe, run, accelerator.device)
    head = _new_head(recipe, run, frozen)
    features, rows = run / "features", rows_of(run / "features", "train")
    steps = _schedule(recipe, run, rows, accelerator.num_processes)
    head.to(accelerator.device)
    optimizers = make_optimizers(head, settings)
    first, seen = load_state(out, head, optimizers)
    model = accelerator.prepare(head)
    cut_metrics(out / "metrics.jsonl", first)
    tracker = Tracker(recipe, run, out / "metrics.jsonl", main=accelerator.is_main_process)
    bar = tqdm(total=len(steps), initial=first, desc="train", unit="step", disable=None)
    for step in range(first, len(steps)):
        started = time.perf_counter()
        mine = steps[step][accelerator.process_index :: accelerator.num_processes]
        packs = [to_device(load_pack(features, rows, one), accelerator.device) for one in mine]
        factor = share(settings, step, len(steps))
        set_rate(optimizers, factor)
        result = _optimise(accelerator, model, optimizers, packs, frozen, settings)
        seen += result.pop("count")
        if accelerator.is_main_process:
            spent = time.perf_counter() - started
            tracker.log(step + 1, seen, {**result, "lr": settings.lr * factor}, result["tokens"] / spent)
            if settings.simulate_steps and (step + 1) % settings.simulate_steps == 0:
                tracker.note(step + 1, simulate(head, features, frozen, settings.ttt_steps))
            if (step + 1) % settings.checkpoint_steps == 0:
                save_state(out, head, optimizers, step + 1, seen)
        bar.update()
    bar.close()
    simulated = simulate(head, features, frozen, settings.ttt_steps)
    tracker.close(len(steps), simulated)
    save_head(out, head, frozen.d2t_D, frozen.t2d_V, simulated)
    for left in checkpoints(out):
        left.unlink()
    return {
        "steps": len(steps), "supervised_tokens_seen": seen, "parameters_trained": _size(head),
        "simulated": {d: round(s["length"], 4) for d, s in simulated.items()},
    }  # fmt: skip


def step_losses(model: Any, pack: Pack, frozen: Frozen, settings: Train) -> dict[str, torch.Tensor]:
    """loss (weighted sum over TTT steps), count (supervised tokens), hits and judged [K], of one pack.

    TTT step k at t learns the teacher's p(. | x_<=t+1+k), weighed by decay^k; a position whose token x_{t+2+k} is
    outside the draft vocabulary teaches nothing, yet counts as a miss.
    """
    logits = model(
        pack.aux_SAH.to(frozen.embed_VH.dtype),
        embeddings(pack, frozen.embed_VH, settings.ttt_steps),
        pack.kept_M,
        pack.docs,
    )
    with torch.no_grad():
        offsets = torch.stack([pack.following(1 + k) for k in range(settings.ttt_steps)])
        needed, place = offsets.unique(return_inverse=True)
        teacher_UD = pack.final_SH[needed].to(frozen.teacher_DH.dtype) @ frozen.teacher_DH.T
    loss = logits[0].new_zeros(())
    hits, judged, count = [], [], torch.zeros((), device=loss.device)
    for k, draft_MD in enumerate(logits):
        wanted_M = pack.input_ids_S[pack.following(2 + k)]
        valid_M = pack.valid(k)
        taught_M = valid_M & frozen.t2d_V[wanted_M]
        part, number = losses.soft_kl(draft_MD, teacher_UD[place[k]], taught_M)
        loss = loss + settings.ttt_decay**k * part
        count = count + number if k == 0 else count
        ids = draft_MD.detach().argmax(-1)
        hits.append(((ids + frozen.d2t_D[ids] == wanted_M) & valid_M).sum())
        judged.append(valid_M.sum())
    return {"loss": loss, "count": count, "hits": torch.stack(hits), "judged": torch.stack(judged)}


def simulate(head: Eagle3, features: Path, frozen: Frozen, steps: int) -> dict[str, dict[str, Any]]:
    """Simulated acceptance by domain on held-out features, in bf16 as served; targets outside the vocabulary miss."""
    was = {name: p.detach().clone() for name, p in head.named_parameters()}
    windows: dict[str, list[Any]] = {}
    served, embed_VH = head.to(torch.bfloat16).eval(), frozen.embed_VH.bfloat16()
    for shard, entry in rows_of(features, "held_out"):
        pack = to_device(load_pack(features, [(shard, entry)], [0]), frozen.d2t_D.device)
        if len(pack.kept_M):
            found = walk(drafts(served, pack, embed_VH, frozen.d2t_D, steps), pack)
            windows.setdefault(entry.domain, []).extend(found)
    head.float().train()
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(was[name])
    return {domain: summary(found, steps) for domain, found in sorted(windows.items())}


def _optimise(
    accelerator: Accelerator, model: Any, optimizers: list[torch.optim.Optimizer], packs: list[Pack], frozen: Frozen,
    settings: Train,
) -> dict[str, Any]:  # fmt: skip
    """One optimiser step. The loss is divided by the supervised tokens of all packs and processes together."""
    local = sum((p.valid(0) & frozen.t2d_V[p.input_ids_S[p.following(2)]]).sum() for p in packs)
    count = _sum(accelerator, torch.as_tensor(local, device=accelerator.device).float())
    totals = {"loss": 0.0, "tokens": 0}
    hits = judged = torch.zeros(settings.ttt_steps, device=accelerator.device)
    for number, pack in enumerate(packs):
        parts = step_losses(model, pack, frozen, settings)
        # DDP averages over processes, so undo its division.
        part = parts["loss"] * accelerator.num_processes / count.clamp_min(1)
        with accelerator.no_sync(model) if number + 1 < len(packs) else _nothing():
            accelerator.backward(part)
        totals["loss"] += float(parts["loss"].detach())
        totals["tokens"] += len(pack.input_ids_S)
        hits, judged = hits + parts["hits"], judged + parts["judged"]
    norm = torch.as_tensor(accelerator.clip_grad_norm_(model.parameters(), settings.clip))
    loss = _sum(accelerator, torch.tensor(totals["loss"], device=accelerator.device)) / count.clamp_min(1)
    if not (torch.isfinite(loss) and torch.isfinite(norm)):
        raise ValueError(
            f"training diverged: loss {float(loss)}, gradient norm {float(norm)}; lower train.lr and run again"
        )
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    accuracy = (hits / judged.clamp_min(1)).tolist()
    return {
        "loss": float(loss), "grad_norm": float(norm), "accuracy": [round(a, 4) for a in accuracy],
        "count": int(count), "tokens": totals["tokens"],
    }  # fmt: skip


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


def _schedule(recipe: Recipe, run: Path, rows: Rows, processes: int) -> Steps:
    """The run's steps; supervised tokens are counted from the rows' masks, without reading features."""
    t = recipe.train
    masks = {r.row_id: r.loss_mask for r in read_rows(run / "tokens") if r.split == "train"}
    supervised = [max(0, sum(masks[e.row_id]) - 1) for _, e in rows]
    repeats = [recipe.domains[e.domain].weight if s else 0.0 for (_, e), s in zip(rows, supervised, strict=True)]
    return schedule(
        [e.length for _, e in rows], supervised, repeats, tokens=t.tokens, epochs=t.epochs, seed=t.seed,
        pack_tokens=t.pack_tokens, packs_a_step=t.accumulate * processes,
    )  # fmt: skip


def _sum(accelerator: Accelerator, value: torch.Tensor) -> torch.Tensor:
    """Over all processes."""
    return cast(torch.Tensor, accelerator.reduce(value, "sum"))


def _size(head: Eagle3) -> int:
    return sum(p.numel() for p in head.parameters() if p.requires_grad)


def _nothing() -> Any:
    return contextlib.nullcontext()
