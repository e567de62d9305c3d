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
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

Span = tuple[int, int]
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
        """[N, M, E], rotated."""
        q = self.q_proj(x).unflatten(-1, (-1, self.config.head_dim))
        q = self.q_norm(q) if self.config.layer_type == "qwen3" else q
        return _rotate(q, rope).transpose(0, 1)

    def keys_values(self, x: torch.Tensor, rope: Pair) -> Pair:
        """Keys (rotated) and values, each [G, S, E]."""
        k = self.k_proj(x).unflatten(-1, (-1, self.config.head_dim))
        k = self.k_norm(k) if self.config.layer_type == "qwen3" else k
        v = self.v_proj(x).unflatten(-1, (-1, self.config.head_dim))
        return _rotate(k, rope).transpose(0, 1), v.transpose(0, 1)


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
        self, aux_SAH: torch.Tensor, embeds: Sequence[torch.Tensor], kept_M: torch.Tensor, docs: Sequence[Span]
    ) -> list[torch.Tensor]:
        """Logits over the draft vocabulary, one [M, D] a TTT step.

        embeds[0] is [S, H], the embedding of x_{t+1} at every position; embeds[k] is [M, H], of x_{t+1+k} at the kept
        positions. docs are the documents' [start, end) in the pack, each from position 0; attention stays within one.
        """
        position_S = torch.cat([torch.arange(b - a, device=aux_SAH.device) for a, b in docs])
        hidden, position = self.fuse(aux_SAH), position_S
        cache: list[list[Pair]] = [[] for _ in self.layers]
        outputs: list[torch.Tensor] = []
        for step, embed in enumerate(embeds):
            rope = self._rope(hidden, position)
            for number, module in enumerate(self.layers):
                layer = cast(Layer, module)
                # Only step 0 of the last layer narrows to the kept positions: below it, all keys are needed.
                narrow = kept_M if step == 0 and number == len(self.layers) - 1 else None
                hidden = _layer_step(layer, embed, hidden, rope, cache[number], narrow, kept_M, docs)
            normed = self.norm(hidden)
            outputs.append(self.lm_head(normed))
            hidden = normed if self.config.norm_output else hidden
            position = position_S[kept_M] + step + 1
        return outputs

    def _rope(self, like: torch.Tensor, position: torch.Tensor) -> Pair:
        cos, sin = self.rotary(like, position[None])
        return cos[0], sin[0]


def _layer_step(
    layer: Layer, embed: torch.Tensor, hidden: torch.Tensor, rope: Pair, cache: list[Pair],
    narrow: torch.Tensor | None, kept_M: torch.Tensor, docs: Sequence[Span],
) -> torch.Tensor:  # fmt: skip
    x, residual = layer.inputs(embed, hidden)
    cache.append(layer.self_attn.keys_values(x, rope))
    if narrow is not None:
        x, residual, rope = x[narrow], residual[narrow], (rope[0][narrow], rope[1][narrow])
    q = layer.self_attn.queries(x, rope)
    everywhere = len(cache) == 1 and narrow is None
    at = torch.arange(len(x), device=x.device) if everywhere else kept_M
    return layer.outputs(attend(q, cache, at, docs, layer.self_attn.config.window), residual)


def attend(
    q_NME: torch.Tensor, cache: Sequence[Pair], at_M: torch.Tensor, docs: Sequence[Span], window: int
) -> torch.Tensor:
    """[M, N*E]: queries at positions `at_M` over step-0 keys <= t in their document and their own keys of later steps.

    cache[0] holds [G, S, E] keys and values of all positions; cache[k], k >= 1, holds [G, M, E], of which query m sees
    only its own, so that part is an elementwise product. `window` counts positions, the query's own included.
    """
    heads, count, size = q_NME.shape
    groups = cache[0][0].shape[0]
    q = q_NME.view(groups, heads // groups, count, size) * size**-0.5
    own = [(q * k[:, None]).sum(-1, keepdim=True) for k, _ in cache[1:]]
    pieces: list[torch.Tensor] = []
    bounds = torch.searchsorted(
        at_M.contiguous(), torch.tensor([a for a, _ in docs] + [docs[-1][1]], device=at_M.device)
    )
    edges: list[int] = bounds.tolist()
    for (start, end), low, high in zip(docs, edges[:-1], edges[1:], strict=True):
        if low == high:
            continue
        keys, values = (x[:, None, start:end] for x in cache[0])
        score = q[:, :, low:high] @ keys.transpose(-1, -2)
        distance = at_M[low:high, None] - torch.arange(start, end, device=at_M.device)
        unseen = distance < 0
        if window:
            unseen |= distance + len(cache) - 1 >= window
        score = score.masked_fill(unseen, float("-inf"))
        weights = torch.cat([score, *(o[:, :, low:high] for o in own)], -1).float().softmax(-1).to(q.dtype)
        out = weights[..., : end - start] @ values
        for j, (_, v) in enumerate(cache[1:]):
            out = out + weights[..., end - start + j, None] * v[:, None, low:high]
        pieces.append(out)
    return torch.cat(pieces, 2).permute(2, 0, 1, 3).reshape(count, heads * size)


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
