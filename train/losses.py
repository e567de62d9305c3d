"""Losses as pure functions of logits, one value a position: the reference, and the path on a CPU.

Shapes: M positions that draft, D draft vocabulary, H hidden size.
"""

from collections.abc import Callable

import torch

LK_DECAY = 3.0
"""of the KL part in lk_lambda with the acceptance (arXiv 2602.23881, section 4: eta)"""


def kl(draft_MD: torch.Tensor, teacher_MD: torch.Tensor) -> torch.Tensor:
    """KL(teacher || draft) [M], both softmaxed over the draft vocabulary.

    The soft-label objective of EAGLE-3 (arXiv 2503.01840, section 3.2), the teacher renormalised over the D tokens.
    """
    with torch.no_grad():
        teacher_logp_MD = teacher_MD.float().log_softmax(-1)
        teacher_p_MD = teacher_logp_MD.exp()
        entropy_M = -(teacher_p_MD * teacher_logp_MD).sum(-1)
    draft_logp_MD = draft_MD.float().log_softmax(-1)
    return -(teacher_p_MD * draft_logp_MD).sum(-1) - entropy_M


def acceptance(draft_MD: torch.Tensor, teacher_MD: torch.Tensor) -> torch.Tensor:
    """Chance [M] that rejection sampling accepts a draft token: sum over tokens of min(teacher, draft)."""
    return torch.minimum(teacher_MD.float().softmax(-1).detach(), draft_MD.float().softmax(-1)).sum(-1)


def lk_alpha(draft_MD: torch.Tensor, teacher_MD: torch.Tensor) -> torch.Tensor:
    """-log of the acceptance [M] (arXiv 2602.23881, L_LK^alpha)."""
    return -acceptance(draft_MD, teacher_MD).clamp_min(1e-9).log()


def lk_lambda(draft_MD: torch.Tensor, teacher_MD: torch.Tensor) -> torch.Tensor:
    """w KL + (1 - w)(1 - acceptance) [M], w = exp(-LK_DECAY acceptance), held fixed, of each position itself."""
    accepted_M = acceptance(draft_MD, teacher_MD)
    w_M = (-LK_DECAY * accepted_M.detach()).exp()
    return w_M * kl(draft_MD, teacher_MD) + (1 - w_M) * (1 - accepted_M)


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "kl": kl, "lk_alpha": lk_alpha, "lk_lambda": lk_lambda,
}  # fmt: skip


def taught(
    normed_MH: torch.Tensor, lm_head_DH: torch.Tensor, teacher_MD: torch.Tensor, shift: int, weight_M: torch.Tensor,
    kind: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(sum of weight * loss, highest draft token [M]) of the draft logits normed @ lm_head.T.

    Position m is taught by teacher row m + shift: TTT step k at t has the teacher of step 0 at t + k.
    """
    draft_MD = (normed_MH @ lm_head_DH.T).float()  # at once: argmax of bf16 takes six times as long on a CPU
    place_M = (torch.arange(len(teacher_MD), device=teacher_MD.device) + shift).clamp_max(len(teacher_MD) - 1)
    loss_M = LOSSES[kind](draft_MD, teacher_MD[place_M])
    return torch.where(weight_M > 0, loss_M * weight_M, 0.0).sum(), draft_MD.detach().argmax(-1)
