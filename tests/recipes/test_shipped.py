"""What ships: complete, plannable recipes whose facts fit the models and whose parts need no copying."""

from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from recipes.load import SHIPPED, load, raw, shipped
from train.eagle3 import Eagle3, _rope_config
from train.head import head_config

TARGETS = sorted((SHIPPED / "targets").glob("*.yaml"))
PROMISED = {
    "smollm2-chat", "smollm2-chat-long", "smollm2-code", "llama-3.3-70b-chat", "llama-3.3-70b-code",
    "qwen3-coder-30b-chat", "qwen3-coder-30b-code", "gpt-oss-120b-chat", "gpt-oss-120b-code",
}  # fmt: skip


def test_all_that_was_promised_ships() -> None:
    assert set(shipped()) >= PROMISED


@pytest.mark.parametrize("name", shipped())
def test_a_recipe_is_composed_and_explained(name: str) -> None:
    text = (SHIPPED / f"{name}.yaml").read_text()
    own = yaml.safe_load(text)
    assert own["name"] == name
    assert any(part.startswith("targets/") for part in own["include"]), "a target is a part, not a copy"
    assert any(part.startswith("domains/") for part in own["include"])
    assert "target" not in own
    head = text[: text.index("include:")]
    assert f"draftsmith run {name}" in head
    assert all(line.startswith("#") for line in head.splitlines())


@pytest.mark.parametrize("name", sorted(PROMISED - {"smollm2-chat"}))
def test_a_header_says_what_it_needs_and_what_is_known(name: str) -> None:
    text = (SHIPPED / f"{name}.yaml").read_text()
    assert "# Needs: " in text
    assert "# Acceptance: " in text


@pytest.mark.parametrize("name", shipped())
def test_a_recipe_can_say_no(name: str) -> None:
    recipe = load(name)
    assert sum(rule.min_speedup > 0 for rule in recipe.gate.rules.values()) == 1, "speed is measured on one domain"
    assert all(domain.held_out >= recipe.gate.min_requests for domain in recipe.domains.values())
    assert recipe.gate.temperatures[0] == 0.0
    assert len(recipe.domains) >= 2


@pytest.mark.parametrize("file", TARGETS, ids=lambda f: f.stem)
def test_the_head_turns_as_its_target_does(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = next(r for r in map(load, shipped()) if r.target.id == yaml.safe_load(file.read_text())["target"]["id"])
    facts = recipe.target.facts
    theirs = AutoConfig.for_model(
        facts.model_type, head_dim=facts.head_dim, hidden_size=facts.hidden_size,
        num_attention_heads=facts.num_attention_heads, max_position_embeddings=facts.max_position_embeddings,
        rope_parameters=dict(facts.rope),
    )  # fmt: skip
    with torch.device("meta"):
        Eagle3(head_config(recipe))
    ours, expected = LlamaRotaryEmbedding(_rope_config(head_config(recipe))), LlamaRotaryEmbedding(theirs)
    assert torch.equal(ours.inv_freq, expected.inv_freq)
    assert ours.attention_scaling == expected.attention_scaling
    assert caplog.text == "", "transformers finds a value of another type than it wants"


@pytest.mark.parametrize("file", TARGETS, ids=lambda f: f.stem)
def test_no_machine_path_in_a_target(file: Path) -> None:
    target = yaml.safe_load(file.read_text())["target"]
    assert not str(target.get("path", "")).startswith("/")
    assert target["revision"]
    assert target["facts"]["template"]


def test_target_times_domain_needs_no_copying(tmp_path: Path) -> None:
    file = tmp_path / "new.yaml"
    file.write_text(
        "include: [targets/gpt-oss-120b.yaml, domains/math.yaml]\nname: new\ntrain: {epochs: 1.0}\n"
        "gate: {rules: {math: {min_acceptance: 1.5}}}\n"
    )
    recipe = load(str(file))
    assert recipe.target.id == "openai/gpt-oss-120b"
    assert list(recipe.domains) == ["math"]
    assert raw("smollm2-chat")["target"]["facts"]["hidden_size"] == 576
