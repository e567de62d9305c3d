"""The shapes and the synthetic documents of the training benchmark, and what a step must compute.

Shapes: S positions of a pack, M positions that draft, A aux layers, H hidden size, V vocabulary, D draft vocabulary.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from data.store import Features
from train.eagle3 import HeadConfig
from train.pack import Pack

PEAK = 989e12
"""dense bf16 flop/s of an H100 or H200 as its maker states it"""
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A target's shape; the head has one layer of it."""

    vocab: int
    hidden: int
    heads: int
    groups: int
    size: int
    inner: int
    layers: int
    rope: dict[str, Any] = field(default_factory=lambda: dict(LLAMA3))
    draft: int = 32000


SHAPES = {
    "30b-a3b": Shape(vocab=151936, hidden=2048, heads=32, groups=4, size=128, inner=12288, layers=48,
                     rope={"rope_type": "default", "rope_theta": 1e7}),
    "8b": Shape(vocab=128256, hidden=4096, heads=32, groups=8, size=128, inner=14336, layers=32),
    "70b": Shape(vocab=128256, hidden=8192, heads=64, groups=8, size=128, inner=28672, layers=80),
    "tiny": Shape(vocab=512, hidden=64, heads=4, groups=2, size=16, inner=128, layers=8, draft=128),
}  # fmt: skip


def head_config(shape: Shape) -> HeadConfig:
    """Speculators' defaults: fc norms, norm_output, norm_before_residual; window 2048."""
    return HeadConfig(
        algorithm="eagle3", layer_type="llama", num_layers=1, hidden_size=shape.hidden, intermediate_size=shape.inner,
        num_attention_heads=shape.heads, num_key_value_heads=shape.groups, head_dim=shape.size, rms_norm_eps=1e-5,
        rope=shape.rope, max_position_embeddings=32768, vocab_size=shape.vocab, draft_vocab_size=shape.draft,
        window=2048, norm_before_residual=True, norm_before_fc=False, fc_norm=True, norm_output=True,
        aux_layers=(2, shape.layers // 2, shape.layers - 3),
    )  # fmt: skip


def documents(shape: Shape, tokens: int, seed: int, extra: int = 0) -> list[Features]:
    """Random documents of 900-1,150 tokens, together `tokens`, the first quarter of each a prompt.

    `extra` tokens are added to each: Speculators' shift takes one away.
    """
    generator = torch.Generator().manual_seed(seed)
    made, left = list[Features](), tokens
    while left:
        length = min(left, int(torch.randint(900, 1150, (1,), generator=generator)))
        left -= length
        size = length + extra
        made.append(
            Features(
                aux_SAH=torch.randn(size, 3 * shape.hidden, generator=generator).bfloat16(),
                final_SH=torch.randn(size, shape.hidden, generator=generator).bfloat16(),
                input_ids_S=torch.randint(0, shape.vocab, (size,), generator=generator),
                loss_mask_S=torch.arange(size) >= length // 4,
            )
        )
    return made


def vocabulary(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """(d2t [D], t2d [V]) of a random draft vocabulary."""
    kept = torch.randperm(shape.vocab, generator=torch.Generator().manual_seed(0))[: shape.draft].sort().values
    t2d_V = torch.zeros(shape.vocab, dtype=torch.bool)
    t2d_V[kept] = True
    return kept - torch.arange(shape.draft), t2d_V


def our_flops(shape: Shape, pack: Pack, steps: int) -> float:
    """What our step computes: later steps and queries only where a position drafts; fc and lm_head without the
    gradients that nobody needs (fc's input, the frozen lm_head); attention over the keys that a query may see.
    """
    s, m = len(pack.input_ids_S), len(pack.at.kept_M)
    keys, rest = _layer(shape)
    near = pack.at.position_S[pack.at.kept_M].float().add(1).clamp_max(2048).sum().item()
    attention = sum(12 * shape.heads * shape.size * (near + k * m) for k in range(steps))
    linear = 4 * s * 3 * shape.hidden**2 + 6 * s * keys + 6 * m * (rest + (steps - 1) * (keys + rest))
    return linear + (4 * steps + 2) * m * shape.draft * shape.hidden + attention


def full_flops(shape: Shape, pack: Pack, steps: int) -> float:
    """What a trainer that computes every position must (Speculators; lm_head frozen there too)."""
    s = len(pack.input_ids_S)
    pairs = sum((b - a) * (b - a + 1) / 2 for a, b in pack.at.docs)
    attention = sum(12 * shape.heads * shape.size * (pairs + k * s) for k in range(steps))
    linear = 4 * s * 3 * shape.hidden**2 + 6 * s * steps * sum(_layer(shape))
    return linear + (4 * steps + 2) * s * shape.draft * shape.hidden + attention


def _layer(shape: Shape) -> tuple[int, int]:
    """(weights of keys and values, weights of queries, output and MLP)."""
    keys = 2 * shape.hidden * 2 * shape.groups * shape.size
    return keys, 3 * shape.hidden * shape.heads * shape.size + 3 * shape.hidden * shape.inner
