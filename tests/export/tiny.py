"""A random two-layer target and a random head for it, small enough to build in every test."""

import json
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from export.layout import expected_tensors
from export.speculators import config_json, write_folder
from recipes.load import build
from recipes.schema import Recipe

H, V, D, LAYERS = 64, 512, 128, 4
ROPE = {"rope_theta": 10000.0, "rope_type": "default"}


def tiny_target(folder: Path, *, layers: int = LAYERS, seed: int = 0, **changes: Any) -> Path:
    """An HF folder of a random Llama in bf16."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": V,
        "hidden_size": H,
        "intermediate_size": 2 * H,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_parameters": ROPE,
        "tie_word_embeddings": False,
    }
    model = LlamaForCausalLM(LlamaConfig(**(settings | changes))).to(torch.bfloat16)  # pyright: ignore
    model.save_pretrained(folder)
    return folder


def settings(**changes: Any) -> dict[str, Any]:
    """head.json's `head` for that target."""
    head: dict[str, Any] = {
        "algorithm": "eagle3",
        "layer_type": "llama",
        "num_layers": 1,
        "hidden_size": H,
        "intermediate_size": 2 * H,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope": ROPE,
        "max_position_embeddings": 256,
        "draft_vocab_size": D,
        "vocab_size": V,
        "window": 0,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": True,
        "norm_output": True,
        "aux_layers": [1, 2, 3],
    }
    return head | changes


def tiny_head(folder: Path, *, seed: int = 1, **changes: Any) -> Path:
    """A head/ directory with random weights and a random vocabulary map."""
    folder.mkdir(parents=True, exist_ok=True)
    head = settings(**changes)
    config = config_json(head, verifier="org/target", architecture="LlamaForCausalLM", speculative_tokens=3)
    draw = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in expected_tensors(config).items():
        if name == "embed_tokens.weight" or tensor.dtype in ("I64", "BOOL"):
            continue
        noise = torch.randn(tensor.shape, generator=draw)
        tensors[name] = 1 + 0.1 * noise if "norm" in name else 0.1 * noise
    if head["draft_vocab_size"] != head["vocab_size"]:
        ids = torch.randperm(head["vocab_size"], generator=draw)[: head["draft_vocab_size"]].sort().values
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(head["vocab_size"], dtype=torch.bool).index_fill_(0, ids, True)
    cast(Any, safetensors.torch).save_file(tensors, folder / "head.safetensors")
    (folder / "head.json").write_text(json.dumps({"head": head, "vocab_sha256": "0" * 64}))
    return folder


def tiny_folder(
    root: Path, *, verifier: str = "org/target", embeddings: torch.Tensor | None = None, **changes: Any
) -> Path:
    """A sound Speculators folder `root/checkpoint` from a random head."""
    write_folder(
        tiny_head(root / "head", **changes),
        root / "checkpoint",
        verifier=verifier,
        architecture="LlamaForCausalLM",
        speculative_tokens=3,
        embeddings=embeddings,
    )
    return root / "checkpoint"


def edit_config(folder: Path, change: Any) -> None:
    """Apply `change` to the parsed config.json."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Any) -> None:
    """Apply `change` to the name -> tensor dict of model.safetensors."""
    tensors = dict(cast(Any, safetensors.torch).load_file(folder / "model.safetensors"))
    change(tensors)
    cast(Any, safetensors.torch).save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def tiny_recipe(**changes: Any) -> Recipe:
    """A recipe whose target is the tiny one; `changes` replace whole sections."""
    facts = {
        "model_type": "llama",
        "architecture": "LlamaForCausalLM",
        "hidden_size": H,
        "intermediate_size": 2 * H,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": V,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "norm": "rms",
        "rope": ROPE,
        "tie_word_embeddings": False,
        "total_params_b": 0.001,
        "active_params_b": 0.001,
    }
    plain: dict[str, Any] = {
        "name": "tiny",
        "target": {"id": "org/target", "revision": "v1", "max_model_len": 256, "facts": facts},
        "domains": {"chat": {"sources": [{"path": "chat.jsonl", "form": "prompt", "field": "text"}], "train": 8}},
        "answers": {"max_tokens": 64, "max_prompt_tokens": 64},
        "capture": {"aux_layers": [1, 2, 3]},
        "head": {"draft_vocab_size": D},
        "train": {"tokens": 1000},
        "gate": {"rules": {"chat": {"min_acceptance": 1.1}}},
    }
    return build(plain | changes)


def tiny_run(root: Path, *, local: bool = False, **changes: Any) -> Path:
    """A run directory with target/ and head/ as their stages leave them."""
    folder = tiny_target(root / "target" / "model")
    info = {
        "id": "org/target",
        "revision": "v1",
        "path": str(folder.relative_to(root / "target")),
        "local": local,
        "note": "",
        "config_sha256": "c" * 64,
        "tokenizer_sha256": "d" * 64,
        "template_sha256": "e" * 64,
        "norm": "rms",
        "architecture": "LlamaForCausalLM",
    }
    (root / "target" / "target.json").write_text(json.dumps(info))
    tiny_head(root / "head", **changes)
    return root
