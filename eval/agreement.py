"""Anybody's folder, served and replayed: does the engine compute what the folder says?

It cannot see what training meant: a folder exported with a wrong flag agrees with itself. For one's own heads parity
(export/parity.py) replays the training checkpoint instead.
"""

import asyncio
import json
import tempfile
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from data.engine import Server, serving
from data.prompts import Prompt
from data.sources import read
from eval.traffic import Load, send
from export.parity import Served, agreement
from export.validate import validate
from recipes.schema import Engine, Facts, Source, Target
from train.eagle3 import Eagle3, HeadConfig

_TOKENS = 128


def check(folder: str, target: str, prompts: str) -> None:
    """Print the faults of anybody's folder, and with prompts its engine agreement. Raises ValueError on faults."""
    faults = validate(Path(folder), target=Path(target) if target else None, local_target=True)
    if faults:
        raise ValueError(
            f"{folder} has {len(faults)} fault{'s' * (len(faults) > 1)}:\n"
            + "\n".join(f"  {f.check}: {f.message}" for f in faults)
        )
    print(f"{folder}: sound")
    if prompts:
        if not target:
            raise ValueError(
                "export --check --prompts: name the target's folder too (--target), the head is served beside it"
            )
        found = engine_agreement(Path(folder), Path(target), Path(prompts))
        print(
            f"engine agreement: {found['equal']} of {found['windows']} windows, "
            f"length {found['served_length']:.3f} served, {found['replayed_length']:.3f} replayed, "
            f"{len(found['not_ties'])} differences beyond rounding"
        )


def engine_agreement(folder: Path, target: Path, prompts: Path, count: int = 16) -> dict[str, Any]:
    """Serve `folder` beside `target`, answer `count` prompts (JSONL with `prompt`), replay the folder's own weights.

    Returns `export.parity.summarise`'s figures. Raises ValueError for a folder that is no EAGLE-3 head,
    EnvironmentFault where the engine does not take it.
    """
    head, d2t_D, steps = read_folder(folder)
    asked = [
        Prompt(id=f"{n:016x}", domain="check", split="held_out", messages=tuple(row.messages), source=str(prompts))
        for n, row in enumerate(read(Source(path=str(prompts), form="prompt", field="prompt")))
        if row.dropped is None
    ][:count]
    if not asked:
        raise ValueError(f'{prompts}: holds no prompt; one JSON object a line, with the key "prompt"')
    config = {"model": str(folder.resolve()), "method": "eagle3", "num_speculative_tokens": steps}
    extra = ["--speculative-config", json.dumps(config), "--per-request-spec-decode-metrics", "detailed"]
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch)
        context = serving(Engine(), run=run, target=_target(target), path=target, log=run / "log", extra=extra)
        with context as server:
            served = asyncio.run(_ask(server, asked))
    return agreement(head, d2t_D, target, served, steps)["check"]


def read_folder(folder: Path) -> tuple[Eagle3, torch.Tensor, int]:
    """(head, d2t, speculative tokens) as the folder's own config describes them. Raises ValueError where it is none."""
    config = cast(dict[str, Any], json.loads((folder / "config.json").read_text(encoding="utf-8")))
    if config.get("speculators_model_type") != "eagle3":
        raise ValueError(f"{folder}: speculators_model_type {config.get('speculators_model_type')!r}; allowed: eagle3")
    layer = config["transformer_layer_config"]
    kinds = layer.get("layer_types") or []
    sizes = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
        "max_position_embeddings", "vocab_size",
    )  # fmt: skip
    head = Eagle3(
        HeadConfig(
            algorithm="eagle3",
            layer_type=layer["model_type"],
            num_layers=layer["num_hidden_layers"],
            **{name: layer[name] for name in sizes},
            rope=layer["rope_parameters"],
            draft_vocab_size=config["draft_vocab_size"],
            window=layer["sliding_window"] if "sliding_attention" in kinds else 0,
            aux_layers=tuple(config["eagle_aux_hidden_state_layer_ids"]),
            **{name: config[name] for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")},
        )
    )
    tensors = load_file(folder / "model.safetensors")
    d2t_D = tensors.pop("d2t", torch.zeros(config["draft_vocab_size"], dtype=torch.int64))
    for name in ("t2d", "embed_tokens.weight"):
        tensors.pop(name, None)
    try:
        head.load_state_dict({name: t.float() for name, t in tensors.items()}, strict=True)
    except RuntimeError as error:
        raise ValueError(f"{folder}: its tensors are not those of its config.json: {error}") from error
    return head, d2t_D, int(config["speculators_config"]["proposal_methods"][0]["speculative_tokens"])


async def _ask(server: Server, prompts: list[Prompt]) -> list[Served]:
    load = Load(arm="head", phase="acceptance", concurrency=8, temperature=0.0, max_tokens=_TOKENS)
    served: list[Served] = []
    async with aclosing(send(server, prompts, load)) as rows:
        async for row in rows:
            if not row.error:
                accepted, ids = row.per_step_accepted, (row.prompt_ids, row.output_ids)
                served.append(Served(domain="check", prompt_ids=ids[0], output_ids=ids[1], accepted=accepted))
    return served


def _target(folder: Path) -> Target:
    """A Target that says enough to serve `folder`; its facts are not used."""
    config: Any = AutoConfig.from_pretrained(folder).get_text_config()
    facts = Facts(
        model_type=config.model_type, architecture="", hidden_size=config.hidden_size, intermediate_size=1,
        num_hidden_layers=config.num_hidden_layers, num_attention_heads=1, num_key_value_heads=1, head_dim=1,
        vocab_size=config.vocab_size, max_position_embeddings=config.max_position_embeddings, rms_norm_eps=1e-5,
        norm="rms", rope={}, tie_word_embeddings=False, total_params_b=1.0, active_params_b=1.0,
    )  # fmt: skip
    longest = min(4096, config.max_position_embeddings)
    return Target(id=folder.name, revision="", max_model_len=longest, facts=facts)
