"""The head as an artifact: its settings from a recipe, its files, loading them again."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file

from data.tensors import write_tensors
from recipes.artifact import hash_bytes, write_json
from recipes.check import aux_layers
from recipes.schema import Recipe
from train.eagle3 import Eagle3, HeadConfig


def head_config(recipe: Recipe) -> HeadConfig:
    """The head that a recipe asks for; what it leaves open is the target's."""
    facts, head = recipe.target.facts, recipe.head
    return HeadConfig(
        algorithm=head.algorithm,
        layer_type=head.layer_type,
        num_layers=head.num_layers,
        hidden_size=facts.hidden_size,
        intermediate_size=head.intermediate_size or facts.intermediate_size,
        num_attention_heads=facts.num_attention_heads,
        num_key_value_heads=facts.num_key_value_heads,
        head_dim=facts.head_dim,
        rms_norm_eps=facts.rms_norm_eps,
        rope=dict(facts.rope),
        max_position_embeddings=facts.max_position_embeddings,
        vocab_size=facts.vocab_size,
        draft_vocab_size=head.draft_vocab_size,
        window=head.window,
        norm_before_residual=head.norm_before_residual,
        norm_before_fc=head.norm_before_fc,
        fc_norm=head.fc_norm,
        norm_output=head.norm_output,
        aux_layers=aux_layers(recipe),
    )


def save_head(folder: Path, head: Eagle3, d2t_D: torch.Tensor, t2d_V: torch.Tensor, simulated: dict[str, Any]) -> None:
    """Write head.safetensors (fp32, Speculators names, with the vocabulary map), head.json and simulated.json."""
    tensors = {name: p.detach().float().cpu().contiguous() for name, p in head.named_parameters()}
    tensors |= {"d2t": d2t_D.cpu(), "t2d": t2d_V.cpu()}
    write_tensors(folder / "head.safetensors", tensors, {"format": "pt"})
    write_json(folder / "simulated.json", simulated)
    write_json(folder / "head.json", {"head": asdict(head.config), "vocab_sha256": vocab_hash(d2t_D)})


def read_config(folder: Path) -> HeadConfig:
    """The settings of a saved head."""
    raw = cast(dict[str, Any], json.loads((folder / "head.json").read_text(encoding="utf-8"))["head"])
    raw["aux_layers"] = tuple(raw["aux_layers"])
    return HeadConfig(**raw)


def open_head(folder: Path) -> tuple[Eagle3, torch.Tensor, torch.Tensor]:
    """(head in fp32, d2t [D], t2d [V]) of a saved head. Raises ValueError where tensors and settings disagree."""
    head = Eagle3(read_config(folder))
    tensors = load_file(folder / "head.safetensors")
    d2t_D, t2d_V = tensors.pop("d2t"), tensors.pop("t2d")
    try:
        head.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        raise ValueError(f"{folder}: its tensors are not those of head.json: {error}") from error
    return head, d2t_D, t2d_V


def vocab_hash(d2t_D: torch.Tensor) -> str:
    """Identity of a draft vocabulary."""
    return hash_bytes(d2t_D.cpu().to(torch.int64).numpy().tobytes())
