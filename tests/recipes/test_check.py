"""Each rule that spans fields: broken by one change, reported by one line that names key, value and remedy."""

from typing import Any

import pytest

from recipes.check import aux_layers, cross_faults, default_aux_layers, is_local
from recipes.load import build
from recipes.schema import Recipe
from tests.recipes.small import FACTS, small


def sound(**changes: Any) -> Recipe:
    return build(small(**changes))


def fault(**changes: Any) -> str:
    """The one fault of the small recipe with `changes`."""
    with pytest.raises(ValueError) as caught:
        build(small(**changes))
    head, *lines = str(caught.value).splitlines()
    assert head == "the recipe has 1 fault:", str(caught.value)
    return lines[0].strip()


def test_sound_recipe_has_no_fault() -> None:
    assert cross_faults(sound()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"domains__a-b": {"sources": [{"path": "x", "form": "prompt", "field": "p"}], "held_out": 0}},
            "domains.a-b: a domain's name is letters, digits and _",
        ),
        (
            {"head__window": 3},
            "head.window: 3 is within train.ttt_steps 3, so late steps would see no context; set 0 (full) or more",
        ),
        (
            {"engine__windows": "chunks", "gate__speed_ngram": False},
            "engine.windows, gate.ngram, gate.speed_ngram: chunks, true, false; n-gram drafts in some steps only, "
            "which chunks do not show, so it can only be timed; set gate.speed_ngram: true, or gate.ngram: false",
        ),
        ({"domains__chat__sources": []}, "domains.chat.sources: empty; name at least one source"),
        (
            {"domains__bench__train": 5},
            "domains.bench.train: 5, but a benchmark is never trained on; set 0 or role: traffic",
        ),
        ({"domains__chat__min_chars": 2000}, "domains.chat.min_chars: 2000 is above max_chars 1500"),
        (
            {"domains__chat__wrap": "Say: prompt"},
            "domains.chat.wrap: 'Say: prompt' lacks {prompt}, so every prompt would be the same",
        ),
        ({"domains__chat__train": 0}, "domains: no domain has train > 0, so there is nothing to train on"),
        (
            {"answers": {"max_tokens": 1500, "max_prompt_tokens": 1000}},
            "answers.max_prompt_tokens + answers.max_tokens: 2500 is above target.max_model_len 2048; lower one "
            "or raise the other",
        ),
        (
            {"target__max_model_len": 4096},
            "target.max_model_len: 4096 is above the target's own 2048 positions",
        ),
        (
            {"capture__aux_layers": [1, 4, 3]},
            "capture.aux_layers: [1, 4, 3] must be strictly ascending and within 1..7 (vLLM sorts them, and would "
            "permute fc's columns)",
        ),
        (
            {"capture__aux_layers": [1, 3, 3]},
            "capture.aux_layers: [1, 3, 3] must be strictly ascending and within 1..7 (vLLM sorts them, and would "
            "permute fc's columns)",
        ),
        (
            {"capture__aux_layers": [2, 4, 8]},
            "capture.aux_layers: [2, 4, 8] must be strictly ascending and within 1..7 (vLLM sorts them, and would "
            "permute fc's columns)",
        ),
        (
            {"capture__aux_layers": [0, 4]},
            "capture.aux_layers: [0, 4] must be strictly ascending and within 1..7 (vLLM sorts them, and would "
            "permute fc's columns)",
        ),
        (
            {"head__norm_before_fc": True},
            "head.norm_before_fc, head.fc_norm: both true; choose one (fc_norm norms each state apart)",
        ),
        (
            {"head__draft_vocab_size": 513},
            "head.draft_vocab_size: 513 is above the target's vocabulary 512",
        ),
        ({"train__tokens": 100}, "train.tokens, train.epochs: 100, 2.0; set exactly one of them above 0"),
        ({"train__epochs": 0}, "train.tokens, train.epochs: 0, 0.0; set exactly one of them above 0"),
        (
            {"train__ttt_steps": 2},
            "train.ttt_steps: 2 is below export.speculative_tokens 3; the last draft tokens would be untrained",
        ),
        (
            {"train__sharding": "fsdp2", "train__optimizer": "adamw"},
            "train.sharding, train.processes: fsdp2, 1, but one process has nobody to share with; set train.processes "
            "above 1, or train.sharding: ddp",
        ),
        (
            {"train__sharding": "fsdp2", "train__processes": 2},
            "train.sharding, train.optimizer: fsdp2, muon, whose every iteration would gather each matrix; set "
            "train.optimizer: adamw, or train.sharding: ddp",
        ),
        (
            {"capture__backend": "hf", "capture__engines": 2},
            "capture.engines, capture.tensor_parallel: 2, 1, but transformers captures in this process alone; set both "
            "to 1, or capture.backend: sglang",
        ),
        (
            {"gate__rules__chatt": {}},
            "gate.rules.chatt: no such domain; domains are chat, bench",
        ),
        (
            {"gate__rules__bench": ...},
            "gate.rules.bench: missing; bench is held out, so give it a rule ({} only reports)",
        ),
        (
            {"gate__rules__chat": {"min_acceptance": 1.0}},
            "gate.rules: no domain has min_acceptance above 1, so the gate could not say no",
        ),
        (
            {"gate__incumbent": "org/head"},
            "gate.incumbent: org/head, but no rule compares with it, so a worse head would pass; set "
            "gate.rules.NAME.max_below_incumbent, e.g. 0.05",
        ),
        (
            {"gate__rules__chat__max_below_incumbent": 0.05},
            "gate.rules.chat.max_below_incumbent: set, but gate.incumbent names no head; name one, or take the rule "
            "out",
        ),
        ({"gate__speed_domain": "code"}, "gate.speed_domain: 'code' is no domain; allowed: chat, bench"),
        ({"gate__min_requests": 41}, "gate.min_requests: 41 is above gate.prompts 40"),
        (
            {"gate__rules__chat__min_speedup_at": {8: 1.1, 32: 1.0}, "gate__loads": [8]},
            "gate.rules.chat.min_speedup_at: 32, but gate.loads is [8]; add it there, or take the rule out "
            "(min_speedup is the rule at one request in flight)",
        ),
        (
            {"gate__loads": [8, 32]},
            "gate.loads: 32 in flight is never reached with gate.speed_prompts 12; time more prompts, or drop that "
            "load",
        ),
        (
            {"gate__looks": 20, "gate__prompts": 36, "gate__min_requests": 30},
            "gate.looks: 20 at gate.prompts 36, none before gate.min_requests 30; ask more prompts, or look once",
        ),
        ({"gate__loads": [8, 8]}, "gate.loads: [8, 8] names a load twice; name each once"),
    ],
)
def test_rule(changes: dict[str, Any], message: str) -> None:
    assert fault(**changes) == message


def test_a_domain_that_is_not_held_out_needs_no_rule() -> None:
    assert cross_faults(sound(domains__bench__held_out=0, gate__rules__bench=...)) == []


def test_aux_layers_default_to_those_of_vllm() -> None:
    assert default_aux_layers(80) == (2, 40, 77)  # vLLM's for Llama-3.3-70B (PR 50170)
    assert aux_layers(sound()) == (2, 4, 5)
    assert aux_layers(sound(capture__aux_layers=[1, 6])) == (1, 6)


def test_a_target_too_shallow_for_the_default_must_name_its_layers() -> None:
    shallow = {**FACTS, "num_hidden_layers": 4}
    assert fault(target__facts=shallow).startswith("capture.aux_layers: [2, 2, 1] must be strictly ascending")
    assert aux_layers(sound(target__facts=shallow, capture__aux_layers=[1, 2, 3])) == (1, 2, 3)


def test_local_target() -> None:
    assert not is_local(sound().target)
    assert is_local(sound(target__local_only=True).target)
