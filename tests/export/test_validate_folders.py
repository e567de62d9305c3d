"""What single planted faults cannot show: other formats, P-EAGLE, other targets, rows of the target, notes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.target import embedding, output_matrix
from export.checks import listing
from export.validate import notes, validate
from tests.export.plants import LC, Plant, checks, config, layer, method, spec, tensors, without
from tests.export.tiny import D, H, V, edit_config, edit_tensors, tiny_folder, tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


def test_no_folder_and_no_config(tmp_path: Path):
    assert checks(tmp_path / "nowhere") == {"folder"}
    assert checks(tmp_path) == {"folder"}
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        assert checks(tmp_path) == {"config-json"}


def test_a_specforge_folder_is_named_as_another_format(tmp_path: Path):
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": D,
        "hidden_size": H,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"midlayer.self_attn.q_proj.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    (fault,) = validate(tmp_path)
    assert fault.check == "not-speculators"
    assert "LlamaForCausalLMEagle3" in fault.message and "speculators convert" in fault.message


def test_unknown_and_unchecked_algorithms(tmp_path: Path, target: Path):
    folder = tiny_folder(tmp_path)
    for kind in ("eagle9", "dflash", None):
        spec(algorithm=kind)(folder)
        config(lambda c, kind=kind: c.update(speculators_model_type=kind))(folder)
        faults = validate(folder, target=target)
        assert [item.check for item in faults] == ["algorithm"]
        assert f"speculators_model_type is {kind!r}" in faults[0].message


@pytest.mark.parametrize(
    ("key", "also"),
    [
        ("fc_norm", {"extra-tensor"}),
        ("draft_vocab_size", {"draft-vocab"}),
        ("eagle_aux_hidden_state_layer_ids", {"aux-ids"}),
    ],
)
def test_implicit_flags_that_break_more(tmp_path: Path, key: str, also: set[str]):
    folder = tiny_folder(tmp_path)
    without(key)(folder)
    assert checks(folder) == {"implicit-flag", *also}


def test_implicit_rope_and_positions_count_against_the_target_too(tmp_path: Path, target: Path):
    folder = tiny_folder(tmp_path)
    without(LC, "rope_parameters")(folder)
    without(LC, "max_position_embeddings")(folder)
    assert checks(folder, target) == {"implicit-flag", "target-rope", "target-positions"}


def test_older_rope_keys_are_understood_but_not_explicit(tmp_path: Path, target: Path):
    folder = tiny_folder(tmp_path)
    without(LC, "rope_parameters")(folder)
    layer(rope_theta=10000, rope_scaling=None)(folder)
    assert checks(folder, target) == {"implicit-flag"}


def test_other_proposal_types(tmp_path: Path):
    folder = tiny_folder(tmp_path)
    method(proposal_type="tree")(folder)
    assert checks(folder) == {"proposal-methods", "default-proposal"}


def test_four_aux_states_need_the_count_for_llama_only(tmp_path: Path, target: Path):
    for kind, expected in (("llama", {"aux-count"}), ("qwen3", set[str]())):
        folder = tiny_folder(tmp_path / kind, aux_layers=[0, 1, 2, 4], layer_type=kind)
        assert validate(folder, target=target) == []
        without(LC, "num_aux_hidden_states")(folder)
        assert checks(folder, target) == expected


def test_both_norms_before_fc(tmp_path: Path):
    folder = tiny_folder(tmp_path)
    config(lambda c: c.update(norm_before_fc=True))(folder)
    edit_tensors(folder, lambda t: t.update({"input_norm.weight": torch.ones(3 * H).bfloat16()}))
    assert checks(folder) == {"norm-conflict"}


def peagle(root: Path, target: Path) -> Path:
    """A sound P-EAGLE folder."""
    folder = tiny_folder(root, norm_output=False, fc_norm=False, embeddings=embedding(target))

    def change(c: dict[str, Any]) -> None:
        c.update(speculators_model_type="peagle", mask_token_id=unused, embed_requires_grad=True)
        c["speculators_config"]["algorithm"] = "peagle"

    unused = 0

    def learn(t: dict[str, torch.Tensor]) -> None:
        nonlocal unused
        unused = int((~t["t2d"]).nonzero()[0])
        t["mask_hidden"] = torch.randn(1, 1, 3 * H).bfloat16()
        t["embed_tokens.weight"] = (t["embed_tokens.weight"].float() + 0.1).bfloat16()

    edit_tensors(folder, learn)
    edit_config(folder, change)
    return folder


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (lambda f: None, set[str]()),
        (config(lambda c: c.update(norm_output=True)), {"peagle-norms"}),
        (config(lambda c: c.update(mask_token_id=None)), {"peagle-mask"}),
        (config(lambda c: c.pop("mask_token_id")), {"peagle-mask"}),
        (config(lambda c: c.update(mask_token_id=V)), {"peagle-mask"}),
        (tensors(lambda t: t.pop("mask_hidden")), {"missing-tensor"}),
        (tensors(lambda t: t.pop("embed_tokens.weight")), {"missing-tensor"}),
        (tensors(lambda t: t["mask_hidden"].zero_()), {"untrained"}),
    ],
)
def test_peagle_traps(tmp_path: Path, target: Path, plant: Plant, expected: set[str]):
    folder = peagle(tmp_path, target)
    plant(folder)
    assert checks(folder, target) == expected, listing(validate(folder, target=target))


def test_a_mask_token_that_is_a_draft_token(tmp_path: Path, target: Path):
    folder = peagle(tmp_path, target)
    edit_tensors(folder, lambda t: used.append(int(t["t2d"].nonzero()[0]))) if (used := list[int]()) == [] else None
    config(lambda c: c.update(mask_token_id=used[0]))(folder)
    assert checks(folder, target) == {"peagle-mask"}


def test_a_peagle_head_with_fc_norm(tmp_path: Path, target: Path):
    folder = peagle(tmp_path, target)
    config(lambda c: c.update(fc_norm=True))(folder)
    edit_tensors(folder, lambda t: t.update({f"fc_norm.{i}.weight": torch.ones(H).bfloat16() for i in range(3)}))
    assert checks(folder, target) == {"peagle-norms"}


def test_another_targets_sizes(tmp_path: Path):
    folder = tiny_folder(tmp_path)
    wide = tiny_target(tmp_path / "wide", hidden_size=128)
    assert checks(folder, wide) == {"target-hidden"}
    more = tiny_target(tmp_path / "more", vocab_size=V + 64)
    assert checks(folder, more) == {"target-vocab"}
    config(lambda c: c.update(target_hidden_size=128))(folder)
    assert checks(folder) == {"target-hidden"}


def test_an_unreadable_target(tmp_path: Path):
    folder = tiny_folder(tmp_path)
    (tmp_path / "empty").mkdir()
    (fault,) = validate(folder, target=tmp_path / "empty")
    assert fault.check == "target-config" and "cannot be read" in fault.message


def test_embeddings_must_be_the_targets(tmp_path: Path, target: Path):
    folder = tiny_folder(tmp_path, embeddings=embedding(target))
    assert validate(folder, target=target) == []
    edit_tensors(folder, lambda t: t["embed_tokens.weight"][5].add_(1))
    (fault,) = validate(folder, target=target)
    assert fault.check == "embeddings-differ" and "1 of 512 rows" in fault.message


def test_lm_head_may_be_the_targets_or_trained_but_not_shuffled(tmp_path: Path, target: Path):
    folder = tiny_folder(tmp_path)
    own = output_matrix(target)

    def rows(order: Callable[[torch.Tensor], torch.Tensor]) -> set[str]:
        edit_tensors(folder, lambda t: t.update({"lm_head.weight": own[order(torch.arange(D) + t["d2t"])].clone()}))
        return checks(folder, target)

    assert rows(lambda ids: ids) == set()
    assert rows(lambda ids: ids.roll(1)) == {"lm-head-rows"}  # a permuted map
    assert rows(lambda ids: (ids + 1) % V) == {"lm-head-rows"}  # another run's map
    edit_tensors(folder, lambda t: t["lm_head.weight"].add_(0.01))
    assert checks(folder, target) == set()


def test_equal_rows_of_the_target_are_no_misplacement(tmp_path: Path):
    """Unused tokens often share one embedding: a head may carry either row."""
    target = tiny_target(tmp_path / "target")
    own = output_matrix(target)
    own[:] = own[0]
    stored = {k: v for k, v in load_file(target / "model.safetensors").items()} | {"lm_head.weight": own}
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    folder = tiny_folder(tmp_path)
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": own[:D].clone()}))
    assert checks(folder, target) == set()


def test_a_sharded_folder_is_sound(tmp_path: Path, target: Path):
    folder = tiny_folder(tmp_path)
    held = load_file(folder / "model.safetensors")
    parts = {"model-00001-of-00002.safetensors": ["fc.weight"]}
    parts["model-00002-of-00002.safetensors"] = [name for name in held if name != "fc.weight"]
    for name, keys in parts.items():
        save_file({key: held[key] for key in keys}, folder / name, metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {key: name for name, keys in parts.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert validate(folder, target=target) == []


def test_a_local_target_may_be_a_path(tmp_path: Path, target: Path):
    folder = tiny_folder(tmp_path, verifier=str(target))
    assert checks(folder, target) == {"verifier-local-path"}
    assert checks(folder, target, local_target=True) == set()
    assert any("not portable" in note for note in notes(folder))


def test_notes_say_what_is_allowed_but_worth_knowing(tmp_path: Path, target: Path):
    assert notes(tiny_folder(tmp_path / "a", embeddings=embedding(target)), target=target) == []
    said = notes(tiny_folder(tmp_path / "b", window=32, draft_vocab_size=V, head_dim=32), target=target)
    words = ("embeddings are not shipped", "slides over 32 tokens", "whole vocabulary", "head_dim 32")
    assert [word in note for word, note in zip(words, said, strict=True)] == [True] * 4


def test_garbage_of_any_type_is_reported_not_raised(tmp_path: Path, target: Path):
    folder = tiny_folder(tmp_path)
    whole = json.loads((folder / "config.json").read_text())
    for value in (None, [], {}, "x", 3, [{}], True, [[1]]):
        for key in whole:
            (folder / "config.json").write_text(json.dumps(whole | {key: value}))
            validate(folder, target=target)
            notes(folder, target=target)
        for holder in (LC, "speculators_config"):
            for key in whole[holder]:
                (folder / "config.json").write_text(json.dumps(whole | {holder: whole[holder] | {key: value}}))
                validate(folder, target=target)
                notes(folder, target=target)
