from dataclasses import replace

from eval.page import markdown
from eval.report import page_of
from export.record import Batch
from tests.eval.samples import recipe, record, traffic
from tests.eval.test_gate import refused, verdict_of

RULES = {"chat": {"min_acceptance": 1.4, "min_speedup": 1.2, "min_speedup_at": {8: 1.1}, "max_p99": 1.05}, "code": {}}
OF = recipe(rules=RULES, loads=[8])


def at_eight(rows, gain: float = 1.4):
    """The rows of one request in flight once more at eight, where the head gains less."""
    slower = {"none": 3.0, "head": 3.0 * 55 / 33 / gain, "ngram": 3.0}
    return [replace(r, concurrency=8, total_s=r.total_s * slower[r.arm]) for r in rows if r.phase == "speed"]


def both(gain: float = 1.4):
    return [*traffic(), *at_eight(traffic(), gain)]


def test_a_head_that_gains_at_each_load_passes():
    made = record(traffic() + at_eight(traffic()), OF)
    batch = Batch(phase="speed", domain="chat", round=0, arm="head", temperature=0.0, concurrency=8, output_tokens=700,
                  seconds=5.0, requests=12)  # fmt: skip
    verdict = verdict_of(both(), OF, made=replace(made, speed=[*made.speed, batch]))
    assert verdict.passed, verdict.refusals
    assert verdict.speed.speedup.low > 1.5 and 1.3 < verdict.speed.loads["8"].speedup.value < 1.5
    assert verdict.speed.p99.high < 0.7 and 0.6 < verdict.speed.loads["8"].p99.value < 0.8
    assert verdict.speed.loads["8"].throughput == {"head": 140.0}
    text = markdown(page_of(verdict, OF))
    assert f"| 8 in flight | {verdict.speed.loads['8'].speedup.value:.3f} \\[" in text
    assert "Greedy answers equal to those without the head: 36 of 36." in text
    assert "8 in flight | no speculation |" in text, "latency by load"


def test_a_head_that_loses_under_load_is_refused():
    verdict = verdict_of(both(0.9), OF)
    found = refused(verdict, "min_speedup_at", "chat", "speed-up at concurrency 8 0.8", "its lower end must reach 1.1")
    assert found.low < found.figure < found.high < 1.1
    slow = refused(verdict, "max_p99", "chat", "seconds at concurrency 8", "its upper end may be 1.05 at most")
    assert slow.figure > 1.05 and slow.threshold == 1.05


def test_a_load_without_rows_or_with_too_few():
    verdict = verdict_of(of=OF)
    refused(verdict, "min_speedup_at", "chat", "speed-up at concurrency 8 was not measured, 1.1 is needed")
    refused(verdict, "max_p99", "chat", "concurrency 8", "was not measured, at most 1.05 is allowed")
    less = [r for r in both() if r.concurrency != 8 or r.phase != "speed" or int(r.prompt_id, 16) < 11]
    refused(verdict_of(less, OF), "min_speedup_at", "chat", "timed 11 prompts at concurrency 8, the recipe wants 12")


def test_a_rule_at_a_load_alone_times_the_domain():
    of = recipe(rules={"chat": {"min_acceptance": 1.4}, "code": {"min_speedup_at": {8: 1.0}}}, loads=[8])
    refused(verdict_of([r for r in both() if r.phase != "speed"], of), "min_speedup_at", "code", "was not measured")


def test_answers_that_differ_are_told():
    rows = [replace(r, output_ids=(5, *r.output_ids[1:])) if (r.phase, r.arm) == ("speed", "head") else r
            for r in traffic()]  # fmt: skip
    (said,) = [f for f in verdict_of(rows).findings if "greedy answers differ" in f]
    assert "36 of 36" in said and "after 0 tokens" in said and "0 of 24 differ from round to round" in said
