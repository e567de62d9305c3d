"""Turns -> rows of served token ids with an exact loss mask, and the draft vocabulary counted from them."""

from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

from data.answers import Turn, read_turns
from data.tensors import write_tensors
from recipes.artifact import write_bytes
from recipes.schema import Recipe


@dataclass(frozen=True, kw_only=True)
class Row:
    """One training sequence: token ids as served, and 1 where a token is the target's answer."""

    row_id: str
    domain: str
    split: str
    input_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]


def make(recipe: Recipe, run: Path, out: Path) -> dict[str, Any]:
    """Write rows.parquet and vocab.safetensors. Raises ValueError where no answer token is left to train on."""
    turns = read_turns(run / "answers")
    rows = merge(turns)
    train = [r for r in rows if r.split == "train"]
    weights = {name: domain.weight for name, domain in recipe.domains.items()}
    if not any(sum(r.loss_mask) > 2 for r in train):
        raise ValueError(
            "no training row has answer tokens; see the drop reasons of prompts and answers (draftsmith status)"
        )
    write_rows(out / "rows.parquet", rows)
    facts, head = recipe.target.facts, recipe.head
    counts = supervised_counts(train, weights)
    d2t, t2d = vocabulary(counts, head.draft_vocab_size, facts.vocab_size)
    write_tensors(out / "vocab.safetensors", {"d2t": d2t, "t2d": t2d})
    short = sum(sum(r.loss_mask) <= 2 for r in rows)
    return {
        "turns": len(turns),
        "dropped_turns": sum(t.finish.startswith("dropped:") for t in turns),
        "rows": len(rows),
        "rows_too_short_to_supervise": short,
        "tokens": sum(len(r.input_ids) for r in rows),
        "supervised_tokens": {s: sum(sum(r.loss_mask) for r in rows if r.split == s) for s in ("train", "held_out")},
        "unique_supervised_tokens": len(counts),
        "coverage": coverage(rows, t2d),
    }


def merge(turns: list[Turn]) -> list[Row]:
    """One row a conversation where each prompt begins with the last prompt and answer; else a row a turn.

    The engine renders the next prompt from text, and text does not always give the same ids again.
    """
    rows: list[Row] = []
    answered = [t for t in turns if not t.finish.startswith("dropped:")]
    for _, group in groupby(answered, key=lambda t: (t.prompt_id, t.domain, t.split)):
        ids: tuple[int, ...] = ()
        mask: tuple[int, ...] = ()
        first: Turn | None = None
        for turn in group:
            if first is not None and turn.prompt_ids[: len(ids)] != ids:
                rows.append(_row(first, ids, mask))
                first, ids, mask = None, (), ()
            first = first or turn
            mask += (0,) * (len(turn.prompt_ids) - len(ids)) + (1,) * len(turn.output_ids)
            ids = turn.prompt_ids + turn.output_ids
        if first is not None:
            rows.append(_row(first, ids, mask))
    return rows


def supervised_counts(rows: list[Row], weights: dict[str, float]) -> Counter[int]:
    """How often each token is an answer token, times its domain's weight."""
    counts: Counter[int] = Counter()
    for row in rows:
        for token, on in zip(row.input_ids, row.loss_mask, strict=True):
            if on:
                counts[token] += cast(int, weights.get(row.domain, 1.0))
    return counts


def vocabulary(counts: Counter[int], size: int, target_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """d2t [D] (offsets: target id = i + d2t[i]) and t2d [V] of the `size` most counted tokens.

    Ties and a shortage of counted tokens go to the lowest ids. Format: speculators' `d2t`/`t2d`.
    """
    ranked = sorted(range(target_size), key=lambda token: (-counts.get(token, 0), token))
    kept = torch.tensor(sorted(ranked[:size]), dtype=torch.int64)
    t2d = torch.zeros(target_size, dtype=torch.bool)
    t2d[kept] = True
    return kept - torch.arange(size, dtype=torch.int64), t2d


def coverage(rows: list[Row], t2d: torch.Tensor) -> dict[str, dict[str, float]]:
    """{domain: {split: share of answer tokens that the draft vocabulary holds}}."""
    held = t2d.tolist()
    tally: dict[str, dict[str, list[int]]] = {}
    for row in rows:
        pair = tally.setdefault(row.domain, {}).setdefault(row.split, [0, 0])
        for token, on in zip(row.input_ids, row.loss_mask, strict=True):
            pair[0] += bool(on and held[token])
            pair[1] += on
    return {d: {s: round(a / max(1, b), 4) for s, (a, b) in by.items()} for d, by in tally.items()}


def read_vocab(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """(d2t [D] int64 offsets, t2d [V] bool) of a tokens directory."""
    tensors = load_file(folder / "vocab.safetensors")
    return tensors["d2t"], tensors["t2d"]


def write_rows(path: Path, rows: list[Row]) -> None:
    """Parquet with row_id, domain, split, input_ids, loss_mask."""
    table = pa.table({
        "row_id": pa.array([r.row_id for r in rows], pa.string()),
        "domain": pa.array([r.domain for r in rows], pa.string()),
        "split": pa.array([r.split for r in rows], pa.string()),
        "input_ids": pa.array([r.input_ids for r in rows], pa.list_(pa.int32())),
        "loss_mask": pa.array([r.loss_mask for r in rows], pa.list_(pa.uint8())),
    })  # fmt: skip
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    write_bytes(path, sink.getvalue().to_pybytes())


def read_rows(folder: Path) -> list[Row]:
    """The rows of a tokens directory."""
    return [
        Row(
            row_id=r["row_id"], domain=r["domain"], split=r["split"],
            input_ids=tuple(r["input_ids"]), loss_mask=tuple(r["loss_mask"]),
        )
        for r in pq.read_table(folder / "rows.parquet").to_pylist()
    ]  # fmt: skip


def _row(first: Turn, ids: tuple[int, ...], mask: tuple[int, ...]) -> Row:
    return Row(
        row_id=f"{first.prompt_id}-{first.turn}", domain=first.domain, split=first.split, input_ids=ids, loss_mask=mask
    )
