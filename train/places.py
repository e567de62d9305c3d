"""Where things stand in a packed sequence: documents, positions in them, positions that draft.

Shapes: S positions of a pack, M positions that draft (kept), C documents + 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Places:
    """docs: [start, end) of each document; starts_C: their starts and the end, int32; longest: tokens of the longest,
    a scalar that stays on the CPU (a number would be compiled in); position_S: from 0 in each document; kept_M.
    """

    docs: tuple[Span, ...]
    longest: torch.Tensor
    starts_C: torch.Tensor
    position_S: torch.Tensor
    kept_M: torch.Tensor


def places(docs: Sequence[Span], kept_M: torch.Tensor) -> Places:
    """Places of documents side by side, on kept_M's device."""
    device = kept_M.device
    starts = [start for start, _ in docs] + [docs[-1][1]]
    return Places(
        docs=tuple(docs),
        longest=torch.tensor(max(end - start for start, end in docs)),
        starts_C=torch.tensor(starts, dtype=torch.int32, device=device),
        position_S=torch.cat([torch.arange(end - start, device=device) for start, end in docs]),
        kept_M=kept_M,
    )


def everywhere(one: Places) -> Places:
    """The same documents with every position kept."""
    return replace(one, kept_M=torch.arange(len(one.position_S), device=one.kept_M.device))


def each(one: Any, do: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A dataclass of tensors (and of such dataclasses) with `do` applied to every tensor."""
    changed: dict[str, Any] = {}
    for field in fields(one):
        value = getattr(one, field.name)
        if isinstance(value, torch.Tensor):
            changed[field.name] = do(value)
        elif is_dataclass(value):
            changed[field.name] = each(value, do)
    return replace(one, **changed)
