"""A small sound recipe as plain data, for tests that break it."""

import copy
from typing import Any

FACTS: dict[str, Any] = {
    "model_type": "llama",
    "architecture": "LlamaForCausalLM",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "norm": "rms",
    "rope": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "total_params_b": 0.001,
    "active_params_b": 0.001,
}
RECIPE: dict[str, Any] = {
    "name": "small",
    "target": {"id": "a/b", "revision": "1", "path": "target", "max_model_len": 2048, "facts": FACTS},
    "domains": {
        "chat": {
            "sources": [{"path": "chat.jsonl", "form": "messages", "field": "messages"}],
            "train": 100,
            "held_out": 40,
        },
        "bench": {
            "role": "benchmark",
            "sources": [{"path": "bench.jsonl", "form": "prompt", "field": "prompt"}],
            "held_out": 40,
        },
    },
    "head": {"draft_vocab_size": 128},
    "train": {"epochs": 2.0},
    "gate": {"rules": {"chat": {"min_acceptance": 1.4, "min_speedup": 1.2}, "bench": {}}, "prompts": 40},
}


def small(**changes: Any) -> dict[str, Any]:
    """The small recipe with `changes`: dotted keys written with __, e.g. train__lr=1; ... removes a key."""
    plain = copy.deepcopy(RECIPE)
    for dotted, value in changes.items():
        *path, last = dotted.split("__")
        node = plain
        for part in path:
            node = node.setdefault(part, {})
        if value is ...:
            del node[last]
        else:
            node[last] = value
    return plain
