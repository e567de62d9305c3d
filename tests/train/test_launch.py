"""Two processes through the real launcher, on the CPU (gloo): the curve of one, its faults, and on after a kill."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from data.engine import end_orphans
from recipes.artifact import hash_file
from recipes.faults import EnvironmentFault
from recipes.load import plain
from tests.train import test_loop
from tests.train.test_loop import recipe_of
from train import launch
from train.head import open_head

ROOT = Path(__file__).parents[2]
folder = test_loop.folder
_fresh_accelerator = test_loop._fresh_accelerator


def curve(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def made(folder: Path, out: Path, **train: Any) -> dict[str, Any]:
    out.mkdir()
    settings = {"precision": "fp32", "epochs": 3.0, **train}
    return launch.make(recipe_of(folder, **settings), folder / "run", out)


def test_two_processes_train_as_one_with_the_same_packs(folder: Path, tmp_path: Path) -> None:
    one = made(folder, tmp_path / "one", accumulate=2)
    two = made(folder, tmp_path / "two", processes=2)
    assert one["steps"] == two["steps"] and one["supervised_tokens_seen"] == two["supervised_tokens_seen"]
    for ours, theirs in zip(curve(tmp_path / "two"), curve(tmp_path / "one"), strict=True):
        for key in ("loss", "grad_norm", "accuracy", "count", "tokens"):
            assert ours[key] == pytest.approx(theirs[key], rel=2e-3), (ours["step"], key)
    heads = [open_head(tmp_path / name)[0] for name in ("one", "two")]
    for a, b in zip(*(h.parameters() for h in heads), strict=True):
        torch.testing.assert_close(a, b, atol=5e-3, rtol=5e-3)
    assert sorted(p.name for p in (tmp_path / "two").iterdir()) == sorted(p.name for p in (tmp_path / "one").iterdir())
    assert not list((folder / "run" / "engines").glob("*.json"))


def test_a_fault_of_a_process_is_the_users(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gives \d+ packs an epoch for 2 processes; lower it, or use fewer"):
        made(folder, tmp_path / "few", processes=2, pack_tokens=100_000)
    said = tmp_path / "said"
    said.mkdir()
    (tmp_path / "log").write_text("[rank1]: RuntimeError: NCCL error\nelastic.ChildFailedError:\n")
    with pytest.raises(EnvironmentFault, match=r"a training process died: RuntimeError: NCCL error \(log: log\)"):
        launch._answer(said, tmp_path / "log")
    (said / "fault-1.json").write_text(json.dumps({"kind": "EnvironmentFault", "message": "the SGLang worker died"}))
    with pytest.raises(EnvironmentFault, match="the SGLang worker died"):
        launch._answer(said, tmp_path / "log")


@pytest.mark.served
def test_two_killed_processes_go_on_to_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"precision": "fp32", "epochs": 60.0, "processes": 2}
    made(folder, tmp_path / "whole", **settings)
    code = (
        "import json,sys;from pathlib import Path;from recipes.load import build;from train import launch;"
        "launch.make(build(json.loads(sys.argv[1])),Path(sys.argv[2]),Path(sys.argv[3]))"
    )
    run, out = folder / "run", tmp_path / "killed"
    out.mkdir()
    command = [sys.executable, "-c", code, json.dumps(plain(recipe_of(folder, **settings))), str(run), str(out)]
    process = subprocess.Popen(command, cwd=ROOT)
    while not list(out.glob("checkpoint-*")) and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert len(end_orphans(run)) == 1  # as the next run of draftsmith does
    assert list(out.glob("checkpoint-*")) and not (out / "head.safetensors").exists()
    assert subprocess.run(command, cwd=ROOT).returncode == 0
    for name in ("head.safetensors", "metrics.jsonl"):
        assert hash_file(out / name) == hash_file(tmp_path / "whole" / name)
