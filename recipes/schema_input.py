"""What a recipe starts from: the target and the traffic. Units are in the field's docstring."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
Count = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[int, Field(strict=True, ge=1)]
Flag = Annotated[bool, Field(strict=True)]
Number = Annotated[float, Field(strict=True)]
Integer = Annotated[int, Field(strict=True)]
Load = Annotated[str, BeforeValidator(str), Field(pattern=r"^[1-9][0-9]*$")]
"""requests in flight, as a key: YAML reads it as a number, JSON as a string"""
Share = Annotated[float, Field(strict=True, ge=0.0, le=1.0)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Facts:
    """What `plan` must know of a target before its weights are here; `prepare` compares it with the real config."""

    model_type: str
    """transformers' model type, e.g. llama, qwen3_moe, gpt_oss"""
    architecture: str
    """class name in the target's config.json"""
    hidden_size: Positive
    intermediate_size: Positive
    """of the target's dense (or shared) MLP; the head's default"""
    num_hidden_layers: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive
    vocab_size: Positive
    max_position_embeddings: Positive
    """tokens"""
    rms_norm_eps: Number
    norm: Literal["rms", "rms_plus_one"]
    """rms multiplies by w, rms_plus_one (Gemma, Qwen3.5) by 1 + w"""
    rope: dict[str, int | float | str | bool]
    """transformers' rope_parameters"""
    tie_word_embeddings: Flag
    total_params_b: Annotated[float, Field(strict=True, gt=0)]
    """1e9 parameters, for bytes"""
    active_params_b: Annotated[float, Field(strict=True, gt=0)]
    """1e9 parameters that one token uses, for time"""
    weight_bytes: Annotated[float, Field(strict=True, gt=0)] = 2.0
    """bytes a parameter as served"""
    template: str = ""
    """one line: what the chat template is and what it does to history"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Target:
    """The model that the head drafts for."""

    id: str
    """published id; goes into the checkpoint as the verifier's name"""
    revision: str
    """published revision (commit or tag) or the version of the package that ships it"""
    path: str = ""
    """where it is served from: folder, `package:PKG/FILE` or a .gguf file; empty = the id itself"""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    quantization: str = ""
    """as the engine calls it (fp8, awq, mxfp4, ...); empty = none"""
    max_model_len: Positive = 4096
    """tokens the engine serves"""
    note: str = ""
    """goes on the card, e.g. that the weights were dequantised"""
    local_only: Flag = False
    """true: nobody else can fetch these weights, so the head is marked as not portable"""
    facts: Facts


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Source:
    """Where conversations come from."""

    path: str
    """`hub:ORG/NAME`, `package:PKG/FILE` (inside an installed package), or a .json, .jsonl, .parquet file (.gz too)"""
    form: Literal["sharegpt", "messages", "prompt"]
    """sharegpt: [{from, value}]; messages: [{role, content}]; prompt: one string a row"""
    field: str
    """the row's key that holds them; for a list of prompts its first item is used"""
    split: str = "train"
    """Hub data only"""
    subset: str = ""
    """Hub data only: configuration name"""
    revision: str = ""
    """Hub data only"""
    licence: str = "unknown"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Domain:
    """One kind of traffic. A benchmark is measured, never trained on."""

    role: Literal["traffic", "benchmark"] = "traffic"
    sources: tuple[Source, ...]
    train: Count = 0
    """conversations to train on, at most"""
    held_out: Count = 64
    """conversations kept for measurement, at most"""
    held_out_share: Share = 0.02
    """share of a traffic domain's conversations that the content hash sends to held-out"""
    weight: Annotated[float, Field(strict=True, gt=0)] = 1.0
    """passes over this domain's rows in one epoch"""
    wrap: str = "{prompt}"
    """put around a user's turn, e.g. an instruction"""
    min_chars: Count = 10
    max_chars: Positive = 1500
    """of each user turn"""
    max_non_ascii: Share = 0.05
    """share of non-ASCII characters above which a conversation counts as another language; 1 = any"""
