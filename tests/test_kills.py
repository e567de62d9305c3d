"""kill -9 at chosen instants of every stage that we compute, in the middle of writes too; then the next run goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.artifact import hash_file
from tests.openai_server import openai_server
from tests.tiny import make_target, recipe_data, write_prompts

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.served
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def run(folder: Path, verb: str, *options: str) -> int:
    """draftsmith in its own process; its exit code."""
    recipe = str(folder / "recipe.yaml")
    command = [sys.executable, "draftsmith.py", verb, recipe, *options, "--runs", str(folder / "runs")]
    return subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True).returncode


def kill(folder: Path, verb: str, moment: str, n: int) -> int:
    """The same, killed at the n-th durable write."""
    options = [verb, str(folder / "recipe.yaml"), "--runs", str(folder / "runs")]
    command = [sys.executable, "-m", "tests.killing", moment, str(n), *options]
    return subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True).returncode


def prepared(folder: Path, url: str, **changes: Any) -> Path:
    """A folder with a tiny recipe, answered by the server at `url`."""
    folder.mkdir(exist_ok=True)
    plain = recipe_data(make_target(folder / "target"), write_prompts(folder / "prompts.jsonl"), **changes)
    plain["answers"] = {**plain["answers"], "url": url}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(plain))
    return folder


def files(folder: Path) -> dict[str, str]:
    """Hashes of what a stage made; the manifest holds wall times and is left out."""
    return {p.name: hash_file(p) for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "manifest.json"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unbroken run up to the checkpoint."""
    with openai_server() as fake:
        folder = prepared(tmp_path_factory.mktemp("whole"), fake.url)
        assert run(folder, "run", "--until", "checkpoint") == 0
    return folder


@pytest.mark.parametrize("moment, n", [("torn", 12), ("torn", 30), ("before", 4), ("after", 7)])
def test_answers_lose_nothing_and_ask_nothing_twice(tmp_path: Path, moment: str, n: int) -> None:
    with openai_server(delay_s=0.01) as fake:
        folder = prepared(tmp_path, fake.url)
        assert kill(folder, "prepare", moment, n) == -9
        partial = folder / "runs" / "tiny" / "answers.partial" / "ledger.jsonl"
        final = folder / "runs" / "tiny" / "answers" / "ledger.jsonl"
        left = next((p.read_bytes() for p in (partial, final) if p.exists()), b"")
        kept = left[: left.rfind(b"\n") + 1]
        answered = list(fake.asked)
        assert run(folder, "prepare") == 0
        ledger = final.read_bytes()
        assert ledger.startswith(kept)  # byte for byte
        rows = [json.loads(line) for line in ledger.splitlines()]
        assert len({r["key"] for r in rows}) == len(rows)
        again = fake.asked[len(answered) :]
        finished = {json.loads(line)["key"] for line in kept.splitlines()}
        assert len(again) == len(rows) - len(finished)


@pytest.mark.parametrize(
    "verb, moment, n",
    [
        ("capture", "torn", 2), ("capture", "before", 4), ("capture", "after", 5),
        ("train", "torn", 2), ("train", "after", 2), ("train", "before", 4),
        ("export", "torn", 2), ("export", "before", 2), ("export", "after", 2),
    ],
)  # fmt: skip
def test_the_same_head_byte_for_byte_after_a_kill(whole: Path, tmp_path: Path, verb: str, moment: str, n: int) -> None:
    subprocess.run(["cp", "-r", str(whole), str(tmp_path / "copy")], check=True)
    folder, stages = tmp_path / "copy", ["features", "head", "checkpoint"]
    text = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(text)
    first = {"capture": 0, "train": 1, "export": 2}[verb]
    for stage in stages[first:]:
        subprocess.run(["rm", "-r", str(folder / "runs" / "tiny" / stage)], check=True)
    assert kill(folder, verb, moment, n) == -9
    assert run(folder, "run", "--until", "checkpoint") == 0
    for stage in stages:
        assert files(folder / "runs" / "tiny" / stage) == files(whole / "runs" / "tiny" / stage), stage
