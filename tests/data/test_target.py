import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from data import target
from data.target import embedding, fact_faults, output_matrix, package_file, read_target, served_path, weight
from recipes.artifact import Stage, build
from recipes.load import build as checked
from tests.tiny import make_target, recipe_data

STAGE = Stage(name="target", verb="prepare", make=target.make, inputs=(), keys=("target",))


def test_a_folder_is_served_from_where_it_is_and_hashed(tmp_path: Path) -> None:
    recipe = checked(recipe_data(make_target(tmp_path / "t"), tmp_path / "p"))
    (tmp_path / "run").mkdir()
    build(STAGE, recipe, tmp_path / "run")
    info = read_target(tmp_path / "run")
    assert served_path(tmp_path / "run") == tmp_path / "t"
    assert info["local"] and len(info["template_sha256"]) == 64 and info["architecture"] == "LlamaForCausalLM"
    assert list(info["weights"]) == ["model.safetensors"]


def test_a_target_that_is_not_the_recipes_is_refused_with_all_differences(tmp_path: Path) -> None:
    plain = recipe_data(make_target(tmp_path / "t"), tmp_path / "p")
    plain["target"]["facts"].update(vocab_size=640, hidden_size=32)
    said = "hidden_size 64, recipe 32; vocab_size 320, recipe 640; name the right target.path, or"
    with pytest.raises(ValueError, match=said):
        target.make(checked(plain), tmp_path, tmp_path)


def test_a_missing_target_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"target.path: .* neither a folder with config.json nor a .gguf file; name one"
    ):
        target.make(checked(recipe_data(tmp_path / "no", tmp_path / "p")), tmp_path, tmp_path)


@pytest.mark.parametrize("broken", ["config.json", "tokenizer.json", "a.gguf"])
def test_a_target_that_is_no_model_is_one_line(tmp_path: Path, broken: str) -> None:
    folder = make_target(tmp_path / "t")
    (folder / broken).write_text('{"model": 3}')
    place = folder / broken if broken.endswith("gguf") else folder
    with pytest.raises(ValueError, match=r"cannot be loaded by transformers \(.+\); name the folder, or the") as caught:
        target.make(checked(recipe_data(place, tmp_path / "p")), tmp_path, tmp_path / "out")
    assert str(place) in str(caught.value) and "\n" not in str(caught.value)


def test_a_full_disk_is_not_the_models_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(target.AutoConfig, "from_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        target.make(checked(recipe_data(make_target(tmp_path / "t"), tmp_path / "p")), tmp_path, tmp_path)


def test_a_target_without_weights_is_refused(tmp_path: Path) -> None:
    folder = make_target(tmp_path / "t")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ValueError, match=r"holds no \*\.safetensors; name a folder that has them"):
        target.make(checked(recipe_data(folder, tmp_path / "p")), tmp_path, tmp_path)


def test_a_target_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    folder = make_target(tmp_path / "t")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template"):
        target.make(checked(recipe_data(folder, tmp_path / "p")), tmp_path, tmp_path)


def test_package_files_are_found_without_importing_and_never_outside() -> None:
    assert package_file("package:pytest/__init__.py").name == "__init__.py"
    with pytest.raises(ValueError, match="package 'nosuchpkg' is not installed"):
        package_file("package:nosuchpkg/x")
    with pytest.raises(ValueError, match="no such file in package 'pytest'; it has, for example, "):
        package_file("package:pytest/nothing.txt")
    with pytest.raises(ValueError, match="leaves the package's folder"):
        package_file("package:pytest/../pip/__init__.py")


def test_output_matrix_is_the_models_own_tied_or_not(tmp_path: Path) -> None:
    for name, tied in (("tied", True), ("apart", False)):
        folder = make_target(tmp_path / name, tie_word_embeddings=tied)
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert torch.equal(output_matrix(folder).float(), model.lm_head.weight.float())
        assert torch.equal(embedding(folder).float(), model.get_input_embeddings().weight.float())
    with pytest.raises(ValueError, match="holds none of nothing"):
        weight(folder, ("nothing",))


def test_facts_compare_a_derived_head_size(tmp_path: Path) -> None:
    facts = checked(recipe_data(tmp_path, tmp_path)).target.facts
    config = SimpleNamespace(hidden_size=64, num_attention_heads=2)
    assert "head_dim 32, recipe 16" in fact_faults(facts, config)
