"""Features -> packed sequences, and the whole run's order, known before the first step.

Shapes: S positions of a pack, M positions that draft, K TTT steps, H hidden size, A aux layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from data.store import Entry, Features, Shard, read_index, read_row

Steps = list[list[list[int]]]
"""for each optimiser step its packs, each a list of row numbers"""


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Documents side by side.

    aux_SAH [S, A*H], final_SH [S, H], input_ids_S, docs: [start, end) of each; kept_M: positions whose token x_{t+2} is
    an answer's (so they draft); run_M: answer tokens from x_{t+1} on in the same answer (step k needs run >= k + 2).
    """

    aux_SAH: torch.Tensor
    final_SH: torch.Tensor
    input_ids_S: torch.Tensor
    docs: tuple[tuple[int, int], ...]
    kept_M: torch.Tensor
    run_M: torch.Tensor

    def valid(self, step: int) -> torch.Tensor:
        """[M] bool: positions whose TTT step `step` predicts an answer token."""
        return self.run_M >= step + 2

    def following(self, offset: int) -> torch.Tensor:
        """[M] positions t + offset, held inside the pack (only read where valid)."""
        return (self.kept_M + offset).clamp_max(len(self.input_ids_S) - 1)


def rows_of(folder: Path, split: str) -> list[tuple[Shard, Entry]]:
    """All rows of one split, in the store's order."""
    return [(shard, entry) for shard in read_index(folder) for entry in shard.entries if entry.split == split]


def answer_runs(loss_mask_S: torch.Tensor) -> torch.Tensor:
    """[S]: how many answer tokens stand in a row from each position on."""
    place = torch.arange(len(loss_mask_S))
    stop = torch.where(loss_mask_S, len(loss_mask_S), place)
    return stop.flip(0).cummin(0).values.flip(0) - place


def pack(rows: Sequence[Features]) -> Pack:
    """Join rows into one sequence."""
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row.input_ids_S))
    runs_S = torch.cat([answer_runs(r.loss_mask_S) for r in rows])
    next_run_S = torch.cat([runs_S[1:], runs_S.new_zeros(1)])
    last = torch.tensor(starts[1:]) - 1
    next_run_S[last] = 0  # the next document's first token is not this one's next
    kept_M = (next_run_S >= 2).nonzero().squeeze(-1)
    return Pack(
        aux_SAH=torch.cat([r.aux_SAH for r in rows]),
        final_SH=torch.cat([r.final_SH for r in rows]),
        input_ids_S=torch.cat([r.input_ids_S for r in rows]),
        docs=tuple(pairwise(starts)),
        kept_M=kept_M,
        run_M=next_run_S[kept_M],
    )


def to_device(one: Pack, device: torch.device) -> Pack:
    """The same pack on another device."""
    return Pack(
        aux_SAH=one.aux_SAH.to(device, non_blocking=True), final_SH=one.final_SH.to(device, non_blocking=True),
        input_ids_S=one.input_ids_S.to(device), docs=one.docs, kept_M=one.kept_M.to(device),
        run_M=one.run_M.to(device),
    )  # fmt: skip


def load_pack(folder: Path, rows: list[tuple[Shard, Entry]], numbers: Sequence[int]) -> Pack:
    """Read rows by number and join them."""
    return pack([read_row(folder, *rows[n]) for n in numbers])


def epoch_packs(
    lengths: Sequence[int], repeats: Sequence[float], epoch: int, seed: int, pack_tokens: int
) -> list[list[int]]:
    """Row numbers of each pack of one epoch, shuffled by (seed, epoch) alone.

    repeats[i] is how often row i appears; a fraction appears with that probability.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    draw = torch.rand(len(lengths), generator=generator).tolist()
    numbers = [n for n, r in enumerate(repeats) for _ in range(int(r) + (draw[n] < r - int(r)))]
    order = torch.randperm(len(numbers), generator=generator).tolist()
    packs: list[list[int]] = []
    room = 0
    for place in order:
        number = numbers[place]
        if lengths[number] > room:
            packs.append([])
            room = pack_tokens
        packs[-1].append(number)
        room -= lengths[number]
    return packs


def schedule(
    lengths: Sequence[int], supervised: Sequence[int], repeats: Sequence[float], *, tokens: int, epochs: float,
    seed: int, pack_tokens: int, packs_a_step: int,
) -> Steps:  # fmt: skip
    """Every optimiser step of the run: until `tokens` supervised tokens were seen, or for `epochs` passes."""
    steps: Steps = []
    goal = tokens or epochs * sum(s * r for s, r in zip(supervised, repeats, strict=True))
    seen, epoch = 0, 0
    while seen < goal:
        packs = epoch_packs(lengths, repeats, epoch, seed, pack_tokens)
        for first in range(0, len(packs), packs_a_step):
            if seen >= goal:
                break
            steps.append(packs[first : first + packs_a_step])
            seen += sum(supervised[n] for one in steps[-1] for n in one)
        epoch += 1
    return steps
