"""Each control changes what it says and nothing else; the served side is in tests/test_e2e.py."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eval.agreement import read_folder
from eval.controls import CONTROLS, corrupted, verdict_of
from export.speculators import write_folder
from export.validate import validate
from recipes.load import load
from tests.train.test_eagle3 import CONFIG, random_head
from train.head import save_head


@pytest.fixture()
def folder(tmp_path: Path) -> Path:
    (tmp_path / "head").mkdir()
    kept = torch.arange(128) * 2
    t2d = torch.zeros(320, dtype=torch.bool)
    t2d[kept] = True
    save_head(tmp_path / "head", random_head(CONFIG), kept - torch.arange(128), t2d, {})
    write_folder(
        tmp_path / "head", tmp_path / "good", verifier="a/b", architecture="LlamaForCausalLM", speculative_tokens=3
    )
    return tmp_path / "good"


def parts(folder: Path) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("corrupt", CONTROLS, ids=lambda c: c.__name__)
def test_a_control_plants_one_error_that_loaders_do_not_see(folder: Path, tmp_path: Path, corrupt: object) -> None:
    config, tensors = parts(folder)
    spoilt, others = parts(corrupted(folder, tmp_path / "bad", corrupt))  # type: ignore[arg-type]
    keys = [k for k in config if config[k] != spoilt[k]]
    names = [n for n in tensors if not torch.equal(tensors[n], others[n])]
    assert len(keys) + len(names) == 1
    assert all(tensors[n].shape == others[n].shape for n in tensors)
    assert parts(folder)[0] == config  # the original stays


def test_a_plain_copy_is_the_same_head(folder: Path, tmp_path: Path) -> None:
    copy = corrupted(folder, tmp_path / "copy", None)
    assert all(torch.equal(a, b) for a, b in zip(parts(folder)[1].values(), parts(copy)[1].values(), strict=True))
    assert validate(copy) == validate(folder) == []


def test_agreement_of_one_kind_is_not_enough() -> None:
    recipe = load("smollm2-chat")
    good = {"equal_share": 0.99, "length_error": 0.001, "not_ties": [], "windows": 1000}
    assert verdict_of(good, recipe) == []
    assert verdict_of({**good, "equal_share": 0.98}, recipe) == ["windows 98.0%"]
    assert verdict_of({**good, "length_error": 0.02}, recipe) == ["length off by 2.0%"]
    assert verdict_of({**good, "not_ties": [1, 2]}, recipe) == ["2 differences beyond rounding"]


def test_anybodys_folder_becomes_the_head_that_it_describes(folder: Path) -> None:
    head, d2t, steps = read_folder(folder)
    assert head.config == CONFIG and steps == 3 and int(d2t[-1]) == 127
    for name, parameter in random_head(CONFIG).named_parameters():
        assert torch.equal(dict(head.named_parameters())[name], parameter.bfloat16().float())


def test_a_folder_that_is_no_eagle3_head_or_not_its_own_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "fc_norm": False}))
    with pytest.raises(ValueError, match=r"its tensors are not those of its config\.json"):
        read_folder(folder)
    (folder / "config.json").write_text(json.dumps({**config, "speculators_model_type": "dflash"}))
    with pytest.raises(ValueError, match="speculators_model_type 'dflash'; allowed: eagle3"):
        read_folder(folder)
