"""Rows -> features: which states, in which batches, by which engine, checked against a transformers forward.

Alignment at position t: aux states h_t, final state s_t (so the teacher's p(.|x_<=t) = softmax(lm_head(s_t))).
"""

import importlib.util
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from data import capture_hf, capture_sglang
from data.ahead import in_order
from data.capture_check import QUANTISED_BOUND, STATE_BOUND, picked, state_errors, teacher_error
from data.store import Entry, Features, Shard, finished_shard, write_index, write_shard
from data.target import output_matrix, served_path
from data.tokens import Row, read_rows
from recipes.check import aux_layers
from recipes.schema import Recipe

Capture = Callable[[Iterable[list[Row]]], Iterator[list[Features]]]
WRITERS = 4
"""shards that are hashed and written while the engine goes on"""


def make(recipe: Recipe, run: Path, out: Path) -> dict[str, Any]:
    """Capture rows into shards; finished shards are kept. With capture.mode: stream only the held-out rows.

    Raises ValueError where what was captured is not what the target computes.
    """
    layers, facts = aux_layers(recipe), recipe.target.facts
    rows = [r for r in read_rows(run / "tokens") if recipe.capture.mode == "disk" or r.split == "held_out"]
    groups = shard_rows(rows, recipe.capture.shard_tokens)
    done: dict[int, Shard] = {n: s for n in range(len(groups)) if (s := finished_shard(out, n)) is not None}
    checked: dict[str, Any] = {}
    if len(done) < len(groups):
        with capturing(recipe, run, rows) as (capture, checked):
            fill(recipe, capture, out, groups, done)
    shards = [done[n] for n in range(len(groups))]
    write_index(out, shards, facts.hidden_size, len(layers))
    for sidecar in out.glob("features-*.safetensors.json"):
        sidecar.unlink()
    return {
        "rows": sum(len(s.entries) for s in shards),
        "quarantined": [row for s in shards for row in s.quarantined],
        "tokens": sum(e.length for s in shards for e in s.entries),
        "shards": len(shards),
        **checked,
        "aux_layers": list(layers),
    }


@contextmanager
def capturing(recipe: Recipe, run: Path, rows: list[Row]) -> Generator[tuple[Capture, dict[str, Any]], None, None]:
    """(batches -> their features, in order; what the checks found) of the recipe's backend, while it runs."""
    chosen, path, layers = picked(rows, recipe.capture.check_rows), served_path(run), aux_layers(recipe)
    if backend(recipe) == "hf":
        session = capture_hf.open_target(path, layers, getattr(torch, recipe.target.dtype))
        error = teacher_error(session, output_matrix(path), chosen)
        yield (lambda batches: (capture_hf.forward(session, batch) for batch in batches)), _found("hf", error, {})
        return
    error, reference = _reference(recipe, path, chosen) if chosen else (0.0, [])
    with capture_sglang.session(recipe, run, path, run / "logs" / "capture.log") as opened:
        streamed = capture_sglang.stream(opened, [[row] for row in chosen])
        captured = [copied(one) for batch in streamed for one in batch]
        quantised = recipe.target.quantization or recipe.capture.options.get("quantization")
        bound = QUANTISED_BOUND if quantised else STATE_BOUND
        errors = state_errors(captured, reference, layers, bound) if chosen else {}
        yield (lambda batches: capture_sglang.stream(opened, batches)), _found("sglang", error, errors)


def _found(engine: str, error: float, errors: dict[str, float]) -> dict[str, Any]:
    return {"backend": engine, "teacher_error": round(error, 5), **({"state_errors": errors} if errors else {})}


def _reference(recipe: Recipe, path: Path, rows: list[Row]) -> tuple[float, list[Features]]:
    """The teacher's error, and every layer's state by a plain transformers forward; its memory is free afterwards."""
    last = recipe.target.facts.num_hidden_layers
    session = capture_hf.open_target(path, tuple(range(last)), getattr(torch, recipe.target.dtype))
    error = teacher_error(session, output_matrix(path), rows)
    reference = [capture_hf.forward(session, [row])[0] for row in rows]
    del session
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return error, reference


def backend(recipe: Recipe) -> str:
    """hf or sglang; `auto` is sglang where a GPU and SGLang are. Raises ValueError for one that is not built yet."""
    named = recipe.capture.backend
    if named == "vllm":
        raise ValueError("capture.backend: 'vllm' is not built yet; allowed now: auto, hf, sglang")
    if named != "auto":
        return named
    elsewhere = recipe.capture.command != ("{python}",)
    found = elsewhere or importlib.util.find_spec("sglang") is not None
    return "sglang" if torch.cuda.is_available() and found else "hf"


def copied(one: Features) -> Features:
    """The features in memory of their own."""
    return Features(
        aux_SAH=one.aux_SAH.clone(), final_SH=one.final_SH.clone(), input_ids_S=one.input_ids_S,
        loss_mask_S=one.loss_mask_S,
    )  # fmt: skip


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


def fill(recipe: Recipe, capture: Capture, out: Path, groups: list[list[Row]], done: dict[int, Shard]) -> None:
    """Capture the shards that are missing in `done`, and add them; hashing and writing run beside the engine."""
    missing = [n for n in range(len(groups)) if n not in done]
    cut = {n: batches(groups[n], recipe.capture.batch_tokens) for n in missing}
    flowing = capture(batch for n in missing for batch in cut[n])
    dtype, layers = getattr(torch, recipe.capture.dtype), len(aux_layers(recipe))
    bar = tqdm(total=sum(len(r.input_ids) for g in groups for r in g), desc="capture", unit="token", disable=None)
    bar.update(sum(len(r.input_ids) for n in done for r in groups[n]))

    def writes() -> Iterator[Callable[[], Shard]]:
        for n in missing:
            captured: list[tuple[Entry, Features]] = []
            for batch in cut[n]:
                features = [copied(one) for one in next(flowing)]
                captured += [(_entry(row), one) for row, one in zip(batch, features, strict=True)]
                bar.update(sum(len(r.input_ids) for r in batch))
            yield partial(write_shard, out, n, captured, dtype, layers)

    done.update(zip(missing, in_order(writes(), WRITERS), strict=True))
    bar.close()


def _entry(row: Row) -> Entry:
    return Entry(row_id=row.row_id, domain=row.domain, split=row.split, start=0, length=len(row.input_ids))
