"""The EAGLE-3 head and its training-time test (arXiv 2503.01840, section 3), in the tensors of the Speculators format.

Shapes: S positions of a packed sequence, M positions that draft (kept), H hidden size, A aux layers, D draft
vocabulary, N query heads, G key/value heads, E head size.

At position t the head reads the target's aux states h_t and the embedding of x_{t+1}, and its TTT step 0 predicts
x_{t+2}, the token after. TTT step k at t reads its own output of step k-1 and x_{t+1+k}, predicts x_{t+2+k}, and
attends to what a served draft would: the step-0 keys of positions <= t (made from target states) and its own keys of
steps 1..k.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from train import attention_eager, attention_flash
from train.places import Places, everywhere

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Everything that decides the head's function; head.json holds it."""

    algorithm: str
    layer_type: str
    """llama, or qwen3 (norms on queries and keys)"""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: dict[str, float | str | bool]
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    window: int
    """0 = full attention"""
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    aux_layers: tuple[int, ...]

    @property
    def num_aux(self) -> int:
        """A."""
        return len(self.aux_layers)


class RMSNorm(nn.Module):
    """x / rms(x) * w, computed in fp32, returned in x's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape as x, normed over the last dimension."""
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention; layer 0 reads [embedding, hidden] side by side, hence the width."""

    def __init__(self, config: HeadConfig, width: int) -> None:
        super().__init__()
        query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, query, bias=False)
        self.k_proj = nn.Linear(width, key, bias=False)
        self.v_proj = nn.Linear(width, key, bias=False)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)
        if config.layer_type == "qwen3":
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.config = config

    def queries(self, x: torch.Tensor, rope: Pair) -> torch.Tensor:
        """[M, N, E], rotated."""
        q = self.q_proj(x).unflatten(-1, (-1, self.config.head_dim))
        q = self.q_norm(q) if self.config.layer_type == "qwen3" else q
        return _rotate(q, rope)

    def keys_values(self, x: torch.Tensor, rope: Pair) -> Pair:
        """Keys (rotated) and values, each [S, G, E]."""
        k = self.k_proj(x).unflatten(-1, (-1, self.config.head_dim))
        k = self.k_norm(k) if self.config.layer_type == "qwen3" else k
        v = self.v_proj(x).unflatten(-1, (-1, self.config.head_dim))
        return _rotate(k, rope), v


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[M, H] -> [M, H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Decoder layer; the first also norms the hidden state and concatenates the embedding."""

    def __init__(self, config: HeadConfig, first: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if first:
            self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, 2 * config.hidden_size if first else config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config.hidden_size, config.intermediate_size)
        self.first, self.norm_before_residual = first, config.norm_before_residual

    def inputs(self, embeds: torch.Tensor, hidden: torch.Tensor) -> Pair:
        """(what attention reads, residual)."""
        if not self.first:
            return self.input_layernorm(hidden), hidden
        normed = self.hidden_norm(hidden)
        return torch.cat([self.input_layernorm(embeds), normed], -1), normed if self.norm_before_residual else hidden

    def outputs(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Residual stream [M, H] after attention and MLP."""
        hidden = residual + self.self_attn.o_proj(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3(nn.Module):
    """The head. Parameter names are the Speculators tensor names; embed_tokens is the target's and not part of it."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.fc = nn.Linear(config.num_aux * h, h, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList([RMSNorm(h, eps) for _ in config.aux_layers])
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.num_aux * h, eps)
        self.layers = nn.ModuleList([Layer(config, first=i == 0) for i in range(config.num_layers)])
        self.norm = RMSNorm(h, eps)
        self.lm_head = nn.Linear(h, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(_rope_config(config))

    def fuse(self, aux_SAH: torch.Tensor) -> torch.Tensor:
        """g_t = fc of the (normed) aux states, [S, H] (paper, section 3.1)."""
        if self.config.norm_before_fc:
            aux_SAH = self.input_norm(aux_SAH)
        if self.config.fc_norm:
            chunks = aux_SAH.chunk(self.config.num_aux, -1)
            aux_SAH = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], -1)
        return self.fc(aux_SAH)

    def forward(
        self, aux_SAH: torch.Tensor, embeds: Sequence[torch.Tensor], at: Places, recompute: bool = False
    ) -> list[torch.Tensor]:
        """What lm_head reads, one [M, H] a TTT step.

        embeds[0] is [S, H], the embedding of x_{t+1} at every position; embeds[k] is [M, H], of x_{t+1+k} at the kept
        positions. Attention stays within a document. recompute: the backward makes each step's activations again
        instead of keeping them.
        """
        hidden, position = self.fuse(aux_SAH), at.position_S
        caches: list[list[Pair]] = [[] for _ in self.layers]
        outputs: list[torch.Tensor] = []
        for step, embed in enumerate(embeds):
            inputs = (embed, hidden, self._rope(hidden, position), caches, at)
            if recompute:
                normed, hidden, added = checkpoint(self._step, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                normed, hidden, added = self._step(*inputs)
            caches = [[*cache, pair] for cache, pair in zip(caches, added, strict=True)]
            outputs.append(normed)
            position = at.position_S[at.kept_M] + step + 1
        return outputs

    def _step(
        self, embed: torch.Tensor, hidden: torch.Tensor, rope: Pair, caches: list[list[Pair]], at: Places
    ) -> tuple[torch.Tensor, torch.Tensor, list[Pair]]:
        """(what lm_head reads, what the next step reads, each layer's own keys and values)."""
        first = not caches[0]
        added: list[Pair] = []
        for number, module in enumerate(self.layers):
            layer = cast(Layer, module)
            x, residual = layer.inputs(embed, hidden)
            added.append(layer.self_attn.keys_values(x, rope))
            # Step 0 narrows to the kept positions in its last layer: below it, all keys are needed.
            last = number == len(self.layers) - 1
            if first and last:
                x, residual = x[at.kept_M], residual[at.kept_M]
                rope = (rope[0][at.kept_M], rope[1][at.kept_M])
            q = layer.self_attn.queries(x, rope)
            here = everywhere(at) if first and not last else at
            attended = _attend(q, [*caches[number], added[-1]], here, self.config.window)
            hidden = layer.outputs(attended, residual)
        normed = self.norm(hidden)
        return normed, normed if self.config.norm_output else hidden, added

    def logits(self, aux_SAH: torch.Tensor, embeds: Sequence[torch.Tensor], at: Places) -> list[torch.Tensor]:
        """Logits over the draft vocabulary, one [M, D] a TTT step."""
        return [self.lm_head(normed) for normed in self(aux_SAH, embeds, at)]

    def _rope(self, like: torch.Tensor, position: torch.Tensor) -> Pair:
        cos, sin = self.rotary(like, position[None])
        return cos[0], sin[0]


def _attend(q_MNE: torch.Tensor, cache: Sequence[Pair], at: Places, window: int) -> torch.Tensor:
    flash = q_MNE.is_cuda and q_MNE.dtype == torch.bfloat16
    return (attention_flash if flash else attention_eager).attend(q_MNE, cache, at, window)


def initialise(head: Eagle3, target_norm_H: torch.Tensor, lm_head_DH: torch.Tensor, scale: float, seed: int) -> None:
    """Start near something useful: fc passes the last aux state, the final norm is the target's times `scale`.

    At small budgets this is worth more than any learning rate (LOG.md). Other matrices are N(0, 0.02).
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = head.config.hidden_size
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.dim() == 2 and name != "lm_head.weight":
                parameter.normal_(0.0, 0.02, generator=generator)
        head.fc.weight.mul_(0.3)
        head.fc.weight[:, -hidden:] += torch.eye(hidden)
        head.norm.weight.copy_(target_norm_H * scale)
        head.lm_head.weight.copy_(lm_head_DH)


def _rotate(x: torch.Tensor, rope: Pair) -> torch.Tensor:
    """x [S, N, E] turned by the angles of its positions (half-split pairs, as Llama and Qwen3)."""
    cos, sin = (part[:, None] for part in rope)
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


def _rope_config(config: HeadConfig) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=config.num_attention_heads * config.head_dim, num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim, max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(config.rope),
    )  # fmt: skip
