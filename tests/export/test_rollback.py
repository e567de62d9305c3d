"""An earlier head on main again, with the real client and plain LFS: its Xet path is switched off."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi

from export import rollback as module
from export.ask import Repo
from export.index import FILE, to_bytes
from export.rollback import rollback
from recipes.faults import EnvironmentFault
from tests.export.publishing import LATER, REPO, index_of, on_main, racing, send, settings, small, two_heads
from tests.hub_server import Hub


def test_main_holds_what_the_tag_holds(tmp_path: Path, logged_in: None):
    with Hub() as hub:
        two_heads(hub, tmp_path)
        repo = hub.state.repos[REPO]
        tags, heads = dict(repo.tags), index_of(hub).heads
        first = {n: d for n, d in repo.commits[1].files.items() if n != FILE}
        sent = sum(s.method == "PUT" for s in hub.seen)
        said = rollback(settings(hub), "target-v1")
        assert said.endswith(f"main holds target-v1 again (commit {repo.commits[-1].oid})")
        assert on_main(hub) == first and "old.txt" in first and "new.txt" not in on_main(hub)
        assert len(repo.commits) == 4, "one commit"
        assert repo.commits[-1].large["model.safetensors"] == repo.commits[1].large["model.safetensors"]
        assert repo.tags == tags, "no tag is moved"
        assert index_of(hub).heads == heads and index_of(hub).current == "target-v1"
        assert sum(s.method == "PUT" for s in hub.seen) == sent, "weights are copied there"
        assert rollback(settings(hub), "target-v1").endswith("is what main holds already; nothing to do")
        assert len(repo.commits) == 4
        rollback(settings(hub), "target-v2")
        assert on_main(hub) == {n: d for n, d in repo.commits[2].files.items() if n != FILE}


def test_publishing_goes_on_after_it(tmp_path: Path, logged_in: None):
    with Hub() as hub:
        two_heads(hub, tmp_path)
        rollback(settings(hub), "target-v1")
        send(hub, small(tmp_path / "3", **{"model.safetensors": "third" * 100}), tag="target-v3", date=LATER)
        assert [h.tag for h in index_of(hub).heads] == ["target-v1", "target-v2", "target-v3"]
        assert index_of(hub).current == "target-v3"


def test_a_tag_that_is_not_there_or_holds_no_head(tmp_path: Path, logged_in: None):
    with Hub() as hub:
        two_heads(hub, tmp_path)
        repo = hub.state.repos[REPO]
        with pytest.raises(ValueError, match="has no tag 'target-v9'; it has target-v1, target-v2"):
            rollback(settings(hub), "target-v9")
        repo.tags["empty"] = repo.commits[0].oid
        with pytest.raises(ValueError, match=r"empty holds no model\.safetensors, so it is no head"):
            rollback(settings(hub), "empty")
        repo.tags["target-v1"] = repo.commits[2].oid
        with pytest.raises(ValueError, match=r"model\.safetensors of target-v1 is not what was published under it"):
            rollback(settings(hub), "target-v1")
        assert len(repo.commits) == 3
    with pytest.raises(ValueError, match=r"publish\.repo_id: empty"):
        rollback(replace(settings(hub), repo_id=""), "target-v1")


def test_a_tag_from_before_the_index(tmp_path: Path, logged_in: None):
    with Hub() as hub:
        send(hub, small(tmp_path / "1"))
        repo = hub.state.repos[REPO]
        old = replace(repo.commits[-1], files=on_main(hub))
        repo.commits[-1] = old
        send(hub, small(tmp_path / "2", **{"model.safetensors": "better" * 100}), tag="target-v2", date=LATER)
        rollback(settings(hub), "target-v1")
        assert on_main(hub) == old.files
        assert [h.tag for h in index_of(hub).heads] == ["target-v2"] and index_of(hub).current == "target-v1"


def test_a_publication_meanwhile_is_seen(tmp_path: Path, logged_in: None, monkeypatch: pytest.MonkeyPatch):
    with Hub() as hub:
        two_heads(hub, tmp_path)
        third = small(tmp_path / "3", **{"model.safetensors": "third" * 100, "third.txt": "x"})
        api = racing(hub, lambda: send(hub, third, tag="target-v3", date=LATER))
        monkeypatch.setattr(module, "repo_at", lambda publish: Repo(api=api, repo_id=REPO))
        rollback(settings(hub), "target-v1")
        repo = hub.state.repos[REPO]
        assert repo.commits[-1].parent == repo.tags["target-v3"]
        assert [h.tag for h in index_of(hub).heads] == ["target-v1", "target-v2", "target-v3"]
        assert "third.txt" not in on_main(hub) and index_of(hub).current == "target-v1"


@pytest.mark.parametrize(
    ("match", "status", "kind", "said"),
    [
        ("/commit/", 401, ValueError, r"the login was refused \(401\)"),
        ("/commit/", 403, ValueError, r"this login may not write there \(403\)"),
        ("/commit/", 409, ValueError, "it changed meanwhile, 3 times"),
        ("/commit/", 412, ValueError, "it changed meanwhile, 3 times"),
        ("/commit/", 429, EnvironmentFault, r"too many requests \(429\)"),
        ("/commit/", 500, EnvironmentFault, r"the Hub failed \(500\)"),
        ("/refs", 503, EnvironmentFault, r"the Hub failed \(503\)"),
        ("/commit/", 0, EnvironmentFault, "cannot be reached"),
    ],
)
def test_a_failure_changes_nothing(
    tmp_path: Path, logged_in: None, waits: list[float], match: str, status: int, kind: Any, said: str
):
    with Hub() as hub:
        two_heads(hub, tmp_path)
        before = on_main(hub)
        hub.fail(match, status, times=99)
        with pytest.raises(kind, match=said) as caught:
            rollback(settings(hub), "target-v1")
        assert Hub.TOKEN not in str(caught.value) and "\n" not in str(caught.value)
        assert on_main(hub) == before and len(hub.state.repos[REPO].commits) == 3
        assert index_of(hub).current == "target-v2"


@pytest.mark.parametrize("status", [409, 429, 500, 0])
def test_a_failure_that_passes_is_outlasted(tmp_path: Path, logged_in: None, waits: list[float], status: int):
    with Hub() as hub:
        two_heads(hub, tmp_path)
        hub.fail("/commit/", status, times=2, **({"Retry_After": "7"} if status == 429 else {}))
        rollback(settings(hub), "target-v1")
        assert index_of(hub).current == "target-v1" and len(hub.state.repos[REPO].commits) == 4
        assert status != 429 or waits == [7.0, 7.0]


def test_an_answer_that_is_lost(tmp_path: Path, logged_in: None, waits: list[float]):
    with Hub() as hub:
        two_heads(hub, tmp_path)
        hub.fail("/commit/", 0, after=True)
        rollback(settings(hub), "target-v1")
        assert index_of(hub).current == "target-v1" and len(hub.state.repos[REPO].commits) == 4


def test_an_index_that_is_not_understood_stops_it(tmp_path: Path, logged_in: None):
    with Hub() as hub:
        two_heads(hub, tmp_path)
        bad = to_bytes(index_of(hub)).replace(b'"schema": 1', b'"schema": 7')
        HfApi(endpoint=hub.url).upload_file(path_or_fileobj=bad, path_in_repo=FILE, repo_id=REPO)
        with pytest.raises(ValueError, match=r"schema '7', this draftsmith knows 1"):
            rollback(settings(hub), "target-v1")
        assert len(hub.state.repos[REPO].commits) == 4
