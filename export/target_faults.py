"""Faults that only show beside the target: sizes, positions, rope, and rows that are not the target's own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig

from data.target import embedding, output_matrix
from export.checks import Fault, fault
from export.config_faults import verifier
from export.weight_faults import Files, draft_ids, read


def target_config(target: Path) -> Any:
    """transformers' (text) config of the target's folder. Raises ValueError where it cannot be read."""
    try:
        return cast(Any, AutoConfig).from_pretrained(target).get_text_config()
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and its own kinds
        raise ValueError(f"target {target} cannot be read ({str(error).strip().splitlines()[0]})") from error


def size_faults(config: dict[str, Any], target: Any) -> Iterator[Fault]:
    """config.json's sizes, ids, positions and rope against the target's config."""
    layer = config["transformer_layer_config"]
    if layer.get("hidden_size") != target.hidden_size:
        yield fault("target-hidden", f"hidden_size is {layer.get('hidden_size')!r}, the target's {target.hidden_size}")
    if layer.get("vocab_size") != target.vocab_size:
        yield fault("target-vocab", f"vocab_size is {layer.get('vocab_size')!r}, the target's {target.vocab_size}")
    positions = layer.get("max_position_embeddings")
    if not isinstance(positions, int) or positions < target.max_position_embeddings:
        own = target.max_position_embeddings
        yield fault("target-positions", f"max_position_embeddings is {positions!r}, the target's {own}")
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    layers = int(target.num_hidden_layers)
    for i in cast(list[Any], ids) if isinstance(ids, list) else []:
        if isinstance(i, int) and i > layers:
            yield fault("aux-range", f"eagle_aux_hidden_state_layer_ids holds {i}, the target has {layers} layers")
    rope, own = _rope(layer), _target_ropes(target)
    if rope not in own:
        yield fault("target-rope", f"rope_parameters is {rope}, the target's {' or '.join(map(str, own))}")


def architecture_faults(config: dict[str, Any], target: Any) -> Iterator[Fault]:
    """The class that the checkpoint names against the target's."""
    named = verifier(config).get("architectures")
    own = list(target.architectures or [])
    if own and named and named != own:
        yield fault("verifier-architectures", f"verifier.architectures is {named!r}, the target's {own}")


def row_faults(files: Files, config: dict[str, Any], target: Path) -> Iterator[Fault]:
    """Embeddings and lm_head rows against the target's weights. Shapes must have passed before."""
    trained = config["speculators_model_type"] == "peagle" or config.get("embed_requires_grad")
    if "embed_tokens.weight" in files and not trained:
        own, shipped = embedding(target), read(files, "embed_tokens.weight")
        differing = int((own.to(shipped.dtype) != shipped).any(dim=1).sum())
        if differing:
            yield fault("embeddings-differ", f"{differing} of {len(shipped)} rows of embed_tokens.weight differ")
    if "lm_head.weight" in files:
        rows, own = read(files, "lm_head.weight"), output_matrix(target)
        if own.is_floating_point() and own.shape[1] == rows.shape[1]:
            ids = draft_ids(files, len(own))
            moved = misplaced_rows(rows, own.to(rows.dtype), ids)
            if moved:
                yield fault("lm-head-rows", f"{moved} of {len(rows)} rows of lm_head.weight are misplaced")


def misplaced_rows(rows: torch.Tensor, own: torch.Tensor, ids: torch.Tensor) -> int:
    """How many rows [D, H] are not their own of `own[ids]`, but bit for bit another row of `own` [V, H].

    A trained row is neither.
    """
    elsewhere = torch.nonzero((rows != own[ids]).any(dim=1)).flatten()
    if not len(elsewhere):
        return 0
    known = {_bytes(row) for row in own}
    return sum(_bytes(rows[int(i)]) in known for i in elsewhere)


def _bytes(row: torch.Tensor) -> bytes:
    return row.contiguous().view(torch.uint8).numpy().tobytes()


def _rope(layer: dict[str, Any]) -> dict[str, Any]:
    """The rope settings in transformers 5's form, older keys too, without what says nothing."""
    given = layer.get("rope_parameters") or layer.get("rope_scaling")
    rope: dict[str, Any] = {**cast(dict[str, Any], given)} if isinstance(given, dict) else {}
    for key in ("rope_theta", "partial_rotary_factor"):
        if layer.get(key) is not None:
            rope.setdefault(key, layer[key])
    older = rope.pop("type", None)
    rope["rope_type"] = rope.get("rope_type") or older or "default"
    if rope.get("partial_rotary_factor") in (None, 1.0):
        rope.pop("partial_rotary_factor", None)
    return {key: float(value) if _is_number(value) else value for key, value in rope.items() if value is not None}


def _target_ropes(target: Any) -> list[dict[str, Any]]:
    """One, or one for each kind of layer (Gemma)."""
    rope = cast(dict[str, Any], getattr(target, "rope_parameters", None) or {})
    nested = [cast(dict[str, Any], value) for value in rope.values() if isinstance(value, dict)]
    return [_rope({"rope_parameters": value}) for value in (nested or [rope])]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
