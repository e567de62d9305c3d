"""A stage directory's life: done, to do, stale and why; resume, clearing, salvage; what a kill leaves behind."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes.artifact import (
    build,
    damaged,
    digest,
    hash_bytes,
    hash_file,
    hash_json,
    plan_of,
    read_manifest,
    state,
    write_bytes,
    write_json,
)
from recipes.load import build as recipe_of
from recipes.load import plain
from recipes.schema import Recipe
from tests.recipes.stages import Killed, dies, first, recipe, second, writes


def test_todo_then_done(tmp_path: Path) -> None:
    assert (state(first(), recipe(), tmp_path).status, state(first(), recipe(), tmp_path).why) == (
        "todo",
        "not made yet",
    )
    build(first(), recipe(), tmp_path)
    assert state(first(), recipe(), tmp_path).status == "done"
    assert state(first(), recipe(), tmp_path, deep=True).status == "done"
    assert sorted(f.name for f in (tmp_path / "first").iterdir()) == ["a.txt", "manifest.json", "sub"]
    assert not (tmp_path / "first.partial").exists()


def test_manifest_says_all(tmp_path: Path) -> None:
    build(first(), recipe(), tmp_path)
    build(second(), recipe(), tmp_path)
    manifest = read_manifest(tmp_path / "second")
    assert manifest is not None
    assert manifest["plan"] == {
        "stage": "second",
        "version": 1,
        "keys": {"gate.prompts": 40},
        "inputs": {"first": digest(tmp_path / "first")},
        "outside": {},
    }
    assert manifest["files"] == {
        "a.txt": {"sha256": hash_bytes(b"two"), "bytes": 3},
        "sub/b.txt": {"sha256": hash_bytes(b"twotwo"), "bytes": 6},
    }
    assert manifest["accounting"] == {"rows": 3}
    assert recipe_of(manifest["recipe"]) == recipe()
    assert "torch" in manifest["packages"]
    assert manifest["wall_s"] >= 0
    assert manifest["finished"].endswith("Z")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"train__lr": 0.5}, "recipe: train.lr: 0.001 -> 0.5"),
        ({"train__seed": 4}, "recipe: train.seed: 0 -> 4"),
        ({"train__epochs": 1.5}, "recipe: train.epochs: 2.0 -> 1.5"),
    ],
)
def test_stale_by_key(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    build(first(), recipe(), tmp_path)
    found = state(first(), recipe(**changes), tmp_path)
    assert (found.status, found.why) == ("stale", why)


def test_stale_names_a_new_and_a_lost_domain(tmp_path: Path) -> None:
    stage = first(keys=("domains",))
    build(stage, recipe(), tmp_path)
    more = {"sources": [{"path": "x", "form": "prompt", "field": "p"}], "held_out": 0}
    assert state(stage, recipe(domains__more=more), tmp_path).why.startswith("recipe: domains.more: None -> {")
    less = recipe(domains__bench=..., gate__rules__bench=...)
    why = state(stage, less, tmp_path).why
    assert why.startswith("recipe: domains.bench: {") and why.endswith("-> None")


def test_not_stale_by_a_key_it_does_not_read(tmp_path: Path) -> None:
    build(first(), recipe(), tmp_path)
    assert state(first(), recipe(gate__prompts=41, publish__repo_id="a/b"), tmp_path).status == "done"


def test_not_stale_by_packages_or_wall_time(tmp_path: Path) -> None:
    build(first(), recipe(), tmp_path)
    manifest = read_manifest(tmp_path / "first")
    assert manifest is not None
    write_json(tmp_path / "first" / "manifest.json", manifest | {"packages": {"torch": "0"}, "wall_s": 9e9})
    assert state(first(), recipe(), tmp_path).status == "done"


def test_stale_by_version(tmp_path: Path) -> None:
    build(first(), recipe(), tmp_path)
    found = state(first(version=2), recipe(), tmp_path)
    assert (found.status, found.why) == ("stale", "format version 1 -> 2")


def test_stale_by_input(tmp_path: Path) -> None:
    build(first(), recipe(), tmp_path)
    build(second(), recipe(), tmp_path)
    build(first(writes("other")), recipe(), tmp_path / "elsewhere")
    artifact_swap(tmp_path / "elsewhere" / "first", tmp_path / "first")
    found = state(second(), recipe(), tmp_path)
    assert (found.status, found.why) == ("stale", "first changed")


def test_the_same_bytes_made_again_leave_the_next_stage_done(tmp_path: Path) -> None:
    build(first(), recipe(), tmp_path)
    build(second(), recipe(), tmp_path)
    build(first(), recipe(), tmp_path)
    assert state(second(), recipe(), tmp_path).status == "done"


def test_stale_by_a_lost_input(tmp_path: Path) -> None:
    build(first(), recipe(), tmp_path)
    build(second(), recipe(), tmp_path)
    (tmp_path / "first" / "manifest.json").unlink()
    found = state(second(), recipe(), tmp_path)
    assert (found.status, found.why) == ("stale", "first changed")


def artifact_swap(source: Path, place: Path) -> None:
    """Put another finished directory where one was."""
    place.rename(place.with_name("gone"))
    source.rename(place)


@pytest.mark.parametrize(
    ("damage", "deep"),
    [
        (lambda f: f.unlink(), False),
        (lambda f: f.write_text("ones"), False),
        (lambda f: f.write_text("ane"), True),
    ],
)  # fmt: skip
def test_stale_by_damage(tmp_path: Path, damage: Callable[[Path], Any], deep: bool) -> None:
    build(first(), recipe(), tmp_path)
    damage(tmp_path / "first" / "a.txt")
    found = state(first(), recipe(), tmp_path, deep=deep)
    assert (found.status, found.why) == ("stale", "damaged: a.txt")


def test_same_size_damage_shows_only_deep(tmp_path: Path) -> None:
    build(first(), recipe(), tmp_path)
    (tmp_path / "first" / "sub" / "b.txt").write_text("oneoen")
    assert damaged(tmp_path / "first") == []
    assert damaged(tmp_path / "first", deep=True) == ["sub/b.txt"]


def test_a_damaged_input_is_refused(tmp_path: Path) -> None:
    build(first(), recipe(), tmp_path)
    (tmp_path / "first" / "a.txt").write_text("eno")
    assert state(first(), recipe(), tmp_path).status == "done"  # same size: only the hash tells
    assert state(first(), recipe(), tmp_path, deep=True).why == "damaged: a.txt"
    (tmp_path / "first" / "a.txt").write_text("longer")
    with pytest.raises(ValueError, match=r"first: a\.txt differ from the manifest; run that stage again"):
        build(second(), recipe(), tmp_path)
    assert not (tmp_path / "second.partial").exists()


def test_an_unfinished_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"first: not finished \(no readable manifest\.json\); run its stage first"):
        build(second(), recipe(), tmp_path)


def test_a_torn_manifest_is_none(tmp_path: Path) -> None:
    build(first(), recipe(), tmp_path)
    (tmp_path / "first" / "manifest.json").write_text('{"plan": ')
    assert read_manifest(tmp_path / "first") is None
    assert state(first(), recipe(), tmp_path).status == "todo"


@pytest.mark.parametrize("spoil", [None, "{", "[]"])
def test_another_plan_clears_the_partial(tmp_path: Path, spoil: str | None) -> None:
    with pytest.raises(Killed):
        build(first(dies("shard-0")), recipe(), tmp_path)
    if spoil is not None:
        (tmp_path / "first.partial" / "plan.json").write_text(spoil)
    build(first(), recipe(train__lr=0.5) if spoil is None else recipe(), tmp_path)
    assert sorted(f.name for f in (tmp_path / "first").iterdir()) == ["a.txt", "manifest.json", "sub"]


def test_another_input_clears_the_partial(tmp_path: Path) -> None:
    build(first(), recipe(), tmp_path)
    with pytest.raises(Killed):
        build(second(dies("shard-0")), recipe(), tmp_path)
    build(first(writes("other")), recipe(train__lr=0.5), tmp_path)
    build(second(), recipe(), tmp_path)
    assert not (tmp_path / "second" / "shard-0").exists()


def test_an_error_in_make_leaves_no_finished_directory(tmp_path: Path) -> None:
    def fails(_recipe: Recipe, _run: Path, out: Path) -> dict[str, Any]:
        (out / "half").write_text("x")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        build(first(fails), recipe(), tmp_path)
    assert not (tmp_path / "first").exists()
    assert state(first(), recipe(), tmp_path).status == "todo"


def test_a_damaged_output_is_salvaged(tmp_path: Path) -> None:
    build(first(), recipe(), tmp_path)
    (tmp_path / "first" / "a.txt").unlink()
    seen: list[str] = []

    def mends(_recipe: Recipe, _run: Path, out: Path) -> dict[str, Any]:
        seen.extend(sorted(str(f.relative_to(out)) for f in out.rglob("*")))
        (out / "a.txt").write_text("one")
        return {}

    build(first(mends), recipe(), tmp_path)
    assert seen == ["plan.json", "sub", "sub/b.txt"]
    assert damaged(tmp_path / "first", deep=True) == []
    assert state(first(), recipe(), tmp_path).status == "done"


def test_a_damaged_output_of_another_plan_is_not_salvaged(tmp_path: Path) -> None:
    build(first(), recipe(), tmp_path)
    (tmp_path / "first" / "a.txt").unlink()
    seen: list[str] = []

    def looks(_recipe: Recipe, _run: Path, out: Path) -> dict[str, Any]:
        seen.extend(f.name for f in out.iterdir())
        return {}

    build(first(looks), recipe(train__lr=0.5), tmp_path)
    assert seen == ["plan.json"]


def test_files_half_written_are_not_in_the_manifest(tmp_path: Path) -> None:
    def leaves_a_half(_recipe: Recipe, _run: Path, out: Path) -> dict[str, Any]:
        (out / "a.txt").write_text("x")
        (out / "b.txt.tmp").write_text("ha")
        return {}

    assert set(build(first(leaves_a_half), recipe(), tmp_path)["files"]) == {"a.txt"}


def test_write_bytes_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.json"
    write_json(file, {"b": "é\ud800"})
    assert file.read_bytes() == b'{\n "b": "\\u00e9\\ud800"\n}\n'

    def dead(_: int) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", dead)
        with pytest.raises(Killed):
            write_bytes(file, b"new")
    assert file.read_bytes().startswith(b"{")
    write_bytes(file, b"new")
    assert [f.name for f in tmp_path.iterdir()] == ["a.json"]
    assert file.read_bytes() == b"new"


def test_hashes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-4's example
    assert hash_bytes(b"abc") == hash_file(tmp_path / "a") == known
    assert hash_json({"b": 1, "a": [1.5, "é"]}) == hash_json({"a": [1.5, "é"], "b": 1})
    assert hash_json({"a": 1}) != hash_json({"a": 2})


def test_identity_follows_plan_and_files(tmp_path: Path) -> None:
    build(first(), recipe(), tmp_path / "a")
    build(first(), recipe(gate__prompts=50), tmp_path / "b")
    build(first(), recipe(train__lr=0.5), tmp_path / "c")
    build(first(writes("two")), recipe(), tmp_path / "d")
    a, b, c, d = (digest(tmp_path / name / "first") for name in "abcd")
    assert a == b
    assert len({a, c, d}) == 3


def test_plan_holds_only_what_the_stage_reads(tmp_path: Path) -> None:
    plan = plan_of(replace(first(), keys=("gate.prompts", "answers")), recipe(), tmp_path)
    assert plan["keys"] == {"gate.prompts": 40, "answers": plain(recipe())["answers"]}
