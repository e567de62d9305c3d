"""Losses as pure functions: (draft logits, teacher logits, mask) -> (sum, count), divided once per optimiser step.

Shapes: M positions that draft, D draft vocabulary.
"""

import torch


def soft_kl(
    draft_logits_MD: torch.Tensor, teacher_logits_MD: torch.Tensor, mask_M: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over masked positions of KL(teacher || draft), both softmaxed over the draft vocabulary, and their number.

    The soft-label objective of EAGLE-3 (arXiv 2503.01840, section 3.2), the teacher renormalised over the D tokens.
    """
    with torch.no_grad():
        teacher_logp_MD = teacher_logits_MD.float().log_softmax(-1)
        teacher_p_MD = teacher_logp_MD.exp()
        entropy_M = -(teacher_p_MD * teacher_logp_MD).sum(-1)
    draft_logp_MD = draft_logits_MD.float().log_softmax(-1)
    cross_M = -(teacher_p_MD * draft_logp_MD).sum(-1)
    return ((cross_M - entropy_M) * mask_M).sum(), mask_M.sum()
