"""What is published, as a release manager lists it, and `publish --dry-run`, with the real client (Xet is off)."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import draftsmith
from export.heads import heads
from export.hub import dry_run, make
from tests.export.measured import finished_run
from tests.export.publishing import REPO, index_of, settings, two_heads
from tests.export.test_hub import remote
from tests.hub_server import Hub


def test_the_table_names_each_head_and_the_one_on_main(tmp_path: Path, logged_in: None):
    with Hub() as hub:
        two_heads(hub, tmp_path)
        lines = heads(settings(hub), False).splitlines()
        assert lines[0] == f"{REPO} at {hub.url}, * = on main"
        assert lines[1].split()[:3] == ["tag", "target", "measured"]
        assert "target-v1 " in lines[2] and "target-v1 *" not in lines[2] and "target-v2 *" in lines[3]
        for shown in ("org/target@v2", "2026-02-02", "1.77 [1.67, 1.87]", "1.67x [1.57, 1.77]", "vllm 0.32.0", "(CPU)"):
            assert shown in lines[3]
        assert json.loads(heads(settings(hub), True))["heads"][1]["tag"] == "target-v2"


def test_from_the_command_line(tmp_path: Path, logged_in: None, capsys: pytest.CaptureFixture[str]):
    with Hub() as hub:
        two_heads(hub, tmp_path)
        where = [f"publish.repo_id={REPO}", f"publish.endpoint={hub.url}"]
        assert draftsmith.main(["publish", "smollm2-chat", "--rollback", "target-v1", *where]) == 0
        assert "main holds target-v1 again" in capsys.readouterr().out
        assert draftsmith.main(["heads", "smollm2-chat", "--json", *where]) == 0
        out = capsys.readouterr()
        assert json.loads(out.out)["current"] == "target-v1" and Hub.TOKEN not in out.out + out.err
        assert draftsmith.main(["publish", "smollm2-chat", "--rollback", "nothing", *where]) == 1
        assert "it has target-v1, target-v2" in capsys.readouterr().err
        assert draftsmith.main(["publish", "smollm2-chat", "--rollback", "", *where]) == 1, "it must not publish"
        assert "has no tag ''; it has target-v1, target-v2" in capsys.readouterr().err
        assert draftsmith.main(["heads", "smollm2-chat"]) == 1
        assert "publish.repo_id: empty" in capsys.readouterr().err


def test_a_repo_without_an_index_says_what_to_do(logged_in: None):
    with Hub() as hub:
        hub.state.create(REPO, private=True)
        with pytest.raises(ValueError, match=r"holds no heads\.json; the next `draftsmith publish` writes it"):
            heads(settings(hub), False)
        with pytest.raises(ValueError, match=r"not found \(404\)"):
            heads(replace(settings(hub), repo_id="org/none"), False)


def test_a_dry_run_says_what_would_be_committed_and_changes_nothing(tmp_path: Path, logged_in: None):
    with Hub() as hub:
        recipe = remote(hub.url)
        run = finished_run(tmp_path / "run", recipe)
        said = dry_run(recipe, run)
        assert said.startswith(f"would create {REPO} at {hub.url} (private) and commit, tag target-v1, with heads.json")
        assert "model.safetensors" in said and hub.state.repos == {}
        make(recipe, run, run / "publication")
        commits = len(hub.state.repos[REPO].commits)
        assert "holds these files already, tag target-v1; nothing would change" in dry_run(recipe, run)
        assert len(hub.state.repos[REPO].commits) == commits and index_of(hub).current == "target-v1"
        assert {s.method for s in hub.seen if "commit" in s.path or "/tag/" in s.path} == {"POST"}
