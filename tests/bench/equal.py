# pyright: basic
"""Speculators 0.9's own trainer on the features and the schedule of a run of ours: equal data, equal steps.

    python -m tests.bench.equal RUN OUT --rate 1.0

RUN holds target, tokens, features and head. Each optimiser step of ours has one pack; the peer gets the same rows, in
the same order, as one batch of its own collator. Its model, loss, optimiser, learning rates (times --rate, both of
them), scheduler, warm-up, seed and checkpoint writer are its own defaults. OUT is then a folder that vLLM loads.

Its verifier norm is taken out: its final states come from before the target's final norm, ours from behind it, and
normed twice they teach other tokens than the target's (of SmolLM2's own answer tokens 76% had another argmax).
"""

import argparse
import json
import logging
import math
import shutil
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data.ahead import in_order
from data.store import read_row
from data.target import served_path
from data.tokens import read_vocab
from recipes.artifact import read_manifest
from recipes.check import aux_layers
from recipes.load import build
from recipes.schema import Recipe
from tests.bench.peer import build_for, collate, make_trainer, stand_in
from train.pack import rows_of
from train.source import steps_of, training_rows

AHEAD = 8
"""batches made ready before they are needed"""
LOGGED = 100
"""steps whose loss is looked at: each makes its timer wait for the GPU"""
BLOCK = 128
"""tokens of a flex attention block"""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What both sides train on, a pack a step."""

    packs: list[list[int]]
    """row numbers of each step, in the store's order"""
    length: int
    """positions of every batch, so that the longest pack fits"""
    tokens: int
    """of all packs, repeats counted"""
    supervised: int
    """answer tokens among them that are predicted"""


class Packs:
    """What its trainer takes for a data loader: our packs, made into its batches a few steps ahead."""

    batch_sampler = None

    def __init__(self, features: Path, plan: Plan, hidden: int) -> None:
        self.features, self.plan, self.hidden = features, plan, hidden
        self.stored = rows_of(features, "train")

    def __len__(self) -> int:
        return len(self.plan.packs)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return in_order((partial(self.batch, numbers) for numbers in self.plan.packs), AHEAD)

    def batch(self, numbers: list[int]) -> dict[str, Any]:
        """The pack of these rows as its collator makes it. Raises ValueError where it cut something off."""
        rows = [read_row(self.features, *self.stored[n]) for n in numbers]
        made = collate(rows, self.hidden, self.plan.length)
        kept, all_of_them = int((made["document_ids"] >= 0).sum()), sum(len(r.input_ids_S) - 1 for r in rows)
        if kept != all_of_them:
            raise ValueError(f"the peer's collator kept {kept} of {all_of_them} positions")
        return made


class Losses(logging.Handler):
    """Keeps the losses that its trainer logs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.found: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the loss of a training step's record; others are left alone."""
        said: Any = record.msg
        if isinstance(said, dict) and "train" in said:
            self.found.append(float(said["train"]["loss"]))


def recipe_of(run: Path) -> tuple[Recipe, int]:
    """(the recipe, our head's optimiser steps): the head's own, or, while that is trained, the features' and 0.

    Raises ValueError where neither stage is finished.
    """
    for stage in ("head", "features"):
        manifest = read_manifest(run / stage)
        if manifest is not None:
            return build(manifest["recipe"]), int(manifest["accounting"].get("steps", 0))
    raise ValueError(f"{run}: has no finished features; `draftsmith capture` first")


def plan_of(recipe: Recipe, run: Path, trained: int = 0, most: int = 0) -> Plan:
    """Our schedule, a pack a step; its first `most` steps only, where that is above 0.

    Raises ValueError where a step has several packs, where features were not kept, and where our head was trained for
    another number of steps (`trained`; 0: not known).
    """
    if recipe.capture.mode != "disk":
        raise ValueError(
            f"capture.mode: {recipe.capture.mode}, so there are no features to train the peer on; set disk"
        )
    rows = training_rows(recipe, run)
    steps = steps_of(recipe, rows, 1)
    if any(len(step) != 1 for step in steps):
        raise ValueError("train.accumulate: a step has several packs, which the peer cannot accumulate; set 1")
    if trained not in (0, len(steps)):
        raise ValueError(f"our head took {trained} steps, this schedule has {len(steps)}")
    packs = [step[0] for step in steps[: most or None]]
    longest = max(sum(len(rows[n].input_ids) - 1 for n in pack) for pack in packs)
    return Plan(
        packs=packs,
        length=math.ceil(longest / BLOCK) * BLOCK,
        tokens=sum(len(rows[n].input_ids) for pack in packs for n in pack),
        supervised=sum(max(0, sum(rows[n].loss_mask) - 1) for pack in packs for n in pack),
    )


def model_of(recipe: Recipe, run: Path, length: int, device: str) -> tuple[Any, argparse.Namespace]:
    """Its model for our target, vocabulary and aux layers, and its flattened settings."""
    from speculators.models.eagle3.rotary_partial import install_partial_neox_rotary
    from speculators.train.cli import set_seed
    from speculators.train.config import TrainConfig

    install_partial_neox_rotary()  # as its own main does
    set_seed(TrainConfig.model_fields["seed"].default)
    vocab = read_vocab(run / "tokens")
    model, arguments = build_for(str(served_path(run)), recipe.train.ttt_steps, length, vocab, device)
    layers = aux_layers(recipe)
    if len(layers) != len(model.target_layer_ids):
        raise ValueError(f"capture.aux_layers: {list(layers)}, but the peer reads {len(model.target_layer_ids)}")
    model.config.eagle_aux_hidden_state_layer_ids = list(layers)
    model.verifier_norm = torch.nn.Identity()
    return model, arguments


def train(recipe: Recipe, run: Path, out: Path, plan: Plan, rate: float) -> dict[str, Any]:
    """Train the peer and write its checkpoint to `out`; what was done. Raises ValueError where `out` exists."""
    if out.exists():
        raise ValueError(f"{out}: exists already")
    cuda = torch.cuda.is_available()
    stand_in(fused=cuda)
    model, arguments = model_of(recipe, run, plan.length, "cuda" if cuda else "cpu")
    arguments.lr, arguments.muon_lr = arguments.lr * rate, arguments.muon_lr * rate
    loader = Packs(run / "features", plan, recipe.target.facts.hidden_size)
    trainer = make_trainer(model, arguments, loader, arguments.optimizer, len(loader))
    trainer.config = trainer.config._replace(log_freq=max(1, len(loader) // LOGGED))
    if not cuda:
        trainer.device_type = "cpu"
    losses, started, marks = listen(), time.perf_counter(), list[float]()
    trainer.train_epoch(0, step_callback=lambda: marks.append(time.perf_counter() - started))
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    save(trainer, out)
    tenth = max(1, len(losses.found) // 10)
    return {
        "steps": len(loader), "tokens": plan.tokens, "supervised_tokens": plan.supervised, "length": plan.length,
        "seconds": round(seconds, 1), "first_step_s": round(marks[0], 1),
        "loss_first": average(losses.found[:tenth]), "loss_last": average(losses.found[-tenth:]),
        "layers": list(model.target_layer_ids), "parameters": sum(p.numel() for p in trained_of(model)),
        **settings_of(trainer, arguments),
    }  # fmt: skip


def settings_of(trainer: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """What its trainer ran with, from its own resolved settings."""
    from speculators.train.trainer import _resolve_scheduler_steps

    warm_up, total = _resolve_scheduler_steps(trainer.config, len(trainer.train_loader))
    names = (
        "optimizer", "lr", "weight_decay", "muon_lr", "muon_momentum", "muon_weight_decay", "muon_ns_steps",
        "muon_adjust_lr_fn", "scheduler_type",
    )  # fmt: skip
    own = ("ttt_steps", "ttt_step_loss_decay", "loss_fn", "loss_implementation", "seed", "norm_before_fc", "fc_norm")
    return {
        **{name: getattr(trainer.config, name) for name in names}, "warmup_steps": warm_up, "scheduler_steps": total,
        **{name: getattr(arguments, name) for name in own},
    }  # fmt: skip


def trained_of(model: Any) -> list[torch.nn.Parameter]:
    """The parameters that its optimisers change."""
    return [p for p in model.parameters() if p.requires_grad]


def average(values: list[float]) -> float | None:
    """Their mean; None without any, or where it is no number (JSON knows none)."""
    mean = statistics.fmean(values) if values else math.nan
    return round(mean, 4) if math.isfinite(mean) else None


def listen() -> Losses:
    """A handler that hears its metrics from now on."""
    losses, logger = Losses(), logging.getLogger("speculators.metrics")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(losses)
    return losses


def save(trainer: Any, out: Path) -> None:
    """Its checkpoint, as its own checkpointer writes it after an epoch (bf16), without the optimisers' state."""
    trainer.checkpointer.save_checkpoint(trainer.model, trainer.optimizers, 0)
    trainer.checkpointer.optimizer_path(0).unlink()
    out.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(trainer.checkpointer.path / "0", out)


def main(argv: list[str] | None = None) -> None:
    """Train and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rate", type=float, default=1.0, help="times the peer's default learning rates")
    parser.add_argument("--steps", type=int, default=0, help="the first so many only, for a trial")
    parser.add_argument("--cpu", action="store_true", help="go on without a GPU: eager and slow, for a trial")
    given = parser.parse_args(argv)
    if not torch.cuda.is_available() and not given.cpu:
        raise SystemExit("no GPU here; --cpu trains without one")
    try:
        recipe, trained = recipe_of(given.run)
        plan = plan_of(recipe, given.run, trained, given.steps)
        done = train(recipe, given.run, given.out, plan, given.rate)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    print(json.dumps({"rate": given.rate, "our_steps": trained, **done}), flush=True)


if __name__ == "__main__":
    main()
