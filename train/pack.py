"""Features -> packed sequences, and the whole run's order, known before the first step.

Shapes: S positions of a pack, M positions that draft, K TTT steps, H hidden size, A aux layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from data.store import Entry, Features, Shard, read_index, read_row
from recipes.schema import Train
from train.places import Places, each, places

Steps = list[list[list[int]]]
"""for each optimiser step its packs, each a list of row numbers"""


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Documents side by side.

    aux_SAH [S, A*H], input_ids_S, at: where things stand; at.kept_M: positions t whose tokens x_{t+1} and x_{t+2} are
    one answer's (so they draft); final_MH: the state s_{t+1} at those; run_M: answer tokens from x_{t+1} on in the
    same answer (step k needs run >= k + 2). The token and the teacher of step k at t are those of step 0 at t + k.
    """

    aux_SAH: torch.Tensor
    final_MH: torch.Tensor
    input_ids_S: torch.Tensor
    run_M: torch.Tensor
    at: Places

    def valid(self, step: int) -> torch.Tensor:
        """[M] bool: positions whose TTT step `step` predicts an answer token."""
        return self.run_M >= step + 2

    def following(self, offset: int) -> torch.Tensor:
        """[M] positions t + offset, held inside the pack (only read where valid)."""
        return (self.at.kept_M + offset).clamp_max(len(self.input_ids_S) - 1)


def rows_of(folder: Path, split: str) -> list[tuple[Shard, Entry]]:
    """All rows of one split, in the store's order."""
    return [(shard, entry) for shard in read_index(folder) for entry in shard.entries if entry.split == split]


def answer_runs(loss_mask_S: torch.Tensor) -> torch.Tensor:
    """[S]: how many answer tokens stand in a row from each position on."""
    place = torch.arange(len(loss_mask_S))
    stop = torch.where(loss_mask_S, len(loss_mask_S), place)
    return stop.flip(0).cummin(0).values.flip(0) - place


def pack(rows: Sequence[Features], pin: bool = False) -> Pack:
    """Join rows into one sequence; `pin`: in page-locked memory, from where a GPU copies without waiting."""
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row.input_ids_S))
    runs_S = torch.cat([answer_runs(r.loss_mask_S) for r in rows])
    next_run_S = torch.cat([runs_S[1:], runs_S.new_zeros(1)])
    last = torch.tensor(starts[1:]) - 1
    next_run_S[last] = 0  # the next document's first token is not this one's next
    kept_M = (next_run_S >= 2).nonzero().squeeze(-1)
    one = Pack(
        aux_SAH=_joined([r.aux_SAH for r in rows], pin),
        final_MH=_joined(_after(rows, starts, kept_M), pin),
        input_ids_S=torch.cat([r.input_ids_S for r in rows]),
        run_M=next_run_S[kept_M],
        at=places(list(pairwise(starts)), kept_M),
    )
    return each(one, torch.Tensor.pin_memory) if pin else one


def _after(rows: Sequence[Features], starts: Sequence[int], kept_M: torch.Tensor) -> list[torch.Tensor]:
    """The states s_{t+1} at the kept positions, row by row."""
    edges: list[int] = torch.searchsorted(kept_M, torch.tensor(starts)).tolist()
    return [
        row.final_SH[kept_M[low:high] + 1 - start]
        for row, start, low, high in zip(rows, starts[:-1], edges[:-1], edges[1:], strict=True)
    ]


def _joined(parts: list[torch.Tensor], pin: bool) -> torch.Tensor:
    """The parts one after the other, copied once."""
    if not pin:
        return torch.cat(parts)
    whole = torch.empty((sum(map(len, parts)), parts[0].shape[1]), dtype=parts[0].dtype, pin_memory=True)
    return torch.cat(parts, out=whole)


def to_device(one: Pack, device: torch.device) -> Pack:
    """The same pack on another device; scalars stay on the CPU, where kernels are launched from."""
    return each(one, lambda x: x.to(device, non_blocking=True) if x.dim() else x)


def load_pack(folder: Path, rows: list[tuple[Shard, Entry]], numbers: Sequence[int], pin: bool = False) -> Pack:
    """Read rows by number and join them."""
    return pack([read_row(folder, *rows[n]) for n in numbers], pin)


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
    lengths: Sequence[int], supervised: Sequence[int], repeats: Sequence[float], settings: Train, processes: int
) -> Steps:
    """Every optimiser step of the run: until settings.tokens supervised tokens were seen, or for settings.epochs.

    Each process gets at least one pack of every step: what an epoch leaves over joins its last step. Raises ValueError
    where an epoch has fewer packs than there are processes.
    """
    steps: Steps = []
    goal = settings.tokens or settings.epochs * sum(s * r for s, r in zip(supervised, repeats, strict=True))
    seen, epoch, each = 0, 0, settings.accumulate * processes
    while seen < goal:
        packs = epoch_packs(lengths, repeats, epoch, settings.seed, settings.pack_tokens)
        if len(packs) < processes:
            raise ValueError(
                f"train.pack_tokens: {settings.pack_tokens} gives {len(packs)} packs an epoch for {processes} "
                "processes; lower it, or use fewer processes"
            )
        for first in range(0, len(packs), each):
            if seen >= goal:
                break
            taken = packs[first : first + each]
            if len(taken) < processes:
                steps[-1] += taken
            else:
                steps.append(taken)
            seen += sum(supervised[n] for one in taken for n in one)
        epoch += 1
    return steps
