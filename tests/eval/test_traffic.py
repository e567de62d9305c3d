import asyncio
import json
import subprocess
import sys
from contextlib import aclosing
from dataclasses import replace

import pytest

from data.prompts import Prompt
from eval import traffic
from eval.traffic import Load, difference, opening, parse_counters, read_counters, row_from_stream, send, total
from export.record import Counters
from recipes.faults import EnvironmentFault
from tests.eval.fake_engine import Engine, prompts, running, windows_of

LOAD = Load(arm="head", phase="acceptance", concurrency=3, temperature=0.0, max_tokens=40)


def ask(engine, asked, load=LOAD, pid=0):
    async def collect(server):
        return [row async for row in send(server, asked, load)]

    with running(engine, pid) as server:
        return asyncio.run(collect(server))


def test_rows_hold_what_the_engine_said():
    engine, asked = Engine(), prompts(7)
    rows = {row.prompt_id: row for row in ask(engine, asked)}
    assert set(rows) == {p.id for p in asked}
    for prompt in asked:
        row, windows = rows[prompt.id], windows_of(prompt.messages[0]["content"], 40)
        assert row.per_step_accepted == tuple(windows)
        assert (row.drafts, row.draft_tokens, row.accepted) == (len(windows), 3 * len(windows), sum(windows))
        assert row.output_tokens == len(row.output_ids) == min(40, 1 + len(windows) + sum(windows))
        assert row.prompt_tokens == len(row.prompt_ids) == 4
        assert len(row.gaps_s) == len(windows) and 0 < row.ttft_s <= row.total_s
        assert row.finish == "stop" and row.error == "" and row.domain == "chat"


def test_the_request_is_as_agreed():
    engine = Engine()
    ask(engine, prompts(1), replace(LOAD, temperature=0.7, max_tokens=5))
    assert engine.asked[0] == {
        "model": "target", "messages": [{"role": "user", "content": "chat held_out question 0"}], "max_tokens": 5,
        "temperature": 0.7, "return_token_ids": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


@pytest.mark.parametrize("concurrency", [1, 4])
def test_concurrency_is_bounded_and_used(concurrency):
    engine = Engine(pause_s=0.005)
    ask(engine, prompts(12), replace(LOAD, concurrency=concurrency))
    assert engine.most == concurrency


def test_an_answer_cut_at_the_cap_keeps_its_tail_out_of_the_ids():
    question = next(p for p in prompts(50) if sum(windows_of(p.messages[0]["content"], 6)) >= 6)
    (row,) = ask(Engine(), [question], replace(LOAD, max_tokens=6))
    assert row.finish == "length" and row.output_tokens == 6
    assert 1 + row.drafts + row.accepted > 6  # the engine counts what it accepted beyond the end


def test_a_server_without_speculation():
    rows = ask(Engine(drafts=False), prompts(3), replace(LOAD, arm="none"))
    assert all(row.error == "" and row.drafts == 0 and row.per_step_accepted == () for row in rows)


def test_a_drafting_arm_without_figures_fails():
    rows = ask(Engine(metrics=False), prompts(2))
    assert all("no speculation figures (--per-request-spec-decode-metrics detailed)" in row.error for row in rows)


def test_a_failed_request_is_a_row():
    asked = prompts(6)
    rows = {row.prompt_id: row for row in ask(Engine(refuse="question 2", break_off="question 4"), asked)}
    assert len(rows) == 6
    assert rows[asked[2].id].error.startswith("HTTP 400") and "max_model_len" in rows[asked[2].id].error
    assert rows[asked[4].id].error.startswith("broke off") and rows[asked[4].id].output_tokens == 0
    assert sum(bool(row.error) for row in rows.values()) == 2


def test_a_sick_engine_stops_the_sending(monkeypatch):
    monkeypatch.setattr(traffic, "_PATIENCE_S", 0.6)
    engine = Engine(sick_after=3, pause_s=0.002)
    with pytest.raises(EnvironmentFault, match=r"does not work any more \(/health says 503\): it wrote nothing"):
        ask(engine, prompts(30))
    assert len(engine.asked) < 10


def test_a_dead_process_stops_the_sending():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(EnvironmentFault, match="the engine died"):
        ask(Engine(sick_after=2), prompts(8), pid=gone.pid)


def test_a_server_that_is_gone(monkeypatch):
    monkeypatch.setattr(traffic, "_PATIENCE_S", 0.6)
    with running(Engine()) as server:
        pass

    async def collect():
        return [row async for row in send(server, prompts(2), LOAD)]

    with pytest.raises(EnvironmentFault, match="does not work any more"):
        asyncio.run(collect())
    with pytest.raises(EnvironmentFault, match="does not work any more"):
        asyncio.run(read_counters(server))


def test_closing_early_cancels_the_rest():
    engine = Engine(pause_s=0.01)

    async def first(server):
        async with aclosing(send(server, prompts(20), LOAD)) as rows:
            return await anext(rows)

    with running(engine) as server:
        assert asyncio.run(first(server)).error == ""
    assert len(engine.asked) < 10


def test_counters_agree_with_rows():
    engine = Engine()

    async def both(server):
        before = await read_counters(server)
        rows = [row async for row in send(server, prompts(9), LOAD)]
        return difference(await read_counters(server), before), rows

    with running(engine) as server:
        asyncio.run(both(server))
        counted, rows = asyncio.run(both(server))  # the second time, so that `before` is not zero
    assert counted.drafts == sum(row.drafts for row in rows)
    assert counted.draft_tokens == sum(row.draft_tokens for row in rows)
    assert counted.accepted == sum(row.accepted for row in rows) == sum(counted.per_position)


def test_counters_of_several_engines_are_summed():
    text = (
        "# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.\n"
        "# TYPE vllm:spec_decode_num_drafts_total counter\n"
        'vllm:spec_decode_num_drafts_total{engine="0",model_name="target"} 3.0\n'
        'vllm:spec_decode_num_drafts_total{engine="1",model_name="target"} 4.0\n'
        'vllm:spec_decode_num_drafts_created{engine="0",model_name="target"} 1.7e+09\n'
        "# HELP vllm:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens per draft position.\n"
        "# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter\n"
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 1.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 2.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 5.0\n'
        "# HELP vllm:other x\n# TYPE vllm:other gauge\nvllm:other 9.0\n"
    )
    assert parse_counters(text) == Counters(drafts=7, draft_tokens=0, accepted=0, per_position=[7, 1])
    assert parse_counters("") == Counters(drafts=0, draft_tokens=0, accepted=0, per_position=[])


def test_totals():
    a = Counters(drafts=1, draft_tokens=3, accepted=2, per_position=[1, 1])
    none = Counters(drafts=0, draft_tokens=0, accepted=0, per_position=[])
    assert total(a, a) == Counters(drafts=2, draft_tokens=6, accepted=4, per_position=[2, 2])
    assert total(a, none) == a and difference(a, none) == a


def test_opening_ends_at_the_first_user_turn():
    turns = ({"role": "system", "content": "s"}, {"role": "user", "content": "1"}, {"role": "user", "content": "2"})
    prompt = Prompt(id="0", domain="chat", split="held_out", messages=turns, source="x")
    assert opening(prompt) == [turns[0], turns[1]]


def lines(*events, done=True):
    said = [(0.1 * (i + 1), json.dumps(event).encode()) for i, event in enumerate(events)]
    return [*said, (0.1 * (len(said) + 1), b"[DONE]")] if done else said


PROMPT = prompts(1)[0]
FIRST = {"prompt_token_ids": [5, 6], "choices": [{"delta": {"role": "assistant"}}]}
ONE = {"choices": [{"token_ids": [7], "finish_reason": None}]}
TWO = {"choices": [{"token_ids": [8, 9], "finish_reason": "stop"}]}
FIGURES = {"num_spec_steps": 1, "num_draft_tokens": 3, "num_accepted_draft_tokens": 1, "per_step_accepted": [1]}
LAST = {"choices": [], "usage": {"completion_tokens": 3}, "metrics": {"speculative_decoding": FIGURES}}


def test_times_of_a_stream():
    row = row_from_stream(PROMPT, LOAD, lines(FIRST, ONE, TWO, LAST))
    assert (row.ttft_s, row.gaps_s, row.total_s) == (0.2, pytest.approx((0.1,)), 0.5)
    assert row.prompt_ids == (5, 6) and row.output_ids == (7, 8, 9) and row.per_step_accepted == (1,)


def test_chunks_are_windows_where_the_engine_has_no_figures():
    more = {"choices": [{"token_ids": [8, 9, 10, 11], "finish_reason": None}]}
    end = {"choices": [{"token_ids": [12], "finish_reason": "stop"}]}
    last = {"choices": [], "usage": {"completion_tokens": 8}}
    stream = lines(FIRST, ONE, more, {"choices": [{"token_ids": [8, 9]}]}, end, last)
    row = row_from_stream(PROMPT, replace(LOAD, chunk_drafts=3), stream)
    assert row.per_step_accepted == (3, 1, 0) and not row.error
    assert (row.drafts, row.draft_tokens, row.accepted) == (3, 9, 4)
    joined = {"choices": [{"token_ids": [7, 8, 9], "finish_reason": None}]}  # the prefill's token and a window
    row = row_from_stream(PROMPT, replace(LOAD, chunk_drafts=3), lines(FIRST, joined, more, {**end}, last))
    assert row.per_step_accepted == (1, 3, 0)
    both = row_from_stream(PROMPT, replace(LOAD, chunk_drafts=3), lines(FIRST, ONE, TWO, LAST))
    assert both.per_step_accepted == (1,) and both.draft_tokens == 3  # the engine's own figures come first


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (lines(FIRST, ONE, TWO, LAST, done=False), "ended early, after 3 tokens"),
        (lines(FIRST, ONE, LAST), "ended early, after 1 tokens"),
        (lines(FIRST, ONE, TWO), "ended early, after 3 tokens"),
        (lines(), "ended early, after 0 tokens"),
        ([], "ended early, after 0 tokens"),
        (lines(FIRST, {"error": {"message": "boom"}}), "the engine said: {'message': 'boom'}"),
        (lines(FIRST, ONE, TWO, {**LAST, "usage": {"completion_tokens": 9}}), "3 token ids for 9 tokens"),
        (lines(ONE, TWO, LAST), "no prompt ids"),
        (lines(FIRST, ONE, TWO, {**LAST, "metrics": None}), "no speculation figures"),
        ([(0.1, b"{torn")], "no JSON"),
    ],
)
def test_a_broken_stream_is_an_error(stream, said):
    row = row_from_stream(PROMPT, LOAD, stream)
    assert said in row.error and row.output_ids == () and row.drafts == 0
