"""What a recipe may say: one frozen dataclass per stage. Units are in the field's docstring.

Types and ranges are checked by pydantic, rules that span fields by :mod:`recipes.check`; both report every fault at once.
"""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

_STRICT = ConfigDict(extra="forbid")
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


@dataclass(frozen=True, kw_only=True, config=_STRICT)
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
    rms_norm_eps: float
    norm: Literal["rms", "rms_plus_one"]
    """rms multiplies by w, rms_plus_one (Gemma, Qwen3.5) by 1 + w"""
    rope: dict[str, float | str | bool]
    """transformers' rope_parameters"""
    tie_word_embeddings: bool
    total_params_b: Annotated[float, Field(gt=0)]
    """1e9 parameters, for bytes"""
    active_params_b: Annotated[float, Field(gt=0)]
    """1e9 parameters that one token uses, for time"""
    weight_bytes: Annotated[float, Field(gt=0)] = 2.0
    """bytes a parameter as served"""
    template: str = ""
    """one line: what the chat template is and what it does to history"""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
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
    local_only: bool = False
    """true: nobody else can fetch these weights, so the head is marked as not portable"""
    facts: Facts


@dataclass(frozen=True, kw_only=True, config=_STRICT)
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


@dataclass(frozen=True, kw_only=True, config=_STRICT)
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
    weight: Annotated[float, Field(gt=0)] = 1.0
    """passes over this domain's rows in one epoch"""
    wrap: str = "{prompt}"
    """put around a user's turn, e.g. an instruction"""
    min_chars: Count = 10
    max_chars: Positive = 1500
    """of each user turn"""
    max_non_ascii: Share = 0.05
    """share of non-ASCII characters above which a conversation counts as another language; 1 = any"""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Answers:
    """How the target answers the prompts."""

    mode: Literal["target", "prewritten"] = "target"
    """target: the target's own answers (on-policy); prewritten: the data's (off-policy, said so on the card)"""
    url: str = ""
    """an OpenAI-compatible server that is already up; empty = we start one"""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: int = 0
    max_tokens: Positive = 200
    """an answer"""
    max_prompt_tokens: Positive = 1024
    """a longer prompt is dropped and counted"""
    max_turns: Positive = 1
    """user turns of a conversation that are answered, one after another"""
    concurrency: Positive = 256
    """requests in flight"""
    retries: Count = 4
    held_out: Count = 16
    """held-out conversations a domain that are answered too, for the simulated acceptance length"""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Capture:
    """Which hidden states, and how they are kept."""

    backend: Literal["hf", "sglang", "vllm"] = "hf"
    aux_layers: tuple[int, ...] = ()
    """vLLM's ids: the residual stream after i layers; empty = 2, N//2, N-3"""
    dtype: Literal["bfloat16", "float8_e4m3fn", "float32"] = "bfloat16"
    """on disk; float8 keeps one scale a token and state"""
    shard_tokens: Positive = 16384
    batch_tokens: Positive = 2048
    """tokens in one forward of the target"""
    check_rows: Positive = 4
    """rows whose teacher logits are compared with the model's own"""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Head:
    """The draft model."""

    algorithm: Literal["eagle3"] = "eagle3"
    layer_type: Literal["llama", "qwen3"] = "llama"
    num_layers: Annotated[int, Field(ge=1, le=4)] = 1
    intermediate_size: Count = 0
    """0 = the target's"""
    draft_vocab_size: Positive = 32000
    window: Count = 0
    """sliding-window attention, tokens; 0 = full"""
    norm_before_residual: bool = True
    norm_before_fc: bool = False
    fc_norm: bool = True
    norm_output: bool = True
    train_lm_head: bool = False
    norm_scale: Annotated[float, Field(gt=0)] = 0.5
    """the final norm starts as this times the target's: at full size the first logits are several times too large"""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Train:
    """The optimisation."""

    tokens: Count = 0
    """supervised tokens to see; 0 = by epochs"""
    epochs: Annotated[float, Field(ge=0)] = 0.0
    """passes over the training rows; 0 = by tokens"""
    pack_tokens: Positive = 1024
    """tokens in a packed sequence, at most; a longer row is its own pack"""
    accumulate: Positive = 1
    """packs an optimiser step and process"""
    ttt_steps: Annotated[int, Field(ge=1, le=16)] = 3
    ttt_decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """weight of TTT step k is this to the power k"""
    loss: Literal["kl"] = "kl"
    optimizer: Literal["muon", "adamw"] = "muon"
    """muon: Muon for the hidden matrices, AdamW for the rest"""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """AdamW's"""
    muon_lr: Annotated[float, Field(gt=0)] = 0.02
    beta1: Share = 0.9
    beta2: Share = 0.95
    weight_decay: Annotated[float, Field(ge=0)] = 0.15
    clip: Annotated[float, Field(gt=0)] = 1.0
    warmup_steps: Count = 20
    final_lr: Share = 0.05
    """share of lr at the end of the cosine"""
    precision: Literal["bf16", "fp32"] = "bf16"
    """of the forward and backward; the master weights are fp32"""
    checkpoint_steps: Positive = 100
    simulate_steps: Count = 0
    """steps between two simulations on held-out features; 0 = only at the end"""
    seed: int = 0
    warm_start: str = ""
    """a head directory to go on from; its vocabulary map must be this run's"""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Export:
    """The checkpoint."""

    speculative_tokens: Annotated[int, Field(ge=1, le=16)] = 3
    include_embeddings: bool = False
    """ship the target's embeddings too; vLLM shares the target's where they are absent"""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Rule:
    """What a domain must reach; each bound is compared with the lower end of the interval."""

    min_acceptance: float = 0.0
    """tokens a target step, pooled"""
    min_acceptance_unrepeated: float = 0.0
    """the same over answers without a repeated 4-gram"""
    min_speedup: float = 0.0
    """output tokens/s against no speculation at concurrency 1, median of the rounds"""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Gate:
    """What is measured in vLLM, and what must be reached to publish."""

    rules: dict[str, Rule]
    """by domain; every domain that is measured needs one, an empty rule only reports"""
    prompts: Positive = 60
    """a domain"""
    max_tokens: Positive = 200
    temperatures: tuple[Annotated[float, Field(ge=0)], ...] = (0.0,)
    concurrency: Positive = 8
    """requests in flight while acceptance is measured"""
    speed_domain: str = ""
    """whose prompts the speed arms answer; empty = the first domain that has a speed rule"""
    speed_prompts: Positive = 12
    speed_max_tokens: Positive = 100
    speed_rounds: Annotated[int, Field(ge=3)] = 3
    ngram: bool = True
    """measure n-gram speculation beside the head"""
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    min_requests: Positive = 30
    """fewer measured requests in a domain fail the gate"""
    bootstrap: Annotated[int, Field(ge=1000)] = 10000
    seed: int = 0
    parity_windows: Share = 0.985
    """share of served windows that our own replay must reproduce"""
    parity_length: Share = 0.01
    """relative difference of the replayed and the served acceptance length, at most"""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Publish:
    """Where the head goes."""

    repo_id: str = ""
    """ORG/NAME on the Hub; empty = a folder laid out like one"""
    private: bool = True
    endpoint: str = ""
    """another Hub's URL; empty = HF_ENDPOINT or the public one"""
    data_licence: str = ""
    """a licence that allows publishing prompts and answers with the record; empty = ids, counts and hashes only"""
    licence: str = "apache-2.0"
    """of the head"""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Tracking:
    """Weights & Biases."""

    wandb: Literal["offline", "online", "disabled"] = "offline"
    project: str = "draftsmith"


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Engine:
    """How the serving engine is started, in its own environment if need be."""

    command: tuple[str, ...] = ("{python}", "-m", "vllm.entrypoints.openai.api_server")
    """{python} is this interpreter; name another environment's for an engine that pins other versions"""
    args: tuple[str, ...] = ()
    """further engine options, e.g. --tensor-parallel-size 4"""
    env: dict[str, str] = Field(default_factory=dict)
    start_timeout_s: Positive = 600


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Recipe:
    """A whole recipe: what to make, from what, and what it must reach."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    target: Target
    domains: dict[str, Domain]
    seed: int = 0
    """of the order of prompts"""
    answers: Answers = Field(default_factory=Answers)
    capture: Capture = Field(default_factory=Capture)
    head: Head = Field(default_factory=Head)
    train: Train
    export: Export = Field(default_factory=Export)
    gate: Gate
    publish: Publish = Field(default_factory=Publish)
    tracking: Tracking = Field(default_factory=Tracking)
    engine: Engine = Field(default_factory=Engine)
