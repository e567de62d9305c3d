# pyright: basic, reportOperatorIssue=false
"""One Triton program a position: loss, highest draft token, and the logits turned into their gradient.

Shapes: R positions of a slice, M positions, D draft vocabulary.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from train.losses import LK_DECAY

BLOCK: tl.constexpr = tl.constexpr(4096)
DECAY: tl.constexpr = tl.constexpr(LK_DECAY)


def rows(
    logits_RD: torch.Tensor, teacher_MD: torch.Tensor, shift: int, weight_R: torch.Tensor, kind: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weighted loss [R], highest draft token [R]); logits_RD becomes the gradient of the losses' sum.

    Row r has teacher row r + shift, the last one where that is past the end. kind: place of the loss in losses.LOSSES.
    """
    count, size = logits_RD.shape
    loss_R = torch.empty(count, device=logits_RD.device)
    ids_R = torch.empty(count, dtype=torch.int64, device=logits_RD.device)
    first = min(shift, len(teacher_MD) - 1)
    kernel: Any = _rows[(count,)]
    kernel(logits_RD, teacher_MD[first:], weight_R, loss_R, ids_R, len(teacher_MD) - 1 - first, size, kind, num_warps=8)
    return loss_R, ids_R


@triton.jit
def _rows(logits, teacher, weight, loss, ids, last, size, KIND: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    w = tl.load(weight + row)
    q_row = logits + row * size
    t_row = teacher + tl.minimum(row, last) * size
    place = tl.arange(0, BLOCK)
    if w == 0.0:
        for start in range(0, size, BLOCK):
            at = start + place
            tl.store(q_row + at, tl.zeros([BLOCK], logits.dtype.element_ty), mask=at < size)
        tl.store(loss + row, 0.0)
        tl.store(ids + row, 0)
    else:
        q_max, q_sum, t_max, t_sum = -float("inf"), 0.0, -float("inf"), 0.0
        cross, own = 0.0, 0.0  # sums of exp(t - t_max) q, and of exp(t - t_max) t
        best, best_at = -float("inf"), 0
        for start in range(0, size, BLOCK):
            at = start + place
            q = tl.load(q_row + at, mask=at < size, other=-float("inf")).to(tl.float32)
            t = tl.load(t_row + at, mask=at < size, other=-float("inf")).to(tl.float32)
            top, top_at = tl.max(q, return_indices=True, axis=0)
            best_at = tl.where(top > best, start + top_at, best_at)
            best = tl.maximum(top, best)
            q_new, t_new = tl.maximum(q_max, top), tl.maximum(t_max, tl.max(t))
            fade = tl.exp(t_max - t_new)
            e = tl.exp(t - t_new)
            q_sum = q_sum * tl.exp(q_max - q_new) + tl.sum(tl.exp(q - q_new))
            t_sum = t_sum * fade + tl.sum(e)
            cross = cross * fade + tl.sum(tl.where(at < size, e * q, 0.0))
            own = own * fade + tl.sum(tl.where(at < size, e * t, 0.0))
            q_max, t_max = q_new, t_new
        q_log, t_log = q_max + tl.log(q_sum), t_max + tl.log(t_sum)
        kl = own / t_sum - t_log - cross / t_sum + q_log
        accepted, above = 0.0, 0.0  # sums of min(p, q), and of q where q < p
        if KIND != 0:
            for start in range(0, size, BLOCK):
                at = start + place
                q = tl.exp(tl.load(q_row + at, mask=at < size, other=-float("inf")).to(tl.float32) - q_log)
                p = tl.exp(tl.load(t_row + at, mask=at < size, other=-float("inf")).to(tl.float32) - t_log)
                accepted += tl.sum(tl.minimum(p, q))
                above += tl.sum(tl.where(q < p, q, 0.0))
        value, on_kl, on_accepted = kl, 1.0, 0.0
        if KIND == 1:
            held = tl.maximum(accepted, 1e-9)
            value, on_kl, on_accepted = -tl.log(held), 0.0, 1.0 / held
        if KIND == 2:
            share = tl.exp(accepted * -DECAY)
            value, on_kl, on_accepted = share * kl + (1 - share) * (1 - accepted), share, 1 - share
        for start in range(0, size, BLOCK):
            at = start + place
            q = tl.exp(tl.load(q_row + at, mask=at < size, other=-float("inf")).to(tl.float32) - q_log)
            p = tl.exp(tl.load(t_row + at, mask=at < size, other=-float("inf")).to(tl.float32) - t_log)
            slope = on_kl * (q - p) - on_accepted * q * (tl.where(q < p, 1.0, 0.0) - above)
            tl.store(q_row + at, (slope * w).to(logits.dtype.element_ty), mask=at < size)
        tl.store(loss + row, value * w)
        tl.store(ids + row, best_at)
