"""Windows walked as vLLM walks them: the simulated acceptance length.

From anchor t the head drafts K tokens, x_{t+2} on; the longest matching prefix a is accepted, the target adds one
token, and the next anchor is t + a + 1. Length = tokens / windows = 1 + accepted / windows. The sum of per-step
accuracies, which peers log, overstates it: easy stretches are consumed in fewer windows.

Shapes: K TTT steps, M positions that draft, D draft vocabulary, V target vocabulary, H hidden size.
"""

from dataclasses import dataclass
from typing import Any

import torch

from train.eagle3 import Eagle3
from train.pack import Pack


@dataclass(frozen=True, kw_only=True)
class Window:
    """One target step: anchor position, draft tokens accepted, and how many could be judged (fewer at the end)."""

    anchor: int
    accepted: int
    judged: int


@torch.no_grad()
def drafts(head: Eagle3, pack: Pack, embed_VH: torch.Tensor, d2t_D: torch.Tensor, steps: int) -> torch.Tensor:
    """[K, M] target ids that the head drafts, greedily, given that its earlier drafts were accepted."""
    logits = head.logits(pack.aux_SAH.to(embed_VH.dtype), embeddings(pack, embed_VH, steps), pack.at)
    return torch.stack([(ids := step.argmax(-1)) + d2t_D[ids] for step in logits])


def embeddings(pack: Pack, embed_VH: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """What each TTT step reads: x_{t+1} at all positions, then x_{t+1+k} at the kept ones."""
    next_S = torch.cat([pack.input_ids_S[1:], pack.input_ids_S[:1]])
    later = [embed_VH[pack.input_ids_S[pack.following(1 + k)]] for k in range(1, steps)]
    return [embed_VH[next_S], *later]


def walk(drafts_KM: torch.Tensor, pack: Pack) -> list[Window]:
    """The windows of every answer in the pack, in order."""
    steps = len(drafts_KM)
    wanted_KM = torch.stack([pack.input_ids_S[pack.following(2 + k)] for k in range(steps)])
    valid_KM = torch.stack([pack.valid(k) for k in range(steps)])
    accepted_M = ((drafts_KM == wanted_KM) & valid_KM).long().cumprod(0).sum(0).tolist()
    judged_M = valid_KM.sum(0).tolist()
    windows: list[Window] = []
    free = -1  # first position that the last window left for an anchor
    previous = -2
    for place, anchor in enumerate(pack.at.kept_M.tolist()):
        if anchor != previous + 1:
            free = anchor  # another answer begins
        if anchor == free:
            windows.append(Window(anchor=anchor, accepted=accepted_M[place], judged=judged_M[place]))
            free = anchor + accepted_M[place] + 1
        previous = anchor
    return windows


def summary(windows: list[Window], steps: int) -> dict[str, Any]:
    """Acceptance length, its counts, and cumulative per-position rates."""
    count = max(1, len(windows))
    return {
        "length": 1 + sum(w.accepted for w in windows) / count,
        "tokens": sum(w.accepted + 1 for w in windows),
        "windows": len(windows),
        "per_position": [sum(w.accepted > k for w in windows) / count for k in range(steps)],
    }
