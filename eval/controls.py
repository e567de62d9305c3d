"""Can parity see an export error? Serve corrupted copies of the folder; each must fail where the good copy passes.

    python -m eval.controls RUN_DIR [--prompts N] [--domain NAME]

The training checkpoint stays as it is and is replayed on what each copy served. Acceptance alone hardly moves under
these errors; window agreement must. Prints one JSON line a control.
"""

import argparse
import asyncio
import json
import shutil
import sys
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file

from data.engine import serving
from data.prompts import Prompt, read_prompts
from data.target import served_path
from eval.measure import options
from eval.traffic import Load, send
from export.parity import Served, parity
from recipes.artifact import read_manifest, write_json
from recipes.load import build
from recipes.schema import Recipe

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]
Corrupt = Callable[[Config, Tensors], None]


def layer_ids(config: Config, _: Tensors) -> None:
    """Every aux layer id one too low: another engine's convention."""
    config["eagle_aux_hidden_state_layer_ids"] = [i - 1 for i in config["eagle_aux_hidden_state_layer_ids"]]


def norm_output(config: Config, _: Tensors) -> None:
    """The flag that decides what the next draft step reads, flipped."""
    config["norm_output"] = not config["norm_output"]


def norm_before_residual(config: Config, _: Tensors) -> None:
    """The flag whose default differs between speculators and vLLM, flipped."""
    config["norm_before_residual"] = not config["norm_before_residual"]


def rope_base(config: Config, _: Tensors) -> None:
    """A tenth of the target's rope base."""
    rope = config["transformer_layer_config"]["rope_parameters"]
    rope["rope_theta"] = rope["rope_theta"] / 10


def d2t(config: Config, tensors: Tensors) -> None:
    """5% of the draft tokens mean each other's target tokens: wrong for rare tokens mostly, so hard to see."""
    size = len(tensors["d2t"])
    chosen = torch.randperm(size, generator=torch.Generator().manual_seed(0))[: max(2, size // 20)]
    targets = torch.arange(size) + tensors["d2t"]
    targets[chosen] = targets[chosen.roll(1)]
    tensors["d2t"] = targets - torch.arange(size)


def lm_head_rows(config: Config, tensors: Tensors) -> None:
    """A tenth of lm_head's rows in another order."""
    size = len(tensors["lm_head.weight"])
    chosen = torch.randperm(size, generator=torch.Generator().manual_seed(1))[: max(2, size // 10)]
    rows = tensors["lm_head.weight"].clone()
    rows[chosen] = tensors["lm_head.weight"][chosen.roll(1)]
    tensors["lm_head.weight"] = rows


def fc_blocks(config: Config, tensors: Tensors) -> None:
    """The first two aux states change places in fc."""
    width = config["transformer_layer_config"]["hidden_size"]
    fc = tensors["fc.weight"]
    tensors["fc.weight"] = torch.cat([fc[:, width : 2 * width], fc[:, :width], fc[:, 2 * width :]], 1).contiguous()


CONTROLS: tuple[Corrupt, ...] = (
    layer_ids, norm_output, norm_before_residual, rope_base, d2t, lm_head_rows, fc_blocks,
)  # fmt: skip


def corrupted(folder: Path, out: Path, corrupt: Corrupt | None) -> Path:
    """A copy of a Speculators folder with one error in it (none: a plain copy)."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(folder, out)
    config = cast(Config, json.loads((out / "config.json").read_text(encoding="utf-8")))
    tensors = load_file(out / "model.safetensors")
    if corrupt is not None:
        corrupt(config, tensors)
    write_json(out / "config.json", config)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def verdict_of(found: dict[str, Any], recipe: Recipe) -> list[str]:
    """Why parity fails, empty where it holds: share of windows, length, differences that are no ties."""
    why: list[str] = []
    if found["equal_share"] < recipe.gate.parity_windows:
        why.append(f"windows {found['equal_share']:.1%}")
    if found["length_error"] > recipe.gate.parity_length:
        why.append(f"length off by {found['length_error']:.1%}")
    if len(found["not_ties"]) > recipe.gate.parity_unexplained * found["windows"]:
        why.append(f"{len(found['not_ties'])} differences beyond rounding")
    return why


def run_control(recipe: Recipe, run: Path, corrupt: Corrupt | None, prompts: list[Prompt]) -> dict[str, Any]:
    """Serve one copy, replay the training checkpoint on what it served; agreement and why it fails."""
    name = corrupt.__name__ if corrupt else "good"
    folder = corrupted(run / "checkpoint", run / "controls" / name, corrupt)
    extra = [
        o.replace(str((run / "checkpoint").resolve()), str(folder.resolve())) for o in options(recipe, run, "head")
    ]
    log = run / "controls" / f"{name}.log"
    with serving(recipe.engine, run=run, target=recipe.target, path=served_path(run), log=log, extra=extra) as server:
        served = asyncio.run(_collect(server, prompts, recipe))
    (found,) = parity(run, served, recipe.export.speculative_tokens).values()
    kept = ("windows", "equal", "equal_share", "served_length", "replayed_length", "length_error", "ties", "not_ties")
    return {"control": name, **{k: found[k] for k in kept}, "fails": verdict_of(found, recipe)}


async def _collect(server: Any, prompts: list[Prompt], recipe: Recipe) -> list[Served]:
    gate, served = recipe.gate, list[Served]()
    load = Load(
        arm="head", phase="acceptance", concurrency=gate.concurrency, temperature=0.0, max_tokens=gate.max_tokens
    )
    async with aclosing(send(server, prompts, load)) as rows:
        async for row in rows:
            served.append(Served(
                domain="control", prompt_ids=row.prompt_ids, output_ids=row.output_ids, accepted=row.per_step_accepted
            ))  # fmt: skip
    return served


def main(argv: list[str] | None = None) -> int:
    """0 where the good copy passes and every corrupted one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--domain", default="", help="default: the first measured one")
    args = parser.parse_args(argv)
    manifest = read_manifest(args.run / "checkpoint")
    if manifest is None:
        raise SystemExit(f"{args.run}: has no finished checkpoint; `draftsmith export` first")
    recipe = build(manifest["recipe"])
    domain = args.domain or next(name for name, d in recipe.domains.items() if d.held_out)
    held_out = [p for p in read_prompts(args.run / "prompts") if p.split == "held_out" and p.domain == domain]
    right = True
    for corrupt in (None, *CONTROLS):
        found = run_control(recipe, args.run, corrupt, held_out[: args.prompts])
        print(json.dumps(found), flush=True)
        right &= bool(found["fails"]) == (corrupt is not None)
    return 0 if right else 2


if __name__ == "__main__":
    sys.exit(main())
