from dataclasses import replace

import pytest

from eval.jobs import jobs
from eval.ledger import add_row, begin, read
from eval.looks import kept
from tests.eval.fake_engine import prompts
from tests.eval.samples import conditions, recipe, request

HELD_OUT = [*prompts(40), *prompts(40, "code")]
GOOD, POOR, EVEN = (
    ((3, 2, 3, 1) * 5, (2, 3, 3, 2) * 5),
    ((1, 1, 0, 1) * 5, (1, 0, 1, 2) * 5),
    ((0, 1) * 10, (0, 0) * 10),
)


def of(**rule):
    return recipe(looks=4, min_requests=10, rules={"chat": rule, "code": {}})


def asked(recipe, work, ledger, windows, answered=40, **changes):
    """A ledger in which the head answered so many prompts of chat, `windows` in turn."""
    begin(ledger, conditions())
    left = answered
    for job in work:
        if (job.load.arm, job.load.phase, job.domain) != ("head", "acceptance", "chat"):
            continue
        for i, prompt in enumerate(job.prompts[:left]):
            add_row(ledger, job, replace(request(windows=windows[i % len(windows)], **changes), prompt_id=prompt.id))
        left = max(0, left - len(job.prompts))
    return read(ledger)


def rounds(recipe, tmp_path, windows, **more):
    work = jobs(recipe, HELD_OUT)
    stay = kept(work, asked(recipe, work, tmp_path / "rows.jsonl", windows, **more), recipe)
    assert [j for j in stay if j.domain != "chat" or j.load.phase != "acceptance"] == [
        j for j in work if j.domain != "chat" or j.load.phase != "acceptance"
    ], "other domains and the timed jobs stay"
    of_arm = {arm: [j.load.round for j in stay if (j.load.arm, j.load.phase, j.domain) == (arm, "acceptance", "chat")]
              for arm in ("head", "ngram")}  # fmt: skip
    assert of_arm["head"] == of_arm["ngram"], "both arms answer the same prompts"
    return of_arm["head"]


def test_a_clear_yes_and_a_clear_no_end_at_the_first_look(tmp_path):
    assert rounds(of(min_acceptance=1.4), tmp_path, GOOD) == [0]
    (tmp_path / "rows.jsonl").unlink()
    assert rounds(of(min_acceptance=3.0), tmp_path, POOR) == [0]


def test_what_is_not_clear_is_asked_to_the_end(tmp_path):
    assert rounds(of(min_acceptance=1.25), tmp_path, EVEN) == [0, 1, 2, 3]


@pytest.mark.parametrize("answered", [0, 9])
def test_a_look_that_is_not_answered_decides_nothing(tmp_path, answered):
    assert rounds(of(min_acceptance=1.4), tmp_path, GOOD, answered=answered) == [0, 1, 2, 3]


def test_failed_answers_decide_nothing(tmp_path):
    assert rounds(of(min_acceptance=1.4), tmp_path, GOOD, error="HTTP 500") == [0, 1, 2, 3]


def test_a_yes_needs_all_that_the_rule_asks_and_a_no_one_thing(tmp_path):
    both = {"min_acceptance": 3.0, "min_acceptance_unrepeated": 1.2}
    assert rounds(of(**both), tmp_path, GOOD) == [0]
    (tmp_path / "rows.jsonl").unlink()
    assert rounds(of(**both), tmp_path, GOOD, repeated_4gram=True) == [0, 1, 2, 3], "no unrepeated answer yet"
    (tmp_path / "rows.jsonl").unlink()
    assert rounds(of(**both), tmp_path, POOR, repeated_4gram=True) == [0], "the first bound is missed for sure"


def test_no_other_arm_is_looked_at(tmp_path):
    recipe = of(min_acceptance=1.4)
    work = jobs(recipe, HELD_OUT)
    begin(tmp_path / "rows.jsonl", conditions())
    for job in work:
        if job.load.arm == "ngram" and job.load.phase == "acceptance":
            for prompt in job.prompts:
                add_row(tmp_path / "rows.jsonl", job, request(arm="ngram", windows=GOOD[0], prompt_id=prompt.id))
    assert kept(work, read(tmp_path / "rows.jsonl"), recipe) == work
