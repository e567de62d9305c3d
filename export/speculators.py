"""Trained state -> a Speculators folder that both `speculators` and vLLM load.

Every flag is written, because the two loaders assume different values for absent ones. Same head, same bytes.
"""

import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open

from data.target import embedding, read_target, served_path
from data.tensors import write_tensors
from export.checks import listing
from export.layout import FORMAT_VERSION, expected_tensors
from export.validate import validate
from recipes.artifact import write_json
from recipes.schema import Recipe


def make(recipe: Recipe, run: Path, out: Path) -> dict[str, Any]:
    """The stage `checkpoint`: target/ and head/ -> config.json and model.safetensors. Returns parameters and bytes.

    Raises ValueError where the head does not fit its own settings or the folder written has a fault.
    """
    target, served = read_target(run), served_path(run)
    local = bool(target["local"])
    accounting = write_folder(
        run / "head",
        out,
        # An id that nobody can fetch would make `vllm serve FOLDER` fail on this machine too.
        verifier=str(served) if local else target["id"],
        architecture=target["architecture"],
        speculative_tokens=recipe.export.speculative_tokens,
        embeddings=embedding(served) if recipe.export.include_embeddings else None,
    )
    faults = validate(out, target=served, local_target=local)
    if faults:
        raise ValueError(f"the folder exported from {run / 'head'} has faults:\n{listing(faults)}")
    return accounting


def write_folder(
    head: Path,
    out: Path,
    *,
    verifier: str,
    architecture: str,
    speculative_tokens: int,
    embeddings: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Write config.json and model.safetensors (bf16) for the trained state in `head` into the folder `out`.

    `verifier` is the target's id or path, `architecture` its class name; `embeddings` [V, H] are shipped where given.
    Returns {"parameters", "bytes"}. Raises ValueError where a tensor is missing, superfluous, misshaped or not finite.
    """
    settings = cast(dict[str, Any], json.loads((head / "head.json").read_text(encoding="utf-8")))["head"]
    config = config_json(settings, verifier=verifier, architecture=architecture, speculative_tokens=speculative_tokens)
    tensors = _tensors(head / "head.safetensors", config, embeddings)
    out.mkdir(parents=True, exist_ok=True)
    write_tensors(out / "model.safetensors", tensors, {"format": "pt"})
    write_json(out / "config.json", config)
    return {
        "parameters": sum(t.numel() for name, t in tensors.items() if name not in ("d2t", "t2d")),
        "bytes": (out / "model.safetensors").stat().st_size,
    }


def config_json(
    settings: dict[str, Any], *, verifier: str, architecture: str, speculative_tokens: int
) -> dict[str, Any]:
    """config.json for head.json's settings. No model_type: vLLM would no longer see the format.

    Raises ValueError where the aux ids are not strictly ascending.
    """
    aux = list(settings["aux_layers"])
    if aux != sorted(set(aux)):
        raise ValueError(
            f"aux_layers: {aux} must be strictly ascending; vLLM sorts them and would permute fc's columns"
        )
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": FORMAT_VERSION,
        "dtype": "bfloat16",
        "draft_vocab_size": settings["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": aux,
        "embed_requires_grad": False,
        "fc_norm": settings["fc_norm"],
        "norm_before_fc": settings["norm_before_fc"],
        "norm_before_residual": settings["norm_before_residual"],
        "norm_output": settings["norm_output"],
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": speculative_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier, "architectures": [architecture]},
        },
        "transformer_layer_config": _layer_config(settings),
    }


def _layer_config(settings: dict[str, Any]) -> dict[str, Any]:
    window, layers = settings["window"], settings["num_layers"]
    config: dict[str, Any] = {
        "model_type": settings["layer_type"],
        "vocab_size": settings["vocab_size"],
        "hidden_size": settings["hidden_size"],
        "intermediate_size": settings["intermediate_size"],
        "num_hidden_layers": layers,
        "num_attention_heads": settings["num_attention_heads"],
        "num_key_value_heads": settings["num_key_value_heads"],
        "head_dim": settings["head_dim"],
        "hidden_act": "silu",
        "rms_norm_eps": settings["rms_norm_eps"],
        "max_position_embeddings": settings["max_position_embeddings"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rope_parameters": settings["rope"],
        "use_sliding_window": bool(window),
        "sliding_window": window or None,
        "layer_types": ["sliding_attention" if window else "full_attention"] * layers,
        "tie_word_embeddings": False,
        "use_cache": True,
        # vLLM's llama drafter reads only this key and takes 3 where it is absent, whatever the ids above say.
        "num_aux_hidden_states": len(settings["aux_layers"]),
    }
    return config | ({"mlp_bias": False, "pretraining_tp": 1} if settings["layer_type"] == "llama" else {})


def _tensors(file: Path, config: dict[str, Any], embeddings: torch.Tensor | None) -> dict[str, torch.Tensor]:
    expected = expected_tensors(config)
    with cast(Any, safe_open)(file, "pt") as stored:
        names = set(stored.keys()) - ({"d2t", "t2d"} - set(expected))
        found = {name: _as_written(name, stored.get_tensor(name)) for name in sorted(names)}
    if embeddings is not None:
        found["embed_tokens.weight"] = _as_written("embed_tokens.weight", embeddings)
    faults = [f"{name}: missing" for name in sorted(expected) if expected[name].required and name not in found]
    faults += [f"{name}: not part of the format" for name in sorted(set(found) - set(expected))]
    for name in sorted(set(found) & set(expected)):
        if tuple(found[name].shape) != expected[name].shape:
            faults.append(f"{name}: shape {list(found[name].shape)}, head.json implies {list(expected[name].shape)}")
        elif not bool(found[name].isfinite().all()):
            faults.append(f"{name}: holds NaN or Inf")
    if faults:
        raise ValueError(f"{file} does not fit its head.json:\n" + "\n".join(f"  {fault}" for fault in faults))
    return found


def _as_written(name: str, tensor: torch.Tensor) -> torch.Tensor:
    dtype = {"d2t": torch.int64, "t2d": torch.bool}.get(name, torch.bfloat16)
    return tensor.to(dtype).contiguous()
