"""Which capture.mode fits: stored features cost disk once, streamed ones cost the target's forward in every epoch."""

import shutil
from dataclasses import replace
from pathlib import Path

from recipes.check import aux_layers
from recipes.estimate import estimate, readable_bytes, readable_seconds
from recipes.estimate_rates import Rates, rates_for
from recipes.estimate_sizes import Figures, feature_bytes_per_token, split_counts, supervised_tokens
from recipes.schema import Recipe


def fitting_mode(recipe: Recipe, free: float, rates: Rates | None = None) -> tuple[str, str]:
    """(disk or stream, one line that says why): the faster one of those that fit into `free` bytes of disk."""
    rates = rates or rates_for(recipe)
    disk, stream = (
        estimate(replace(recipe, capture=replace(recipe.capture, mode=mode)), rates) for mode in ("disk", "stream")
    )
    if disk.totals["disk_bytes"] + disk.totals["spare_disk_bytes"] > free:
        fits, why = "stream", f"of which disk has {readable_bytes(free)} free"
    elif _seconds(stream) < _seconds(disk):
        fits, why = "stream", "and is the slower one"
    else:
        fits, why = "disk", f"of which {readable_bytes(free)} are free"
    train = split_counts(recipe, "train")
    epochs = supervised_tokens(recipe) / max(1.0, train.answer_tokens)
    width = feature_bytes_per_token(recipe.target.facts.hidden_size, len(aux_layers(recipe)), recipe.capture.dtype)
    line = (
        f"capture.mode: {fits} fits. {width:,.0f} bytes a token, {epochs:.2g} epochs; capture and training with disk: "
        f"{readable_seconds(_seconds(disk))} and {readable_bytes(disk.stages['features']['disk_bytes'])}, {why}; with "
        f"stream: {readable_seconds(_seconds(stream))} and {readable_bytes(stream.stages['features']['disk_bytes'])}"
    )
    return fits, line


def free_bytes(run: Path) -> float:
    """Free on the disk where the run lives or will live."""
    here = next(p for p in (run.absolute(), *run.absolute().parents) if p.exists())
    return float(shutil.disk_usage(here).free)


def _seconds(figures: Figures) -> float:
    return figures.stages["features"]["seconds"] + figures.stages["head"]["seconds"]
