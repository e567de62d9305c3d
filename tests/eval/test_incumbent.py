from dataclasses import replace

import pytest

from eval.arms import asked_arms, options, timed_arms
from eval.gate import judge
from eval.incumbent import incumbent_folder
from eval.page import markdown
from eval.report import page_of
from export.requests import Request
from recipes.faults import EnvironmentFault
from tests.eval.samples import conditions, head_folder, recipe, record, traffic, unchanged

RULES = {"chat": {"min_acceptance": 1.4, "min_speedup": 1.2, "max_below_incumbent": 0.05}, "code": {}}
DRAFTING = '{"model": "incumbent", "method": "eagle3", "num_speculative_tokens": 3}'


def beside(more: int = 0, **changes):
    """A verdict beside an incumbent that accepts `more` further tokens in each answer of 40 windows."""
    of = recipe(**{"incumbent": "org/head@1", "rules": RULES, **changes})
    rows = traffic()
    others = [replace(r, arm="incumbent", **added(r, more)) for r in rows if r.arm == "head"]
    rows += others
    made = record(rows, of)
    said = conditions()
    command = {**said.command, "incumbent": ["{python}", "--speculative-config", DRAFTING]}
    made = replace(made, conditions=replace(said, command=command, incumbent="org/head@1, sha256 0"))
    return judge(made, rows, of, unchanged(made)), of


def added(row: Request, more: int) -> dict:
    """`more` windows of the answer accept one token more."""
    room = [i for i, a in enumerate(row.per_step_accepted) if a < 3][:more]
    steps = tuple(a + (i in room) for i, a in enumerate(row.per_step_accepted))
    return {"per_step_accepted": steps, "accepted": sum(steps)}


def test_a_head_as_good_as_the_incumbent_passes_and_the_report_says_by_how_much():
    verdict, of = beside()
    assert verdict.passed, verdict.refusals
    assert verdict.domains["chat"].over_incumbent["0"].value == 0.0
    assert verdict.speed.beside["incumbent"].value == pytest.approx(1.0)
    assert verdict.speed.beside["ngram"].low > 1.3, "55 tokens/s beside 36"
    text = markdown(page_of(verdict, of))
    assert "Beside the head now published" in text and "org/head@1, sha256 0" in text
    assert "head / incumbent" in text and "| 1 | 2.1" in text


def test_a_head_worse_than_the_incumbent_is_refused_with_the_paired_difference():
    verdict, _ = beside(more=4)
    (refusal,) = verdict.refusals
    assert (refusal.rule, refusal.domain, refusal.threshold) == ("max_below_incumbent", "chat", -0.05)
    assert refusal.low <= refusal.figure == pytest.approx(-0.1, abs=0.01)
    assert "less the incumbent's -0.1" in refusal.why and "its lower end must reach -0.05" in refusal.why


def test_a_little_worse_passes_within_the_margin_and_not_without():
    assert beside(more=1)[0].passed, "0.025 a window within 0.05"
    strict = {**RULES, "chat": {**RULES["chat"], "max_below_incumbent": 0.0}}
    assert [r.rule for r in beside(more=1, rules=strict)[0].refusals] == ["max_below_incumbent"]
    assert beside(rules=strict)[0].passed, "equal is not worse"


def test_an_incumbent_that_was_not_measured_or_hardly_is_a_refusal():
    of = recipe(incumbent="org/head@1", rules=RULES)
    made = record(traffic(), of)
    verdict = judge(made, traffic(), of, unchanged(made))
    whys = {r.rule: r.why for r in verdict.refusals}
    said = "chat: acceptance length beside the incumbent's was not measured, at most 0.05 below it is allowed"
    assert whys["max_below_incumbent"] == said
    assert "the incumbent's server was not started with gate.incumbent" in whys["speculation"]
    answered = [r for r in traffic() if r.arm == "head" and r.prompt_id < f"{9:016x}"]
    rows = [*traffic(), *(replace(r, arm="incumbent") for r in answered)]
    made = record(rows, of)
    few = [r.why for r in judge(made, rows, of, unchanged(made)).refusals]
    assert any("9 prompts were answered by both heads, gate.min_requests is 30" in why for why in few)


def test_its_counters_must_agree_like_the_heads():
    of = recipe(incumbent="org/head@1", rules=RULES)
    rows = [*traffic(), *(replace(r, arm="incumbent") for r in traffic() if r.arm == "head")]
    made = record(rows, of)
    of_incumbent = made.counters["incumbent"]
    bad = {**of_incumbent, "chat": replace(of_incumbent["chat"], drafts=9)}
    wrong = replace(made, counters={**made.counters, "incumbent": bad})
    whys = [r.why for r in judge(wrong, rows, of, unchanged(made)).refusals]
    assert any("chat: incumbent: the engine counted 9 drafts" in why for why in whys)


def test_its_server_drafts_with_its_folder(tmp_path):
    folder = head_folder(tmp_path / "old")
    of = recipe(incumbent=str(folder), rules=RULES)
    assert f'"model": "{folder}", "method": "eagle3"' in options(of, tmp_path, "incumbent")[2]
    assert asked_arms(of) == ["head", "incumbent", "ngram"] and timed_arms(of) == ["none", *asked_arms(of)]
    chunks = replace(of, engine=replace(of.engine, windows="chunks"))
    assert asked_arms(chunks) == ["head", "incumbent"]
    assert asked_arms(recipe()) == ["head", "ngram"]


def test_what_is_no_head_is_said_before_anything_starts(tmp_path, monkeypatch):
    for named in ("no such folder", str(tmp_path / "missing")):
        with pytest.raises(ValueError, match="is no folder and no Hub name; give a head's folder, or"):
            incumbent_folder(recipe(incumbent=named, rules=RULES))
    with pytest.raises(ValueError, match="holds no config.json with .safetensors weights; name the folder of a head"):
        incumbent_folder(recipe(incumbent=str(tmp_path), rules=RULES))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(EnvironmentFault, match="org/none@1 cannot be fetched from the Hub"):
        incumbent_folder(recipe(incumbent="org/none@1", rules=RULES))
    assert incumbent_folder(recipe()) is None
