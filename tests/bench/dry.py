"""A big target, cut to the layers that fit: random weights through SGLang capture and ten training steps, with the
memory and bytes that `plan` expects beside what they took (a CUDA GPU and SGLang are needed).

    python -m tests.bench.dry [--features] llama-3.3-70b-chat FOLDER 8 [key=value ...]    FOLDER is written if missing

Memory is what the driver reports for the stage's processes. Rows are random ids, as long and with as many answer tokens
as the recipe expects.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from data.store import read_index
from data.tokens import Row, vocabulary, write_rows
from recipes.estimate import Figures, estimate
from recipes.estimate_rates import gpu_rates
from recipes.estimate_sizes import split_counts
from recipes.load import load
from recipes.schema import Facts, Recipe

STEPS = 10
EXTRA = {
    "qwen3_moe": {
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    }
}  # fmt: skip
"""what the config of a mixture says beyond the recipe's facts"""


def config_of(facts: Facts) -> Any:
    """A transformers config of the facts."""
    return AutoConfig.for_model(
        facts.model_type, hidden_size=facts.hidden_size, intermediate_size=facts.intermediate_size,
        num_hidden_layers=facts.num_hidden_layers, num_attention_heads=facts.num_attention_heads,
        num_key_value_heads=facts.num_key_value_heads, head_dim=facts.head_dim, vocab_size=facts.vocab_size,
        max_position_embeddings=facts.max_position_embeddings, rms_norm_eps=facts.rms_norm_eps,
        rope_parameters=dict(facts.rope), tie_word_embeddings=facts.tie_word_embeddings, dtype="bfloat16",
        **EXTRA.get(facts.model_type, {}),
    )  # fmt: skip


def write_target(facts: Facts, folder: Path) -> float:
    """Random weights of the facts' shape in `folder`, unless they are there; 1e9 parameters."""
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model: Any = AutoModelForCausalLM.from_config(config_of(facts), dtype=torch.bfloat16)
        model.save_pretrained(folder)
        # Published configs say num_experts, which this transformers writes under another name.
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**EXTRA.get(facts.model_type, {}), **config}))
    return sum(f.stat().st_size for f in folder.glob("*.safetensors")) / 2e9


def rows_of(recipe: Recipe, count: int) -> list[Row]:
    """Random rows with the recipe's expected length (held within a pack) and share of answer tokens; a tenth of them
    is held out.
    """
    generator, expected = torch.Generator().manual_seed(0), split_counts(recipe, "train")
    mean = min(expected.row_tokens / expected.conversations, recipe.train.pack_tokens / 2)
    share = expected.answer_tokens / expected.row_tokens
    made: list[Row] = []
    for number in range(count):
        length = int(mean * (0.5 + float(torch.rand(1, generator=generator))))
        ids = tuple(torch.randint(10, recipe.target.facts.vocab_size - 10, (length,), generator=generator).tolist())
        mask = tuple(int(i >= (1 - share) * length) for i in range(length))
        split = "held_out" if number % 10 == 0 else "train"
        domain = next(iter(recipe.domains))
        made.append(Row(row_id=f"{number:05}", domain=domain, split=split, input_ids=ids, loss_mask=mask))
    return made


def prepare(recipe: Recipe, run: Path) -> None:
    """What the stages before capture would have made."""
    (run / "target").mkdir(parents=True)
    (run / "tokens").mkdir()
    (run / "target" / "target.json").write_text(json.dumps({"path": recipe.target.path}))
    packs = recipe.train.accumulate * (STEPS + 4)
    expected = split_counts(recipe, "train")
    mean = min(expected.row_tokens / expected.conversations, recipe.train.pack_tokens / 2)
    write_rows(run / "tokens" / "rows.parquet", rows_of(recipe, int(1.3 * packs * recipe.train.pack_tokens / mean)))
    facts, size = recipe.target.facts, recipe.head.draft_vocab_size
    d2t_D, t2d_V = vocabulary(Counter(range(0, facts.vocab_size, facts.vocab_size // size)), size, facts.vocab_size)
    save_file({"d2t": d2t_D, "t2d": t2d_V}, run / "tokens" / "vocab.safetensors")


def used_bytes(pid: int) -> float:
    """GPU memory of a process and all that it started, as the driver says."""
    command = ("nvidia-smi", "--query-compute-apps=pid,used_gpu_memory", "--format=csv,noheader,nounits")
    said = subprocess.run(command, capture_output=True, text=True).stdout
    with contextlib.suppress(psutil.NoSuchProcess):
        own = {pid, *(p.pid for p in psutil.Process(pid).children(recursive=True))}
        lines = [line.split(",") for line in said.splitlines() if line.count(",") == 1]
        return sum(float(size) * 2**20 for owner, size in lines if int(owner) in own and size.strip().isdigit())
    return 0.0


def peak_of(command: list[str]) -> tuple[float, float, str]:
    """(bytes at most, seconds, last line) of a process. Raises SystemExit where it fails."""
    started, most = time.perf_counter(), 0.0
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err)
        while process.poll() is None:
            most = max(most, used_bytes(process.pid))
        out.seek(0)
        err.seek(0)
        if process.returncode:
            raise SystemExit(f"{command[3:5]} failed:\n{err.read()[-3000:]}")
        return most, time.perf_counter() - started, out.read().splitlines()[-1]


def stage(name: str, recipe: Recipe, run: Path) -> dict[str, Any]:
    """Make features or head in this process; accounting and the allocator's own peaks."""
    (run / name).mkdir(exist_ok=True)
    if name == "features":
        from data import capture

        return capture.make(recipe, run, run / name)
    from train import loop

    made = loop.make(recipe, run, run / name)
    gib = {"allocated_gib": torch.cuda.max_memory_allocated(), "reserved_gib": torch.cuda.max_memory_reserved()}
    return made | {key: round(value / 2**30, 2) for key, value in gib.items()}


def compared(recipe: Recipe, run: Path, name: str, expected: Figures, arguments: list[str]) -> dict[str, Any]:
    """One stage measured, with the estimates beside."""
    memory, seconds, line = peak_of([sys.executable, "-m", "tests.bench.dry", "--stage", name, str(run), *arguments])
    planned = expected.stages[name]["memory_bytes"]
    found = {
        "stage": name, "seconds": round(seconds, 1), "memory_gib": round(memory / 2**30, 2),
        "planned_gib": round(planned / 2**30, 2), "planned_over_measured": round(planned / memory, 3),
        **json.loads(line),
    }  # fmt: skip
    if name == "features":
        tokens = sum(e.length for s in read_index(run / name) for e in s.entries)
        size = sum(f.stat().st_size for f in (run / name).iterdir()) / tokens
        planned_size = expected.stages[name]["disk_bytes"] / expected.stages[name]["tokens"]
        found |= {"bytes_a_token": round(size, 1), "planned_bytes_a_token": round(planned_size, 1)}
    else:
        times = [json.loads(text) for text in (run / name / "metrics.jsonl").read_text().splitlines()]
        found["loss"] = [round(x["loss"], 3) for x in times if "loss" in x]
    return found


def read(arguments: list[str]) -> Recipe:
    """RECIPE FOLDER LAYERS [key=value ...] -> the cut recipe."""
    name, folder, layers, *overrides = arguments
    recipe = load(name, [f"target.facts.num_hidden_layers={layers}", f"target.path={folder}", "engine.args=[]",
                         "capture.engines=1", "train.processes=1", "tracking.wandb=disabled", *overrides])  # fmt: skip
    size = sum(f.stat().st_size for f in Path(folder).glob("*.safetensors")) / 2e9
    facts = replace(recipe.target.facts, total_params_b=size or 1.0, active_params_b=size or 1.0, weight_bytes=2.0)
    if recipe.capture.options.get("quantization") == "fp8" and size:  # the embedding and lm_head stay in bf16
        facts = replace(facts, weight_bytes=1 + 2 * facts.vocab_size * facts.hidden_size / (size * 1e9))
    steps = STEPS * recipe.train.accumulate * recipe.train.pack_tokens
    seen = int(steps * split_counts(recipe, "train").answer_tokens / split_counts(recipe, "train").row_tokens)
    return replace(
        recipe, target=replace(recipe.target, facts=facts, quantization=""),
        train=replace(recipe.train, tokens=seen, epochs=0.0, simulate_steps=0),
    )  # fmt: skip


def main() -> None:
    """Measure both stages and print JSON lines."""
    if sys.argv[1] == "--stage":
        _, _, name, run, *arguments = sys.argv
        print(json.dumps(stage(name, read(arguments), Path(run))), flush=True)
        return
    names, arguments = ("features", "head"), sys.argv[1:]
    if arguments[0] == "--features":
        names, arguments = ("features",), arguments[1:]
    started = time.perf_counter()
    billions = write_target(read(arguments).target.facts, Path(arguments[1]))
    print(json.dumps({"target": arguments[:3], "params_b": round(billions, 3),
                      "written_s": round(time.perf_counter() - started, 1)}), flush=True)  # fmt: skip
    torch.cuda.empty_cache()
    recipe, run = read(arguments), Path(tempfile.mkdtemp(prefix="dry-"))
    prepare(recipe, run)
    expected = estimate(recipe, gpu_rates(recipe, recipe.capture.tensor_parallel))
    for name in names:
        print(json.dumps(compared(recipe, run, name, expected, arguments)), flush=True)


if __name__ == "__main__":
    main()
