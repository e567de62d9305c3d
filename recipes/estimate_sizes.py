"""How many tokens, parameters, bytes and FLOP a recipe stands for, from the recipe alone: no files, no network.

Shapes: A aux layers, H hidden size, N query heads, G key/value heads, E head size, I the head's MLP, D draft
vocabulary, V target vocabulary, K TTT steps.
"""

import math
from dataclasses import dataclass

from recipes.check import aux_layers
from recipes.schema import Domain, Recipe

ANSWER_TOKENS = {"gpt_oss": 5600.0}
"""mean answer without a cap, by model type: gpt-oss-120b's UltraChat answers have median 3,891 and P90 10,800 tokens
(P-EAGLE, arXiv 2602.01469), an exponential of this mean has 3,880 and 12,900"""
CHAT_ANSWER_TOKENS = 540.0
"""the same for models that do not think: 1,280 ShareGPT prompts gave SmolLM2 167 tokens each under a cap of 200, and
29% of the answers ended by themselves; an exponential of this mean gives 167 and 31%"""
TEMPLATE_TOKENS = 30.0
"""the chat template's own tokens around a prompt (SmolLM2: 22 of them are its system turn)"""
CHARS_A_TOKEN = 25.0
"""a domain's max_chars over its prompts' mean tokens: ShareGPT under 1,500 chars 60, HumanEval under 4,000 145"""
LATER_TURN_TOKENS = 44.0
"""a further user turn with its template tokens (ShareGPT, 12,680 turns)"""
FURTHER_TURN = 0.72
"""share of conversations with a next user turn (ShareGPT: 69%, then 76%, then 77%)"""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Expected conversations, their prompt tokens (history not counted twice) and answer tokens."""

    conversations: float
    prompt_tokens: float
    answer_tokens: float

    @property
    def row_tokens(self) -> float:
        """Tokens of the rows that these conversations become."""
        return self.prompt_tokens + self.answer_tokens


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What the stages of a recipe would take. Each stage and `totals`: tokens, disk_bytes, memory_bytes, seconds.

    disk_bytes is what a finished stage holds, memory_bytes its peak (of RAM, or of all GPUs together). In totals memory
    is the largest stage's, tokens are those captured, and spare_disk_bytes come and go while a stage is made.
    """

    stages: dict[str, dict[str, float]]
    totals: dict[str, float]
    machine: str
    """what the seconds are for"""
    devices: int
    """GPUs that they are for; 0 = the CPU"""


def feature_bytes_per_token(hidden_size: int, layers: int, dtype: str) -> float:
    """On disk: A+1 states of H values (fp8: one more 4-byte scale a state), a 4-byte id, a 1-byte mask."""
    width = {"bfloat16": 2, "float32": 4, "float8_e4m3fn": 1}[dtype]
    scales = 4 * (layers + 1) if width == 1 else 0
    return (layers + 1) * hidden_size * width + scales + 5


def answer_length(recipe: Recipe, max_tokens: int) -> float:
    """Expected tokens of one answer under a cap: of an exponential with the family's mean, cut off at the cap."""
    mean = ANSWER_TOKENS.get(recipe.target.facts.model_type, CHAT_ANSWER_TOKENS)
    return mean * -math.expm1(-max_tokens / mean)


def prompt_length(domain: Domain) -> float:
    """Expected tokens of a first prompt, template included."""
    return TEMPLATE_TOKENS + domain.max_chars / CHARS_A_TOKEN


def split_counts(recipe: Recipe, split: str) -> Counts:
    """What the stage `answers` is expected to make of one split: `train` or `held_out`."""
    parts = [
        _domain_counts(recipe, d, d.train if split == "train" else min(d.held_out, recipe.answers.held_out))
        for d in recipe.domains.values()
    ]
    return Counts(
        conversations=sum(p.conversations for p in parts),
        prompt_tokens=sum(p.prompt_tokens for p in parts),
        answer_tokens=sum(p.answer_tokens for p in parts),
    )


def stored_splits(recipe: Recipe) -> tuple[str, ...]:
    """The splits whose features are written: a streamed run keeps only what is held out."""
    return ("held_out",) if recipe.capture.mode == "stream" else ("train", "held_out")


def supervised_tokens(recipe: Recipe) -> float:
    """Supervised tokens that training sees: `train.tokens`, or epochs over the weighted training answers."""
    answers = [_domain_counts(recipe, d, d.train).answer_tokens * d.weight for d in recipe.domains.values()]
    return recipe.train.tokens or recipe.train.epochs * sum(answers)


def head_parameters(recipe: Recipe) -> tuple[float, float]:
    """(trained, frozen) parameters of the head; the target's embedding is not part of it."""
    facts, head, a = recipe.target.facts, recipe.head, len(aux_layers(recipe))
    h, d = facts.hidden_size, head.draft_vocab_size
    n, g = facts.num_attention_heads * facts.head_dim, facts.num_key_value_heads * facts.head_dim
    inner = head.intermediate_size or facts.intermediate_size
    norms = (a * h) * (head.fc_norm + head.norm_before_fc) + h
    layer = n * h + 3 * h * inner + 2 * h + 2 * facts.head_dim * (head.layer_type == "qwen3")
    trained = a * h * h + norms + h + head.num_layers * layer + (head.num_layers + 1) * h * (n + 2 * g)
    return (trained + d * h, 0.0) if head.train_lm_head else (trained, float(d * h))


def training_flops(recipe: Recipe) -> tuple[float, float]:
    """(FLOP a packed token, FLOP a supervised token), forward and backward: 6 a parameter, 4 where one side is frozen.

    fc and the first step's keys and values are computed everywhere, the rest at supervised positions, K times; the
    teacher's logits once. Attention scores are left out (under 5% at 2,000 tokens).
    """
    facts, head, a = recipe.target.facts, recipe.head, len(aux_layers(recipe))
    h, d = facts.hidden_size, head.draft_vocab_size
    n, g = facts.num_attention_heads * facts.head_dim, facts.num_key_value_heads * facts.head_dim
    inner = head.intermediate_size or facts.intermediate_size
    keys = (head.num_layers + 1) * h * 2 * g
    rest = (head.num_layers + 1) * h * n + head.num_layers * (n * h + 3 * h * inner)
    step = 6 * rest + (6 if head.train_lm_head else 4) * d * h
    k = recipe.train.ttt_steps
    return 4 * a * h * h + 6 * keys, k * step + (k - 1) * 6 * keys + 2 * d * h


def head_matrices(recipe: Recipe) -> list[tuple[int, int]]:
    """Shapes of the head's hidden matrices: all but lm_head."""
    facts, head, h = recipe.target.facts, recipe.head, recipe.target.facts.hidden_size
    n, g = facts.num_attention_heads * facts.head_dim, facts.num_key_value_heads * facts.head_dim
    inner = head.intermediate_size or facts.intermediate_size
    shapes = [(h, len(aux_layers(recipe)) * h)]
    for width in (2 * h, *[h] * (head.num_layers - 1)):
        shapes += [(n, width), (g, width), (g, width), (h, n), (inner, h), (inner, h), (h, inner)]
    return shapes


def optimizer_flops(recipe: Recipe) -> float:
    """FLOP of one optimiser step: Muon's Newton-Schulz iterations, three products each; AdamW's are none."""
    if recipe.train.optimizer == "adamw":
        return 0.0
    sides = [(min(shape), max(shape)) for shape in head_matrices(recipe)]
    return float(sum(recipe.train.muon_steps * (4 * m * m * n + 2 * m**3) for m, n in sides))


def optimizer_bytes(recipe: Recipe) -> float:
    """State in fp32: two moments a trained parameter, one where Muon trains it."""
    trained, _ = head_parameters(recipe)
    by_muon = sum(m * n for m, n in head_matrices(recipe)) if recipe.train.optimizer == "muon" else 0
    return 8 * trained - 4.0 * by_muon


def kv_bytes_per_token(recipe: Recipe) -> float:
    """Key/value cache of the target, in bf16."""
    facts = recipe.target.facts
    return 4.0 * facts.num_hidden_layers * facts.num_key_value_heads * facts.head_dim


def weight_bytes(recipe: Recipe) -> float:
    """The target's weights as served."""
    return recipe.target.facts.total_params_b * 1e9 * recipe.target.facts.weight_bytes


def id_bytes(recipe: Recipe) -> float:
    """A token id in JSON, with its comma and blank: 5.5 for SmolLM2's vocabulary."""
    return 2 + 0.75 * math.log10(recipe.target.facts.vocab_size)


def _domain_counts(recipe: Recipe, domain: Domain, conversations: int) -> Counts:
    """A turn that was cut off at the cap has no next one."""
    answers = recipe.answers
    mean = ANSWER_TOKENS.get(recipe.target.facts.model_type, CHAT_ANSWER_TOKENS)
    stops = -math.expm1(-answers.max_tokens / mean)
    several = any(source.form != "prompt" for source in domain.sources)
    turns = sum((stops * FURTHER_TURN) ** k for k in range(answers.max_turns if several else 1))
    return Counts(
        conversations=conversations,
        prompt_tokens=conversations * (prompt_length(domain) + (turns - 1) * LATER_TURN_TOKENS),
        answer_tokens=conversations * turns * answer_length(recipe, answers.max_tokens),
    )
