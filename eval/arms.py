"""What is measured beside what: no speculation, the head, the incumbent (if the recipe names one), n-gram."""

import json
from pathlib import Path
from typing import Any

from eval.incumbent import incumbent_folder
from eval.synthetic import synthetic
from export.requests import Arm
from recipes.schema import Recipe

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def asked_arms(recipe: Recipe) -> list[Arm]:
    """The arms whose acceptance is measured.

    n-gram does not draft at each step, so chunks do not tell its windows: there it is only timed.
    """
    arms = _heads(recipe)
    return [*arms, "ngram"] if recipe.gate.ngram and recipe.engine.windows == "metrics" else arms


def timed_arms(recipe: Recipe) -> list[Arm]:
    """The arms that are timed."""
    ngram: list[Arm] = ["ngram"] if recipe.gate.ngram and recipe.gate.speed_ngram else []
    return ["none", *_heads(recipe), *ngram]


def checkpoint(run: Path) -> Path:
    """The Speculators folder that the head's server loads, absolute."""
    return (run / "checkpoint").resolve()


def options(recipe: Recipe, run: Path, arm: Arm) -> list[str]:
    """Engine options that make a server this arm. Raises as incumbent_folder does."""
    if arm == "none":
        return ["--no-enable-prefix-caching"]
    config = json.dumps(NGRAM if arm == "ngram" else _drafting(recipe, run, arm))
    metrics = ("--per-request-spec-decode-metrics", "detailed") if recipe.engine.windows == "metrics" else ()
    return ["--no-enable-prefix-caching", "--speculative-config", config, *metrics]


def _drafting(recipe: Recipe, run: Path, arm: Arm) -> dict[str, Any]:
    folder = incumbent_folder(recipe) if arm == "incumbent" else checkpoint(run)
    tokens = recipe.export.speculative_tokens
    return {"model": str(folder), "method": "eagle3", "num_speculative_tokens": tokens} | synthetic(recipe.engine)


def _heads(recipe: Recipe) -> list[Arm]:
    return ["head", "incumbent"] if recipe.gate.incumbent else ["head"]
