"""Every fault message of loading, overrides, includes, and the round trip through plain data."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.load import build, load, plain, raw, shipped
from tests.recipes.small import small


def write(file: Path, value: Any) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(value if isinstance(value, str) else yaml.safe_dump(value))
    return str(file)


def faults(value: dict[str, Any]) -> list[str]:
    """The lines of the listing that `build` raises, without the head line."""
    with pytest.raises(ValueError) as caught:
        build(value)
    head, *lines = str(caught.value).splitlines()
    count = f"{len(lines)} fault" + ("s" if len(lines) > 1 else "")
    assert head == f"the recipe has {count}:"
    return [line.strip() for line in lines]


def test_small_recipe_is_sound() -> None:
    recipe = build(small())
    assert recipe.name == "small"
    assert build(plain(recipe)) == recipe


@pytest.mark.parametrize("name", shipped())
def test_shipped_round_trip(name: str) -> None:
    recipe = load(name)
    assert recipe.name == name
    assert build(plain(recipe)) == recipe
    assert plain(build(plain(recipe))) == plain(recipe)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"train__lrr": 1}, "train.lrr: unknown key (value 1); nearest known key: lr"),
        ({"trian": {"lr": 1}}, "trian: unknown key (value {'lr': 1}); nearest known key: train"),
        (
            {"target__facts__hiden_size": 5},
            "target.facts.hiden_size: unknown key (value 5); nearest known key: hidden_size",
        ),
        (
            {"gate__rules": {"chat": {"min_acceptance": 2, "min_accept": 1}, "bench": {}}},
            "gate.rules.chat.min_accept: unknown key (value 1); nearest known key: min_acceptance",
        ),
        (
            {"domains__chat__sources": [{"path": "a", "form": "prompt", "field": "b", "splt": "c"}]},
            "domains.chat.sources.0.splt: unknown key (value 'c'); nearest known key: split",
        ),
        ({"name": ...}, "name: missing; a recipe must set it"),
        ({"target__facts__norm": ...}, "target.facts.norm: missing; a recipe must set it"),
        ({"gate__rules": ...}, "gate.rules: missing; a recipe must set it"),
        (
            {"train__lr": "abc"},
            "train.lr: 'abc' is not allowed: input should be a valid number",
        ),
        ({"train__lr": 0}, "train.lr: 0 is not allowed: input should be greater than 0"),
        ({"train__tokens": -1}, "train.tokens: -1 is not allowed: input should be greater than or equal to 0"),
        ({"gate__prompts": 0}, "gate.prompts: 0 is not allowed: input should be greater than or equal to 1"),
        ({"gate__confidence": 1.0}, "gate.confidence: 1.0 is not allowed: input should be less than 1"),
        ({"gate__speed_rounds": 2}, "gate.speed_rounds: 2 is not allowed: input should be greater than or equal to 3"),
        ({"head__layer_type": "lama"}, "head.layer_type: 'lama' is not allowed: input should be 'llama' or 'qwen3'"),
        ({"train": 5}, "train: 5 is not allowed: input should be a dictionary or an instance of Train"),
        (
            {"capture__aux_layers": [1, 2.5]},
            "capture.aux_layers.1: 2.5 is not allowed: input should be a valid integer",
        ),
        ({"engine__args": ["-tp", 2]}, "engine.args.1: 2 is not allowed: input should be a valid string"),
        ({"name": "A b"}, "name: 'A b' is not allowed: string should match pattern '^[a-z0-9][a-z0-9._-]*$'"),
        (
            {"target__note": ["x" * 100]},
            "target.note: ['" + "x" * 55 + "... is not allowed: input should be a valid string",
        ),
    ],
)  # fmt: skip
def test_one_fault(change: dict[str, Any], fault: str) -> None:
    assert faults(small(**change)) == [fault]


def test_several_faults_at_once() -> None:
    found = faults(small(train__lrr=1, gate__prompts=0, name=..., target__dtype="int8", head__window=-1))
    assert [line.split(":")[0] for line in sorted(found)] == [
        "gate.prompts", "head.window", "name", "target.dtype", "train.lrr",
    ]  # fmt: skip


def test_several_impossible_combinations_at_once() -> None:
    found = faults(small(train__tokens=5, head__draft_vocab_size=1000, domains__bench__train=3))
    assert [line.split(":")[0] for line in found] == [
        "domains.bench.train", "head.draft_vocab_size", "train.tokens, train.epochs",
    ]  # fmt: skip


def test_overrides_win_and_keep_their_types(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", small())
    recipe = load(
        file,
        ["train.lr=0.5", "gate.temperatures=[0.0,0.7]", "publish.repo_id=org/x=y", "head.fc_norm=false", "train.seed=7",
         "domains.chat.weight=2", "engine.env.A=b"],
    )  # fmt: skip
    assert recipe.train.lr == 0.5
    assert recipe.gate.temperatures == (0.0, 0.7)
    assert recipe.publish.repo_id == "org/x=y"
    assert recipe.head.fc_norm is False
    assert recipe.train.seed == 7
    assert recipe.domains["chat"].weight == 2.0
    assert recipe.engine.env == {"A": "b"}
    assert load(file).train.lr == 1e-3


@pytest.mark.parametrize("override", ["train.lr", "=3", " =3"])
def test_override_without_key_or_value(tmp_path: Path, override: str) -> None:
    file = write(tmp_path / "a.yaml", small())
    with pytest.raises(ValueError, match=r"override '.*': not of the form key=value, e\.g\. train\.lr=0\.001"):
        load(file, [override])


def test_override_that_is_no_yaml(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", small())
    with pytest.raises(ValueError, match=r"recipe .*a\.yaml.*: while parsing a flow sequence"):
        load(file, ["train.lr=[1"])


def test_override_of_an_item_of_a_list(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", small())
    with pytest.raises(ValueError, match=r"0\.field=x\): .*; a list is overridden whole, key=\[item"):
        load(file, ["domains.chat.sources.0.field=x"])


def test_a_part_of_another_shape(tmp_path: Path) -> None:
    write(tmp_path / "b.yaml", {"domains": ["chat"]})
    file = write(tmp_path / "a.yaml", small() | {"include": ["b.yaml"]})
    with pytest.raises(ValueError, match=r"a\.yaml: does not fit the parts that it includes"):
        load(file)


def test_rope_values_keep_their_types() -> None:
    rope = load("gpt-oss-120b-chat").target.facts.rope
    assert isinstance(rope["original_max_position_embeddings"], int)  # transformers and vLLM want an integer
    assert isinstance(rope["factor"], float)
    assert rope["truncate"] is False


def test_override_of_an_unknown_key(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", small())
    with pytest.raises(ValueError, match=r"train\.optimiser: unknown key \(value 1\); nearest known key: optimizer"):
        load(file, ["train.optimiser=1"])


def test_interpolation_of_nothing(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", small(train__lr="${nope}"))
    with pytest.raises(ValueError, match="Interpolation key 'nope' not found"):
        load(file)


def test_interpolation_is_resolved(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", small(gate__max_tokens=123, gate__speed_max_tokens="${gate.max_tokens}"))
    assert load(file).gate.speed_max_tokens == 123


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "not YAML: while parsing a flow sequence"),
        ("- 1\n- 2", "holds list, a recipe is a mapping of keys"),
        ("", "holds NoneType, a recipe is a mapping of keys"),
        ("include: b.yaml", "include: 'b.yaml' is not a list of files"),
        ("include: [b.yaml]", "include 'b.yaml' not found beside it or in the shipped recipes"),
        ("include: [smollm2-chat]", "in the shipped recipes; nearest shipped: smollm2-chat.yaml"),
        ("include: [smollm2-135m.yaml]", "nearest shipped: targets/smollm2-135m.yaml"),
    ],
)
def test_unreadable_file(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path / "a.yaml", text)
    with pytest.raises(ValueError) as caught:
        load(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert message in str(caught.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(b"name: \xff\xfe")
    with pytest.raises(ValueError, match="not YAML"):
        load(str(file))


def test_missing_recipe_names_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"recipe 'smollm2-chatt' not found; shipped recipes: .*; nearest: smollm2-chat"
    ):
        load("smollm2-chatt")


def test_include_loop(tmp_path: Path) -> None:
    write(tmp_path / "b.yaml", {"include": ["a.yaml"]})
    file = write(tmp_path / "a.yaml", {"include": ["b.yaml"]})
    with pytest.raises(ValueError, match=r"a\.yaml: includes itself through a\.yaml -> b\.yaml"):
        load(file)


def test_included_twice_is_no_loop(tmp_path: Path) -> None:
    write(tmp_path / "c.yaml", {"seed": 3})
    write(tmp_path / "b.yaml", {"include": ["c.yaml"]})
    file = write(tmp_path / "a.yaml", small() | {"include": ["c.yaml", "b.yaml"]})
    assert load(file).seed == 3


def test_later_parts_and_own_keys_win(tmp_path: Path) -> None:
    write(tmp_path / "parts" / "b.yaml", {"train": {"lr": 0.1, "seed": 1}, "gate": {"prompts": 50}})
    write(tmp_path / "parts" / "c.yaml", {"train": {"lr": 0.2}})
    file = write(tmp_path / "a.yaml", small(gate__prompts=41) | {"include": ["parts/b.yaml", "parts/c.yaml"]})
    recipe = load(file)
    assert (recipe.train.lr, recipe.train.seed, recipe.train.epochs, recipe.gate.prompts) == (0.2, 1, 2.0, 41)


def test_parts_come_from_the_shipped_recipes_too(tmp_path: Path) -> None:
    own = small(target=..., domains__more={"sources": []}) | {"include": ["targets/smollm2-135m.yaml"]}
    merged = raw(write(tmp_path / "a.yaml", own))
    assert merged["target"]["id"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert set(merged["domains"]) == {"chat", "bench", "more"}


def test_own_list_replaces_an_included_one(tmp_path: Path) -> None:
    write(tmp_path / "b.yaml", {"gate": {"temperatures": [0.0, 0.5, 1.0]}})
    file = write(tmp_path / "a.yaml", small(gate__temperatures=[0.0]) | {"include": ["b.yaml"]})
    assert load(file).gate.temperatures == (0.0,)


def test_impossible_combinations_are_reported_beside_wrong_types_and_unknown_keys(tmp_path: Path) -> None:
    plain = raw("smollm2-chat")
    plain["train"].update(ttt_steps=1, lr="abc")
    plain["head"]["fc_nrom"] = True
    with pytest.raises(ValueError) as said:
        build(plain)
    text = str(said.value)
    assert "3 faults" in text and "nearest known key: fc_norm" in text
    assert "train.lr: 'abc'" in text and "train.ttt_steps: 1 is below export.speculative_tokens 3" in text


@pytest.mark.parametrize(
    "override, key",
    [("train.lr=.inf", "train.lr"), ("train.seed=true", "train.seed"), ("publish.private=3", "publish.private")],
)
def test_numbers_are_finite_and_booleans_are_no_numbers(override: str, key: str) -> None:
    with pytest.raises(ValueError, match=key):
        load("smollm2-chat", [override])
