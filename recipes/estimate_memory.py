"""Memory of capture and training, from the recipe alone. On a GPU, what its driver says is in use, for one GPU.

Shapes: S tokens of a batch or pack, M of them that draft, A aux layers, H hidden size, N*E query width, I inner size,
D draft vocabulary, V target vocabulary, K TTT steps.
"""

from recipes.check import aux_layers
from recipes.estimate_sizes import (
    head_parameters,
    kv_bytes_per_token,
    optimizer_bytes,
    split_counts,
    weight_bytes,
)
from recipes.schema import Recipe

CONTEXT = 0.8 * 2**30
"""of a CUDA context with the libraries' kernels and workspaces"""
PROCESS = 0.9 * 2**30
"""RAM of a process that has imported torch and transformers"""
SPARE = 1.26
"""what the caching allocator holds over what is asked, with packs of many sizes (a 70B head: 50.6 GiB for 39.7)"""
BATCHES = 2.0
"""times what one batch's forward takes: batches of many sizes leave that much behind (a 70B-shaped target)"""
LOGITS = 2.0 * 2**27
"""one slice of logits in bf16 (train/losses_fused.py)"""
PACKS = 3
"""packs on the GPU: the one in use, the one before, the one on its way"""
SGLANG_REQUESTS = 2048
"""requests for which SGLang keeps a table of the longest context, 4 bytes a token"""


def training_gpu_bytes(recipe: Recipe) -> float:
    """One training process on a GPU: fp32 weights, gradients and moments, bf16 copies, tables, one pack's activations.

    The gradients of a first pack are there while a second one runs; with one pack a step they come as activations go.
    FSDP2 shares out weights and moments; for a step each process still has all weights, their copies and gradients.
    """
    facts, train = recipe.target.facts, recipe.train
    trained, frozen = head_parameters(recipe)
    tables = 2.0 * facts.hidden_size * (facts.vocab_size + recipe.head.draft_vocab_size)
    sharers = train.processes if train.sharding == "fsdp2" else 1
    states = (4 * trained + optimizer_bytes(recipe)) / sharers
    held = states + 4 * frozen + 2 * (trained + frozen) + tables
    activations, gradients = fused_activation_bytes(recipe), 4.0 * trained
    moving = activations + gradients if train.accumulate > 1 else max(activations, gradients)
    # DDP's buckets, or the weights that FSDP2 gathers, which are gone again when it packs the gradients to share them.
    passing = 4.0 * trained if train.processes > 1 else 0.0
    return CONTEXT + SPARE * (held + moving + passing + PACKS * pack_bytes(recipe))


def drafting_tokens(recipe: Recipe) -> float:
    """M: expected tokens of a pack that draft."""
    train = split_counts(recipe, "train")
    return recipe.train.pack_tokens * train.answer_tokens / max(1.0, train.row_tokens)


def pack_bytes(recipe: Recipe) -> float:
    """Aux states everywhere, final states where it drafts, in bf16."""
    hidden = recipe.target.facts.hidden_size
    return 2.0 * hidden * (recipe.train.pack_tokens * len(aux_layers(recipe)) + drafting_tokens(recipe))


def fused_activation_bytes(recipe: Recipe) -> float:
    """Kept for the backward of one pack with the fused loss: every TTT step's layer at M positions, in bf16, the
    teacher's logits once, one slice of the draft's; a trained lm_head's gradient, step by step.
    """
    facts, head, m, k = recipe.target.facts, recipe.head, drafting_tokens(recipe), recipe.train.ttt_steps
    inner = head.intermediate_size or facts.intermediate_size
    layer = 8 * facts.hidden_size + 4 * facts.num_attention_heads * facts.head_dim + 4 * inner
    matrix = float(head.draft_vocab_size * facts.hidden_size)
    trained = (2 * k + 4) * matrix if head.train_lm_head else 0.0
    return 2.0 * m * k * head.num_layers * layer + 2 * m * head.draft_vocab_size + LOGITS + trained


def training_cpu_bytes(recipe: Recipe) -> float:
    """One training process on a CPU, in RAM: the same without bf16 copies; activations at every position, in bf16, and
    logits twice, in bf16 and fp32.
    """
    facts, head, t = recipe.target.facts, recipe.head, recipe.train
    trained, frozen = head_parameters(recipe)
    inner = head.intermediate_size or facts.intermediate_size
    values = head.num_layers * (12 * facts.hidden_size + 4 * inner)
    activations = t.pack_tokens * t.ttt_steps * (2.0 * values + 8.0 * head.draft_vocab_size)
    tables = 2.0 * facts.hidden_size * (facts.vocab_size + head.draft_vocab_size)
    return PROCESS + 8 * trained + optimizer_bytes(recipe) + 4 * frozen + tables + activations


def capture_gpu_bytes(recipe: Recipe) -> float:
    """One of the GPUs of a capture through SGLang: its share of the target, the cache of one batch, a prefill's
    activations, the captured states twice (one batch is copied while the next one runs), and the process that asks.
    """
    facts, layers, ranks = recipe.target.facts, len(aux_layers(recipe)), recipe.capture.tensor_parallel
    tokens = slot_tokens(recipe)
    states = 2.0 * tokens * facts.hidden_size * (layers + 2 * (layers + 1))
    forward = 2.0 * tokens * (2 * facts.hidden_size + 3 * facts.intermediate_size / ranks)
    held = (weight_bytes(recipe) + (tokens + 1024) * kv_bytes_per_token(recipe)) / ranks
    tables = 4.0 * SGLANG_REQUESTS * facts.max_position_embeddings
    return 2 * CONTEXT + held + tables + BATCHES * (states + forward)


def slot_tokens(recipe: Recipe) -> int:
    """Tokens of the longest batch that one prefill takes: of a batch, a streamed pack, or one row that is longer."""
    capture, answers = recipe.capture, recipe.answers
    longest = answers.max_prompt_tokens + answers.max_tokens * answers.max_turns
    batch = max(capture.batch_tokens, recipe.train.pack_tokens if capture.mode == "stream" else 0)
    return max(batch, min(longest, recipe.target.max_model_len))
