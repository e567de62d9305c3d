"""Two processes through the real launcher, on the CPU (gloo): the curve of one, its faults, and on after a kill."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from data.engine import end_orphans
from recipes.artifact import hash_file
from recipes.faults import EnvironmentFault
from recipes.load import plain
from tests.train import test_loop
from tests.train.test_loop import recipe_of
from train import launch, loop
from train.head import open_head

ROOT = Path(__file__).parents[2]
folder = test_loop.folder
_fresh_accelerator = test_loop._fresh_accelerator


def curve(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def soon_gone(processes: list[psutil.Process]) -> bool:
    """Within 2 s; one that nobody has waited for yet is gone too."""
    deadline = time.monotonic() + 2
    left = processes
    while left and time.monotonic() < deadline:
        left = [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        time.sleep(0.02)
    return not left


def made(folder: Path, out: Path, **train: Any) -> dict[str, Any]:
    out.mkdir(exist_ok=True)
    settings = {"precision": "fp32", "epochs": 3.0, **train}
    return launch.make(recipe_of(folder, **settings), folder / "run", out)


def same_end(one: Path, two: Path, tolerance: float, first: int = 0) -> None:
    """The same curve (of one from step `first` on), head and files."""
    for ours, theirs in zip(curve(two), curve(one)[first:], strict=True):
        for key in ("loss", "grad_norm", "accuracy", "count", "tokens"):
            assert ours[key] == pytest.approx(theirs[key], rel=tolerance), (ours["step"], key)
    for a, b in zip(*(open_head(folder)[0].parameters() for folder in (one, two)), strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=1e-4)
    assert sorted(p.name for p in two.iterdir()) == sorted(p.name for p in one.iterdir())


def test_two_processes_train_as_one_with_the_same_packs(folder: Path, tmp_path: Path) -> None:
    one = made(folder, tmp_path / "one", accumulate=2)
    two = made(folder, tmp_path / "two", processes=2)
    assert one["steps"] == two["steps"] and one["supervised_tokens_seen"] == two["supervised_tokens_seen"]
    same_end(tmp_path / "one", tmp_path / "two", 1e-4)
    assert not list((folder / "run" / "engines").glob("*.json"))


def test_sharded_processes_go_on_from_one_process_to_the_same_end(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its checkpoint, with steps of three packs, of which one process has two."""
    settings = {"optimizer": "adamw", "pack_tokens": 70, "clip": 0.1}
    with monkeypatch.context() as patched:
        patched.setattr(loop, "checkpoints", lambda _: [])  # so it stays
        one = made(folder, tmp_path / "one", accumulate=4, checkpoint_steps=7, simulate_steps=8, **settings)
    (tmp_path / "two").mkdir()
    (tmp_path / "one" / "checkpoint-0000007.safetensors").rename(tmp_path / "two" / "checkpoint-0000007.safetensors")
    sharded = {"processes": 2, "accumulate": 2, "sharding": "fsdp2", "checkpoint_steps": 3, "simulate_steps": 8}
    two = made(folder, tmp_path / "two", **settings, **sharded)
    assert {**two, "seconds_waited_for_data": 0} == {**one, "seconds_waited_for_data": 0}
    assert {line["count"] for line in curve(tmp_path / "two")} == {4 * 58, 3 * 58}
    same_end(tmp_path / "one", tmp_path / "two", 1e-5, first=7)


def test_a_fault_of_a_process_is_the_users(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gives \d+ packs an epoch for 2 processes; lower it, or use fewer"):
        made(folder, tmp_path / "few", processes=2, pack_tokens=100_000)


SUMMARY = """[rank0]: RuntimeError: Connection reset by peer
[rank1]: torch.OutOfMemoryError: CUDA out of memory.
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Failures:
  rank      : 0 (local_rank: 0)
  traceback : Signal 15 (SIGTERM) received by PID 7
Root Cause (first observed failure):
  rank      : 1 (local_rank: 1)
  traceback : """


@pytest.mark.parametrize(
    ("text", "code", "why"),
    [
        (SUMMARY + "To enable traceback see: ...", 1, r"torch.OutOfMemoryError: CUDA out of memory\."),
        (SUMMARY + "Signal 9 (SIGKILL) received by PID 8", 1, "it was ended by SIGKILL, as where memory runs out"),
        (SUMMARY + "Signal 11 (SIGSEGV) received by PID 8", 1, "it was ended by SIGSEGV"),
        ("ImportError: no such thing\nerrors.ChildFailedError:\n====\n", 1, "ImportError: no such thing"),
        ("a warning\n", -signal.SIGKILL, "the launcher was ended by SIGKILL"),
        ("", 1, "it wrote nothing"),
    ],
)
def test_a_death_is_told_by_its_first_cause_and_never_by_an_older_run(
    tmp_path: Path, text: str, code: int, why: str
) -> None:
    before = "[rank1]: ValueError: of an older run\n"
    (tmp_path / "log").write_text(before + text)
    with pytest.raises(EnvironmentFault, match=rf"^a training process died: {why} \(log: log\)$"):
        launch._answer(tmp_path, tmp_path / "log", len(before), code)
    fault = {"kind": "EnvironmentFault", "message": "the SGLang worker died"}
    (tmp_path / "fault-1.json").write_text(json.dumps(fault))
    with pytest.raises(EnvironmentFault, match="^the SGLang worker died$"):
        launch._answer(tmp_path, tmp_path / "log", len(before), code)


@pytest.mark.served
@pytest.mark.parametrize("train", [{}, {"sharding": "fsdp2", "optimizer": "adamw"}])
def test_two_killed_processes_go_on_to_the_same_bytes(folder: Path, tmp_path: Path, train: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"precision": "fp32", "epochs": 60.0, "processes": 2, **train}
    made(folder, tmp_path / "whole", **settings)
    code = (
        "import json,sys;from pathlib import Path;from recipes.load import build;from train import launch;"
        "launch.make(build(json.loads(sys.argv[1])),Path(sys.argv[2]),Path(sys.argv[3]))"
    )
    run, out = folder / "run", tmp_path / "killed"
    out.mkdir()
    command = [sys.executable, "-c", code, json.dumps(plain(recipe_of(folder, **settings))), str(run), str(out)]

    def until_a_checkpoint() -> tuple[subprocess.Popen[bytes], psutil.Process, list[psutil.Process]]:
        """The run, its launcher and its training processes, after one more checkpoint."""
        known = [p.name for p in out.glob("checkpoint-*")]
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
        while [p.name for p in out.glob("checkpoint-*")] == known and process.poll() is None:
            time.sleep(0.01)
        (launcher,) = psutil.Process(process.pid).children()
        assert len(launcher.children()) == 2
        return process, launcher, launcher.children()

    process, _, trainers = until_a_checkpoint()
    process.kill()
    process.wait()
    assert len(end_orphans(run)) == 1  # as the next run of draftsmith does
    assert soon_gone(trainers)
    process, launcher, trainers = until_a_checkpoint()
    launcher.kill()
    assert process.wait() == 1
    assert soon_gone(trainers), "a killed launcher leaves nobody that trains on"
    assert list(out.glob("checkpoint-*")) and not (out / "head.safetensors").exists()
    assert subprocess.run(command, cwd=ROOT).returncode == 0
    for name in ("head.safetensors", "metrics.jsonl"):
        assert hash_file(out / name) == hash_file(tmp_path / "whole" / name)
