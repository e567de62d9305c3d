"""Is what was captured what the target computes? Compared with a plain transformers forward on a few rows."""

import torch

from data import capture_hf
from data.store import Features
from data.tokens import Row

TEACHER_BOUND = 0.02
"""relative L2 of teacher logits; bf16 noise is below 0.005, a wrong norm above 0.3"""
STATE_BOUND = 0.15
"""median over tokens of |difference| / |reference| of a state; two bf16 engines differ by 0.005-0.02 (random weights:
0.07), a missing norm by far more"""
QUANTISED_BOUND = 0.6
"""the same where the engine quantises what the reference does not (FP8, 8 layers of random weights: 0.25-0.50)"""


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


def state_errors(
    captured: list[Features], reference: list[Features], layers: tuple[int, ...], bound: float = STATE_BOUND
) -> dict[str, float]:
    """Median over tokens of the relative error of each aux state and of the final state, by name.

    `reference` holds the states after 0, 1, 2, ... layers. Raises ValueError where a captured state is nearer to
    another layer's than to its own, or `bound` or more away from it: the engine captured other layers, or other
    positions.
    """
    size = reference[0].final_SH.shape[1]
    errors = {"final": _error([f.final_SH for f in captured], [f.final_SH for f in reference])}
    for place, layer in enumerate(layers):
        ours = [f.aux_SAH[:, place * size : (place + 1) * size] for f in captured]
        by_layer = [
            _error(ours, [f.aux_SAH[:, i * size : (i + 1) * size] for f in reference])
            for i in range(reference[0].aux_SAH.shape[1] // size)
        ]
        nearest = min(range(len(by_layer)), key=by_layer.__getitem__)
        if nearest != layer:
            raise ValueError(
                f"what was captured as layer {layer} is nearer to layer {nearest} of a transformers forward "
                f"({by_layer[layer]}, {by_layer[nearest]}): the engine counts its layers otherwise; nothing was "
                "captured"
            )
        errors[f"layer {layer}"] = by_layer[layer]
    if not max(errors.values()) < bound:
        raise ValueError(
            f"captured states differ from a transformers forward by {errors} (bound {bound}): another norm, or "
            "other positions; nothing was captured"
        )
    return errors


def _error(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Median over all tokens of |difference| / |theirs|."""
    pairs = [(a.float(), b.float()) for a, b in zip(ours, theirs, strict=True)]
    return round(float(torch.cat([(a - b).norm(dim=-1) / b.norm(dim=-1) for a, b in pairs]).median()), 5)
