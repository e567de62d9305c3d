"""Counts, parameters, bytes and FLOP of a recipe against the real modules and files."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from data.store import Entry, Features, write_shard
from data.tokens import Row, write_rows
from recipes.check import aux_layers
from recipes.estimate import estimate, feature_bytes_per_token
from recipes.estimate_rates import cpu_rates
from recipes.estimate_sizes import (
    answer_length,
    head_parameters,
    optimizer_flops,
    split_counts,
    supervised_tokens,
    training_flops,
)
from recipes.load import build, load
from recipes.schema import Recipe
from tests.recipes.small import small
from train.eagle3 import Eagle3
from train.head import head_config, save_head
from train.optim import make_optimizers
from train.places import places
from train.state import save_state

MACHINE = cpu_rates(4.7e11, cores=2)


def recipe(**changes: Any) -> Recipe:
    return build(small(**changes))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
def test_feature_bytes_are_those_of_a_shard(tmp_path: Path, dtype: str) -> None:
    length, hidden, layers = 3000, 64, 3
    entry = Entry(row_id="r", domain="d", split="train", start=0, length=length)
    features = Features(
        aux_SAH=torch.randn(length, layers * hidden),
        final_SH=torch.randn(length, hidden),
        input_ids_S=torch.zeros(length, dtype=torch.long),
        loss_mask_S=torch.ones(length, dtype=torch.bool),
    )
    shard = write_shard(tmp_path, 0, [(entry, features)], getattr(torch, dtype), layers)
    written = (tmp_path / shard.file).stat().st_size
    assert feature_bytes_per_token(hidden, layers, dtype) * length == pytest.approx(written, rel=0.002)


@pytest.mark.parametrize(
    ("hidden", "layers", "expected"), [(8192, 3, 65_536), (2048, 3, 16_384), (2880, 3, 23_040), (576, 3, 4_608)]
)
def test_feature_bytes_of_the_field_notes(hidden: int, layers: int, expected: int) -> None:
    assert feature_bytes_per_token(hidden, layers, "bfloat16") == expected + 5


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head__num_layers": 2, "head__layer_type": "qwen3"},
        {"head__train_lm_head": True, "head__intermediate_size": 96},
        {"head__fc_norm": False, "head__norm_before_fc": True, "capture__aux_layers": [1, 2, 3, 4]},
    ],
)
def test_head_parameters_are_those_of_the_module(changes: dict[str, Any]) -> None:
    one = recipe(**changes)
    head = Eagle3(head_config(one))
    head.lm_head.weight.requires_grad_(one.head.train_lm_head)
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in head.parameters() if not p.requires_grad)
    assert head_parameters(one) == (trained, frozen)


def test_head_bytes_are_those_of_the_saved_head(tmp_path: Path) -> None:
    one = recipe()
    head = Eagle3(head_config(one))
    save_head(tmp_path, head, torch.zeros(128, dtype=torch.int64), torch.zeros(512, dtype=torch.bool), {})
    written = (tmp_path / "head.safetensors").stat().st_size
    assert estimate(one, MACHINE).stages["head"]["disk_bytes"] == pytest.approx(written, rel=0.02)


@pytest.mark.parametrize(
    ("name", "millions"), [("llama-3.3-70b-chat", 1403), ("qwen3-coder-30b-chat", 183), ("gpt-oss-120b-chat", 308)]
)
def test_big_heads_have_the_published_sizes(name: str, millions: int) -> None:
    trained, frozen = head_parameters(load(name))  # SpecForge's heads of the same shape, which train lm_head too
    assert trained / 1e6 == pytest.approx(millions, rel=0.005)
    assert frozen == 0


@pytest.mark.parametrize(
    ("name", "gflop"), [("llama-3.3-70b-chat", 52.0), ("qwen3-coder-30b-chat", 7.6), ("gpt-oss-120b-chat", 12.4)]
)
def test_training_flops_agree_with_an_independent_count(name: str, gflop: float) -> None:
    """Field notes 2.3: 7 steps, every token supervised, no teacher; they count attention scores too."""
    one = load(name)
    everywhere, supervised = training_flops(one)
    teacher = 2 * one.head.draft_vocab_size * one.target.facts.hidden_size
    assert (everywhere + supervised - teacher) / 1e9 == pytest.approx(gflop, rel=0.06)


def test_training_flops_are_those_that_torch_counts() -> None:
    one = recipe(train__ttt_steps=3)
    head, h, s = Eagle3(head_config(one)), 64, 512
    head.lm_head.weight.requires_grad_(False)
    kept = torch.arange(128, s)
    aux = torch.randn(s, len(aux_layers(one)) * h)
    embeds = [torch.randn(s, h), *(torch.randn(len(kept), h) for _ in range(2))]
    docs = [
        (i, i + 8) for i in range(0, s, 8)
    ]  # short documents, so that attention scores, which are left out, stay few
    with FlopCounterMode(display=False) as counted:
        sum(out.sum() for out in head.logits(aux, embeds, places(docs, kept))).backward()  # type: ignore[union-attr]
    everywhere, supervised = training_flops(one)
    ours = s * everywhere + len(kept) * (supervised - 2 * 128 * h)
    assert ours == pytest.approx(counted.get_total_flops(), rel=0.05)


def test_muon_does_the_flops_that_torch_counts_and_keeps_the_state_that_is_saved(tmp_path: Path) -> None:
    one = recipe(head__train_lm_head=True)
    head = Eagle3(head_config(one))
    optimizers = make_optimizers(head, one.train)
    for parameter in head.parameters():
        parameter.grad = torch.ones_like(parameter)
    with FlopCounterMode(display=False) as counted:
        for optimizer in optimizers:
            optimizer.step()
    assert optimizer_flops(one) == counted.get_total_flops()
    assert optimizer_flops(recipe(train__optimizer="adamw")) == 0
    save_state(tmp_path, head, optimizers, 1, 1)
    written = (tmp_path / "checkpoint-0000001.safetensors").stat().st_size
    assert estimate(one, MACHINE).totals["spare_disk_bytes"] / 2 == pytest.approx(written, rel=0.02)


def test_adamw_keeps_two_moments(tmp_path: Path) -> None:
    one = recipe(train__optimizer="adamw")
    head = Eagle3(head_config(one))
    head.lm_head.weight.requires_grad_(False)
    optimizers = make_optimizers(head, one.train)
    for parameter in head.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizers[0].step()
    save_state(tmp_path, head, optimizers, 1, 1)
    written = (tmp_path / "checkpoint-0000001.safetensors").stat().st_size
    assert estimate(one, MACHINE).totals["spare_disk_bytes"] / 2 == pytest.approx(written, rel=0.02)


def test_rows_take_the_bytes_that_parquet_writes(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    zipf = 1 / (torch.arange(9000) + 2.7)  # 174,000 answer tokens of SmolLM2 held 8,962 different ones
    tokens = torch.multinomial(zipf, 100_000, replacement=True, generator=generator)
    mask = (0,) * 90 + (1,) * 160
    rows = [
        Row(row_id=f"{i:016x}-0", domain="chat", split="train", input_ids=tuple(ids.tolist()), loss_mask=mask)
        for i, ids in enumerate(tokens.view(400, 250))
    ]
    write_rows(tmp_path / "rows.parquet", rows)
    one = recipe()
    train = split_counts(one, "train")
    stage = estimate(one, MACHINE).stages["tokens"]
    a_token = (stage["disk_bytes"] - 8 * 128 - 512) / stage["tokens"]
    assert train.row_tokens < stage["tokens"]
    # Real rows take less than these: they share their system turn, and answers repeat themselves.
    assert 0.5 < a_token * tokens.numel() / (tmp_path / "rows.parquet").stat().st_size < 1.1


def test_answers_are_as_long_as_measured() -> None:
    one = load("smollm2-chat")
    assert answer_length(one, 200) == pytest.approx(167.05, rel=0.01)  # 1,280 prompts, 213,828 tokens
    assert answer_length(one, 1) == pytest.approx(1.0, rel=0.01)
    assert answer_length(one, 10**6) == pytest.approx(540)


def test_thinking_targets_answer_longer() -> None:
    assert answer_length(load("gpt-oss-120b-chat"), 10**6) > 5 * answer_length(load("llama-3.3-70b-chat"), 10**6)
    median = answer_length(load("gpt-oss-120b-chat"), 10**9) * math.log(2)
    assert median == pytest.approx(3891, rel=0.01)


def test_counts() -> None:
    one = recipe(answers={"max_tokens": 200, "held_out": 16}, domains__chat__weight=3.0)
    train, held = split_counts(one, "train"), split_counts(one, "held_out")
    assert (train.conversations, held.conversations) == (100, 32)
    assert train.answer_tokens == pytest.approx(100 * answer_length(one, 200))
    assert train.row_tokens == train.prompt_tokens + train.answer_tokens
    assert supervised_tokens(one) == pytest.approx(2 * 3 * train.answer_tokens)
    assert supervised_tokens(recipe(train={"tokens": 777})) == 777


def test_more_turns_mean_more_tokens_but_only_where_there_are_turns() -> None:
    chats = [split_counts(recipe(answers__max_turns=n), "train").answer_tokens for n in (1, 2, 3)]
    assert chats[0] < chats[1] < chats[2]
    assert chats[1] - chats[0] > chats[2] - chats[1]
    single = {"domains__chat__sources": [{"path": "a", "form": "prompt", "field": "p"}]}
    assert len({split_counts(recipe(answers__max_turns=n, **single), "train").answer_tokens for n in (1, 2, 3)}) == 1
