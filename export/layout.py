"""The Speculators format in one place: which tensors, of which shape and type, a config.json implies.

Facts are from speculators 0.9.0 (models/eagle3, models/peagle) and vLLM 0.32 (model_executor/models/llama_eagle3.py,
qwen3_eagle3.py). Letters: H hidden size, A aux states, D draft vocabulary, V the target's vocabulary.
"""

from dataclasses import dataclass
from typing import Any

FORMAT_VERSION = "0.9.0"
"""the speculators release whose format is written and checked"""

NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""config.json's name of a type -> safetensors' name"""


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """What one tensor of model.safetensors must be."""

    shape: tuple[int, ...]
    dtype: str
    """safetensors' name: BF16, I64, BOOL, ..."""
    required: bool = True


def expected_tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    """Name -> Tensor for an eagle3 or peagle config.json; absent flags count as false.

    Its sizes, aux ids and dtype must be sound, which `config_faults.describes_tensors` tells.
    """
    layer = config["transformer_layer_config"]
    hidden, vocab, draft = layer["hidden_size"], layer["vocab_size"], config["draft_vocab_size"]
    fused = len(config["eagle_aux_hidden_state_layer_ids"]) * (config.get("target_hidden_size") or hidden)
    peagle = config["speculators_model_type"] == "peagle"
    shapes = {
        "fc.weight": (hidden, fused),
        "norm.weight": (hidden,),
        **_norm_shapes(config, fused),
        **{name: shape for i in range(layer["num_hidden_layers"]) for name, shape in _layer_shapes(layer, i).items()},
    }
    if peagle:
        shapes["mask_hidden"] = (1, 1, fused)
    floats = DTYPES[config.get("dtype") or config["torch_dtype"]]
    tensors = {name: Tensor(shape=shape, dtype=floats) for name, shape in shapes.items()}
    trained = peagle or bool(config.get("embed_requires_grad"))
    tensors["embed_tokens.weight"] = Tensor(shape=(vocab, hidden), dtype=floats, required=trained)
    tensors["lm_head.weight"] = Tensor(shape=(draft, hidden), dtype=floats, required=draft != vocab)
    if draft != vocab:
        tensors["d2t"] = Tensor(shape=(draft,), dtype="I64")
        tensors["t2d"] = Tensor(shape=(vocab,), dtype="BOOL")
    return tensors


def _norm_shapes(config: dict[str, Any], fused: int) -> dict[str, tuple[int, ...]]:
    count = len(config["eagle_aux_hidden_state_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {}
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (fused,)
    if config.get("fc_norm"):
        shapes.update({f"fc_norm.{i}.weight": (fused // count,) for i in range(count)})
    return shapes


def _layer_shapes(layer: dict[str, Any], index: int) -> dict[str, tuple[int, ...]]:
    hidden, inner = layer["hidden_size"], layer["intermediate_size"]
    heads, kv_heads = layer["num_attention_heads"], layer["num_key_value_heads"]
    size = layer.get("head_dim") or hidden // heads  # both loaders fall back to that
    width = 2 * hidden if index == 0 else hidden  # the first layer reads cat(embedding, fused state)
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (heads * size, width),
        "self_attn.k_proj.weight": (kv_heads * size, width),
        "self_attn.v_proj.weight": (kv_heads * size, width),
        "self_attn.o_proj.weight": (hidden, heads * size),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if index == 0:
        shapes["hidden_norm.weight"] = (hidden,)
    if layer["model_type"] == "qwen3":
        shapes |= {"self_attn.q_norm.weight": (size,), "self_attn.k_norm.weight": (size,)}
    biased = [n for n in shapes if "self_attn" in n and "_proj" in n] if layer.get("attention_bias") else []
    biased += [n for n in shapes if "mlp" in n] if layer.get("mlp_bias") and layer["model_type"] == "llama" else []
    shapes |= {name.replace(".weight", ".bias"): shapes[name][:1] for name in biased}
    return {f"layers.{index}.{name}": shape for name, shape in shapes.items()}
