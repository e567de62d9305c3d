"""What `plan` expects of a GPU's memory, beside what was measured on one H200 (LOG.md)."""

from dataclasses import replace

import pytest

from recipes import estimate_memory
from recipes.estimate_memory import capture_gpu_bytes, slot_tokens, training_gpu_bytes
from recipes.estimate_sizes import head_parameters
from recipes.load import load
from recipes.schema import Recipe

GIB = 2**30


def cut_70b() -> Recipe:
    """llama-3.3-70b-chat on 8 of its layers, in bf16, as tests.bench.dry runs it."""
    recipe = load("llama-3.3-70b-chat", ["target.facts.num_hidden_layers=8", "train.processes=1", "capture.engines=1"])
    facts = replace(recipe.target.facts, total_params_b=8.947, active_params_b=8.947, weight_bytes=2.0)
    return replace(recipe, target=replace(recipe.target, facts=facts, quantization=""))


def bench(*overrides: str) -> Recipe:
    """A head of tests.bench.train: 8,192 tokens, three quarters of which draft, a frozen lm_head."""
    given = [
        "head.train_lm_head=false", "export.speculative_tokens=3", "train.pack_tokens=8192", "train.processes=1",
    ]  # fmt: skip
    return load("qwen3-coder-30b-code", [*given, *overrides])


def test_a_big_targets_capture_and_training_took_what_plan_says() -> None:
    recipe = cut_70b()
    assert capture_gpu_bytes(recipe) / GIB == pytest.approx(32.1, rel=0.15)
    assert training_gpu_bytes(recipe) / GIB == pytest.approx(51.4, rel=0.15)


LLAMA_8B = ("target.facts.hidden_size=4096", "target.facts.num_key_value_heads=8", "target.facts.vocab_size=128256",
            "head.intermediate_size=14336")  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "measured"),
    [
        (("train.ttt_steps=3",), 6.28),
        (("train.ttt_steps=7",), 10.28),
        ((*LLAMA_8B, "train.ttt_steps=3"), 10.64),
    ],
)
def test_what_the_benchmarks_heads_allocated(
    monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], measured: float
) -> None:
    monkeypatch.setattr(estimate_memory, "drafting_tokens", lambda _: 0.747 * 8192)
    planned = (training_gpu_bytes(bench(*overrides)) - estimate_memory.CONTEXT) / estimate_memory.SPARE
    assert planned / GIB == pytest.approx(measured, rel=0.05)


def test_several_processes_hold_the_gradients_once_more() -> None:
    one = bench("train.ttt_steps=3")
    two = replace(one, train=replace(one.train, processes=2))
    assert training_gpu_bytes(two) > training_gpu_bytes(one)


def test_sharing_divides_weights_and_moments_and_not_what_is_gathered_for_a_step() -> None:
    one, (trained, _) = bench("train.ttt_steps=3"), head_parameters(bench())
    whole = training_gpu_bytes(replace(one, train=replace(one.train, processes=8)))
    shared = [
        training_gpu_bytes(replace(one, train=replace(one.train, sharding="fsdp2", processes=n))) for n in (2, 8, 10**6)
    ]
    weights_and_moments = estimate_memory.SPARE * 12 * trained
    assert [whole - s for s in shared] == pytest.approx([weights_and_moments * part for part in (1 / 2, 7 / 8, 1)])
    assert min(shared) > estimate_memory.SPARE * (4 + 2 + 4) * trained


def test_a_streamed_pack_makes_the_slots_longer() -> None:
    recipe = load("smollm2-chat")
    streamed = replace(
        recipe, capture=replace(recipe.capture, mode="stream"), train=replace(recipe.train, pack_tokens=9000)
    )
    assert slot_tokens(recipe) == 2048 and slot_tokens(streamed) == 9000
