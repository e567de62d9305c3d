"""Training-time attention in plain tensors, one document after another: the reference, and the path on a CPU.

Shapes: S positions of a pack, M positions that draft, N query heads, G key/value heads, E head size.
"""

from collections.abc import Sequence

import torch

from train.places import Places

Pair = tuple[torch.Tensor, torch.Tensor]


def attend(q_MNE: torch.Tensor, cache: Sequence[Pair], at: Places, window: int) -> torch.Tensor:
    """[M, N*E]: queries at at.kept_M over step-0 keys <= t in their document and their own keys of later steps.

    cache[0] holds [S, G, E] keys and values of all positions; cache[k], k >= 1, holds [M, G, E], of which query m sees
    only its own, so that part is an elementwise product. `window` counts positions, the query's own included; 0 = all.
    """
    count, heads, size = q_MNE.shape
    groups = cache[0][0].shape[1]
    q = q_MNE.transpose(0, 1).reshape(groups, heads // groups, count, size) * size**-0.5
    own = [(q * k.transpose(0, 1)[:, None]).sum(-1, keepdim=True) for k, _ in cache[1:]]
    pieces: list[torch.Tensor] = []
    at_M = at.kept_M
    edges: list[int] = torch.searchsorted(at_M.contiguous(), at.starts_C.to(at_M.dtype)).tolist()
    for (start, end), low, high in zip(at.docs, edges[:-1], edges[1:], strict=True):
        if low == high:
            continue
        keys, values = (x[start:end].transpose(0, 1)[:, None] for x in cache[0])
        score = q[:, :, low:high] @ keys.transpose(-1, -2)
        distance = at_M[low:high, None] - torch.arange(start, end, device=at_M.device)
        unseen = distance < 0
        if window:
            unseen |= distance + len(cache) - 1 >= window
        score = score.masked_fill(unseen, float("-inf"))
        weights = torch.cat([score, *(o[:, :, low:high] for o in own)], -1).float().softmax(-1).to(q.dtype)
        out = weights[..., : end - start] @ values
        for j, (_, v) in enumerate(cache[1:]):
            out = out + weights[..., end - start + j, None] * v.transpose(0, 1)[:, None, low:high]
        pieces.append(out)
    if not pieces:
        return q_MNE.flatten(1)
    return torch.cat(pieces, 2).permute(2, 0, 1, 3).reshape(count, heads * size)
