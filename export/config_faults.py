"""Faults that config.json shows by itself.

vLLM 0.32: transformers_utils/configs/speculators/{base,algos}.py; speculators 0.9.0: config.py, proposals/, models/.
"""

import re
from collections.abc import Iterator
from typing import Any, TypeGuard, cast

from export.checks import Fault, fault
from export.layout import DTYPES, NORM_FLAGS

CHECKED = ("eagle3", "peagle")
_FLAGS = (*NORM_FLAGS, "embed_requires_grad", "tie_word_embeddings")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
_EXPLICIT = (
    "architectures",
    "speculators_version",
    "draft_vocab_size",
    "eagle_aux_hidden_state_layer_ids",
    "target_hidden_size",
)
_EXPLICIT_LAYER = (
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_parameters",
    "attention_bias",
    "layer_types",
    "tie_word_embeddings",
)
_DEFAULTS = {
    "norm_before_residual": "vLLM takes true for eagle3 and false for peagle, speculators false",
    "norm_before_fc": "both loaders take false and leave input_norm out",
    "fc_norm": "both loaders take false and leave fc_norm out",
    "norm_output": "both loaders take false and feed back other hidden states than were trained",
    "layer_types": "both loaders take full attention",
    "rope_parameters": "vLLM takes base 10000 where it finds no rope settings",
}
_LOCAL = re.compile(r"^[/~.]|^file:|^[A-Za-z]:|\\|^[^/]+/[^/]+/")
"""what a Hub id (NAME or ORG/NAME) never looks like"""


def config_faults(config: dict[str, Any], *, local_target: bool) -> list[Fault]:
    """All faults of a config.json that is known to be Speculators format, without looking at weights or target."""
    faults = [*_algorithm(config), *_proposals(config), *_verifier(config, local_target)]
    if config.get("speculators_model_type") in CHECKED:
        faults += [*_flags(config), *_layer(config), *_aux(config), *_norms(config), *_mask(config)]
    return faults


def describes_tensors(faults: list[Fault]) -> bool:
    """True where the config is sound enough for `layout.expected_tensors`."""
    blocking = {"algorithm", "layer-config", "layer-model-type", "aux-ids", "draft-vocab", "dtype", "target-hidden"}
    return not any(item.check in blocking for item in faults)


def _algorithm(config: dict[str, Any]) -> Iterator[Fault]:
    kind, named = config.get("speculators_model_type"), _dict(config, "speculators_config").get("algorithm")
    if "model_type" in config:
        yield fault("top-model-type", f"model_type is {config['model_type']!r}")
    if kind not in CHECKED:
        yield fault("algorithm", f"speculators_model_type is {kind!r}")
    if named != kind:
        yield fault("algorithm", f"speculators_config.algorithm is {named!r}, speculators_model_type {kind!r}")


def _proposals(config: dict[str, Any]) -> Iterator[Fault]:
    spec = _dict(config, "speculators_config")
    methods = _list(spec, "proposal_methods")
    if not methods or not all(isinstance(m, dict) for m in methods):
        yield fault("proposal-methods", f"proposal_methods is {spec.get('proposal_methods')!r}")
        return
    for number, method in enumerate(methods):
        where, tokens = f"proposal_methods[{number}]", method.get("speculative_tokens")
        if method.get("proposal_type") != "greedy":
            yield fault("proposal-methods", f"{where}.proposal_type is {method.get('proposal_type')!r}")
        if not _is_count(tokens):
            yield fault("speculative-tokens", f"{where}.speculative_tokens is {tokens!r}")
        yield from (_absent(f"{where}.{k}") for k in ("verifier_accept_k", "accept_tolerance") if k not in method)
        relaxed = (method.get("verifier_accept_k", 1), method.get("accept_tolerance", 0.0))
        if relaxed != (1, 0.0):
            yield fault("proposal-acceptance", f"{where} has verifier_accept_k, accept_tolerance {relaxed}")
    default, types = spec.get("default_proposal_method"), [m.get("proposal_type") for m in methods]
    if default not in types:
        yield fault("default-proposal", f"default_proposal_method is {default!r}, listed are {types}")


def _verifier(config: dict[str, Any], local_target: bool) -> Iterator[Fault]:
    named = verifier(config)
    name = named.get("name_or_path")
    if not isinstance(name, str) or name.strip() in ("", "None", "null"):
        yield fault("verifier-name", f"speculators_config.verifier.name_or_path is {name!r}")
    elif is_local_path(name) and not local_target:
        yield fault("verifier-local-path", f"speculators_config.verifier.name_or_path is {name!r}")
    names = _list(named, "architectures")
    if not names or not all(isinstance(n, str) for n in names):
        yield fault("verifier-architectures", f"verifier.architectures is {named.get('architectures')!r}")


def is_local_path(name: str) -> bool:
    """True where `name` cannot be an id on the Hub (NAME or ORG/NAME)."""
    return bool(_LOCAL.search(name))


def _flags(config: dict[str, Any]) -> Iterator[Fault]:
    layer = _dict(config, "transformer_layer_config")
    yield from (_absent(key) for key in (*_EXPLICIT, *_FLAGS) if key not in config)
    for key in _FLAGS:
        if not isinstance(config.get(key, False), bool):
            yield fault("flag-type", f"{key} is {config[key]!r}")
    dtype = config.get("dtype", config.get("torch_dtype"))
    if dtype not in list(DTYPES):  # a list also answers for what cannot be hashed
        yield fault("dtype", f"dtype is {dtype!r}")
    if config.get("tie_word_embeddings") is True or layer.get("tie_word_embeddings"):
        yield fault("tied-embeddings", "tie_word_embeddings is true")
    draft, vocab = config.get("draft_vocab_size"), layer.get("vocab_size")
    if not _is_count(draft) or (_is_count(vocab) and draft > vocab):
        yield fault("draft-vocab", f"draft_vocab_size is {draft!r}, vocab_size {vocab!r}")
    width, hidden = config.get("target_hidden_size"), layer.get("hidden_size")
    if width is not None and width != hidden:
        yield fault("target-hidden", f"target_hidden_size is {width!r}, hidden_size {hidden!r}")


def _layer(config: dict[str, Any]) -> Iterator[Fault]:
    layer = _dict(config, "transformer_layer_config")
    sizes = {key: layer.get(key) for key in _SIZES}
    sizes |= {"head_dim": layer["head_dim"]} if layer.get("head_dim") is not None else {}
    if not all(_is_count(size) for size in sizes.values()):
        wrong = ", ".join(f"{key} {size!r}" for key, size in sizes.items() if not _is_count(size))
        yield fault("layer-config", f"transformer_layer_config has {wrong}")
    elif layer["num_attention_heads"] % layer["num_key_value_heads"]:
        yield fault("layer-config", "num_attention_heads is no multiple of num_key_value_heads")
    kind = layer.get("model_type")
    if kind not in ("llama", "qwen3"):
        yield fault("layer-model-type", f"transformer_layer_config.model_type is {kind!r}")
    explicit = (*_EXPLICIT_LAYER, "mlp_bias") if kind == "llama" else _EXPLICIT_LAYER
    yield from (_absent(f"transformer_layer_config.{key}") for key in explicit if layer.get(key) is None)
    yield from _layer_types(layer)


def _layer_types(layer: dict[str, Any]) -> Iterator[Fault]:
    types, window = layer.get("layer_types"), layer.get("sliding_window")
    if types is None:
        return
    listed = _list(layer, "layer_types")
    unknown = [t for t in listed if t not in ("full_attention", "sliding_attention")]
    if unknown or len(listed) != layer.get("num_hidden_layers"):
        yield fault("layer-types", f"layer_types is {types!r} for {layer.get('num_hidden_layers')!r} layers")
    elif "sliding_attention" in listed and not _is_count(window):
        yield fault("layer-types", f"layer_types is {types!r}, sliding_window {window!r}")


def _aux(config: dict[str, Any]) -> Iterator[Fault]:
    ids, layer = _list(config, "eagle_aux_hidden_state_layer_ids"), _dict(config, "transformer_layer_config")
    if not ids or not all(_is_count(i, least=0) for i in ids):
        given = config.get("eagle_aux_hidden_state_layer_ids")
        yield fault("aux-ids", f"eagle_aux_hidden_state_layer_ids is {given!r}")
        return
    if ids != sorted(set(ids)):
        yield fault("aux-order", f"eagle_aux_hidden_state_layer_ids is {ids}")
    stated = layer.get("num_aux_hidden_states")
    assumed = len(ids) if layer.get("model_type") == "qwen3" else 3
    if len(ids) != (assumed if stated is None else stated):
        yield fault("aux-count", f"{len(ids)} ids, transformer_layer_config.num_aux_hidden_states {stated!r}")


def _norms(config: dict[str, Any]) -> Iterator[Fault]:
    if config.get("norm_before_fc") and config.get("fc_norm"):
        yield fault("norm-conflict", "norm_before_fc and fc_norm are both true")
    if config["speculators_model_type"] == "peagle":
        yield from (fault("peagle-norms", f"{flag} is true") for flag in ("fc_norm", "norm_output") if config.get(flag))


def _mask(config: dict[str, Any]) -> Iterator[Fault]:
    mask, vocab = config.get("mask_token_id"), _dict(config, "transformer_layer_config").get("vocab_size")
    if config["speculators_model_type"] != "peagle":
        return
    if not _is_count(mask, least=0) or (_is_count(vocab) and mask >= vocab):
        yield fault("peagle-mask", f"mask_token_id is {mask!r}, vocab_size {vocab!r}")


def _absent(key: str) -> Fault:
    why = _DEFAULTS.get(key.rsplit(".", 1)[-1], "a loader's default would decide")
    return fault("implicit-flag", f"{key} is not written ({why})")


def verifier(config: dict[str, Any]) -> dict[str, Any]:
    """speculators_config.verifier, empty where it is none."""
    return _dict(_dict(config, "speculators_config"), "verifier")


def _dict(holder: dict[str, Any], key: str) -> dict[str, Any]:
    value = holder.get(key)
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def _list(holder: dict[str, Any], key: str) -> list[Any]:
    value = holder.get(key)
    return cast(list[Any], value) if isinstance(value, list) else []


def _is_count(value: Any, *, least: int = 1) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
