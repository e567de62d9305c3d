"""The stage `prompts`: split, sizes, order, duplicates and the identity of its accounting."""

import hashlib
import json
import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from data.prompts import NEAR, Prompt, make, read_prompts
from recipes.load import SHIPPED, build
from recipes.schema import Domain, Recipe

FACTS: dict[str, Any] = {
    "model_type": "llama", "architecture": "LlamaForCausalLM", "hidden_size": 8, "intermediate_size": 16,
    "num_hidden_layers": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 64000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "norm": "rms", "rope": {}, "tie_word_embeddings": True,
    "total_params_b": 0.1, "active_params_b": 0.1,
}  # fmt: skip
WORDS = [f"word{i}" for i in range(4000)]


def recipe(domains: dict[str, Any], seed: int = 0, **answers: Any) -> Recipe:
    return build(
        {
            "name": "x",
            "target": {"id": "org/target", "revision": "v1", "facts": FACTS},
            "domains": domains,
            "seed": seed,
            "answers": answers,
            "train": {"tokens": 1},
            "gate": {"rules": {name: {"min_acceptance": 1.1} for name in domains}},
        }
    )


def domain(path: Path, form: str = "prompt", field: str = "text", **more: Any) -> dict[str, Any]:
    source = {"path": str(path), "form": form, "field": field, "licence": "mit"}
    return {"sources": [source], "train": 10_000, "held_out": 10_000, "held_out_share": 0.2, **more}


def sentences(count: int, seed: int = 0, words: int = 12) -> list[str]:
    pick = random.Random(seed)
    return [" ".join(pick.sample(WORDS, words)) for _ in range(count)]


def prompts_file(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def talks_file(path: Path, *talks: list[str], system: str = "") -> Path:
    """Conversations, each a list of turns, the user's first."""
    opening = [{"role": "system", "content": system}] if system else []
    rows = [
        {"messages": opening + [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(talk)]}
        for talk in talks
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def stage(tmp_path: Path, wanted: Recipe) -> tuple[dict[str, Any], list[Prompt]]:
    """The stage's accounting and prompts, its identity checked."""
    accounting = make(wanted, tmp_path, tmp_path)
    prompts = read_prompts(tmp_path)
    for name, a in accounting.items():
        assert a["rows_in"] == a["train"] + a["held_out"] + sum(a["dropped"].values())
        assert Counter(p.split for p in prompts if p.domain == name) == Counter(
            {split: a[split] for split in ("train", "held_out") if a[split]}
        )
    return accounting, prompts


def sides(prompts: list[Prompt]) -> dict[str, str]:
    return {p.messages[-1]["content"]: p.split for p in prompts}


@cache
def shingles(text: str) -> frozenset[tuple[str, ...]]:
    words = text.split()
    return frozenset(zip(words, words[1:], words[2:], strict=False))


def jaccard(a: str, b: str) -> float:
    return len(shingles(a) & shingles(b)) / len(shingles(a) | shingles(b))


def test_prompts_are_written_in_order_with_content_ids(tmp_path: Path) -> None:
    file = prompts_file(tmp_path / "a.jsonl", sentences(60))
    benchmark = prompts_file(tmp_path / "b.jsonl", ["a longer question with an ümlaut and a line\u2028separator in it"])
    plan = recipe({"zoo": domain(file), "ant": domain(benchmark, role="benchmark", train=0)})
    accounting, prompts = stage(tmp_path, plan)
    order = [(["zoo", "ant"].index(p.domain), p.split, p.id) for p in prompts]
    assert order == sorted(order) and len(prompts) == 61
    for p in prompts:
        canonical = json.dumps(list(p.messages), sort_keys=True, separators=(",", ":"))
        assert p.id == hashlib.sha256(canonical.encode()).hexdigest()[:16]
        assert p.source == str(benchmark if p.domain == "ant" else file)
    assert accounting["zoo"]["licences"] == ["mit"]
    assert accounting["zoo"]["sources"] == {str(file): hashlib.sha256(file.read_bytes()).hexdigest()}


def test_same_content_gives_the_same_bytes_in_any_row_order(tmp_path: Path) -> None:
    texts = sentences(80) + [t.upper() for t in sentences(20)]
    sizes: dict[str, Any] = {"train": 30, "held_out": 5}
    written: set[bytes] = set()
    for seed in range(3):
        random.Random(seed).shuffle(texts)
        stage(tmp_path, recipe({"a": domain(prompts_file(tmp_path / "a.jsonl", texts), **sizes)}))
        written.add((tmp_path / "prompts.jsonl").read_bytes())
    assert len(written) == 1


def test_a_conversation_stays_on_its_side_whatever_else_changes(tmp_path: Path) -> None:
    talks = [[text, "an answer", f"and then {text}", "another"] for text in sentences(300)]
    file = talks_file(tmp_path / "a.jsonl", *talks)
    other = prompts_file(tmp_path / "b.jsonl", sentences(50, seed=9))

    def split(plan: Recipe) -> dict[str, str]:
        return {p.messages[0]["content"].split("Q: ")[-1]: p.split for p in stage(tmp_path, plan)[1] if p.domain == "a"}

    def of(**more: Any) -> dict[str, Any]:
        return domain(file, "messages", "messages", **more)

    all_rows = split(recipe({"a": of()}))
    assert len(all_rows) == 300
    for changed in (
        recipe({"a": of()}, seed=5),
        recipe({"a": of(train=40, held_out=7)}),
        recipe({"a": of(wrap="Q: {prompt}")}),
        recipe({"a": of()}, max_turns=2),
        recipe({"a": of()}, mode="prewritten", max_turns=2),
        recipe({"b": domain(other), "a": of()}),
    ):
        some = split(changed)
        assert some and some.items() <= all_rows.items()
    fewer, more = (split(recipe({"a": of(held_out_share=share)})) for share in (0.1, 0.2))
    assert {t for t, s in fewer.items() if s == "held_out"} < {t for t, s in more.items() if s == "held_out"}


def test_held_out_share_is_a_share_of_the_rows(tmp_path: Path) -> None:
    file = prompts_file(tmp_path / "a.jsonl", sentences(3000, words=8))
    for share in (0.05, 0.3):
        accounting, _ = stage(tmp_path, recipe({"a": domain(file, held_out_share=share)}))
        assert accounting["a"]["held_out"] == pytest.approx(3000 * share, rel=0.2)


def test_sizes_choose_by_seed_and_count_the_rest(tmp_path: Path) -> None:
    file = prompts_file(tmp_path / "a.jsonl", sentences(200))
    chosen: list[set[str]] = []
    for seed in (0, 1):
        accounting, prompts = stage(tmp_path, recipe({"a": domain(file, train=20, held_out=9)}, seed=seed))
        assert (accounting["a"]["train"], accounting["a"]["held_out"]) == (20, 9)
        assert accounting["a"]["dropped"] == {"not_needed": 171}
        chosen.append({p.id for p in prompts})
    assert chosen[0] != chosen[1]
    _, more = stage(tmp_path, recipe({"a": domain(file, train=30, held_out=9)}, seed=1))
    assert chosen[1] < {p.id for p in more}


def test_limits_drop_by_reason(tmp_path: Path) -> None:
    texts = ["  short  ", "y" * 51, "grüße aus köln", "just right here", "exactly fifty".ljust(50, "."), "exactly 10"]
    plan = domain(prompts_file(tmp_path / "a.jsonl", texts), held_out_share=0, held_out=0, min_chars=10, max_chars=50)
    accounting, _ = stage(tmp_path, recipe({"a": plan}))
    assert accounting["a"]["dropped"] == {"too_short": 1, "too_long": 1, "other_language": 1}
    accounting, _ = stage(tmp_path, recipe({"a": {**plan, "max_non_ascii": 1.0}}))
    assert accounting["a"]["train"] == 4


def test_duplicates_are_found_through_case_and_space(tmp_path: Path) -> None:
    texts = ["Tell me a  Story\nplease", "tell me a story please", "TELL ME A STORY PLEASE ", "tell me another story"]
    plan = domain(prompts_file(tmp_path / "a.jsonl", texts), held_out_share=0, held_out=0)
    accounting, _ = stage(tmp_path, recipe({"a": plan}))
    assert accounting["a"]["dropped"] == {"duplicate": 2} and accounting["a"]["train"] == 2


def test_ids_are_unique_across_domains_and_a_benchmark_keeps_its_own(tmp_path: Path) -> None:
    texts = sentences(80)
    domains = {
        "a": domain(prompts_file(tmp_path / "a.jsonl", texts[:60])),
        "b": domain(prompts_file(tmp_path / "b.jsonl", texts[20:])),
        "exam": domain(prompts_file(tmp_path / "c.jsonl", texts[:10]), role="benchmark", train=0),
    }
    accounting, prompts = stage(tmp_path, recipe(domains))
    assert len({p.id for p in prompts}) == len(prompts) == 80
    assert accounting["exam"]["held_out"] == 10
    assert accounting["b"]["dropped"] == {"duplicate": 40}


def test_near_duplicates_of_the_held_out_side_are_not_trained_on(tmp_path: Path) -> None:
    exam = sentences(60, seed=1, words=30)
    pick = random.Random(2)

    def edited(text: str, edits: int) -> str:
        words = text.split()
        for at in pick.sample(range(len(words)), edits):
            words[at] = f"edit{pick.getrandbits(40)}"
        return " ".join(words)

    texts = sentences(200, seed=3, words=30) + [edited(text, n) for text in exam for n in (1, 2, 3, 5, 9)]
    texts += [edited(text, n) for text in texts[:100] for n in (1, 2, 4)]
    domains = {
        "a": domain(prompts_file(tmp_path / "a.jsonl", texts)),
        "exam": domain(prompts_file(tmp_path / "b.jsonl", exam), role="benchmark", train=0, held_out=5),
    }
    accounting, prompts = stage(tmp_path, recipe(domains))
    split = sides([p for p in prompts if p.domain == "a"])
    held_out = [t for t, s in split.items() if s == "held_out"] + exam
    near = {t for t in texts if any(jaccard(t, h) >= NEAR for h in held_out)}
    assert near - set(held_out) and accounting["a"]["dropped"] == {
        "near_duplicate_of_held_out": len(near - set(held_out))
    }
    assert {t for t, s in split.items() if s == "train"} == set(texts) - near - set(held_out)


def test_near_duplicates_are_replaced_until_the_size_is_reached(tmp_path: Path) -> None:
    exam = sentences(1, seed=1, words=40)
    texts = [f"{exam[0]} {text}" for text in sentences(50, words=1)] + sentences(50, words=30)
    domains = {
        "a": domain(prompts_file(tmp_path / "a.jsonl", texts), train=40, held_out=0, held_out_share=0),
        "exam": domain(prompts_file(tmp_path / "b.jsonl", exam), role="benchmark", train=0),
    }
    accounting, _ = stage(tmp_path, recipe(domains))
    dropped = accounting["a"]["dropped"]
    assert accounting["a"]["train"] == 40 and 10 < dropped["near_duplicate_of_held_out"] < 50


def test_turns_of_either_mode(tmp_path: Path) -> None:
    talk = ["first question", "first answer", "second question", "second answer", "third question"]
    plan = domain(tmp_path / "a.jsonl", "messages", "messages", held_out=0, held_out_share=0, wrap="Q: {prompt} {x}")
    talks_file(tmp_path / "a.jsonl", talk, ["alone and unanswered"], system="be kind")

    def contents(**answers: Any) -> list[list[str]]:
        accounting, prompts = stage(tmp_path, recipe({"a": plan}, **answers))
        assert accounting["a"]["dropped"] == ({"no_answer": 1} if answers["mode"] == "prewritten" else {})
        return [[m["content"] for m in p.messages] for p in prompts if len(p.messages) > 2 or answers["max_turns"] == 1]

    def q(text: str) -> str:
        return f"Q: {text} question {{x}}"

    assert ["be kind", q("first")] in contents(mode="target", max_turns=1)
    assert contents(mode="target", max_turns=2) == [["be kind", q("first"), q("second")]]
    assert contents(mode="target", max_turns=9) == [["be kind", q("first"), q("second"), q("third")]]
    assert contents(mode="prewritten", max_turns=1) == [["be kind", q("first"), "first answer"]]
    both = ["be kind", q("first"), "first answer", q("second"), "second answer"]
    assert contents(mode="prewritten", max_turns=9) == [both]


def test_benchmarks_need_no_answers_where_they_are_prewritten(tmp_path: Path) -> None:
    exam = prompts_file(tmp_path / "a.jsonl", ["a question of the exam"])
    file = talks_file(tmp_path / "b.jsonl", ["a question", "its answer"])
    traffic = domain(file, "messages", "messages", held_out=0, held_out_share=0)
    exam_domain = domain(exam, role="benchmark", train=0)
    _, prompts = stage(tmp_path, recipe({"a": traffic, "exam": exam_domain}, mode="prewritten"))
    assert [len(p.messages) for p in prompts] == [2, 1]


def test_repaired_rows_are_counted_beside_the_kept(tmp_path: Path) -> None:
    greeting = [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "a question"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": greeting}) + "\n")
    plan = domain(tmp_path / "a.jsonl", "messages", "messages", held_out=0, held_out_share=0)
    accounting, _ = stage(tmp_path, recipe({"a": plan}))
    assert accounting["a"]["repaired"] == {"leading_assistant": 1} and accounting["a"]["train"] == 1


def test_a_domain_left_without_prompts_says_what_became_of_its_rows(tmp_path: Path) -> None:
    file = prompts_file(tmp_path / "a.jsonl", [*sentences(5), "short", "brief"])
    with pytest.raises(
        ValueError, match=r"domains.a: no held_out prompts left of 7 rows \(too_short 2\); raise held_out"
    ):
        make(recipe({"a": domain(file, held_out_share=0.0)}), tmp_path, tmp_path)
    with pytest.raises(ValueError, match=r"domains.a: no train prompts left of 7 rows \(too_short 2\); lower held_out"):
        make(recipe({"a": domain(file, held_out_share=1.0)}), tmp_path, tmp_path)
    assert not (tmp_path / "prompts.jsonl").exists()


def test_missing_or_damaged_prompts_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"prompts.jsonl: missing; run the stage that makes the prompts first"):
        read_prompts(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"id": "x"}\n')
    with pytest.raises(ValueError, match=r"prompts.jsonl: line 1 is damaged; run the stage"):
        read_prompts(tmp_path)


@pytest.mark.parametrize("file", sorted((SHIPPED / "domains").glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_domains_are_sound(file: Path) -> None:
    part = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert list(part) == ["domains"]
    build_domain = TypeAdapter(Domain).validate_python
    for name, plain in part["domains"].items():
        found = build_domain(plain)
        assert name.isidentifier() and (found.train > 0) == (found.role == "traffic")
        assert all(s.revision for s in found.sources if s.path.startswith("hub:"))
