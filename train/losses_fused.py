"""The same losses on a GPU, with the output matrix fused in: logits live for one slice of positions at a time.

Forward already knows the gradient, so each slice's logits become their own gradient in place, then the gradient of the
hidden states (and of a trained lm_head); nothing of size M x D is kept.

Shapes: M positions that draft, D draft vocabulary, H hidden size, R positions of a slice.
"""

from typing import Any

import torch

from train.losses import LOSSES

SLICE = 1 << 27
"""logits held at a time"""


def taught(
    normed_MH: torch.Tensor, lm_head_DH: torch.Tensor, teacher_MD: torch.Tensor, shift: int, weight_M: torch.Tensor,
    kind: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The same as losses.taught; where weight is 0 the highest draft token is not looked for, and 0 is returned."""
    number, trained = list(LOSSES).index(kind), lm_head_DH.requires_grad
    loss, ids_M, *_ = _taught(normed_MH, lm_head_DH, teacher_MD, shift, weight_M, number, trained)
    return loss, ids_M


@torch.library.custom_op("draftsmith::taught", mutates_args=())
def _taught(
    normed_MH: torch.Tensor, lm_head_DH: torch.Tensor, teacher_MD: torch.Tensor, shift: int, weight_M: torch.Tensor,
    kind: int, trained: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(loss, ids_M, gradient of normed, gradient of lm_head or empty)."""
    from train.loss_kernel import rows  # Triton is there on GPU machines only

    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    grad_MH, grad_DH = torch.empty_like(normed_MH), _lm_head_grad(lm_head_DH, trained)
    step = max(1, SLICE // len(lm_head_DH))
    for first in range(0, len(normed_MH), step):
        part = slice(first, first + step)
        logits_RD = normed_MH[part] @ lm_head_DH.T
        found.append(rows(logits_RD, teacher_MD, first + shift, weight_M[part], kind))
        torch.mm(logits_RD, lm_head_DH, out=grad_MH[part])
        if trained:
            grad_DH += logits_RD.T @ normed_MH[part]
    losses = torch.cat([weight_M[:0], *(loss_R for loss_R, _ in found)])
    ids_M = torch.cat([torch.empty(0, dtype=torch.int64, device=weight_M.device), *(ids_R for _, ids_R in found)])
    return losses.sum(), ids_M, grad_MH, grad_DH.to(lm_head_DH.dtype)


@_taught.register_fake
def _(
    normed_MH: torch.Tensor, lm_head_DH: torch.Tensor, teacher_MD: torch.Tensor, shift: int, weight_M: torch.Tensor,
    kind: int, trained: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    loss, ids_M = weight_M.new_empty((), dtype=torch.float32), weight_M.new_empty(weight_M.shape, dtype=torch.int64)
    return loss, ids_M, torch.empty_like(normed_MH), _lm_head_grad(lm_head_DH, trained).to(lm_head_DH.dtype)


def _lm_head_grad(lm_head_DH: torch.Tensor, trained: bool) -> torch.Tensor:
    return lm_head_DH.new_zeros(lm_head_DH.shape if trained else (0,), dtype=torch.float32)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(output[2], output[3])
    ctx.trained = inputs[6]


def _backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    grad_MH, grad_DH = ctx.saved_tensors
    lm_head = (grad_DH * grad).to(grad_DH.dtype) if ctx.trained else None
    return (grad_MH * grad).to(grad_MH.dtype), lm_head, None, None, None, None, None


_taught.register_autograd(_backward, setup_context=_remember)
