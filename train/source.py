"""Where the trainer's packs come from: the feature store, or a capture that runs beside it."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from data.capture import capturing
from data.store import Features
from data.tokens import Row, read_rows
from recipes.schema import Recipe
from train.feed import Fed, from_capture, from_disk
from train.pack import Pack, Steps, load_pack, pack, rows_of, schedule


def training_rows(recipe: Recipe, run: Path) -> list[Row]:
    """The rows that are trained on, in the store's order (by length, then id), whether or not they are stored."""
    rows = {row.row_id: row for row in read_rows(run / "tokens") if row.split == "train"}
    if recipe.capture.mode == "disk":
        return [rows[entry.row_id] for _, entry in rows_of(run / "features", "train")]
    return sorted(rows.values(), key=lambda row: (len(row.input_ids), row.row_id))


def steps_of(recipe: Recipe, rows: list[Row], processes: int) -> Steps:
    """The run's optimiser steps; supervised tokens are counted from the rows' masks."""
    supervised = [max(0, sum(row.loss_mask) - 1) for row in rows]
    repeats = [recipe.domains[r.domain].weight if s else 0.0 for r, s in zip(rows, supervised, strict=True)]
    lengths = [len(row.input_ids) for row in rows]
    return schedule(lengths, supervised, repeats, recipe.train, processes)


@contextmanager
def packs_of(
    recipe: Recipe, run: Path, rows: list[Row], steps: Steps, pin: bool
) -> Generator[Iterator[Fed], None, None]:
    """The packs of `steps`, in order; row numbers are places in `rows`. `pin`: in page-locked memory.

    Raises ValueError where a streamed state is not finite.
    """
    if recipe.capture.mode == "disk":
        features = run / "features"
        stored = rows_of(features, "train")
        yield from_disk(lambda numbers: load_pack(features, stored, numbers, pin), steps)
        return
    with capturing(recipe, run, rows) as (capture, _):
        flowing = capture([rows[n] for n in numbers] for step in steps for numbers in step)
        made = ([_whole(next(flowing), [rows[n] for n in numbers], pin) for numbers in step] for step in steps)
        with from_capture(made) as fed:
            yield fed


def _whole(features: list[Features], rows: list[Row], pin: bool) -> Pack:
    one = pack(features, pin)
    # A sum is finite where all its terms are, and costs one reading.
    if not all(bool(x.sum(dtype=torch.float32).isfinite()) for x in (one.aux_SAH, one.final_MH)):
        named = ", ".join(row.row_id for row in rows[:5])
        raise ValueError(f"a captured state is not finite (rows {named}); capture.mode: disk leaves such rows out")
    return one
