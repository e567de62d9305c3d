"""Is what was captured what the target computes? Compared with a plain transformers forward on a few rows."""

import torch

from data import capture_hf
from data.store import Features
from data.tokens import Row

TEACHER_BOUND = 0.02
"""relative L2 of teacher logits; bf16 noise is below 0.005, a wrong norm above 0.3"""
STATE_BOUND = 0.05
"""median over tokens of |difference| / |reference| of a state; two bf16 engines differ by 0.005-0.02, another layer by
more than 0.2"""


def picked(rows: list[Row], count: int) -> list[Row]:
    """`count` rows spread over all lengths."""
    ordered = sorted(rows, key=lambda r: (len(r.input_ids), r.row_id))
    return ordered[:: max(1, len(ordered) // count)][:count] if count else []


def teacher_error(session: capture_hf.Session, lm_head_VH: torch.Tensor, rows: list[Row]) -> float:
    """Largest relative L2 error of lm_head(final state) against the target's own logits, over the rows.

    Raises ValueError above the bound: then the final state is not what the target's head reads (a wrong norm, a logit
    scale or cap), and training on it would teach another model.
    """
    worst = 0.0
    for row in rows:
        features = capture_hf.forward(session, [row])[0]
        ours = features.final_SH.float() @ lm_head_VH.float().T
        theirs = capture_hf.logits(session, row).float()
        worst = max(worst, float((ours - theirs).norm() / theirs.norm()))
    if not worst < TEACHER_BOUND:
        raise ValueError(
            f"the teacher's logits differ from the target's own by {worst:.3f} (bound {TEACHER_BOUND}): the final "
            "norm, a logit scale or a logit cap of this family is not handled; nothing was captured"
        )
    return worst


def state_errors(captured: list[Features], reference: list[Features], layers: tuple[int, ...]) -> dict[str, float]:
    """Median over tokens of the relative error of each aux state and of the final state, by name.

    Raises ValueError above the bound: the engine captured other layers, or other positions.
    """
    errors: dict[str, float] = {}
    size = reference[0].final_SH.shape[1]
    for place, name in enumerate([f"layer {i}" for i in layers] + ["final"]):
        found: list[torch.Tensor] = []
        for ours, theirs in zip(captured, reference, strict=True):
            a, b = (
                torch.cat([f.aux_SAH, f.final_SH], -1)[:, place * size : (place + 1) * size].float()
                for f in (ours, theirs)
            )
            found.append((a - b).norm(dim=-1) / b.norm(dim=-1))
        errors[name] = round(float(torch.cat(found).median()), 5)
    if not max(errors.values()) < STATE_BOUND:
        raise ValueError(
            f"captured states differ from a transformers forward by {errors} (bound {STATE_BOUND}): the engine "
            "captured other layers or other positions; nothing was captured"
        )
    return errors
