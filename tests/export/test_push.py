"""The real huggingface_hub client against a Hub on loopback."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import HfApi

from export.push import push
from recipes.faults import EnvironmentFault
from tests.hub_server import Hub

REPO = "org/head"


def small(folder: Path, **texts: str) -> dict[str, Path]:
    """Files to push, one of them large in the Hub's eyes."""
    folder.mkdir(parents=True, exist_ok=True)
    held = {"README.md": "---\nlicense: mit\n---\n", "model.safetensors": "weights" * 100, **texts}
    for name, text in held.items():
        (folder / name).write_text(text)
    return {name: folder / name for name in held}


def send(hub: Hub, files: dict[str, Path], **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"repo_id": REPO, "private": True, "tag": "target-v1", "message": "a head"}
    return push(files, endpoint=hub.url, **(settings | changes))


def test_large_files_in_parts(tmp_path: Path, logged_in: None):
    with Hub(chunk_bytes=256) as hub:
        files = small(tmp_path)
        send(hub, files)
        assert hub.state.repos[REPO].commits[-1].files["model.safetensors"] == files["model.safetensors"].read_bytes()
        assert sum(s.method == "PUT" for s in hub.seen) == 3


def test_the_same_again_makes_no_second_commit(tmp_path: Path, logged_in: None):
    with Hub() as hub:
        first, again = send(hub, small(tmp_path)), send(hub, small(tmp_path))
        assert first == again
        assert len(hub.state.repos[REPO].commits) == 2


def test_a_tag_is_never_moved(tmp_path: Path, logged_in: None):
    with Hub() as hub:
        first = send(hub, small(tmp_path))
        second = send(hub, small(tmp_path, **{"model.safetensors": "better" * 100}))
        third = send(hub, small(tmp_path, **{"model.safetensors": "best" * 100}))
        assert [r["tag"] for r in (first, second, third)] == ["target-v1", "target-v1.2", "target-v1.3"]
        tags = hub.state.repos[REPO].tags
        assert [tags[r["tag"]] for r in (first, second, third)] == [r["commit"] for r in (first, second, third)]


def test_a_public_repo_is_not_used_for_a_private_head(tmp_path: Path, logged_in: None):
    with Hub() as hub:
        hub.state.create(REPO, private=False)
        with pytest.raises(ValueError, match=r"exists and is public, but publish\.private is true"):
            send(hub, small(tmp_path))
        assert len(hub.state.repos[REPO].commits) == 1
        send(hub, small(tmp_path), private=False)


def test_other_weights_in_the_repo_are_not_shadowed(tmp_path: Path, logged_in: None):
    with Hub() as hub:
        hub.state.create(REPO, private=True, files={"pytorch_model.bin": b"x", ".gitattributes": b"y"})
        with pytest.raises(ValueError, match=r"already holds pytorch_model\.bin, which loaders would read"):
            send(hub, small(tmp_path))
        assert len(hub.state.repos[REPO].commits) == 1


def test_a_repo_that_changes_meanwhile_is_left_alone(tmp_path: Path, logged_in: None, monkeypatch: pytest.MonkeyPatch):
    with Hub() as hub:
        hub.state.create(REPO, private=True)
        create_commit = HfApi.create_commit

        def late(self: HfApi, *args: Any, **settings: Any) -> Any:
            HfApi(endpoint=hub.url).upload_file(path_or_fileobj=b"x", path_in_repo="other.txt", repo_id=REPO)
            return create_commit(self, *args, **settings)

        monkeypatch.setattr("export.push.HfApi", type("Late", (HfApi,), {"create_commit": late}))
        with pytest.raises(ValueError, match=r"it changed meanwhile \(412\): publish again"):
            send(hub, small(tmp_path))
        assert sorted(hub.state.repos[REPO].commits[-1].files) == ["other.txt"]


@pytest.mark.parametrize(
    ("match", "status", "kind", "said"),
    [
        ("repos/create", 401, ValueError, r"the login was refused \(401\): set HF_TOKEN"),
        ("repos/create|models/org/head$", 403, ValueError, r"this login may not write there \(403\)"),
        ("repos/create", 404, ValueError, r"not found \(404\): correct publish.repo_id"),
        ("/commit/", 409, ValueError, r"it changed meanwhile \(409\)"),
        ("/commit/", 422, ValueError, "422"),
        ("repos/create", 429, EnvironmentFault, r"too many requests \(429\)"),
        ("/commit/", 500, EnvironmentFault, r"the Hub failed \(500\)"),
        ("/tag/", 503, EnvironmentFault, r"the Hub failed \(503\)"),
        ("objects/batch", 502, EnvironmentFault, r"the Hub failed \(502\)"),
        ("PUT /lfs", 403, ValueError, r"may not write there \(403\)"),
        ("PUT /lfs", 500, EnvironmentFault, r"the Hub failed \(500\)"),
        ("/commit/", 0, EnvironmentFault, "cannot be reached"),
    ],
)
def test_failures_are_one_clear_line(
    tmp_path: Path, logged_in: None, waits: list[float], match: str, status: int, kind: type[Exception], said: str
):
    with Hub() as hub:
        hub.fail(match, status, times=99)
        with pytest.raises(kind, match=said) as caught:
            send(hub, small(tmp_path))
        assert f"{REPO} at {hub.url}" in str(caught.value) and "\n" not in str(caught.value)
        assert Hub.TOKEN not in str(caught.value)
        repo = hub.state.repos.get(REPO)
        assert repo is None or len(repo.commits) == 1 or match == "/tag/"
        assert repo is None or repo.tags == {}
        assert sum(waits) < 300


@pytest.mark.parametrize(
    "match",
    ["repos/create", "GET /api/models/org/head$", "preupload", "batch", "PUT", "verify", "/commit/", "/refs", "/tag/"],
)
@pytest.mark.parametrize("status", [429, 500, 0])
def test_passing_failures_are_outlasted(tmp_path: Path, logged_in: None, waits: list[float], match: str, status: int):
    with Hub() as hub:
        hub.fail(match, status, times=2)
        receipt = send(hub, small(tmp_path))
        assert len(hub.state.repos[REPO].commits) == 2
        assert hub.state.repos[REPO].tags == {"target-v1": receipt["commit"]}
        assert waits


@pytest.mark.parametrize("match", ["/commit/", "/tag/", "repos/create", "PUT"])
def test_a_lost_answer_makes_no_second_commit(tmp_path: Path, logged_in: None, waits: list[float], match: str):
    with Hub() as hub:
        hub.fail(match, 0, after=True)
        receipt = send(hub, small(tmp_path))
        repo = hub.state.repos[REPO]
        assert len(repo.commits) == 2 and repo.tags == {"target-v1": receipt["commit"]}


def test_the_hub_may_say_how_long_to_wait(tmp_path: Path, logged_in: None, waits: list[float]):
    with Hub() as hub:
        hub.fail("repos/create", 429, Retry_After="7")
        hub.fail("/refs", 429, Retry_After="9999")
        send(hub, small(tmp_path))
        assert waits == [7.0, 60.0]


def test_a_tag_that_failed_is_made_by_the_next_try(tmp_path: Path, logged_in: None, waits: list[float]):
    with Hub() as hub:
        hub.fail("POST .*/tag/", 500, times=3)
        with pytest.raises(EnvironmentFault):
            send(hub, small(tmp_path))
        receipt = send(hub, small(tmp_path))
        assert len(hub.state.repos[REPO].commits) == 2 and hub.state.repos[REPO].tags == {
            "target-v1": receipt["commit"]
        }


def test_nobody_there_no_login_and_a_bad_name(
    tmp_path: Path, logged_in: None, waits: list[float], monkeypatch: pytest.MonkeyPatch
):
    with Hub() as hub:
        with pytest.raises(ValueError, match=r"a b/c at .*Repo id must"):
            send(hub, small(tmp_path), repo_id="a b/c")
        monkeypatch.setenv("HF_TOKEN", Hub.TOKEN + "x")
        with pytest.raises(ValueError, match=r"\(401\)"):
            send(hub, small(tmp_path))
    monkeypatch.setenv("HF_TOKEN", Hub.TOKEN)
    with pytest.raises(EnvironmentFault, match=r"cannot be reached \(Connect"):
        send(hub, small(tmp_path))
    assert hub.state.repos == {} and len(waits) == 2


def test_a_server_that_echoes_the_login(tmp_path: Path, logged_in: None):
    with Hub() as hub:
        hub.fail("repos/create", 422, times=9, X_Error_Message=f"bad token {Hub.TOKEN}")
        with pytest.raises(ValueError, match=r"\*\*\*") as caught:
            send(hub, small(tmp_path))
        assert Hub.TOKEN not in str(caught.value)


def test_xet_only_clients_are_told_what_to_do(tmp_path: Path, logged_in: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
    with Hub() as hub, pytest.raises(ValueError, match="does not speak Xet; set HF_HUB_DISABLE_XET=1"):
        send(hub, small(tmp_path))
