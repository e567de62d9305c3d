"""Training-time attention on a GPU: flash attention over the step-0 keys, an elementwise product over the later ones.

A TTT step's own keys form a diagonal, which block-sparse attention pays for as whole blocks. Here the two parts are
joined by their log-sum-exps; backward, flash attention is given the joint output and log-sum-exp, with which its
probabilities and its row sums are those of the joint softmax, so the gradients are exact (FlashAttention-2,
arXiv 2307.08691, section 3.1).

Shapes: S positions of a pack, M positions that draft, N query heads, G key/value heads, E head size, J later steps,
C documents + 1.
"""

from collections.abc import Sequence
from typing import Any

import torch

from train.places import Places

Pair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_ops: Any = torch.ops.aten


def attend(q_MNE: torch.Tensor, cache: Sequence[Pair], at: Places, window: int) -> torch.Tensor:
    """The same as attention_eager.attend, [M, N*E], in bf16."""
    left = window - len(cache) if window else -1
    pairs = [x for pair in cache for x in pair]
    return _Joint.apply(at.kept_M, at.starts_C, at.longest, left, q_MNE, *pairs).flatten(1)


class _Joint(torch.autograd.Function):
    """attend over (places, queries, step-0 keys, step-0 values, then keys and values of each later step)."""

    @staticmethod
    def forward(
        ctx: Any, kept_M: torch.Tensor, starts_C: torch.Tensor, longest: torch.Tensor, left: int, q_MNE: torch.Tensor,
        *pairs: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        k_SGE, v_SGE, *later = pairs
        first_SNE, norm_NS = forward(_spread(q_MNE, kept_M, len(k_SGE)), k_SGE, v_SGE, starts_C, longest, left)
        out, norm_MN = first_SNE[kept_M].float(), norm_NS[:, kept_M].T
        scores = [_scores(q_MNE, k) for k in later[::2]]
        joint_MN = torch.stack([norm_MN, *scores]).logsumexp(0)
        out = out * (norm_MN - joint_MN).exp()[..., None]
        for score, v in zip(scores, later[1::2], strict=True):
            out = out + (score - joint_MN).exp()[..., None] * _heads(v, q_MNE)
        out = out.to(q_MNE.dtype)
        ctx.save_for_backward(q_MNE, k_SGE, v_SGE, kept_M, starts_C, longest, out, joint_MN, *later)
        ctx.left = left
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Of queries, step-0 keys and values, and each later step's: in the order of `forward`."""
        q, k, v, kept, starts, longest, out, joint, *later = ctx.saved_tensors
        grad = grads[0].contiguous()
        spread = [_spread(x, kept, len(k)) for x in (grad, q, out)]
        joint_NS = _spread(joint, kept, len(k)).T.contiguous()
        dq_S, dk, dv = backward([*spread, joint_NS, k, v], starts, longest, ctx.left)
        dq, row_MN1 = dq_S[kept].float(), (grad.float() * out.float()).sum(-1, keepdim=True)
        scale, later_grads = q.shape[-1] ** -0.5, []
        for own_k, own_v in zip(later[::2], later[1::2], strict=True):
            keys, values = _heads(own_k, q), _heads(own_v, q)
            p_MN1 = (_scores(q, own_k) - joint).exp()[..., None]
            ds_MN1 = p_MN1 * ((grad.float() * values).sum(-1, keepdim=True) - row_MN1) * scale
            dq = dq + ds_MN1 * keys
            later_grads += [_groups(ds_MN1 * q.float(), own_k), _groups(p_MN1 * grad.float(), own_v)]
        return None, None, None, None, dq.to(q.dtype), dk, dv, *later_grads


@torch.library.custom_op("draftsmith::flash_forward", mutates_args=())
def forward(
    q_SNE: torch.Tensor, k_SGE: torch.Tensor, v_SGE: torch.Tensor, starts_C: torch.Tensor, longest: torch.Tensor,
    left: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Causal attention within each document: output [S, N, E] and log-sum-exp [N, S]; left: keys before one's own that
    are seen, -1 = all.
    """
    out, norm_NS, *_ = _ops._flash_attention_forward(
        q_SNE, k_SGE, v_SGE, starts_C, starts_C, int(longest), int(longest), 0.0, True, False,
        scale=q_SNE.shape[-1] ** -0.5, **_span(left),
    )  # fmt: skip
    return out, norm_NS


@torch.library.custom_op("draftsmith::flash_backward", mutates_args=())
def backward(known: Sequence[torch.Tensor], starts_C: torch.Tensor, longest: torch.Tensor, left: int) -> Triple:
    """Gradients of q, k and v. known: the output's gradient, q, the (joint) output [S, N, E] and log-sum-exp [N, S], k
    and v.
    """
    grad_SNE, q_SNE, out_SNE, norm_NS, k_SGE, v_SGE = known
    unused = torch.zeros(2, dtype=torch.uint64, device=q_SNE.device)
    dq, dk, dv = _ops._flash_attention_backward(
        grad_SNE, q_SNE, k_SGE, v_SGE, out_SNE, norm_NS, starts_C, starts_C, int(longest), int(longest), 0.0, True,
        unused, unused, scale=q_SNE.shape[-1] ** -0.5, **_span(left),
    )  # fmt: skip
    return dq, dk, dv


@forward.register_fake
def _(
    q_SNE: torch.Tensor, k_SGE: torch.Tensor, v_SGE: torch.Tensor, starts_C: torch.Tensor, longest: torch.Tensor,
    left: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return torch.empty_like(q_SNE), q_SNE.new_empty((q_SNE.shape[1], q_SNE.shape[0]), dtype=torch.float32)


@backward.register_fake
def _(known: Sequence[torch.Tensor], starts_C: torch.Tensor, longest: torch.Tensor, left: int) -> Triple:
    _grad, q_SNE, _out, _norm, k_SGE, v_SGE = known
    return torch.empty_like(q_SNE), torch.empty_like(k_SGE), torch.empty_like(v_SGE)


def _span(left: int) -> dict[str, int]:
    return {"window_size_left": left, "window_size_right": 0} if left >= 0 else {}


def _spread(x: torch.Tensor, kept_M: torch.Tensor, size: int) -> torch.Tensor:
    """Rows of x at their positions among `size`, zeros between."""
    return x.new_zeros((size, *x.shape[1:])).index_copy(0, kept_M, x)


def _heads(x_MGE: torch.Tensor, q_MNE: torch.Tensor) -> torch.Tensor:
    """[M, N, E] fp32: each group's row for all its query heads."""
    return x_MGE.float().repeat_interleave(q_MNE.shape[1] // x_MGE.shape[1], 1)


def _groups(x_MNE: torch.Tensor, like_MGE: torch.Tensor) -> torch.Tensor:
    """Sum over each group's query heads, in like's dtype."""
    return x_MNE.unflatten(1, (like_MGE.shape[1], -1)).sum(2).to(like_MGE.dtype)


def _scores(q_MNE: torch.Tensor, k_MGE: torch.Tensor) -> torch.Tensor:
    """[M, N] fp32: each query with its own key."""
    return (q_MNE.float() * _heads(k_MGE, q_MNE)).sum(-1) * q_MNE.shape[-1] ** -0.5
