"""How heads are compared: pairs, intervals, and rows against the engine's counters."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data.prompts import Prompt
from eval import traffic
from eval.acceptance import Bootstrap
from export.record import Counters
from export.requests import Request
from recipes.load import plain
from recipes.schema import Recipe
from tests.bench import served
from tests.bench.served import ALL, Answered, agrees, ask, changed, compared, figures, paired_ratio, pooled
from tests.eval.fake_engine import Engine, prompts, running
from tests.eval.samples import recipe, request

QUICK = Bootstrap(samples=2000, confidence=0.95, seed=0)


@pytest.fixture(autouse=True)
def _quick_counters(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(traffic, "SETTLE_S", 0.005)


def rows(rates: list[float], domain: str = "chat", windows: int = 60, seed: int = 0) -> list[Request]:
    """A request a rate, whose windows accept that share of three draft tokens."""
    generator = np.random.default_rng(seed)
    return [
        request(i, domain=domain, windows=tuple(generator.binomial(3, rate, windows).tolist()))
        for i, rate in enumerate(rates)
    ]


def chunked() -> Recipe:
    return changed(plain(recipe(ngram=False)), ["engine.windows=chunks"])


def test_a_head_against_itself_is_exactly_one():
    own = rows([0.1, 0.5, 0.9, 0.3])
    figure = paired_ratio(own, list(reversed(own)), QUICK)
    assert figure is not None and (figure.value, figure.n) == (1.0, 4)
    assert (figure.low, figure.high) == pytest.approx((1.0, 1.0))


def test_the_ratio_is_of_sums_over_windows():
    ours = [request(0, windows=(3,) * 10), request(1, windows=(0,) * 90)]
    theirs = [request(0, windows=(1,) * 10), request(1, windows=(1,) * 10)]
    figure = paired_ratio(ours, theirs, QUICK)
    assert figure is not None and figure.value == pytest.approx((30 / 100) / (20 / 20))


def test_only_prompts_that_both_answered_count():
    ours = [request(0, windows=(2,) * 10), request(1, windows=(3,) * 10), request(2, windows=(3,) * 10)]
    theirs = [request(0, windows=(1,) * 10), replace(request(1), error="broke off"), request(0, domain="code")]
    figure = paired_ratio(ours, theirs, QUICK)
    assert figure is not None and (figure.value, figure.n) == (2.0, 1)
    assert served.shown(figure) is None  # one prompt has no interval


def test_pairs_narrow_the_interval_where_prompts_differ_more_than_heads():
    rates = np.random.default_rng(1).beta(1.5, 3, 80)
    ours, theirs = rows((0.9 * rates).tolist(), seed=2), rows((0.8 * rates).tolist(), seed=3)
    paired = paired_ratio(ours, theirs, QUICK)
    order = np.random.default_rng(4).permutation(80)
    strangers = [replace(theirs[j], prompt_id=theirs[i].prompt_id) for i, j in enumerate(order)]
    apart = paired_ratio(ours, strangers, QUICK)
    assert paired is not None and apart is not None and paired.value == pytest.approx(apart.value)
    assert paired.high - paired.low < 0.4 * (apart.high - apart.low)


def test_the_interval_covers_the_truth():
    """9 / 8 on simulated heads that share their prompts' difficulty, which is a ratio of expectations."""
    generator, covered, trials = np.random.default_rng(5), 0, 120
    for _ in range(trials):
        rates = generator.beta(1.5, 3, 40)
        counts = [generator.binomial(180, share * rates) for share in (0.9, 0.8)]
        sides = [[replace(_ROW, prompt_id=str(i), accepted=int(a)) for i, a in enumerate(side)] for side in counts]
        figure = paired_ratio(sides[0], sides[1], Bootstrap(samples=400, confidence=0.95, seed=0))
        covered += figure is not None and figure.low <= 9 / 8 <= figure.high
    assert covered / trials >= 0.9


_ROW = replace(request(0), drafts=60)


@pytest.mark.parametrize("windows", [(0, 0, 0), ()])
def test_no_ratio_to_a_head_that_accepts_nothing(windows: tuple[int, ...]):
    assert paired_ratio(rows([0.5] * 4), [request(i, windows=windows) for i in range(4)], QUICK) is None
    assert paired_ratio([], [], QUICK) is None


def test_heads_are_compared_with_the_first_by_domain_and_over_all():
    def sets(share: float) -> dict[str, Answered]:
        counters = Counters(drafts=0, draft_tokens=0, accepted=0, per_position=[])
        found = {
            name: Answered(rows=tuple(rows([share] * 5, name, seed=i)), counters=counters)
            for i, name in enumerate(("chat", "code"))
        }
        return {**found, ALL: pooled(list(found.values()))}

    lines = compared({"ours": sets(0.6), "a": sets(0.3), "b": sets(0.6)})
    assert [(line["ratio_of"], line["to"]) for line in lines] == [("ours", "a"), ("ours", "b")]
    assert all(set(line) == {"ratio_of", "to", "chat", "code", ALL} for line in lines)
    assert lines[0][ALL]["n"] == 10 and lines[0][ALL]["value"] == pytest.approx(2, abs=0.3)
    assert lines[1]["chat"] == {"value": 1.0, "low": 1.0, "high": 1.0, "n": 5}


def test_a_set_is_checked_against_the_engines_counters():
    settings, asked, engine = recipe(), prompts(6), Engine()
    with running(engine) as server:
        answered = asyncio.run(ask(settings, server, asked))
        line = figures(settings, answered)
    assert len(engine.asked) == 7 and engine.asked[0]["max_tokens"] == served.WARM_UP_TOKENS
    assert line["agrees"] and (line["requests"], line["failed"]) == (6, 0)
    assert line["engine"] == {"windows": line["windows"], "length": line["length"]["value"]}
    assert len(line["by_position"]) == 3 and json.loads(json.dumps(line)) == line
    short = replace(answered, rows=answered.rows[1:])
    assert not agrees(settings, short)


def test_joined_chunks_are_asked_again_but_not_for_ever():
    asked = prompts(4)
    for joins, times in ((1, 2), (100, served.ATTEMPTS)):
        engine = Engine(metrics=False, joins=joins + 1)  # the first one falls to the warm-up
        with running(engine) as server:
            answered = asyncio.run(ask(chunked(), server, asked))
        assert len(engine.asked) == 1 + 4 * times
        assert agrees(chunked(), answered) == (joins == 1)


def test_all_windows_of_chunks_must_add_up_but_what_the_end_cut_need_not():
    row = request(0)
    short = Counters(drafts=row.drafts, draft_tokens=60, accepted=row.accepted + 1, per_position=[])
    one = Answered(rows=(row,), counters=short)
    assert agrees(chunked(), one) and not agrees(recipe(), one)
    assert not agrees(chunked(), replace(one, counters=replace(short, drafts=row.drafts + 1)))


def test_overrides_are_checked_like_a_recipes():
    base = plain(recipe())
    found = changed(base, ["engine.args=[--gpu-memory-utilization,'0.2']", "gate.max_tokens=7"])
    assert found.engine.args == ("--gpu-memory-utilization", "0.2") and found.gate.max_tokens == 7
    with pytest.raises(ValueError, match="gate.max_tokens"):
        changed(base, ["gate.max_tokens=many"])


def test_every_head_answers_the_same_prompts_and_all_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The whole command with two stand-in engines, one of which refuses a prompt."""
    asked = {"chat": prompts(3), "code": prompts(2, "code")}
    refused = asked["code"][0].messages[0]["content"]

    def measure(
        settings: Recipe, run: Path, heads: dict[str, Path], sets: dict[str, list[Prompt]], logs: Path
    ) -> Iterator[tuple[str, str, Answered]]:
        for domain, some in sets.items():
            for name in heads:
                with running(Engine(refuse=refused if name == "b" else "")) as server:
                    yield name, domain, asyncio.run(ask(settings, server, some))

    monkeypatch.setattr(served, "measure", measure)
    monkeypatch.setattr(served, "recipe_of", lambda run, overrides: recipe())
    monkeypatch.setattr(served, "held_out", lambda settings, run, count: asked)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    arguments = [str(tmp_path), f"a={tmp_path / 'a'}", f"b={tmp_path / 'b'}", "--out", str(tmp_path / "out")]
    assert served.main(arguments) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    named = [(line["head"], line["domain"]) for line in lines[:-1]]
    assert named == [("a", "chat"), ("b", "chat"), ("a", "code"), ("b", "code"), ("a", ALL), ("b", ALL)]
    assert [line["failed"] for line in lines[:-1]] == [0, 0, 0, 1, 0, 1]
    assert lines[-1]["chat"]["value"] == 1.0 and lines[-1][ALL]["n"] == 4
    kept = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert kept[: len(lines)] == lines
    assert [(line["head"], len(line["rows"])) for line in kept[len(lines) :]] == [("a", 5), ("b", 5)]
    with pytest.raises(SystemExit, match=r"config\.json"):
        served.main([str(tmp_path), f"c={tmp_path / 'c'}"])
