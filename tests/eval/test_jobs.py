import pytest

from eval.jobs import jobs, looks
from eval.sequential import evenly
from tests.eval.fake_engine import prompts
from tests.eval.samples import recipe

HELD_OUT = [*prompts(40), *prompts(40, "code"), *prompts(3, "chat", "train")]


def parts(of, domain="chat", arm="head"):
    return [
        [p.id for p in job.prompts]
        for job in jobs(of, HELD_OUT)
        if (job.load.phase, job.domain, job.load.arm) == ("acceptance", domain, arm)
    ]


def test_looks_cut_a_domain_into_parts_that_are_asked_by_all_arms_in_turn():
    of = recipe(looks=4, min_requests=10)
    ids = [p.id for p in HELD_OUT[:40]]
    assert parts(of) == parts(of, arm="ngram") == [ids[:10], ids[10:20], ids[20:30], ids[30:]]
    turns = [
        (j.load.round, j.load.arm) for j in jobs(of, HELD_OUT) if (j.load.phase, j.domain) == ("acceptance", "chat")
    ]
    assert turns == [(look, arm) for look in range(4) for arm in ("head", "ngram")]
    assert looks(of, jobs(of, HELD_OUT)) == {"chat": [10, 20, 30, 40], "code": [40]}
    assert looks(of, jobs(of, HELD_OUT))["chat"] == list(evenly(40, 4, 10))
    assert len({job.key for job in jobs(of, HELD_OUT)}) == len(jobs(of, HELD_OUT)), "a key is one job's"


def test_no_look_comes_before_the_fewest_requests_that_may_pass():
    of = recipe(looks=4, min_requests=25)
    assert looks(of, jobs(of, HELD_OUT))["chat"] == [30, 40]


def test_ngram_is_asked_its_own_number_of_prompts():
    of = recipe(looks=4, min_requests=10, ngram_prompts=14)
    assert [len(ids) for ids in parts(of, arm="ngram")] == [10, 4]


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ({}, "a rule that only reports decides nothing"),
        ({"min_speedup": 1.2}, "speed is no matter of looks"),
        ({"min_acceptance": 1.4, "max_below_incumbent": 0.05}, "the paired interval is one of all prompts"),
    ],
)
def test_a_domain_that_cannot_end_early_is_asked_once(rule, why):
    incumbent = {"incumbent": "org/head"} if "max_below_incumbent" in rule else {}
    of = recipe(looks=4, min_requests=10, rules={"chat": rule, "code": {"min_acceptance": 1.1}}, **incumbent)
    assert looks(of, jobs(of, HELD_OUT)) == {"chat": [40], "code": [10, 20, 30, 40]}, why


def test_a_domain_with_too_few_prompts_is_asked_once():
    of = recipe(looks=4, min_requests=10)
    assert looks(of, jobs(of, HELD_OUT[:7])) == {"chat": [7]}
