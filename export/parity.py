"""Does the engine run the head that was trained? Our own forward against vLLM's accepted counts, window by window.

The training checkpoint, with the trainer's own settings and separately captured features, is replayed on the token ids
that the served run returned. At each served window's anchor our accepted count must be the engine's. The exported
folder is never read here, so an error in it shows. A separately generated reference would prove nothing: bf16 greedy
text differs between engines and batch shapes.

Shapes: K draft tokens, M positions that draft, D draft vocabulary.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from data import capture_hf
from data.target import embedding, served_path
from data.tokens import Row
from train.eagle3 import Eagle3
from train.head import open_head
from train.pack import Pack, pack, to_device
from train.replay import embeddings, walk

# (features, head) of the replays: what engines do, then what tells rounding from error.
ROUNDINGS = (
    (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Served:
    """One served request: what went in, what came out, and how many draft tokens each window had accepted."""

    domain: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    accepted: tuple[int, ...]
    cut: bool = False
    """the last window was read off what was returned, so it may have had one more accepted than it shows"""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A window in which replay and engine disagree, at the first draft token that differs."""

    anchor: int
    ours: int
    served: int
    gap: float
    """between the two highest of our logits there"""
    quantum: float
    """spacing of bf16 at that logit"""
    again: tuple[float, ...] = ()
    """the same gap in further replays that round elsewhere (`ROUNDINGS`); 0 where one gives the engine's count"""

    @property
    def tie(self) -> bool:
        """True where a replay puts the two tokens within one bf16 quantum, so that rounding alone decides."""
        return min((self.gap, *self.again)) <= self.quantum


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Agreement of one request."""

    windows: int
    differences: tuple[Difference, ...]
    replayed_tokens: int
    replayed_windows: int
    served_tokens: int


def parity(run: Path, served: Sequence[Served], steps: int) -> dict[str, dict[str, Any]]:
    """Agreement by domain of the run's training checkpoint with served requests (see `summarise`); `steps` is K."""
    head, d2t_D, _ = open_head(run / "head")
    return agreement(head, d2t_D, served_path(run), served, steps)


def agreement(
    head: Eagle3, d2t_D: torch.Tensor, target: Path, served: Sequence[Served], steps: int
) -> dict[str, dict[str, Any]]:
    """Agreement by domain of any head with served requests; the head is replayed in bf16, as the engine runs it.

    Two bf16 engines differ by about one quantum of a logit, now and then by two. So requests with a difference that is
    no tie are replayed again, on the same bf16 weights, with fp32 arithmetic in the target, the head or both, until
    one replay explains it.
    """
    asked = [request for request in served if request.accepted]
    replays = _replays(head, d2t_D, target, asked, steps, ROUNDINGS[0])
    for rounding in ROUNDINGS[1:]:
        doubtful = [n for n, one in enumerate(replays) if not all(d.tie for d in one.differences)]
        if not doubtful:
            break
        again = _replays(head, d2t_D, target, [asked[n] for n in doubtful], steps, rounding)
        for n, one in zip(doubtful, again, strict=True):
            replays[n] = _seen_again(replays[n], one)
    found: dict[str, list[Replay]] = {}
    for request, one in zip(asked, replays, strict=True):
        found.setdefault(request.domain, []).append(one)
    return {domain: summarise(replays) for domain, replays in sorted(found.items())}


def _seen_again(first: Replay, other: Replay) -> Replay:
    """`first`, whose differences also hold the gap that another replay has in the same window."""
    gaps = {d.anchor: d.gap for d in other.differences}
    noted = (replace(d, again=(*d.again, gaps.get(d.anchor, 0.0))) for d in first.differences)
    return replace(first, differences=tuple(noted))


def _replays(
    head: Eagle3, d2t_D: torch.Tensor, target: Path, served: Sequence[Served], steps: int,
    rounding: tuple[torch.dtype, torch.dtype],
) -> list[Replay]:  # fmt: skip
    session = capture_hf.open_target(target, head.config.aux_layers, rounding[0])
    rounded = copy.deepcopy(head).to(session.device, torch.bfloat16).to(rounding[1]).eval()
    frozen = (d2t_D.to(session.device), embedding(target).to(session.device, torch.bfloat16).to(rounding[1]))
    return [replay(rounded, *frozen, session, request, steps) for request in served]


@torch.no_grad()
def replay(
    head: Eagle3, d2t_D: torch.Tensor, embed_VH: torch.Tensor, session: capture_hf.Session, request: Served, steps: int
) -> Replay:
    """Replay one request on its own token ids."""
    ids, start = request.prompt_ids + request.output_ids, len(request.prompt_ids)
    mask = (0,) * start + (1,) * len(request.output_ids)
    row = Row(row_id="", domain=request.domain, split="", input_ids=ids, loss_mask=mask)
    one = to_device(pack(capture_hf.forward(session, [row])), session.device)
    if not len(one.at.kept_M):
        return Replay(windows=0, differences=(), replayed_tokens=0, replayed_windows=0, served_tokens=0)
    logits_KMD = torch.stack(head.logits(one.aux_SAH.to(embed_VH.dtype), embeddings(one, embed_VH, steps), one.at))
    best_KM = logits_KMD.argmax(-1)
    drafts_KM = best_KM + d2t_D[best_KM]
    own = walk(drafts_KM, one)
    ours_M, judged_M = _counts(drafts_KM, one)
    place = {anchor: m for m, anchor in enumerate(one.at.kept_M.tolist())}
    anchor, differences, windows, tokens = start - 1, list[Difference](), 0, 0
    for number, accepted in enumerate(request.accepted):
        if anchor in place:
            m = place[anchor]
            # The engine counts before it trims at the end of the answer; what was trimmed cannot be judged.
            seen = min(accepted, judged_M[m])
            if request.cut and number == len(request.accepted) - 1 and ours_M[m] == seen + 1:
                seen = ours_M[m]
            windows, tokens = windows + 1, tokens + seen + 1
            if ours_M[m] != seen:
                at_first = logits_KMD[min(ours_M[m], seen), m]
                differences.append(_difference(at_first, anchor, ours_M[m], seen))
        anchor += accepted + 1
    return Replay(
        windows=windows, differences=tuple(differences), served_tokens=tokens,
        replayed_tokens=sum(w.accepted + 1 for w in own), replayed_windows=len(own),
    )  # fmt: skip


def summarise(replays: Sequence[Replay]) -> dict[str, Any]:
    """Windows, equal windows, lengths by replay and served, and the differing windows' logit gaps."""
    windows = sum(r.windows for r in replays)
    differences = [d for r in replays for d in r.differences]
    served = sum(r.served_tokens for r in replays) / max(1, windows)
    replayed = sum(r.replayed_tokens for r in replays) / max(1, sum(r.replayed_windows for r in replays))
    return {
        "requests": len(replays),
        "windows": windows,
        "equal": windows - len(differences),
        "equal_share": (windows - len(differences)) / max(1, windows),
        "served_length": served,
        "replayed_length": replayed,
        "length_error": abs(replayed - served) / max(served, 1e-9),
        "ties": sum(d.tie for d in differences),
        "not_ties": [asdict(d) for d in differences if not d.tie],
        "differences": [asdict(d) for d in differences],
    }


def _counts(drafts_KM: torch.Tensor, one: Pack) -> tuple[list[int], list[int]]:
    """At every kept position: our accepted count, and how many draft tokens the returned text can judge."""
    steps = range(len(drafts_KM))
    wanted_KM = torch.stack([one.input_ids_S[one.following(2 + k)] for k in steps])
    valid_KM = torch.stack([one.valid(k) for k in steps])
    accepted_M = ((drafts_KM == wanted_KM) & valid_KM).long().cumprod(0).sum(0)
    return accepted_M.tolist(), valid_KM.sum(0).tolist()


def _difference(logits_D: torch.Tensor, anchor: int, ours: int, served: int) -> Difference:
    top = logits_D.float().topk(2).values.tolist()
    quantum = 2.0 ** (math.floor(math.log2(max(abs(top[0]), 1e-30))) - 7)
    return Difference(anchor=anchor, ours=ours, served=served, gap=top[0] - top[1], quantum=quantum)
