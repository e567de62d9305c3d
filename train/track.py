"""Where a run's figures go: metrics.jsonl always, Weights & Biases as the recipe says."""

import json
import os
from pathlib import Path
from typing import Any

from recipes.artifact import hash_json
from recipes.load import plain
from recipes.schema import Recipe


class Tracker:
    """Appends to metrics.jsonl and mirrors to wandb (offline without a login)."""

    def __init__(self, recipe: Recipe, run: Path, metrics: Path, *, main: bool) -> None:
        """Open the log; on other processes than the main one everything here is a no-op."""
        self._file = open(metrics, "a", encoding="utf-8") if main else None  # noqa: SIM115 - lives as long as the run
        self._wandb: Any = None
        if main and recipe.tracking.wandb != "disabled":
            import wandb  # optional: a recipe with tracking.wandb=disabled runs without it

            os.environ.setdefault("WANDB_SILENT", "true")
            (run / "wandb").mkdir(exist_ok=True)
            name = f"{recipe.name}-{hash_json(plain(recipe))[:8]}"
            self._wandb = wandb.init(
                project=recipe.tracking.project, id=name, name=recipe.name, dir=str(run), mode=recipe.tracking.wandb,
                resume="allow", config=plain(recipe), settings=wandb.Settings(console="off", x_disable_stats=True),
            )  # fmt: skip

    def log(self, step: int, seen: int, result: dict[str, Any], speed: dict[str, float]) -> None:
        """One optimiser step: loss, accuracy by TTT step, learning rate; speed, which never repeats, goes to wandb."""
        self._line({"step": step, "seen": seen, **result})
        if self._wandb is not None:
            accuracy = {f"accuracy/{k}": a for k, a in enumerate(result["accuracy"])}
            flat = {k: v for k, v in result.items() if k != "accuracy"}
            self._wandb.log({**flat, **accuracy, **speed, "seen": seen}, step=step)

    def note(self, step: int, simulated: dict[str, dict[str, Any]]) -> None:
        """Simulated acceptance by domain, at a step."""
        self._line({"step": step, "simulated": simulated})
        if self._wandb is not None:
            self._wandb.log({f"simulated/{d}": s["length"] for d, s in simulated.items()}, step=step)

    def close(self, step: int, simulated: dict[str, dict[str, Any]]) -> None:
        """Log the final simulation and close."""
        self.note(step, simulated)
        if self._file is not None:
            self._file.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _line(self, entry: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()
