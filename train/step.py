"""The head with its loss: what accelerate wraps and torch compiles, as one graph.

Shapes: K TTT steps, M positions that draft, S positions of a pack, D draft vocabulary, V target vocabulary, H hidden
size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo
from torch._dynamo import maybe_mark_dynamic  # pyright: ignore[reportPrivateImportUsage]
from torch.func import functional_call  # pyright: ignore[reportPrivateImportUsage, reportUnknownVariableType]

from recipes.schema import Train
from train import losses, losses_fused
from train.eagle3 import Eagle3
from train.pack import Pack
from train.replay import embeddings

Parts = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """What training reads and never changes: target embedding, teacher's rows, vocabulary map."""

    embed_VH: torch.Tensor
    teacher_DH: torch.Tensor
    d2t_D: torch.Tensor
    t2d_V: torch.Tensor


class Step(nn.Module):
    """Pack -> loss (sum over positions and TTT steps, weighed by decay^k), hits and judged [K].

    TTT step k at t learns the teacher's p(. | x_<=t+1+k); a position whose token x_{t+2+k} is outside the draft
    vocabulary teaches nothing, yet counts as a miss.
    """

    def __init__(self, head: Eagle3, frozen: Frozen, settings: Train) -> None:
        super().__init__()
        self.head, self.frozen, self.settings = head, frozen, settings

    def forward(self, pack: Pack) -> Parts:
        """See the class."""
        frozen, steps, dtype = self.frozen, self.settings.ttt_steps, self.frozen.embed_VH.dtype
        weights = half(self.head, dtype)
        embeds = embeddings(pack, frozen.embed_VH, steps)
        # Outside a graph the backward would make a step again with the fp32 weights that functional_call put back.
        again = self.settings.recompute and (torch.compiler.is_compiling() or dtype == torch.float32)
        inputs = (pack.aux_SAH.to(dtype), embeds, pack.at, again)
        normed: list[torch.Tensor] = functional_call(self.head, weights, inputs)
        with torch.no_grad():
            teacher_MD = pack.final_MH.to(frozen.teacher_DH.dtype) @ frozen.teacher_DH.T
        taught = _taught(normed[0])
        loss = teacher_MD.new_zeros((), dtype=torch.float32)
        hits: list[torch.Tensor] = []
        judged: list[torch.Tensor] = []
        for k, normed_MH in enumerate(normed):
            wanted_M, valid_M = pack.input_ids_S[pack.following(2 + k)], pack.valid(k)
            weight_M = (valid_M & frozen.t2d_V[wanted_M]).float()
            part, ids_M = taught(normed_MH, weights["lm_head.weight"], teacher_MD, k, weight_M, self.settings.loss)
            loss = loss + self.settings.ttt_decay**k * part
            hits.append(((ids_M + frozen.d2t_D[ids_M] == wanted_M) & (weight_M > 0)).sum())
            judged.append(valid_M.sum())
        return {"loss": loss, "hits": torch.stack(hits), "judged": torch.stack(judged)}


def half(head: nn.Module, dtype: torch.dtype) -> Parts:
    """The head's matrices in `dtype`, cast once an optimiser step; norms stay in fp32."""
    return {name: p.to(dtype) if p.dim() == 2 else p for name, p in head.named_parameters()}


def taught_count(pack: Pack, frozen: Frozen) -> torch.Tensor:
    """Positions that step 0 teaches, what the loss is divided by."""
    return (pack.valid(0) & frozen.t2d_V[pack.input_ids_S[pack.following(2)]]).sum()


def compiled(step: Step) -> Any:
    """The step as one graph for any number of positions, in bf16 on a GPU; elsewhere as it is."""
    if not _fused(step.frozen.embed_VH):
        return step
    # Every matrix is cast once and read by every TTT step, so its gradient is ready at the very end: cutting the graph
    # at DDP's buckets would hide no communication.
    dynamo.optimize_ddp = False
    step.compile(fullgraph=True)
    return step


def mark(pack: Pack) -> Pack:
    """Tell the compiler which sizes change from pack to pack."""
    at = pack.at
    for tensor in (pack.aux_SAH, pack.input_ids_S, at.position_S, pack.final_MH, pack.run_M, at.kept_M, at.starts_C):
        maybe_mark_dynamic(tensor, 0)
    return pack


def _taught(like: torch.Tensor) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    return (losses_fused if _fused(like) else losses).taught


def _fused(like: torch.Tensor) -> bool:
    return like.is_cuda and like.dtype == torch.bfloat16
