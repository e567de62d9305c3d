"""Capture speed through SGLang: plain prefill, to the trainer's queue, to the store (a CUDA GPU and SGLang are needed).

    python -m tests.bench.capture smollm2-chat TARGET [key=value ...]      e.g. capture.env.PYTHONPATH=/path/to/sglang
    python -m tests.bench.capture 8b TARGET [key=value ...]                an 8B-shaped target, written there if missing

Random token ids, rows of 300-700 tokens. Plain prefill is the same worker told to capture nothing. tokens/s after a
warm-up; errors are those of the run's own check against transformers. Every figure comes from one run.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

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


def rate(flowing: Iterator[Any], batches: list[list[Row]], warm: int = 12) -> float:
    """tokens/s over the batches after the first `warm`."""
    started, tokens = 0.0, 0
    for number, batch in enumerate(batches):
        next(flowing)
        if number + 1 == warm:
            started = time.perf_counter()
        if number >= warm:
            tokens += sum(len(r.input_ids) for r in batch)
    return tokens / (time.perf_counter() - started)


def packs(flowing: Iterator[list[Features]], batches: list[list[Row]]) -> Iterator[list[Pack]]:
    """What stream mode makes of each batch: a page-locked pack."""
    for _ in batches:
        yield [pack(next(flowing), pin=True)]


def measure(recipe: Recipe, run: Path, made: list[Row]) -> dict[str, float]:
    """All figures of one target."""
    path, batches = Path(recipe.target.path), batches_of(made, recipe.capture.batch_tokens)
    found: dict[str, Any] = {"tokens": sum(len(r.input_ids) for r in made), "batch_tokens": recipe.capture.batch_tokens}
    with capture_sglang.session(recipe, run, path, run / "plain.log", plain=True) as opened:
        found["plain_prefill"] = rate(capture_sglang.stream(opened, batches), batches)
    with capture.capturing(recipe, run, made) as (capturing, checked):
        found |= checked
        found["to_slots"] = rate(capturing(batches), batches)
        with from_capture(packs(capturing(batches), batches)) as fed:
            found["to_queue"] = rate(fed, batches)
        (out := run / "features").mkdir()
        groups, started = capture.shard_rows(made, recipe.capture.shard_tokens), time.perf_counter()
        capture.fill(recipe, capturing, out, groups, {})
        found["to_disk"] = found["tokens"] / (time.perf_counter() - started)
    found["share_of_prefill"] = round(found["to_queue"] / found["plain_prefill"], 3)
    written = sum(f.stat().st_size for f in out.glob("*.safetensors"))
    found["bytes_per_token"] = round(written / found["tokens"], 2)
    found["disk_bytes_per_s"] = round(found["to_disk"] * found["bytes_per_token"])
    found["writing_alone"] = write_rate(out)
    return found


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
            LlamaForCausalLM(LlamaConfig(**SHAPE_8B, dtype="bfloat16")).bfloat16().save_pretrained(folder)


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
    made = rows(600 if kind == "8b" else 3000, vocab, 0)
    write_rows(run / "tokens" / "rows.parquet", made)
    print(json.dumps({"target": kind, **measure(recipe, run, made)}), flush=True)


if __name__ == "__main__":
    main()
