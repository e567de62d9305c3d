"""A recipe, rows and a record that pass the gate, to be changed by one thing at a time."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from eval.acceptance import has_repeated_4gram
from export.figures import Parity
from export.record import Batch, Conditions, Counters, Machine, Record, Simulated, recipe_hash
from export.requests import Request
from recipes.load import build
from recipes.schema import Recipe

FACTS = {
    "model_type": "llama", "architecture": "LlamaForCausalLM", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "norm": "rms", "rope": {}, "tie_word_embeddings": True,
    "total_params_b": 0.001, "active_params_b": 0.001,
}  # fmt: skip
STAGES = ("target", "prompts", "head", "checkpoint")
HEAD = '{"model": "checkpoint", "method": "eagle3", "num_speculative_tokens": 3}'


def recipe(**changes: Any) -> Recipe:
    """Two domains, 40 prompts each; `changes` go into the gate."""
    gate: dict[str, Any] = {
        "rules": {"chat": {"min_acceptance": 1.4, "min_acceptance_unrepeated": 1.2, "min_speedup": 1.2}, "code": {}},
        "prompts": 40, "min_requests": 30, "bootstrap": 1000, "speed_prompts": 12,
    }  # fmt: skip
    source = {"path": "x.jsonl", "form": "prompt", "field": "prompt"}
    return build(
        {
            "name": "small",
            "target": {"id": "org/model", "revision": "1", "max_model_len": 512, "facts": FACTS},
            "domains": {
                "chat": {"sources": [source], "train": 8},
                "code": {"sources": [source], "role": "benchmark"},
            },
            "answers": {"max_prompt_tokens": 128, "held_out": 16},
            "capture": {"aux_layers": [1, 3, 5]},
            "head": {"draft_vocab_size": 64},
            "train": {"tokens": 1000},
            "gate": {**gate, **changes},
        }
    )


def head_folder(folder: Path) -> Path:
    """A folder that looks like a head's."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def request(i: int = 0, **changes: Any) -> Request:
    """A head's acceptance row on chat: 20 windows of 3 draft tokens, `windows` says how many of each are accepted."""
    windows: tuple[int, ...] = changes.pop("windows", (1, 0, 2, 0, 1) * 4)
    ids: tuple[int, ...] = changes.pop("output_ids", tuple(range(1 + len(windows) + sum(windows))))
    row = Request(
        arm="head", domain="chat", phase="acceptance", round=0, concurrency=8, temperature=0.0, prompt_id=f"{i:016x}",
        prompt_tokens=4, output_tokens=len(ids), drafts=len(windows), draft_tokens=3 * len(windows),
        accepted=sum(windows), per_step_accepted=windows, ttft_s=0.05, total_s=0.05 + 0.03 * len(windows),
        gaps_s=(0.03,) * len(windows), finish="stop", repeated_4gram=has_repeated_4gram(ids), prompt_ids=(1, 2, 3, 4),
        output_ids=ids,
    )  # fmt: skip
    return replace(row, **changes)


def traffic(seed: int = 0) -> list[Request]:
    """Rows of a whole measurement under :func:`recipe`."""
    generator = np.random.default_rng(seed)
    rows: list[Request] = []
    for domain in ("chat", "code"):
        for arm, rates in (("head", [0.35, 0.3, 0.2, 0.15]), ("ngram", [0.7, 0.1, 0.1, 0.1])):
            for i in range(40):
                windows = tuple(int(a) for a in generator.choice(4, size=40, p=rates))
                ids = (7,) * (41 + sum(windows)) if arm == "head" and i % 4 == 0 else None
                more = {} if ids is None else {"output_ids": ids}
                rows.append(request(i, windows=windows, arm=arm, domain=domain, **more))
    for number in range(3):
        for arm, speed in (("none", 33.0), ("head", 55.0), ("ngram", 36.0)):
            for i in range(12):
                windows = () if arm == "none" else (1,) * 30
                row = request(i, windows=windows, arm=arm, phase="speed", round=number, concurrency=1,
                              output_ids=tuple(range(61)))  # fmt: skip
                noise = float(generator.normal(1, 0.03))
                rows.append(replace(row, total_s=61 / speed * noise, gaps_s=(0.9 / speed,) * 60))
    return rows


def counters(rows: list[Request]) -> dict[str, dict[str, Counters]]:
    """What an engine would have counted for these rows."""
    found: dict[str, dict[str, Counters]] = {}
    for arm in sorted({r.arm for r in rows if r.drafts}):
        for domain in ("chat", "code"):
            mine = [r for r in rows if (r.arm, r.domain) == (arm, domain) and r.counted]
            steps = [a for r in mine for a in r.per_step_accepted]
            found.setdefault(arm, {})[domain] = Counters(
                drafts=sum(r.drafts for r in mine), draft_tokens=sum(r.draft_tokens for r in mine),
                accepted=sum(r.accepted for r in mine),
                per_position=[sum(a >= k for a in steps) for k in (1, 2, 3)],
            )  # fmt: skip
    return found


def record(rows: list[Request], of: Recipe) -> Record:
    """The record of :func:`traffic`."""
    return Record(
        made_from={**{stage: stage[0] * 64 for stage in STAGES}, "recipe": recipe_hash(of)},
        conditions=conditions(),
        counters=counters(rows),
        speed=[
            Batch(phase="acceptance", domain="chat", round=0, arm="head", temperature=0.0, concurrency=8,
                  output_tokens=4000, seconds=25.0, requests=40),
        ],
        simulated={name: Simulated(length=2.1, tokens=2100, windows=1000, per_position=[0.6, 0.3, 0.2])
                   for name in ("chat", "code")},
        parity={name: Parity(windows=1000, equal=994, served_length=2.15, replayed_length=2.146)
                for name in ("chat", "code")},
    )  # fmt: skip


def conditions() -> Conditions:
    """Of a CPU measurement."""
    serve = ["{python}", "-m", "vllm", "--model", "org/model", "--port", "PORT"]
    return Conditions(
        engine="vllm", engine_version="0.32.0",
        command={"none": serve, "head": [*serve, "--speculative-config", HEAD],
                 "ngram": [*serve, "--speculative-config", '{"method": "ngram"}']},
        env={}, machine=Machine(cpu="a CPU", cores=2, gpu="", memory_gib=24.0), dtype="bfloat16", quantization="",
        max_tokens=200, speed_max_tokens=100, concurrency=8, speculative_tokens=3, rejection_sample_method="standard",
        draft_sample_method="greedy", temperatures=[0.0], date="2026-01-01T00:00:00Z",
    )  # fmt: skip


def unchanged(of: Record) -> dict[str, str]:
    """The identities that :func:`eval.gate.judge` compares with, when nothing changed."""
    return {**of.made_from, "record": "e" * 64}
