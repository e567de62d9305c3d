"""The command line: exit codes, one clear line a mistake, nothing half-written."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import draftsmith
from recipes.artifact import read_manifest
from tests.openai_server import openai_server
from tests.tiny import make_target, recipe_data, write_prompts


def written(folder: Path, **changes: Any) -> list[str]:
    """A tiny recipe file in `folder`, and the arguments that name it."""
    plain = recipe_data(folder / "target", write_prompts(folder / "p.jsonl"), **changes)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(plain))
    return [str(folder / "recipe.yaml"), "--runs", str(folder / "runs")]


def test_help_teaches_the_verbs_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        draftsmith.main(["--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(word in said for word in ("plan", "prepare", "publish", "Exit codes", "smollm2-chat"))


@pytest.mark.parametrize(
    "args, said",
    [
        (["run", "nosuch"], "recipe 'nosuch' not found"),
        (["status", "smollm2-chat", "train.lrr=1"], "nearest known key: lr"),
        (["plan", "smollm2-chat", "train.lr"], "not of the form key=value"),
        (["export"], "name a recipe, or --check FOLDER"),
        (["export", "--check", "nosuchfolder"], "nosuchfolder"),
    ],
)
def test_user_mistakes_are_exit_code_1_and_say_what_to_do(
    args: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert draftsmith.main(args) == 1
    assert said in capsys.readouterr().err


def test_a_verb_before_its_inputs_names_the_verb_to_run_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = written(tmp_path)
    assert draftsmith.main(["train", *args]) == 1
    assert "target is not done (not made yet); `draftsmith prepare` first" in capsys.readouterr().err
    for verb in ("gate", "publish"):
        assert draftsmith.main([verb, *args]) == 2


def test_a_missing_target_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = written(tmp_path)
    assert draftsmith.main(["run", *args]) == 1
    assert "target.path" in capsys.readouterr().err
    assert read_manifest(tmp_path / "runs" / "tiny" / "target") is None
    assert not (tmp_path / "runs" / "tiny" / "lock").exists()


def test_run_makes_only_what_is_stale_and_status_tells_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_target(tmp_path / "target")
    with openai_server() as fake:
        args = written(tmp_path)
        answered = [*args, f"answers.url={fake.url}"]
        assert draftsmith.main(["run", *answered, "--until", "train"]) == 0
        asked, head = len(fake.asked), read_manifest(tmp_path / "runs" / "tiny" / "head")
        capsys.readouterr()
        assert draftsmith.main(["run", *answered, "--until", "train"]) == 0
        assert capsys.readouterr().err == ""
        assert draftsmith.main(["status", *answered, "--json", "train.lr=0.5"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["features"]["status"] == "done" and found["head"]["why"] == "recipe: train.lr: 0.001 -> 0.5"
        assert found["tokens"]["accounting"]["rows"] == 28
        # What a stage that is made again will miss is told before it is.
        gone = "domains.chat.sources=[{path: gone.jsonl, form: prompt, field: p}]"
        assert draftsmith.main(["plan", *answered, gone]) == 1
        assert "preflight: domains.chat.sources: gone.jsonl: no such file; check the path" in capsys.readouterr().out
        # A changed vocabulary: tokens and what stands on them are made again, answers are not asked again.
        assert draftsmith.main(["run", *answered, "--until", "train", "head.draft_vocab_size=100"]) == 0
        assert len(fake.asked) == asked
        again = read_manifest(tmp_path / "runs" / "tiny" / "head")
        assert head is not None and again is not None and head["files"] != again["files"]


def test_a_damaged_shard_is_named_and_captured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_target(tmp_path / "target")
    with openai_server() as fake:
        args = [*written(tmp_path), f"answers.url={fake.url}"]
        assert draftsmith.main(["run", *args, "--until", "capture"]) == 0
        features = tmp_path / "runs" / "tiny" / "features"
        shard = features / "features-00001.safetensors"
        good, others = shard.read_bytes(), {p: p.stat().st_mtime_ns for p in features.glob("*-0000[02].safetensors")}
        shard.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))  # same size: only the hash can tell
        capsys.readouterr()
        assert draftsmith.main(["run", *args, "--until", "train"]) == 0
        assert "features: damaged: features-00001.safetensors" in capsys.readouterr().err
        assert shard.read_bytes() == good
        assert all(p.stat().st_mtime_ns == t for p, t in others.items())


def test_a_full_disk_and_a_missing_package_are_the_environments_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = written(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "runs/tiny/x.tmp")

    def missing(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'wandb'", name="wandb")

    for fault, said in ((full, "the disk is full (runs/tiny/x.tmp)"), (missing, "package 'wandb' is not installed")):
        monkeypatch.setattr(draftsmith, "build", fault)
        assert draftsmith.main(["run", *args]) == 3
        assert said in capsys.readouterr().err
