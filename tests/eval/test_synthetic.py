import dataclasses

import pytest

from eval.arms import options
from eval.gate import judge
from eval.measure import preflight
from eval.synthetic import controlled, synthetic_faults
from export.figures import Figure
from tests.eval.samples import recipe, record, traffic, unchanged


def control(length):
    plain = recipe()
    return dataclasses.replace(plain, engine=dataclasses.replace(plain.engine, synthetic_length=length))


def domains(value, low, high):
    found = judge(record(traffic(), recipe()), traffic(), recipe(), unchanged(record(traffic(), recipe()))).domains[
        "chat"
    ]
    return {"chat": dataclasses.replace(found, acceptance=Figure(value=value, low=low, high=high, n=40))}


def test_the_head_is_started_with_the_set_length_and_the_other_arms_are_not(tmp_path):
    said = options(control(2.5), tmp_path, "head")[2]
    assert '"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5' in said
    assert not any("synthetic" in o for arm in ("none", "ngram") for o in options(control(2.5), tmp_path, arm))
    assert not any("synthetic" in o for o in options(recipe(), tmp_path, "head"))


def test_a_control_on_a_cpu_or_beyond_the_window_is_refused_before_it_starts(tmp_path):
    assert synthetic_faults(control(2.5), cpu=False) == [] and synthetic_faults(recipe(), cpu=True) == []
    (fault,) = synthetic_faults(control(2.5), cpu=True)
    assert "dies at the first request" in fault and "on a GPU" in fault
    (fault,) = synthetic_faults(control(4.5), cpu=False)
    assert "4.5; with export.speculative_tokens 3 it may be 1 to 4" in fault
    with pytest.raises(ValueError, match="dies at the first request"):
        preflight(control(2.5), tmp_path)


@pytest.mark.parametrize(
    "figure, refused", [((2.5, 2.45, 2.55), False), ((2.52, 2.51, 2.53), False), ((2.6, 2.55, 2.65), True)]
)
def test_the_measured_length_must_be_the_one_that_was_set(figure, refused):
    found = controlled(control(2.5), domains(*figure))
    assert bool(found) == refused
    if refused:
        assert found[0].why == "chat: set to 2.5, measured 2.600 [2.550, 2.650]" and found[0].threshold == 2.5


def test_nothing_measured_is_no_control():
    found = {"chat": dataclasses.replace(domains(2.5, 2.4, 2.6)["chat"], acceptance=None)}
    assert "nothing was measured" in controlled(control(2.5), found)[0].why
    assert controlled(recipe(), found) == []


def test_a_control_is_never_a_pass_and_the_verdict_says_what_it_measured():
    of = control(1.0 + 0.35)
    made = record(traffic(), of)
    made = dataclasses.replace(
        made, conditions=dataclasses.replace(made.conditions, rejection_sample_method="synthetic")
    )
    verdict = judge(made, traffic(), of, unchanged(made))
    assert not verdict.passed and {"rejection_sampler", "synthetic_length"} <= {r.rule for r in verdict.refusals}
    assert verdict.findings[0].startswith("chat: synthetic acceptance was set to 1.35 and measured as ")
