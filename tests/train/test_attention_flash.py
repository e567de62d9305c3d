"""The joined attention against the eager one, with plain CPU kernels for the two flash operators.

What is tested is what is ours: the joining of the two parts, forward and backward. The kernel itself runs on a GPU
only; `python -m tests.bench.exact` compares the whole there.
"""

import math
from collections.abc import Sequence

import pytest
import torch

from train import attention_eager, attention_flash
from train.places import Places, places

DOCS = [(0, 7), (7, 19), (19, 24)]
KEPT = torch.tensor([2, 3, 4, 9, 10, 14, 15, 21])


def _probabilities(
    q: torch.Tensor, k: torch.Tensor, starts: torch.Tensor, left: int, norm: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax of causal scores within documents [N, S, S], and the log-sum-exp, or that given."""
    size = len(q)
    doc = torch.bucketize(torch.arange(size), starts[1:], right=True)
    distance = torch.arange(size)[:, None] - torch.arange(size)
    seen = (doc[:, None] == doc) & (distance >= 0) & ((distance <= left) if left >= 0 else True)
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    score = torch.einsum("sne,tne->nst", q, keys) / math.sqrt(q.shape[-1])
    score = score.masked_fill(~seen, float("-inf"))
    norm = score.logsumexp(-1) if norm is None else norm
    return (score - norm[..., None]).exp(), norm


@attention_flash.forward.register_kernel("cpu")
def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, longest: torch.Tensor, left: int
) -> tuple[torch.Tensor, torch.Tensor]:
    assert int(longest) == starts.diff().max()
    p, norm = _probabilities(q, k, starts, left, None)
    out = torch.einsum("nst,tne->sne", p, v.repeat_interleave(q.shape[1] // v.shape[1], 1))
    return out.contiguous(), norm.contiguous()


@attention_flash.backward.register_kernel("cpu")
def _backward(
    known: Sequence[torch.Tensor], starts: torch.Tensor, longest: torch.Tensor, left: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The flash backward's formulas: probabilities from the given log-sum-exp, row sums from the given output."""
    grad, q, out, norm, k, v = known
    repeat, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    keys, values = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    p, _norm = _probabilities(q, k, starts, left, norm)
    row = (grad * out).sum(-1).T[..., None]
    ds = p * (torch.einsum("sne,tne->nst", grad, values) - row) * scale
    dk, dv = torch.einsum("nst,sne->tne", ds, q), torch.einsum("nst,sne->tne", p, grad)
    dk, dv = (x.unflatten(1, (-1, repeat)).sum(2) for x in (dk, dv))
    return torch.einsum("nst,tne->sne", ds, keys).contiguous(), dk, dv


@pytest.mark.parametrize("later", [0, 1, 3])
@pytest.mark.parametrize("window", [0, 6])
def test_output_and_every_gradient_equal_the_eager_twins(later: int, window: int) -> None:
    torch.manual_seed(later)
    at: Places = places(DOCS, KEPT)
    shapes = [(8, 4, 16), *[(24, 2, 16)] * 2, *[(8, 2, 16)] * (2 * later)]
    weights = torch.randn(8, 64)
    grads: list[list[torch.Tensor]] = []
    outputs: list[torch.Tensor] = []
    values = [torch.randn(shape) for shape in shapes]
    for module in (attention_flash, attention_eager):
        q, *rest = leaves = [v.clone().requires_grad_() for v in values]
        out = module.attend(q, list(zip(rest[::2], rest[1::2], strict=True)), at, window)
        (out * weights).sum().backward()
        outputs.append(out.detach())
        grads.append([leaf.grad for leaf in leaves if leaf.grad is not None])
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)
    assert len(grads[0]) == len(grads[1]) == len(shapes)
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
