"""Capture speed through SGLang: plain prefill, to the trainer's queue, to the store (a CUDA GPU and SGLang are needed).

    python -m tests.bench.capture smollm2-chat TARGET [key=value ...]      e.g. capture.env.PYTHONPATH=/path/to/sglang
    python -m tests.bench.capture 8b TARGET [key=value ...]                an 8B-shaped target, written there if missing

Random token ids, rows of 300-700 tokens. Plain prefill is the same worker told to capture nothing; both engines are up
at once and take turns, ROUNDS times, after a warm-up: medians, and the median of each round's ratio. Errors are those
of the run's own check against transformers. Every figure comes from one run.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from data import capture, capture_sglang
from data.store import Features
from data.tokens import Row, write_rows
from recipes.artifact import hash_bytes, write_bytes
from recipes.load import load
from recipes.schema import Recipe
from train.feed import from_capture
from train.pack import Pack, pack

SHAPE_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}  # fmt: skip

WARM, ROUNDS = 12, 3


def rows(count: int, vocab: int, seed: int) -> list[Row]:
    """Random rows of 300-700 tokens, a third of each a prompt."""
    generator = torch.Generator().manual_seed(seed)
    made: list[Row] = []
    for number in range(count):
        length = int(torch.randint(300, 700, (1,), generator=generator))
        ids = tuple(torch.randint(10, vocab - 10, (length,), generator=generator).tolist())
        mask = tuple(int(i >= length // 3) for i in range(length))
        made.append(Row(row_id=f"{number:05}", domain="sharegpt", split="train", input_ids=ids, loss_mask=mask))
    return made


def batches_of(made: list[Row], tokens: int) -> list[list[Row]]:
    """Rows side by side, at most `tokens` a batch."""
    cut: list[list[Row]] = [[]]
    for row in made:
        if sum(len(r.input_ids) for r in cut[-1]) + len(row.input_ids) > tokens:
            cut.append([])
        cut[-1].append(row)
    return cut


def rate(flowing: Iterator[Any], batches: list[list[Row]]) -> float:
    """tokens/s over all batches."""
    started = time.perf_counter()
    for _ in batches:
        next(flowing)
    return sum(len(r.input_ids) for batch in batches for r in batch) / (time.perf_counter() - started)


def packs(flowing: Iterator[list[Features]], batches: list[list[Row]]) -> Iterator[list[Pack]]:
    """What stream mode makes of each batch: a page-locked pack."""
    for _ in batches:
        yield [pack(next(flowing), pin=True)]


def measure(recipe: Recipe, run: Path, made: list[Row]) -> dict[str, float]:
    """All figures of one target."""
    path, batches = Path(recipe.target.path), batches_of(made, recipe.capture.batch_tokens)
    found: dict[str, Any] = {"tokens": sum(len(r.input_ids) for r in made), "batch_tokens": recipe.capture.batch_tokens}
    with (
        capture_sglang.session(recipe, run, path, run / "plain.log", plain=True) as plain,
        capture.capturing(recipe, run, made) as (capturing, checked),
    ):
        found |= checked
        found |= turns(lambda part: capture_sglang.stream(plain, part), capturing, batches)
        (out := run / "features").mkdir()
        groups, started = capture.shard_rows(made, recipe.capture.shard_tokens), time.perf_counter()
        capture.fill(recipe, capturing, out, groups, {})
        found["to_disk"] = found["tokens"] / (time.perf_counter() - started)
    written = sum(f.stat().st_size for f in out.glob("*.safetensors"))
    found["bytes_per_token"] = round(written / found["tokens"], 2)
    found["disk_bytes_per_s"] = round(found["to_disk"] * found["bytes_per_token"])
    found["writing_alone"] = write_rate(out)
    return found


def turns(plain: capture.Capture, capturing: capture.Capture, batches: list[list[Row]]) -> dict[str, Any]:
    """tokens/s of plain prefill, of capture to the slots and to the trainer's queue: medians of the rounds."""

    def queued(part: list[list[Row]]) -> float:
        with from_capture(packs(capturing(part), part)) as fed:
            return rate(fed, part)

    ways: dict[str, Callable[[list[list[Row]]], float]] = {
        "plain_prefill": lambda part: rate(plain(part), part),
        "to_slots": lambda part: rate(capturing(part), part),
        "to_queue": queued,
    }
    for way in ways.values():
        way(batches[:WARM])
    rounds = [{name: way(batches) for name, way in ways.items()} for _ in range(ROUNDS)]
    return {
        **{name: round(statistics.median(one[name] for one in rounds)) for name in ways},
        "share_of_prefill": round(statistics.median(one["to_queue"] / one["plain_prefill"] for one in rounds), 3),
        "rounds": [[round(one[name]) for name in ways] for one in rounds],
    }


def write_rate(folder: Path, size: int = 2**29) -> float:
    """bytes/s of hashing and writing ready bytes, one thread: what bounds the store."""
    data, started = bytes(size), time.perf_counter()
    hash_bytes(data)
    write_bytes(folder / "probe", data)
    return size / (time.perf_counter() - started)


def make_8b(folder: Path) -> None:
    """An 8B-shaped Llama with random weights."""
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        with torch.device("cuda"):
            model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE_8B), dtype=torch.bfloat16)
        model.save_pretrained(folder)
        del model
        torch.cuda.empty_cache()


def main() -> None:
    """Measure and print JSON."""
    kind, target, *overrides = sys.argv[1:]
    if kind == "8b":
        make_8b(Path(target))
        overrides = [f"target.facts.{k}={json.dumps(v)}" for k, v in SHAPE_8B.items()] + overrides
    name = "smollm2-chat" if kind == "8b" else kind
    recipe = load(name, [f"target.path={target}", "capture.backend=sglang", *overrides])
    vocab = recipe.target.facts.vocab_size
    run = Path(tempfile.mkdtemp(prefix="bench-"))  # kept: the workers' logs are there
    (run / "target").mkdir()
    (run / "tokens").mkdir()
    (run / "target" / "target.json").write_text(json.dumps({"path": target}))
    made = rows(200 if kind == "8b" else 3000, vocab, 0)
    write_rows(run / "tokens" / "rows.parquet", made)
    print(json.dumps({"target": kind, **measure(recipe, run, made)}), flush=True)


if __name__ == "__main__":
    main()
