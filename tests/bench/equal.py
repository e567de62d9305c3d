# pyright: basic
"""Speculators' own trainer on the features and the schedule of a run of ours: equal data, equal steps.

    python -m tests.bench.equal RUN OUT --rate 1.0

RUN holds target, tokens, features and head. Every optimiser step of ours has one pack; the peer gets the same rows as
one batch of its own collator, in the same order. Its model, loss, optimiser, learning rates (times --rate, both of
them), scheduler and checkpoint writer are its own defaults. OUT is then a folder that vLLM loads.
"""

import argparse
import json
import time
from collections.abc import Iterator
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
from train.pack import Steps, rows_of
from train.source import steps_of, training_rows

AHEAD = 8


class Packs:
    """What its trainer takes for a data loader: our packs, made into its batches a few steps ahead."""

    batch_sampler = None

    def __init__(self, features: Path, steps: Steps, hidden: int, length: int) -> None:
        self.features, self.steps, self.hidden, self.length = features, steps, hidden, length
        self.stored = rows_of(features, "train")

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return in_order((partial(self.batch, step[0]) for step in self.steps), AHEAD)

    def batch(self, numbers: list[int]) -> dict[str, Any]:
        rows = [read_row(self.features, *self.stored[n]) for n in numbers]
        return collate(rows, self.hidden, self.length)


def schedule_of(recipe: Recipe, run: Path) -> tuple[Steps, int]:
    """(the run's steps, tokens of its longest pack). Raises ValueError where a step has several packs."""
    rows = training_rows(recipe, run)
    steps = steps_of(recipe, rows, 1)
    if any(len(step) != 1 for step in steps):
        raise ValueError("a step has several packs; the peer cannot accumulate, set train.accumulate=1")
    return steps, max(sum(len(rows[n].input_ids) for n in step[0]) for step in steps)


def train(recipe: Recipe, run: Path, out: Path, rate: float, most: int) -> dict[str, Any]:
    """Train the peer and write its checkpoint to `out`; what was done."""
    cuda = torch.cuda.is_available()
    stand_in(fused=cuda)
    steps, length = schedule_of(recipe, run)
    steps, length = steps[:most] if most else steps, (length + 127) // 128 * 128
    folder = str(served_path(run))
    vocab, device = read_vocab(run / "tokens"), "cuda" if cuda else "cpu"
    torch.manual_seed(recipe.train.seed)
    model, arguments = build_for(folder, recipe.train.ttt_steps, length, vocab, device)
    arguments.lr, arguments.muon_lr = arguments.lr * rate, arguments.muon_lr * rate
    loader = Packs(run / "features", steps, recipe.target.facts.hidden_size, length)
    trainer = make_trainer(model, arguments, loader, arguments.optimizer, len(steps))
    started, first = time.perf_counter(), 0.0

    def mark() -> None:
        nonlocal first
        first = first or time.perf_counter() - started

    trainer.train_epoch(0, step_callback=mark)
    seconds = time.perf_counter() - started
    trainer.checkpointer.save_checkpoint(trainer.model, trainer.optimizers, "last")
    (trainer.checkpointer.path / "last").rename(out)
    config = json.loads((out / "config.json").read_text())
    layers = config.get("eagle_aux_hidden_state_layer_ids")
    if layers and list(layers) != list(aux_layers(recipe)):
        raise ValueError(f"the peer reads layers {layers}, the features hold {aux_layers(recipe)}")
    return {
        "steps": len(steps), "pack": length, "ttt": recipe.train.ttt_steps, "seconds": round(seconds, 1),
        "first_step_s": round(first, 1), "optimizer": arguments.optimizer, "lr": arguments.lr,
        "muon_lr": arguments.muon_lr, "scheduler": arguments.scheduler_type, "layers": layers,
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }  # fmt: skip


def main() -> None:
    """Train and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rate", type=float, default=1.0, help="times the peer's default learning rates")
    parser.add_argument("--steps", type=int, default=0, help="stop after so many, for a trial")
    given = parser.parse_args()
    manifest = read_manifest(given.run / "features")
    if manifest is None:
        raise SystemExit(f"{given.run}: has no features; `draftsmith capture` first")
    recipe = build(manifest["recipe"])
    print(json.dumps({"rate": given.rate, **train(recipe, given.run, given.out, given.rate, given.steps)}), flush=True)


if __name__ == "__main__":
    main()
