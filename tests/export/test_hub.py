import io
import json
import logging
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet
import pytest
from huggingface_hub import ModelCard, snapshot_download
from safetensors.torch import load_file

from export.hub import make, public_rows, tag_name
from export.record import Refusal, read_record, recipe_hash
from export.validate import validate
from recipes.artifact import hash_file, hash_json
from recipes.faults import GateRefused
from recipes.schema import Recipe
from tests.export.measured import SECRET_IDS, finished_run, rows, seal
from tests.export.tiny import edit_tensors, tiny_recipe
from tests.hub_server import Hub

REPO = "org/head"
LAID_OUT = ["README.md", "config.json", "model.safetensors", "record.json", "requests.parquet", "verdict.json"]


def remote(endpoint: str, **changes: Any) -> Recipe:
    return tiny_recipe(publish={"repo_id": REPO, "endpoint": endpoint, **changes})


# A local folder


def test_local_folder_is_laid_out_like_a_repo(tmp_path: Path):
    recipe = tiny_recipe()
    run = finished_run(tmp_path, recipe)
    accounting = make(recipe, run, run / "publication")
    out = run / "publication"
    assert sorted(p.name for p in out.iterdir()) == LAID_OUT
    assert accounting == {"files": 6, "bytes": sum(p.stat().st_size for p in out.iterdir())}
    assert validate(out, target=run / "target" / "model") == []
    for name in ("config.json", "model.safetensors"):
        assert (out / name).read_bytes() == (run / "checkpoint" / name).read_bytes()
    said = (out / "README.md").read_text()
    for name in set(LAID_OUT) - {"README.md"}:
        assert hash_file(out / name) in said, name
    assert ModelCard.load(out / "README.md").data.base_model == "org/target"


def test_a_local_target_gives_a_folder_that_is_marked(tmp_path: Path):
    recipe = tiny_recipe()
    run = finished_run(tmp_path, recipe, local=True)
    make(recipe, run, run / "publication")
    assert "**Not portable.**" in (run / "publication" / "README.md").read_text()
    config = json.loads((run / "publication" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(run / "target" / "model")


def test_nothing_published_holds_text_ids_paths_or_secrets(tmp_path: Path):
    recipe = tiny_recipe()
    run = finished_run(tmp_path, recipe)
    make(recipe, run, run / "publication")
    for name in ("README.md", "record.json", "verdict.json", "config.json"):
        text = (run / "publication" / name).read_text()
        for word in ("my secret question", str(tmp_path), "sesame"):
            assert word not in text, (name, word)
    table = cast(Any, pyarrow.parquet).read_table(run / "publication" / "requests.parquet")
    assert not {"prompt_ids", "output_ids", "error"} & set(table.column_names)
    assert "secret" not in str(table.to_pylist())
    assert "TARGET" in (run / "publication" / "record.json").read_text()


def test_rows_are_hashed_unless_a_licence_allows_them(tmp_path: Path):
    run = finished_run(tmp_path, tiny_recipe())
    file = run / "record" / "requests.parquet"
    hashed = _rows(public_rows(file, ""))
    assert [row["prompt_ids_sha256"] for row in hashed] == [hash_json(list(SECRET_IDS[:2]))] * 2
    assert [row["failed"] for row in hashed] == [False, True]
    assert hashed[0]["per_step_accepted"] == [1] and hashed[0]["accepted"] == 1
    assert public_rows(file, "") == public_rows(file, "")
    allowed = _rows(public_rows(file, "cc-by-4.0"))
    assert [row["output_ids"] for row in allowed] == [list(r.output_ids) for r in rows()]
    assert "error" not in allowed[0] and allowed[1]["failed"]


def _rows(data: bytes) -> list[dict[str, Any]]:
    return cast(Any, pyarrow.parquet).read_table(io.BytesIO(data)).to_pylist()


# The gate


def rewrite(run: Path, name: str, file: str, **changes: Any) -> None:
    path = run / name / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    seal(run, name)


def corrupt(run: Path) -> None:
    path = run / "checkpoint" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def retrain(run: Path) -> None:
    edit_tensors(run / "checkpoint", lambda t: t["fc.weight"].add_(1))
    seal(run, "checkpoint")


def other_target(run: Path) -> None:
    info = json.loads((run / "target" / "target.json").read_text())
    (run / "target" / "target.json").write_text(json.dumps(info | {"revision": "v2"}))
    seal(run, "target")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda run: (run / "verdict" / "verdict.json").unlink(), "verdict.json: missing"),
        (lambda run: (run / "verdict" / "verdict.json").write_text("{"), "verdict.json"),
        (lambda run: (run / "record" / "record.json").unlink(), "record.json: missing"),
        (lambda run: (run / "record" / "manifest.json").unlink(), "record: not finished"),
        (lambda run: rewrite(run, "verdict", "verdict.json", passed=False), "the gate said no"),
        (lambda run: rewrite(run, "verdict", "verdict.json", made_from={}), "changed since the measurement: target"),
        (lambda run: rewrite(run, "record", "record.json", text="x"), "changed since the measurement: record"),
        (retrain, "changed since the measurement: checkpoint"),
        (other_target, "changed since the measurement: target"),
        (corrupt, r"checkpoint/ is damaged \(model.safetensors\)"),
        (lambda run: (run / "verdict" / "verdict.json").write_text(
            (run / "verdict" / "verdict.json").read_text().replace("1.77", "2.77")), "verdict/ is damaged"),
    ],
)  # fmt: skip
def test_the_gate_refuses(tmp_path: Path, change: Any, said: str):
    recipe = tiny_recipe()
    run = finished_run(tmp_path, recipe)
    change(run)
    with pytest.raises(GateRefused, match=f"nothing is published: .*{said}"):
        make(recipe, run, run / "publication")
    assert not (run / "publication").exists()


def test_the_gate_names_its_reasons(tmp_path: Path):
    recipe = tiny_recipe()
    refusal = Refusal(
        rule="min_acceptance", domain="chat", figure=1.2, low=1.1, high=1.3, threshold=1.4, why="chat: 1.1"
    )
    run = finished_run(tmp_path, recipe, passed=False, refusals=[refusal])
    with pytest.raises(GateRefused, match=r"the gate said no\n  chat: 1.1"):
        make(recipe, run, run / "publication")


def test_a_recipe_edited_after_the_measurement_is_refused(tmp_path: Path):
    run = finished_run(tmp_path, tiny_recipe())
    with pytest.raises(GateRefused, match="changed since the measurement: recipe"):
        make(tiny_recipe(train={"tokens": 2000}), run, run / "publication")


def test_where_it_goes_is_no_part_of_the_measurement():
    assert recipe_hash(tiny_recipe()) == recipe_hash(remote("http://127.0.0.1:1"))


def test_a_checkpoint_with_a_fault_is_refused_even_with_a_verdict(tmp_path: Path):
    recipe = tiny_recipe()
    run = finished_run(tmp_path, recipe)
    edit_tensors(run / "checkpoint", lambda t: t.pop("t2d"))
    seal(run, "checkpoint")
    made = {**read_record(run).made_from, "checkpoint": _digest(run, "checkpoint")}
    rewrite(run, "record", "record.json", made_from=made)
    rewrite(run, "verdict", "verdict.json", made_from=made | {"record": _digest(run, "record")})
    with pytest.raises(GateRefused, match=r"the checkpoint has faults:\n  missing-tensor: t2d"):
        make(recipe, run, run / "publication")


def _digest(run: Path, name: str) -> str:
    from recipes.artifact import digest

    return digest(run / name)


def test_a_local_target_is_never_pushed(tmp_path: Path, logged_in: None):
    with Hub() as hub:
        recipe = remote(hub.url)
        run = finished_run(tmp_path, recipe, local=True)
        with pytest.raises(ValueError, match=r"the head is not portable; leave publish\.repo_id empty"):
            make(recipe, run, run / "publication")
        assert hub.seen == []


# A Hub


def test_one_commit_and_a_tag(tmp_path: Path, logged_in: None):
    with Hub() as hub:
        recipe = remote(hub.url)
        run = finished_run(tmp_path / "run", recipe)
        accounting = make(recipe, run, run / "publication")
        repo = hub.state.repos[REPO]
        assert repo.private
        assert len(repo.commits) == 2  # the Hub's own first one, and ours
        commit = repo.commits[-1]
        assert sorted(commit.files) == sorted([*LAID_OUT, "heads.json"])
        assert sorted(commit.large) == ["model.safetensors", "requests.parquet"]
        assert commit.message == "Draft head for org/target@v1, measured 2026-01-01T00:00:00Z"
        assert repo.tags == {"target-v1": commit.oid}
        receipt = json.loads((run / "publication" / "receipt.json").read_text())
        assert receipt["commit"] == commit.oid == accounting["commit"]
        assert receipt["url"] == f"{hub.url}/{REPO}/tree/target-v1"
        assert not (run / "publication" / "model.safetensors").exists()
        for name, sha in receipt["files"].items():
            (tmp_path / name).write_bytes(commit.files[name])
            assert hash_file(tmp_path / name) == sha, name
        folder = Path(snapshot_download(REPO, revision="target-v1", local_dir=tmp_path / "down", endpoint=hub.url))
        assert validate(folder, target=run / "target" / "model") == []
        assert (
            load_file(folder / "model.safetensors").keys() == load_file(run / "checkpoint" / "model.safetensors").keys()
        )


def test_the_login_is_nowhere(
    tmp_path: Path, logged_in: None, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    caplog.set_level(logging.DEBUG)
    with Hub() as hub:
        recipe = remote(hub.url)
        run = finished_run(tmp_path, recipe)
        make(recipe, run, run / "publication")
        assert [s.path for s in hub.seen if not s.authorised and not s.path.startswith("/lfs/")] == []
        assert all(Hub.TOKEN.encode() not in s.body for s in hub.seen)
        said = capfd.readouterr()
        for text in (caplog.text, said.out, said.err):
            assert Hub.TOKEN not in text
        for path in run.rglob("*"):
            assert not path.is_file() or Hub.TOKEN.encode() not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("revision", "tag"),
    [("v1", "target-v1"), ("refs/pr/1", "target-refs-pr-1"), ("a..b c", "target-a-b-c"), ("x.lock", "target-x"),
     ("0.1.0", "target-0.1.0")],
)  # fmt: skip
def test_tag_names(revision: str, tag: str):
    assert tag_name(revision) == tag
