"""The plan's figures: sizes against the real modules and files, monotone in what they depend on, readable, offline."""

import json
import math
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes import estimate_rates
from recipes.estimate import (
    decoding_seconds,
    estimate,
    readable_bytes,
    readable_count,
    readable_seconds,
    table,
)
from recipes.estimate_rates import Rates, cpu_rates, gpu_rates, gpus_wanted, probe_flops, rates_for
from recipes.load import build, load
from recipes.schema import Recipe
from tests.recipes.small import small

STAGES = [
    "target",
    "prompts",
    "answers",
    "tokens",
    "features",
    "head",
    "checkpoint",
    "record",
    "verdict",
    "publication",
]
MACHINE = cpu_rates(4.7e11, cores=2)
BIG = [
    f"{target}-{kind}" for target in ("llama-3.3-70b", "qwen3-coder-30b", "gpt-oss-120b") for kind in ("chat", "code")
]


def recipe(**changes: Any) -> Recipe:
    return build(small(**changes))


def seconds(name: str, rates: Rates = MACHINE, **changes: Any) -> float:
    return estimate(recipe(**changes), rates).stages[name]["seconds"]


def test_every_stage_has_every_figure() -> None:
    figures = estimate(recipe(), MACHINE)
    assert list(figures.stages) == STAGES
    for stage in figures.stages.values():
        assert set(stage) == {"tokens", "disk_bytes", "memory_bytes", "seconds"}
        assert all(math.isfinite(value) and value >= 0 for value in stage.values())
        assert stage["seconds"] > 0 and stage["disk_bytes"] > 0
    assert figures.totals["disk_bytes"] == sum(s["disk_bytes"] for s in figures.stages.values())
    assert figures.totals["seconds"] == sum(s["seconds"] for s in figures.stages.values())
    assert figures.totals["memory_bytes"] == max(s["memory_bytes"] for s in figures.stages.values())
    json.dumps([figures.stages, figures.totals])


# The demo's own manifests: seconds and bytes a stage, 2 cores alone on the machine (LOG.md, 2026-12-01).
DEMO = {
    "target": (17.4, 272_585_858), "prompts": (1.8, 493_925), "answers": (199, 2_275_221), "tokens": (0.3, 405_538),
    "features": (122, 1_174_955_557), "head": (254, 24_828_977), "checkpoint": (0.1, 12_332_047),
    "record": (568, 535_760), "verdict": (0.6, 65_209),
}  # fmt: skip


def test_the_demo_took_what_plan_says_within_a_fifth() -> None:
    stages = estimate(load("smollm2-chat"), MACHINE).stages
    took, wrote = (sum(figures[i] for figures in DEMO.values()) for i in (0, 1))
    assert sum(stages[name]["seconds"] for name in DEMO) == pytest.approx(took, rel=0.2)
    assert sum(stages[name]["disk_bytes"] for name in DEMO) == pytest.approx(wrote, rel=0.2)
    for name, (seconds, count) in DEMO.items():
        assert stages[name]["disk_bytes"] == pytest.approx(count, rel=0.2), name
        if seconds > 60:
            assert stages[name]["seconds"] == pytest.approx(seconds, rel=0.2), name


def test_a_streamed_run_stores_held_out_features_only_and_captures_while_it_trains() -> None:
    disk, stream = (estimate(recipe(capture__mode=mode), MACHINE).stages for mode in ("disk", "stream"))
    assert stream["features"]["disk_bytes"] < 0.3 * disk["features"]["disk_bytes"]
    assert stream["features"]["seconds"] < disk["features"]["seconds"]
    slow = cpu_rates(1e9, cores=1)
    again = estimate(recipe(capture__mode="stream", train={"tokens": 10**7}), slow).stages["head"]["seconds"]
    assert again >= estimate(recipe(train={"tokens": 10**7}), slow).stages["head"]["seconds"] * 0.9


def test_time_follows_what_it_depends_on() -> None:
    assert seconds("answers", answers__max_tokens=400) > seconds("answers", answers__max_tokens=200)
    assert seconds("answers", answers__concurrency=1) > seconds("answers", answers__concurrency=64)
    assert seconds("head", train__ttt_steps=7) > seconds("head", train__ttt_steps=3)
    assert seconds("head", train={"tokens": 10**6}) > seconds("head", train={"tokens": 10**5})
    assert seconds("head", train__simulate_steps=1) > seconds("head")
    assert seconds("head", train__optimizer="adamw") < seconds("head")
    assert seconds("head", train__accumulate=8) < seconds("head")
    assert seconds("record", gate__ngram=False) < seconds("record")
    assert seconds("record", gate__temperatures=[0.0, 0.7]) > seconds("record")
    assert seconds("record", gate__loads=[8]) > seconds("record")
    assert seconds("features", cpu_rates(1e11, cores=2)) > seconds("features")
    assert seconds("features", cpu_rates(4.7e11, cores=1)) > seconds("features")


def test_several_processes_share_what_is_trained_and_not_what_is_simulated() -> None:
    def head(**changes: Any) -> dict[str, float]:
        one = load("llama-3.3-70b-chat", [f"{key}={value}" for key, value in changes.items()])
        return estimate(one, gpu_rates(one, 2)).stages["head"]

    one, two = head(**{"train.processes": 1}), head(**{"train.processes": 2})
    assert 0.5 < two["seconds"] / one["seconds"] < 0.7
    assert 2 < two["memory_bytes"] / one["memory_bytes"] < 2.5
    often = [head(**{"train.processes": n, "train.accumulate": 4 // n, "train.simulate_steps": 50}) for n in (1, 2)]
    rarely = [head(**{"train.processes": n, "train.accumulate": 4 // n}) for n in (1, 2)]
    spent = [a["seconds"] - b["seconds"] for a, b in zip(often, rarely, strict=True)]
    assert spent[0] > 0 and spent[1] == pytest.approx(spent[0])


def test_disk_follows_what_it_depends_on() -> None:
    def disk(name: str, **changes: Any) -> float:
        return estimate(recipe(**changes), MACHINE).stages[name]["disk_bytes"]

    assert 0.45 < disk("features", capture__dtype="float8_e4m3fn") / disk("features") < 0.6
    assert disk("features", domains__chat__train=1000) > 5 * disk("features")
    assert disk("checkpoint", export__include_embeddings=True) - disk("checkpoint") == 2 * 512 * 64
    assert disk("publication", publish__repo_id="a/b") < disk("publication")
    assert disk("target", target__path="") == pytest.approx(2e6)


def test_answers_of_another_server_need_no_memory_here() -> None:
    ours, theirs = (estimate(recipe(answers__url=url), MACHINE).stages["answers"] for url in ("", "http://a"))
    assert theirs["memory_bytes"] < ours["memory_bytes"]
    assert theirs["seconds"] == pytest.approx(ours["seconds"] - MACHINE.engine_start_s)


def test_prewritten_answers_need_no_engine() -> None:
    assert seconds("answers", answers__mode="prewritten") < seconds("answers") / 3


def test_a_decoding_step_of_a_mixture_reads_more_experts_for_more_tokens() -> None:
    one = load("qwen3-coder-30b-chat")
    rates = gpu_rates(one, 1)
    alone, verifying = (decoding_seconds(one, rates, in_flight=1, drafted=k) for k in (0, 4))
    dense = load("llama-3.3-70b-chat")
    there = gpu_rates(dense, 1)
    alone_dense, verifying_dense = (decoding_seconds(dense, there, in_flight=1, drafted=k) for k in (0, 4))
    assert verifying / alone > 1.5 > 1.2 > verifying_dense / alone_dense


def test_gpus_wanted() -> None:
    assert gpus_wanted(recipe()) == 0
    assert gpus_wanted(recipe(engine__args=["--tensor-parallel-size", "4"])) == 4
    assert gpus_wanted(recipe(engine__args=["--tensor-parallel-size=2", "-dp", "4", "--seed", "9"])) == 8
    assert gpus_wanted(recipe(engine__args=["--tensor-parallel-size", "auto"])) == 1


def test_rates_follow_the_recipe_and_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate_rates, "gpus_here", lambda: ())
    monkeypatch.setattr(estimate_rates, "probe_flops", lambda: 1e11)
    assert rates_for(recipe()).devices == 0
    assert rates_for(recipe(engine__args=["-tp", "2"])).devices == 2
    monkeypatch.setattr(estimate_rates, "probe_flops", lambda: 0.0)
    assert "assumed" in rates_for(recipe()).name
    monkeypatch.setattr(estimate_rates, "gpus_here", lambda: (1e11,))
    assert rates_for(recipe()).devices == 1


def test_published_rates_of_the_big_targets() -> None:
    """Field notes 2.3: tokens/s a GPU of the target alone; half of it for mixtures, as they advise."""
    for name, published in (
        ("llama-3.3-70b-chat", 7.1e3),
        ("qwen3-coder-30b-chat", 30e3),
        ("gpt-oss-120b-chat", 19.5e3),
    ):
        one = load(name)
        assert gpu_rates(one, 1).capture_flops / (2e9 * one.target.facts.active_params_b) == pytest.approx(
            published, rel=0.03
        )


def test_the_probe_is_quick_and_of_one_core() -> None:
    threads, started = torch.get_num_threads(), time.perf_counter()
    assert 1e8 < probe_flops(0.05) < 1e14
    assert time.perf_counter() - started < 5
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("name", BIG)
def test_big_targets_are_planned_offline_without_torch(name: str) -> None:
    code = (
        "import socket, sys\n"
        "def no(*a, **k): raise AssertionError('network')\n"
        "socket.socket.connect = no; socket.getaddrinfo = no\n"
        "from recipes.estimate import estimate; from recipes.load import load\n"
        f"figures = estimate(load('{name}'))\n"
        "assert figures.devices == 8 and 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "print(figures.totals['disk_bytes'], figures.totals['seconds'])\n"
    )
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
    disk, spent = map(float, done.stdout.split())
    assert 1e12 < disk < 6e12, "a node's local disks hold it"
    assert 3600 < spent < 12 * 3600, "one night on a node"
    assert time.perf_counter() - started < 5


def test_table() -> None:
    figures = estimate(recipe(), MACHINE)
    why = "recipe: train.lr: 0.001 -> 0.0005 and much more text that does not fit"
    text = table(
        {name: ("todo", "not made yet") for name in STAGES} | {"target": ("done", ""), "head": ("stale", why)}, figures
    )
    lines = text.splitlines()
    assert len(lines) == 1 + len(STAGES) + 2 + 1
    assert lines[0].split() == ["stage", "status", "why", "tokens", "disk", "memory", "time"]
    assert [line.split()[0] for line in lines[1:11]] == STAGES
    assert len({line.rstrip() == line for line in lines}) == 1
    assert why[:37] + "..." in text
    assert lines[11].startswith("to do") and "9 stages" in lines[11]
    assert lines[12].startswith("total")
    assert "2 CPU cores" in lines[13] and "RAM" in lines[13]
    ends = {len(line) for line in lines[:13]}
    assert len(ends) == 1, "figures end in one column"


def test_table_of_a_finished_run() -> None:
    text = table(dict.fromkeys(STAGES, ("done", "")), estimate(recipe(), MACHINE))
    assert "0 stages" in text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "-"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (3.9 * 2**40, "3.9 TiB"),
        (2**60, "1.05e+06 TiB"),
    ],
)
def test_readable_bytes(count: float, text: str) -> None:
    assert readable_bytes(count) == text


@pytest.mark.parametrize(
    ("spent", "text"), [(0, "-"), (12, "12 s"), (89, "89 s"), (90, "1.5 min"), (5399, "90.0 min"), (7200, "2.0 h")]
)
def test_readable_seconds(spent: float, text: str) -> None:
    assert readable_seconds(spent) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "-"), (540, "540"), (12_345, "12.3 k"), (4.5e6, "4.5 M"), (1.3e9, "1.3 G")]
)
def test_readable_count(count: float, text: str) -> None:
    assert readable_count(count) == text


def test_no_socket_is_opened_for_the_small_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    def no(*_: Any) -> None:
        raise AssertionError("network")

    monkeypatch.setattr(socket.socket, "connect", no)
    assert estimate(recipe(), MACHINE).totals["seconds"] > 0
