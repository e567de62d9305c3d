from dataclasses import replace

import pytest

from eval.cost import served
from eval.page import markdown, web
from eval.report import page_of
from recipes.schema import Cost
from tests.eval.test_gate import verdict_of
from tests.eval.test_gate_speed import OF, both

VERDICT = verdict_of(both(), OF)
ONE = Cost(usd_per_hour=3.6, source="a price list, 2026-11")


def test_cost_is_dollars_an_hour_over_tokens_an_hour():
    speed = replace(VERDICT.speed, rounds=[{"none": 50.0, "head": 100.0}] * 3, loads={})
    found = {x.arm: x for x in served(speed, ONE)}
    assert set(found) == {"none", "head"}
    assert found["none"].usd == pytest.approx(20.0)  # 3.6 / 3600 / 50 * 1e6
    assert found["head"].usd == pytest.approx(10.0) and found["head"].load == 1
    four = {x.arm: x for x in served(speed, replace(ONE, gpus=4))}
    assert four["head"].usd == pytest.approx(40.0)


def test_the_cheapest_load_that_the_service_allows():
    fast, slow = VERDICT.speed.latency["head"], VERDICT.speed.loads["8"].latency["head"]
    fast, slow = replace(fast, per_token_p99=0.020), replace(slow, per_token_p99=0.050)
    at = replace(VERDICT.speed.loads["8"], throughput={"head": 400.0}, latency={"head": slow})
    speed = replace(VERDICT.speed, rounds=[{"head": 100.0}], latency={"head": fast}, loads={"8": at})
    any_load = served(speed, ONE)[0]
    assert (any_load.load, any_load.token_p99_ms) == (8, 50.0)
    (strict,) = served(speed, replace(ONE, max_token_ms=30.0))
    assert (strict.load, strict.tokens_per_s) == (1, 100.0)
    assert served(speed, replace(ONE, max_token_ms=10.0)) == []
    unknown = replace(speed, latency={}, loads={})
    assert served(unknown, replace(ONE, max_token_ms=30.0)) == [], "unknown latency is not allowed latency"


def test_the_report_sets_it_beside_dated_list_prices():
    of = replace(OF, cost=ONE)
    text = markdown(page_of(VERDICT, of))
    assert "## Cost of a million output tokens" in text and "a price list, 2026-11" in text
    assert "| GPT-6.1 Sol | 2 | 10 | 2026-10-13 |" in text
    row = next(x for x in served(VERDICT.speed, ONE) if x.arm == "head")
    assert f"| head | {row.load} | {row.tokens_per_s:.1f} |" in text and f"{row.usd:.4g}" in text
    assert "<h2>Cost of a million output tokens</h2>" in web(page_of(VERDICT, of))
    assert "Cost" not in markdown(page_of(VERDICT, OF)), "no price, no cost"
    none = markdown(page_of(VERDICT, replace(of, cost=replace(ONE, max_token_ms=0.001))))
    assert "No arm keeps to at most 0.001 ms a token at p99 at a measured load." in none
