from dataclasses import replace
from pathlib import Path

from recipes import outside
from recipes.artifact import Stage, build, state
from recipes.load import build as checked
from recipes.schema import Recipe
from tests.recipes.small import small


def reading(path: str) -> Recipe:
    return checked(small(domains__chat__sources=[{"path": path, "form": "prompt", "field": "prompt"}]))


def test_a_changed_source_file_makes_its_stage_stale_and_says_which(tmp_path: Path) -> None:
    data = tmp_path / "logs.jsonl"
    data.write_text('{"prompt": "one"}\n')
    recipe = reading(str(data))
    stage = Stage(
        name="prompts", verb="prepare", make=lambda _r, _run, out: {"n": (out / "x").write_text("x")}, inputs=(),
        keys=("domains",), outside=outside.sources,
    )  # fmt: skip
    build(stage, recipe, tmp_path)
    assert state(stage, recipe, tmp_path).status == "done"
    data.write_text('{"prompt": "two"}\n')
    assert state(stage, recipe, tmp_path).why == f"{data} changed"


def test_a_target_folder_is_known_by_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(3 * 2**20))
    recipe = reading("x.jsonl")
    recipe = replace(recipe, target=replace(recipe.target, path=str(folder)))
    before = outside.target(recipe)
    assert outside.target(recipe) == before
    (folder / "model.safetensors").write_bytes(bytes(3 * 2**20 - 1) + b"\x01")
    assert outside.target(recipe) != before


def test_another_head_in_the_incumbents_folder_makes_the_measurement_stale(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    recipe = reading("x.jsonl")
    assert outside.incumbent(recipe) == {}
    beside = replace(recipe, gate=replace(recipe.gate, incumbent=str(tmp_path)))
    before = outside.incumbent(beside)
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert set(before) == {str(tmp_path)} and outside.incumbent(beside) != before
    assert outside.incumbent(replace(recipe, gate=replace(recipe.gate, incumbent="org/head@1"))) == {}


def test_what_is_missing_is_empty_and_what_is_on_the_hub_is_its_revision(tmp_path: Path) -> None:
    recipe = reading(str(tmp_path / "no.jsonl"))
    assert set(outside.sources(recipe).values()) == {""}
