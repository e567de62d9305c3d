"""Rows -> features: which states, in which batches, checked against the target's own logits.

Alignment at position t: aux states h_t, final state s_t (so the teacher's p(.|x_<=t) = softmax(lm_head(s_t))).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from data import capture_hf
from data.store import Entry, Features, Shard, finished_shard, write_index, write_shard
from data.target import output_matrix, served_path
from data.tokens import Row, read_rows
from recipes.check import aux_layers
from recipes.schema import Recipe

Forward = Callable[[list[Row]], list[Features]]
CHECK_BOUND = 0.02  # relative L2 of teacher logits; bf16 noise is below 0.005, a wrong norm above 0.3


def make(recipe: Recipe, run: Path, out: Path) -> dict[str, Any]:
    """Capture all rows into shards; finished shards are kept. Raises ValueError where the teacher is not the target."""
    if recipe.capture.backend != "hf":
        raise ValueError(f"capture.backend: {recipe.capture.backend!r} is not built yet; allowed now: hf")
    layers, facts = aux_layers(recipe), recipe.target.facts
    groups = shard_rows(read_rows(run / "tokens"), recipe.capture.shard_tokens)
    done: dict[int, Shard] = {n: s for n in range(len(groups)) if (s := finished_shard(out, n)) is not None}
    error = 0.0
    if len(done) < len(groups):
        dtype = getattr(torch, recipe.target.dtype)
        session = capture_hf.open_target(served_path(run), layers, dtype)
        error = check_teacher(session, output_matrix(served_path(run)), groups, recipe.capture.check_rows)
        bar = tqdm(total=sum(len(r.input_ids) for g in groups for r in g), desc="capture", unit="token", disable=None)
        for number, rows in enumerate(groups):
            if number not in done:
                done[number] = _capture_shard(recipe, session, out, number, rows)
            bar.update(sum(len(r.input_ids) for r in rows))
        bar.close()
    shards = [done[n] for n in range(len(groups))]
    write_index(out, shards, facts.hidden_size, len(layers))
    for sidecar in out.glob("features-*.safetensors.json"):
        sidecar.unlink()
    return {
        "rows": sum(len(s.entries) for s in shards),
        "quarantined": [row for s in shards for row in s.quarantined],
        "tokens": sum(e.length for s in shards for e in s.entries),
        "shards": len(shards),
        "teacher_error": round(error, 5),
        "aux_layers": list(layers),
    }


def shard_rows(rows: list[Row], shard_tokens: int) -> list[list[Row]]:
    """Rows in the order of their length, cut into shards of about `shard_tokens` tokens."""
    groups: list[list[Row]] = []
    size = shard_tokens
    for row in sorted(rows, key=lambda r: (len(r.input_ids), r.row_id)):
        if size + len(row.input_ids) > shard_tokens:
            groups.append([])
            size = 0
        groups[-1].append(row)
        size += len(row.input_ids)
    return groups


def batches(rows: list[Row], batch_tokens: int) -> list[list[Row]]:
    """Neighbours in length, together at most `batch_tokens` tokens with padding counted (a longer row goes alone)."""
    cut: list[list[Row]] = []
    for row in rows:
        longest = len(row.input_ids)
        if cut and longest * (len(cut[-1]) + 1) <= batch_tokens:
            cut[-1].append(row)
        else:
            cut.append([row])
    return cut


def check_teacher(session: capture_hf.Session, lm_head: torch.Tensor, groups: list[list[Row]], rows: int) -> float:
    """Largest relative L2 error of lm_head(final state) against the target's own logits, over a few rows.

    Raises ValueError above the bound: then the final state is not what the target's head reads (a wrong norm, a logit
    scale or cap), and training on it would teach another model.
    """
    every = [row for group in groups for row in group]
    picked = every[:: max(1, len(every) // rows)][:rows]
    worst = 0.0
    for row in picked:
        features = capture_hf.forward(session, [row])[0]
        ours = features.final_SH.float() @ lm_head.float().T
        theirs = capture_hf.logits(session, row).float()
        worst = max(worst, float((ours - theirs).norm() / theirs.norm()))
    if not worst < CHECK_BOUND:
        raise ValueError(
            f"the teacher's logits differ from the target's own by {worst:.3f} (bound {CHECK_BOUND}): the final norm, "
            "a logit scale or a logit cap of this family is not handled; nothing was captured"
        )
    return worst


def _capture_shard(recipe: Recipe, session: capture_hf.Session, out: Path, number: int, rows: list[Row]) -> Shard:
    captured: list[tuple[Entry, Features]] = []
    for batch in batches(rows, recipe.capture.batch_tokens):
        for row, features in zip(batch, capture_hf.forward(session, batch), strict=True):
            assert len(features.input_ids_S) == len(row.input_ids)
            entry = Entry(
                row_id=row.row_id, domain=row.domain, split=row.split, start=0, length=len(row.input_ids)
            )  # fmt: skip
            captured.append((entry, features))
    dtype = getattr(torch, recipe.capture.dtype)
    return write_shard(out, number, captured, dtype, len(aux_layers(recipe)))
