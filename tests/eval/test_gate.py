import json
import math
from dataclasses import replace

import pytest

from eval.gate import COUNTER_TOLERANCE, judge, make, require_record
from export.figures import Parity
from export.record import read_verdict, recipe_hash, to_json, write_record
from export.requests import write_requests
from recipes.artifact import digest, hash_file, write_json
from recipes.faults import GateRefused
from recipes.load import plain
from tests.eval.samples import STAGES, recipe, record, traffic, unchanged


def verdict_of(rows=None, of=None, *, made=None, now=None, edited=""):
    of, rows = of or recipe(), traffic() if rows is None else rows
    made = made or record(rows, of)
    return judge(made, rows, of, now or unchanged(made), edited)


def refused(verdict, rule: str, domain: str = "", *said: str):
    """The one refusal by this rule on this domain; it says what it must and is one line."""
    assert not verdict.passed
    (found,) = [r for r in verdict.refusals if (r.rule, r.domain) == (rule, domain)]
    for words in said:
        assert words in found.why
    assert "\n" not in found.why
    json.dumps(to_json(verdict), allow_nan=False)
    return found


def test_a_good_head_passes():
    verdict = verdict_of()
    assert verdict.passed and verdict.refusals == []
    chat = verdict.domains["chat"]
    assert chat.requests == 40 and chat.acceptance.low > 1.4 and chat.repeated_share == 0.25
    assert chat.acceptance.value == pytest.approx(1 + sum(chat.per_position))
    assert verdict.speed.speedup.low > 1.2 and len(verdict.speed.rounds) == 3
    assert verdict.speed.served == {"8": {"head": 160.0}}
    assert verdict.made_from["record"] == "e" * 64 and verdict.made_from["recipe"] == recipe_hash(recipe())


def test_the_lower_end_decides():
    chat = verdict_of().domains["chat"].acceptance
    between = (chat.low + chat.value) / 2
    found = refused(
        verdict_of(of=recipe(rules={"chat": {"min_acceptance": between}, "code": {}})), "min_acceptance", "chat",
        "its lower end must reach",
    )  # fmt: skip
    assert found.low < found.threshold < found.figure == chat.value
    assert verdict_of(of=recipe(rules={"chat": {"min_acceptance": chat.low}, "code": {}})).passed


def test_a_random_head_is_refused():
    rows = [replace(r, accepted=0, per_step_accepted=(0,) * r.drafts) for r in traffic()]
    found = refused(verdict_of(rows), "min_acceptance", "chat", "acceptance length 1.000 [1.000, 1.000]")
    assert found.figure == 1.0


def test_loops_do_not_carry_the_unrepeated_rule():
    rows = [
        r if r.repeated_4gram or r.phase == "speed" else replace(r, accepted=0, per_step_accepted=(0,) * r.drafts)
        for r in traffic()
    ]
    found = refused(verdict_of(rows), "min_acceptance_unrepeated", "chat", "unrepeated answers 1.000")
    assert found.threshold == 1.2


def test_few_unrepeated_answers_cannot_pass_a_rule():
    rows = [replace(r, repeated_4gram=r.prompt_id[-1] != "0") for r in traffic()]
    refused(verdict_of(rows), "min_acceptance_unrepeated", "chat", "only 3 answers without a repeated 4-gram", "10")


def test_a_slow_head_is_refused():
    rows = [replace(r, total_s=2 * r.total_s) if (r.phase, r.arm) == ("speed", "head") else r for r in traffic()]
    found = refused(verdict_of(rows), "min_speedup", "chat", "speed-up at concurrency 1", "must reach 1.2")
    assert found.high < 1.0


def test_speed_rule_without_speed_rows():
    refused(verdict_of([r for r in traffic() if r.phase != "speed"]), "min_speedup", "chat", "was not measured")


def test_speed_rule_on_a_domain_that_was_not_timed():
    rules = {"chat": {"min_acceptance": 1.4, "min_speedup": 1.2}, "code": {"min_speedup": 1.2}}
    refused(verdict_of(of=recipe(rules=rules)), "min_speedup", "code", "was not measured")


def test_fewer_rounds_or_prompts_than_asked():
    refused(verdict_of([r for r in traffic() if r.round < 2]), "min_speedup", "chat", "12 prompts in 2 rounds")
    less = [r for r in traffic() if r.phase != "speed" or int(r.prompt_id, 16) < 11]
    refused(verdict_of(less), "min_speedup", "chat", "11 prompts in 3 rounds, the recipe wants 12 in 3")


def test_zero_requests():
    verdict = verdict_of([])
    refused(verdict, "min_requests", "chat", "0 requests measured", "gate.min_requests is 30")
    refused(verdict, "min_requests", "code")
    refused(verdict, "min_acceptance", "chat", "was not measured")


def test_too_few_requests():
    rows = [r for r in traffic() if r.phase == "speed" or int(r.prompt_id, 16) < 29]
    found = refused(verdict_of(rows), "min_requests", "code", "29 requests")
    assert (found.figure, found.threshold) == (29.0, 30.0)


def test_a_rule_but_no_measurement():
    rows = [r for r in traffic() if r.domain == "chat"]
    refused(verdict_of(rows), "min_requests", "code", "0 requests measured")


def test_a_prompt_counted_twice():
    rows = traffic()
    refused(verdict_of([*rows, rows[0]]), "min_requests", "chat", "1 prompts were counted twice")


def test_failed_requests():
    rows = traffic()
    rows[3] = replace(rows[3], error="HTTP 500: <html>\nboom")
    verdict = judge(record(rows, recipe()), rows, recipe(), unchanged(record(rows, recipe())))
    assert not verdict.passed and any(
        r.rule == "failed_requests" and "1 requests failed" in r.why for r in verdict.refusals
    )


def test_every_temperature_must_reach_the_rule():
    of = recipe(temperatures=[0.0, 0.7])
    cold = traffic()
    hot = [replace(r, temperature=0.7) for r in cold if r.phase == "acceptance"]
    assert verdict_of([*cold, *hot], of).passed
    assert verdict_of([*cold, *hot], of).domains["chat"].temperatures["0.7"].n == 40
    bad = [replace(r, accepted=0, per_step_accepted=(0,) * r.drafts) for r in hot]
    refused(verdict_of([*cold, *bad], of), "min_acceptance", "chat", "at T=0.7 1.000")
    verdict = verdict_of(cold, of)
    assert any("0 requests measured at T=0.7" in r.why for r in verdict.refusals)


def test_head_that_drafts_nothing():
    rows = [
        replace(r, drafts=0, draft_tokens=0, accepted=0, per_step_accepted=()) if r.arm == "head" else r
        for r in traffic()
    ]
    refused(verdict_of(rows), "drafts", "chat", "no window was verified")


@pytest.mark.parametrize("stage", [*STAGES, "recipe"])
def test_something_changed_since_the_measurement(stage):
    made = record(traffic(), recipe())
    now = {**unchanged(made), stage: "f" * 64}
    found = refused(verdict_of(made=made, now=now), "unchanged", "", f"{stage} changed since the measurement")
    assert "-> ffffffffffff" in found.why


def test_a_stage_that_is_gone_or_damaged():
    made = record(traffic(), recipe())
    now = {**unchanged(made), "checkpoint": "model.safetensors not as its manifest says"}
    refused(verdict_of(made=made, now=now), "unchanged", "", "checkpoint: model.safetensors not as its manifest says")
    gone = {k: v for k, v in unchanged(made).items() if k != "head"}
    refused(verdict_of(made=made, now=gone), "unchanged", "", "head: it is gone")


def test_a_record_that_does_not_say_what_it_is_of():
    made = record(traffic(), recipe())
    made = replace(made, made_from={k: v for k, v in made.made_from.items() if k != "target"})
    now = {**unchanged(made), "target": "a" * 64}
    refused(verdict_of(made=made, now=now), "unchanged", "", "target changed since the measurement (unrecorded")


def test_an_edited_recipe_names_the_key():
    made = record(traffic(), recipe())
    edited = recipe(prompts=50)
    now = {**unchanged(made), "recipe": recipe_hash(edited)}
    verdict = verdict_of(of=edited, made=made, now=now, edited="gate.prompts: 40 -> 50")
    refused(verdict, "unchanged", "", "recipe changed since the measurement (gate.prompts: 40 -> 50)")


SYNTHETIC = '{"model": "checkpoint", "method": "eagle3", "rejection_sample_method": "synthetic"}'


@pytest.mark.parametrize(
    "extra",
    [
        ["--speculative-config", SYNTHETIC],
        [f"--speculative-config={SYNTHETIC}"],
        ["--speculative_config.rejection_sample_method", "synthetic"],
        ["--speculative-config.rejection_sample_method=block"],
        ["--speculative-config", '{"model": "checkpoint", "synthetic_acceptance_rate": 0.9}'],
        ["--speculative-config", "{torn"],
    ],
)
def test_another_rejection_sampler(extra):
    made = record(traffic(), recipe())
    command = {**made.conditions.command, "head": [*made.conditions.command["head"], *extra]}
    made = replace(made, conditions=replace(made.conditions, command=command))
    refused(verdict_of(made=made), "rejection_sampler", "", "head: rejection sampler", "'standard'")


def test_a_sampler_in_the_conditions_or_the_recipe():
    made = record(traffic(), recipe())
    made = replace(made, conditions=replace(made.conditions, rejection_sample_method="synthetic"))
    refused(verdict_of(made=made), "rejection_sampler", "", "the record: rejection sampler 'synthetic'")
    base = recipe()
    of = replace(base, engine=replace(base.engine, args=("--speculative-config", SYNTHETIC)))
    refused(verdict_of(of=of, made=record(traffic(), of)), "rejection_sampler", "", "engine.args")


@pytest.mark.parametrize(
    ("arm", "said"), [("none", "without speculation was started with"), ("head", "not started with")]
)
def test_arms_are_what_they_are_called(arm, said):
    made = record(traffic(), recipe())
    command = {**made.conditions.command, arm: ["--speculative-config", '{"model": "other", "method": "eagle3"}']}
    made = replace(made, conditions=replace(made.conditions, command=command))
    refused(verdict_of(made=made), "speculation", "", said)


def test_parity_missing():
    made = replace(record(traffic(), recipe()), parity=None)
    refused(verdict_of(made=made), "parity", "chat", "replay of the served token ids is missing")
    refused(verdict_of(made=made), "parity", "code")


def with_parity(**changes):
    made = record(traffic(), recipe())
    good = {"windows": 1000, "equal": 994, "served_length": 2.0, "replayed_length": 2.0}
    return replace(made, parity={"chat": Parity(**{**good, **changes}), "code": Parity(**good)})


def test_parity_of_windows_is_pooled():
    assert verdict_of(made=with_parity(equal=976)).passed  # 98.5% of both together
    found = refused(verdict_of(made=with_parity(equal=975)), "parity_windows", "", "1969 of 2000", "98.5%")
    assert found.figure == pytest.approx(0.9845)
    assert not verdict_of(made=with_parity(equal=2000)).passed  # more equal windows than windows


def test_parity_of_lengths_is_by_domain():
    assert verdict_of(made=with_parity(replayed_length=2.0199)).passed
    refused(verdict_of(made=with_parity(replayed_length=2.03)), "parity_length", "chat", "replayed length 2.030")


@pytest.mark.parametrize("field", ["served_length", "replayed_length"])
def test_parity_that_is_no_number(field):
    verdict = verdict_of(made=with_parity(**{field: math.nan}))
    refused(verdict, "parity_length", "chat")
    assert verdict.domains["chat"].parity is None


def test_unexplained_windows_are_a_finding():
    verdict = verdict_of(made=with_parity(unexplained=2))
    assert verdict.passed and any("2 windows differ from our replay" in f for f in verdict.findings)


def off(made, **changes):
    chat = replace(made.counters["head"]["chat"], **changes)
    return replace(made, counters={**made.counters, "head": {**made.counters["head"], "chat": chat}})


@pytest.mark.parametrize("field", ["drafts", "draft_tokens", "accepted"])
@pytest.mark.parametrize("sign", [-1, 1])
def test_counters_and_answers_disagree(field, sign):
    made = record(traffic(), recipe())
    said = getattr(made.counters["head"]["chat"], field)
    assert verdict_of(made=off(made, **{field: round(said * (1 + sign * 0.8 * COUNTER_TOLERANCE))})).passed
    wrong = off(made, **{field: round(said * (1 + sign * 1.5 * COUNTER_TOLERANCE))})
    refused(
        verdict_of(made=wrong),
        "counters",
        "chat",
        f"the engine counted {getattr(wrong.counters['head']['chat'], field)}",
    )


def test_counters_missing():
    made = record(traffic(), recipe())
    made = replace(made, counters={"ngram": made.counters["ngram"]})
    refused(verdict_of(made=made), "counters", "chat", "head: the engine's counters are missing")


def test_interrupted_rows_are_left_out_of_the_comparison_and_said():
    rows = [replace(r, counted=r.prompt_id[-1] != "0") for r in traffic()]
    verdict = verdict_of(rows)
    assert verdict.passed and any("batches that were interrupted" in f for f in verdict.findings)
    none = [replace(r, counted=False) for r in rows]
    refused(verdict_of(none), "counters", "code", "no row of the head is covered")


def test_rows_that_do_not_add_up():
    rows = traffic()
    rows[0] = replace(rows[0], per_step_accepted=rows[0].per_step_accepted[:-1])
    refused(verdict_of(rows), "counts", "chat", "head: 1 rows whose windows do not add up")


@pytest.mark.parametrize("bad", [{"total_s": math.nan}, {"ttft_s": 0.0}, {"gaps_s": (math.inf,)}, {"gaps_s": (-1.0,)}])
def test_times_that_are_no_numbers(bad):
    rows = traffic()
    for i in (0, len(rows) - 1):
        rows[i] = replace(rows[i], **bad)
    refused(verdict_of(rows), "finite", "", "2 rows and 0 batches")


def test_batch_and_simulation_that_are_no_numbers():
    made = record(traffic(), recipe())
    made = replace(made, speed=[replace(made.speed[0], seconds=math.nan)])
    refused(verdict_of(made=made), "finite", "", "0 rows and 1 batches")
    made = record(traffic(), recipe())
    simulated = {**made.simulated, "chat": replace(made.simulated["chat"], length=math.nan)}
    refused(verdict_of(made=replace(made, simulated=simulated)), "finite", "", "simulated length is no number on chat")


def test_simulated_far_from_served_is_explained():
    made = record(traffic(), recipe())
    assert not any("simulated" in f for f in verdict_of(made=made).findings)
    made = replace(made, simulated={"chat": replace(made.simulated["chat"], length=2.6)})
    (chat, code) = [f for f in verdict_of(made=made).findings if "simulated" in f]
    for words in ("2.600 against served 2.1", "more than 10% apart", "on the first 16 prompts", "last window",
                  "25% of the answers repeat a 4-gram"):  # fmt: skip
        assert words in chat
    assert "training gave no simulated length" in code


def test_ngram_that_beats_the_head_is_a_finding():
    rows = [
        replace(r, accepted=0, per_step_accepted=(0,) * r.drafts) if (r.arm, r.domain) == ("head", "code") else r
        for r in traffic()
    ]
    assert any("code: n-gram speculation, which needs no head" in f for f in verdict_of(rows).findings)


def test_noisy_rounds_are_a_finding():
    rows = [replace(r, total_s=r.total_s * (1.3 if r.round == 1 and r.arm == "head" else 1)) for r in traffic()]
    assert any("rounds' ratios lie" in f for f in verdict_of(rows).findings)


def finished(run, stage: str, of=None):
    """A stage directory as artifact.build leaves it."""
    folder = run / stage
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        (folder / "data").write_text(stage)
    files = {
        f.name: {"sha256": hash_file(f), "bytes": f.stat().st_size}
        for f in folder.iterdir()
        if f.name != "manifest.json"
    }
    write_json(folder / "manifest.json", {"plan": {"stage": stage}, "files": files, "recipe": plain(of or recipe())})


@pytest.fixture
def run(tmp_path):
    of, rows, run = recipe(), traffic(), tmp_path / "small"
    for stage in STAGES:
        finished(run, stage)
    made = replace(record(rows, of), made_from={**{s: digest(run / s) for s in STAGES}, "recipe": recipe_hash(of)})
    (run / "record").mkdir()
    write_record(run / "record", made)
    write_requests(run / "record", rows)
    finished(run, "record", of)
    (run / "verdict").mkdir()
    return run


def test_make_writes_verdict_and_reports(run):
    assert make(recipe(), run, run / "verdict") == {"passed": True, "refusals": 0, "findings": 0}
    verdict = read_verdict(run)
    assert verdict.passed and verdict.made_from["record"] == digest(run / "record")
    assert {f.name for f in (run / "verdict").iterdir()} == {"verdict.json", "report.md", "report.html"}


def test_make_twice_gives_the_same_bytes(run):
    make(recipe(), run, run / "verdict")
    first = {f.name: f.read_bytes() for f in (run / "verdict").iterdir()}
    make(recipe(), run, run / "verdict")
    assert first == {f.name: f.read_bytes() for f in (run / "verdict").iterdir()}


def test_make_refuses_an_edited_recipe_by_key(run):
    edited = recipe(rules={"chat": {"min_acceptance": 1.1}, "code": {}})
    assert not make(edited, run, run / "verdict")["passed"]
    refused(read_verdict(run), "unchanged", "", "recipe changed", "gate.rules.chat.min_acceptance: 1.4 -> 1.1")


def test_make_refuses_a_truncated_checkpoint(run):
    (run / "checkpoint" / "data").write_text("che")
    make(recipe(), run, run / "verdict")
    refused(read_verdict(run), "unchanged", "", "checkpoint: data not as its manifest says")


def test_make_refuses_a_record_changed_by_hand(run):
    text = (run / "record" / "record.json").read_text()
    (run / "record" / "record.json").write_text(text.replace('"equal": 994', '"equal": 995'))
    make(recipe(), run, run / "verdict")
    refused(read_verdict(run), "unchanged", "", "record: record.json not as its manifest says")


def test_make_refuses_another_target(run):
    (run / "target" / "data").write_text("another")
    finished(run, "target")
    make(recipe(), run, run / "verdict")
    refused(read_verdict(run), "unchanged", "", "target changed since the measurement")


def test_make_without_a_measurement(tmp_path):
    run = tmp_path / "small"
    with pytest.raises(
        GateRefused, match="no measurement of small: nothing was measured yet; run `draftsmith measure`"
    ):
        make(recipe(), run, run)
    (run / "record.partial").mkdir(parents=True)
    with pytest.raises(GateRefused, match="the last attempt was interrupted"):
        require_record(run)
    (run / "record.partial" / "fault.txt").write_text("the engine died: out of memory\n")
    with pytest.raises(GateRefused, match="stopped: the engine died: out of memory"):
        require_record(run)


def test_make_with_an_unreadable_record(run):
    (run / "record" / "record.json").write_text("{")
    with pytest.raises(GateRefused, match="the measurement cannot be read"):
        make(recipe(), run, run / "verdict")
    assert not (run / "verdict" / "verdict.json").exists()
