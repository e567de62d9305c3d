"""The real huggingface_hub client against a Hub on loopback, with plain LFS uploads: its Xet path is switched off."""

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import HfApi

from export.index import FILE
from recipes.faults import EnvironmentFault
from tests.export.publishing import LATER, REPO, entry, index_of, on_main, racing, send, small
from tests.hub_server import Hub


def test_large_files_in_parts(tmp_path: Path, logged_in: None):
    with Hub(chunk_bytes=256) as hub:
        files = small(tmp_path)
        send(hub, files)
        assert (
            hub.state.repos[REPO].commits[-1].files["model.safetensors"] == files["model.safetensors"].path.read_bytes()
        )
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


def test_a_tag_that_somebody_else_set_is_left_where_it_is(tmp_path: Path, logged_in: None):
    with Hub() as hub:
        repo = hub.state.create(REPO, private=True)
        repo.tags["target-v1"] = repo.commits[0].oid
        receipt = send(hub, small(tmp_path))
        assert receipt["tag"] == "target-v1.2" == index_of(hub).current
        assert repo.tags == {"target-v1": repo.commits[0].oid, "target-v1.2": receipt["commit"]}


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


def test_two_publications_at_once_are_both_in_the_index(tmp_path: Path, logged_in: None):
    with Hub() as hub:
        hub.state.create(REPO, private=True)
        other = small(tmp_path / "other", **{"model.safetensors": "other" * 100})
        mine = small(tmp_path / "mine")
        api = racing(hub, lambda: send(hub, other, tag="target-v0", revision="v0", date=LATER))
        receipt = send(hub, mine, api=api)
        assert [head.tag for head in index_of(hub).heads] == ["target-v0", "target-v1"]
        assert index_of(hub).current == "target-v1"
        repo = hub.state.repos[REPO]
        assert len(repo.commits) == 3 and repo.commits[-1].parent == repo.tags["target-v0"]
        assert repo.tags["target-v1"] == receipt["commit"] == repo.commits[-1].oid


def test_a_repo_that_changes_all_the_time_is_left_alone(tmp_path: Path, logged_in: None):
    with Hub() as hub:
        hub.state.create(REPO, private=True)
        numbers = iter(range(9))

        def act() -> None:
            HfApi(endpoint=hub.url).upload_file(path_or_fileobj=b"x", path_in_repo=f"{next(numbers)}.txt", repo_id=REPO)

        with pytest.raises(ValueError, match="it changed meanwhile, 3 times; somebody else publishes there, try again"):
            send(hub, small(tmp_path), api=racing(hub, act, times=99))
        assert sorted(on_main(hub)) == ["0.txt", "1.txt", "2.txt"] and hub.state.repos[REPO].tags == {}


@pytest.mark.parametrize("status", [409, 412])
def test_a_conflict_is_tried_again(tmp_path: Path, logged_in: None, status: int):
    with Hub() as hub:
        hub.fail("/commit/", status, times=2)
        send(hub, small(tmp_path))
        assert len(hub.state.repos[REPO].commits) == 2
        assert sum(s.path.endswith("/commit/main") for s in hub.seen) == 3


def test_an_upload_that_breaks_in_the_middle_ends_with_the_right_bytes(
    tmp_path: Path, logged_in: None, waits: list[float]
):
    with Hub() as hub:
        files = small(tmp_path, **{"model.safetensors": "0123456789abcdef" * 65536})
        hub.fail("PUT /lfs", 0, times=2, cut=100_000)
        send(hub, files)
        repo = hub.state.repos[REPO]
        assert len(repo.commits) == 2
        assert repo.commits[-1].files["model.safetensors"] == files["model.safetensors"].path.read_bytes()
        assert sum(s.method == "PUT" for s in hub.seen) == 3


def test_a_killed_upload_leaves_nothing_half_and_is_resumed(tmp_path: Path, logged_in: None, waits: list[float]):
    with Hub(chunk_bytes=1 << 16) as hub:
        files = small(tmp_path, **{"model.safetensors": "0123456789abcdef" * 65536})
        hub.fail("PUT /lfs", 0, times=999, cut=10)
        with pytest.raises(EnvironmentFault, match="cannot be reached"):
            send(hub, files)
        assert len(hub.state.repos[REPO].commits) == 1 and hub.state.repos[REPO].tags == {}
        hub.failures.clear()
        send(hub, files)
        sent = sum(s.method == "PUT" for s in hub.seen)
        send(hub, files)
        assert sum(s.method == "PUT" for s in hub.seen) == sent, "what is there is not sent again"
        assert on_main(hub)["model.safetensors"] == files["model.safetensors"].path.read_bytes()


def test_the_index_is_in_the_heads_own_commit_and_keeps_the_heads_before(tmp_path: Path, logged_in: None):
    with Hub() as hub:
        first = small(tmp_path / "1")
        second = small(tmp_path / "2", **{"model.safetensors": "better" * 100})
        send(hub, first)
        send(hub, second, date=LATER)
        repo = hub.state.repos[REPO]
        assert len(repo.commits) == 3 and all(FILE in commit.files for commit in repo.commits[1:])
        assert index_of(hub).heads == [entry(first), entry(second, tag="target-v1.2", date=LATER)]
        assert index_of(hub).current == "target-v1.2"
        assert str(tmp_path) not in repo.commits[-1].files[FILE].decode()


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 2, "current": "", "heads": []}', '{"schema": 1}', "NaN"])
def test_an_index_that_is_not_understood_is_never_written_over(tmp_path: Path, logged_in: None, text: str):
    with Hub() as hub:
        hub.state.create(REPO, private=True, files={FILE: text.encode()})
        with pytest.raises(ValueError, match=r"heads\.json cannot be read .*nothing was written"):
            send(hub, small(tmp_path))
        assert len(hub.state.repos[REPO].commits) == 1 and hub.state.repos[REPO].tags == {}


@pytest.mark.parametrize(
    ("match", "status", "kind", "said"),
    [
        ("repos/create", 401, ValueError, r"the login was refused \(401\): set HF_TOKEN"),
        ("repos/create|models/org/head$", 403, ValueError, r"this login may not write there \(403\)"),
        ("repos/create", 404, ValueError, r"not found \(404\): correct publish.repo_id"),
        ("/commit/", 409, ValueError, "it changed meanwhile, 3 times"),
        ("/commit/", 412, ValueError, "it changed meanwhile, 3 times"),
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
