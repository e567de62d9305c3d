"""What a recipe may say: one frozen dataclass per stage. Units are in the field's docstring.

Types and ranges are checked by pydantic, rules that span fields by recipes.check; both report every fault at once.
"""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from recipes.schema_gate import Gate as Gate
from recipes.schema_gate import Rule as Rule
from recipes.schema_input import STRICT, Count, Flag, Integer, Positive, Share
from recipes.schema_input import Domain as Domain
from recipes.schema_input import Facts as Facts
from recipes.schema_input import Source as Source
from recipes.schema_input import Target as Target


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Answers:
    """How the target answers the prompts."""

    mode: Literal["target", "prewritten"] = "target"
    """target: the target's own answers (on-policy); prewritten: the data's (off-policy, said so on the card)"""
    url: str = ""
    """an OpenAI-compatible server that is already up; empty = we start one"""
    temperature: Annotated[float, Field(strict=True, ge=0)] = 0.0
    top_p: Annotated[float, Field(strict=True, gt=0, le=1)] = 1.0
    seed: Integer = 0
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


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Capture:
    """Which hidden states, and how they are kept."""

    backend: Literal["auto", "hf", "sglang", "vllm"] = "auto"
    """auto: SGLang where a GPU and SGLang are, else transformers (hf)"""
    mode: Literal["disk", "stream"] = "disk"
    """stream: the trainer is fed by the running engine, and only held-out features are written"""
    command: tuple[str, ...] = ("{python}",)
    """starts Python in SGLang's environment; {python} is this interpreter"""
    env: dict[str, str] = Field(default_factory=dict)
    options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """further ServerArgs of SGLang, e.g. attention_backend: triton"""
    engines: Positive = 1
    """SGLang engines that share the rows, each on tensor_parallel GPUs of its own"""
    tensor_parallel: Positive = 1
    """GPUs that share one target"""
    memory: Annotated[float, Field(strict=True, gt=0, lt=1)] = 0.6
    """share of the GPU that SGLang may take"""
    aux_layers: tuple[Integer, ...] = ()
    """vLLM's ids: the residual stream after i layers; empty = 2, N//2, N-3"""
    dtype: Literal["bfloat16", "float8_e4m3fn", "float32"] = "bfloat16"
    """on disk; float8 keeps one scale a token and state"""
    shard_tokens: Positive = 16384
    batch_tokens: Positive = 2048
    """tokens in one forward of the target"""
    check_rows: Count = 4
    """rows compared with a transformers forward before anything is captured; 0 where the target is too large for one"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Head:
    """The draft model."""

    algorithm: Literal["eagle3"] = "eagle3"
    layer_type: Literal["llama", "qwen3"] = "llama"
    num_layers: Annotated[int, Field(strict=True, ge=1, le=4)] = 1
    intermediate_size: Count = 0
    """0 = the target's"""
    draft_vocab_size: Positive = 32000
    window: Count = 0
    """sliding-window attention, tokens; 0 = full"""
    norm_before_residual: Flag = True
    norm_before_fc: Flag = False
    fc_norm: Flag = True
    norm_output: Flag = True
    train_lm_head: Flag = False
    norm_scale: Annotated[float, Field(strict=True, gt=0)] = 0.5
    """the final norm starts as this times the target's: at full size the first logits are several times too large"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Train:
    """The optimisation."""

    tokens: Count = 0
    """supervised tokens to see; 0 = by epochs"""
    epochs: Annotated[float, Field(strict=True, ge=0)] = 0.0
    """passes over the training rows; 0 = by tokens"""
    pack_tokens: Positive = 1024
    """tokens in a packed sequence, at most; a longer row is its own pack"""
    accumulate: Positive = 1
    """packs an optimiser step and process"""
    processes: Positive = 1
    """training processes, one a GPU; on a CPU they share the cores"""
    sharding: Literal["ddp", "fsdp2"] = "ddp"
    """ddp: each process holds everything; fsdp2: its share of trained weights, gradients and optimiser states"""
    ttt_steps: Annotated[int, Field(strict=True, ge=1, le=16)] = 3
    ttt_decay: Annotated[float, Field(strict=True, gt=0, le=1)] = 0.8
    """weight of TTT step k is this to the power k"""
    loss: Literal["kl", "lk_alpha", "lk_lambda"] = "kl"
    """kl: soft labels; lk_alpha, lk_lambda: the chance of acceptance, alone or mixed with kl (arXiv 2602.23881)"""
    optimizer: Literal["muon", "adamw"] = "muon"
    """muon: Muon for the hidden matrices, AdamW for the rest"""
    lr: Annotated[float, Field(strict=True, gt=0)] = 1e-3
    """AdamW's"""
    muon_lr: Annotated[float, Field(strict=True, gt=0)] = 0.02
    muon_steps: Positive = 5
    """Newton-Schulz iterations; 3 did as well at the demo's size, and cost less"""
    beta1: Share = 0.9
    beta2: Share = 0.95
    weight_decay: Annotated[float, Field(strict=True, ge=0)] = 0.15
    clip: Annotated[float, Field(strict=True, gt=0)] = 1.0
    warmup_steps: Count = 20
    final_lr: Share = 0.05
    """share of lr at the end of the cosine"""
    precision: Literal["bf16", "fp32"] = "bf16"
    """of the forward and backward; the master weights are fp32"""
    recompute: Flag = False
    """gradient checkpointing: the backward makes each TTT step again instead of keeping it; slower, less memory;
    without effect in bf16 on a CPU"""
    deterministic: Flag = False
    """on a GPU: only kernels that give the same bits every time; slower"""
    checkpoint_steps: Positive = 100
    simulate_steps: Count = 0
    """steps between two simulations on held-out features; 0 = only at the end"""
    seed: Integer = 0
    warm_start: str = ""
    """a head directory to go on from; its vocabulary map must be this run's"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Export:
    """The checkpoint."""

    speculative_tokens: Annotated[int, Field(strict=True, ge=1, le=16)] = 3
    include_embeddings: Flag = False
    """ship the target's embeddings too; vLLM shares the target's where they are absent"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Publish:
    """Where the head goes."""

    repo_id: str = ""
    """ORG/NAME on the Hub; empty = a folder laid out like one"""
    private: Flag = True
    endpoint: str = ""
    """another Hub's URL; empty = HF_ENDPOINT or the public one"""
    data_licence: str = ""
    """a licence that allows publishing prompts and answers with the record; empty = ids, counts and hashes only"""
    licence: str = "apache-2.0"
    """of the head"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Tracking:
    """Weights & Biases."""

    wandb: Literal["offline", "online", "disabled"] = "offline"
    project: str = "draftsmith"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Cost:
    """What the measured machine costs; nothing of it is measured, so a change makes the report anew and no more."""

    usd_per_hour: Annotated[float, Field(strict=True, ge=0)] = 0.0
    """of one GPU, or of the machine where there is none; 0 = no cost is reported"""
    gpus: Positive = 1
    """that serve one copy of the target"""
    source: str = ""
    """where the price is from, and its date; shown beside it"""
    max_token_ms: Annotated[float, Field(strict=True, ge=0)] = 0.0
    """the p99 time per token that the service allows; loads above it are not counted; 0 = any"""
    prices: str = ""
    """a YAML file of list prices to set beside it; empty = the shipped one (recipes/prices/usd.yaml)"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Engine:
    """How the serving engine is started, in its own environment if need be."""

    command: tuple[str, ...] = ("{python}", "-m", "vllm.entrypoints.openai.api_server")
    """{python} is this interpreter; name another environment's for an engine that pins other versions"""
    args: tuple[str, ...] = ()
    """further engine options, e.g. --tensor-parallel-size 4"""
    env: dict[str, str] = Field(default_factory=dict)
    windows: Literal["metrics", "chunks"] = "metrics"
    """where a request's windows are read: vLLM's per-request figures, or, for a vLLM without them (before 0.30), the
    sizes of the streamed chunks, which must add up to the engine's counters"""
    synthetic_length: Annotated[float, Field(strict=True, ge=0, le=17)] = 0.0
    """the gate's own control, on a GPU: vLLM accepts drafts at random so that the acceptance length is this; such a
    measurement is refused, and so is a length that was not measured as it was set; 0 = no control"""
    start_timeout_s: Positive = 600


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Recipe:
    """A whole recipe: what to make, from what, and what it must reach."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    target: Target
    domains: dict[str, Domain]
    seed: Integer = 0
    """of the order of prompts"""
    answers: Answers = Field(default_factory=Answers)
    capture: Capture = Field(default_factory=Capture)
    head: Head = Field(default_factory=Head)
    train: Train
    export: Export = Field(default_factory=Export)
    gate: Gate
    cost: Cost = Field(default_factory=Cost)
    publish: Publish = Field(default_factory=Publish)
    tracking: Tracking = Field(default_factory=Tracking)
    engine: Engine = Field(default_factory=Engine)
