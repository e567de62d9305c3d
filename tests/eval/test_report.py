import re
import statistics
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from eval import plots
from eval.gate import judge
from eval.page import Page, Points, Section, Table, markdown, web
from eval.report import page_of, write_report
from export.figures import Loaded
from tests.eval.samples import recipe, record, traffic, unchanged


@pytest.fixture(scope="module")
def good():
    made = record(traffic(), recipe())
    return judge(made, traffic(), recipe(), unchanged(made))


class Reader(HTMLParser):
    """Tags that are open, to see that each is closed; what would be loaded from elsewhere; ids."""

    def __init__(self, text):
        super().__init__()
        self.open, self.loads, self.ids, self.tags = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [v for k, v in attrs if k in ("src", "href", "xlink:href") and not v.startswith("#")]
        self.ids += [v for k, v in attrs if k == "id"]
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_html_is_one_sound_file_that_loads_nothing(tmp_path, good):
    write_report(tmp_path, good, recipe())
    text = (tmp_path / "report.html").read_text()
    read = Reader(text)
    assert read.open == [] and read.loads == []
    assert len(read.ids) == len(set(read.ids))  # four drawings in one page
    assert not re.search(r"https?://(?!www\.w3\.org/)|@import|url\((?!#)|<script", text)
    assert read.tags.count("svg") == 4 and text.count('role="img" aria-label="') == 4
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text and "currentColor" in text
    assert len(text) < 200_000


def test_same_verdict_same_bytes(tmp_path, good):
    write_report(tmp_path, good, recipe())
    first = [(tmp_path / name).read_bytes() for name in ("report.md", "report.html")]
    write_report(tmp_path, good, recipe())
    assert first == [(tmp_path / name).read_bytes() for name in ("report.md", "report.html")]


def test_the_report_holds_each_figure(good):
    text = markdown(page_of(good, recipe()))
    chat = good.domains["chat"]
    for shown in (
        f"{chat.acceptance.value:.3f} \\[{chat.acceptance.low:.3f}, {chat.acceptance.high:.3f}\\]",
        f"{chat.acceptance_unrepeated.value:.3f}", f"{chat.tokens_per_step.ngram.value:.3f}", "25%", "1.4",
        *[f"{rate:.3f}" for rate in chat.per_position],
        *[f"{r['ratio']:.3f}" for r in good.speed.rounds], f"{good.speed.speedup.value:.3f}",
        f"{1000 * chat.latency['head'].per_token_p99:.1f}", "994 of 1000", "99.40%", "2.100", "vllm 0.32.0", "e" * 64,
    ):  # fmt: skip
        assert shown in text, shown


def test_the_verdict_stands_first(good):
    for text in (markdown(page_of(good, recipe())), web(page_of(good, recipe()))):
        assert text.index("Passed. Tokens a target step: chat") < text.index("Acceptance by domain")
    made = record([], recipe())
    refused = judge(made, [], recipe(), unchanged(made))
    text = markdown(page_of(refused, recipe()))
    assert (
        text.index("Nothing may be published") < text.index("Why it was refused") < text.index("Acceptance by domain")
    )
    for refusal in refused.refusals:
        assert refusal.why in text.replace("\\", "")
    Reader(web(page_of(refused, recipe())))


def test_everything_is_escaped():
    nasty = '<script>alert("x")</script> | `a` *b* [c](http://d) \n # e'
    page = Page(title=nasty, passed=False, verdict=nasty, sections=[
        Section(title=nasty, blocks=[nasty, Points(items=[nasty]), Table(header=[nasty, "n"], rows=[[nasty, "1"]])]),
    ])  # fmt: skip
    text = web(page)
    assert "<script" not in text and '"x"' not in text and Reader(text).open == []
    written = markdown(page)
    assert not re.search(r"(?<!\\)[<|`*\[](?!-| )", written.replace("**", "").replace("| ", "").replace("|\n", ""))
    rows = [line for line in written.splitlines() if line.startswith("|")]
    assert len(rows) == 3 and all(len(re.findall(r"(?<!\\)\|", row)) == 3 for row in rows)


def test_refusal_text_from_an_engine_is_escaped(good):
    rows = traffic()
    rows[0] = replace(rows[0], error="HTTP 500: <img src=x onerror=alert(1)>")
    made = record(rows, recipe())
    text = web(page_of(judge(made, rows, recipe(), unchanged(made)), recipe()))
    assert "<img" not in text and "&lt;img src=x" in text


def test_drawings_are_sound_svg(good):
    rules = recipe().gate.rules
    drawn = [
        plots.acceptance(good.domains, rules),
        plots.positions(good.domains),
        plots.rounds(good.speed),
        plots.token_times(good.speed.latency, "t"),
        plots.frontier({"head": [("1", 50.0, 50.0), ("8", 20.0, 90.0)]}),
    ]
    for svg in drawn:
        root = ElementTree.fromstring(svg.replace("<svg ", '<svg xmlns:x="x" ', 1))
        assert root.get("viewBox") and root.get("width") is None and root.get("height") is None
        assert "currentColor" in svg and "#010203" not in svg
    assert "chat" in plots.acceptance(good.domains, rules) and "code" in plots.positions(good.domains)


def test_drawings_of_what_was_not_measured():
    made = record([], recipe())
    empty = judge(made, [], recipe(), unchanged(made))
    assert "<svg" in plots.acceptance(empty.domains, recipe().gate.rules)
    assert "<svg" in plots.positions(empty.domains)


def test_no_speed_is_said():
    of = recipe(rules={"chat": {"min_acceptance": 1.4}, "code": {}})
    rows = [r for r in traffic() if r.phase == "acceptance"]
    made = record(rows, of)
    verdict = judge(made, rows, of, unchanged(made))
    assert verdict.passed and "Not measured: the recipe has no speed rule" in markdown(page_of(verdict, of))


def test_rates_by_position_are_named_and_conditional_ones_follow(good):
    text = markdown(page_of(good, recipe()))
    first, second, third = good.domains["chat"].per_position
    assert f"| chat | cumulative | {first:.3f} | {second:.3f} | {third:.3f} |" in text
    assert f"| chat | conditional | {first:.3f} | {second / first:.3f} | {third / second:.3f} |" in text
    never = replace(good.domains["chat"], per_position=[0.0, 0.0, 0.0])
    text = markdown(page_of(replace(good, domains={"chat": never}), recipe()))
    assert "| chat | conditional | 0.000 | - | - |" in text


def test_acceptance_is_shown_by_context(good):
    of = replace(recipe(), train=replace(recipe().train, pack_tokens=96))
    made = record(traffic(), of)
    verdict = judge(made, traffic(), of, unchanged(made))
    text = markdown(page_of(verdict, of))
    assert "rows of up to 96 tokens" in text
    for at, x in verdict.domains["chat"].contexts.items():
        assert f"| chat | {at} | {x.value:.3f} " in text
    assert list(verdict.domains["chat"].contexts) == ["up to 48", "up to 96", "beyond 96"]


def test_loads_are_drawn_as_distribution_and_frontier(good):
    alone = good.speed.latency
    slow = {arm: replace(x, per_token_p50=2 * x.per_token_p50) for arm, x in alone.items()}
    busy = Loaded(speedup=None, p99=None, throughput={"none": 100.0, "head": 150.0}, latency=slow)
    text = web(page_of(replace(good, speed=replace(good.speed, loads={"8": busy, "32": busy})), recipe()))
    rate = statistics.median(r["head"] for r in good.speed.rounds)
    each = 1 / alone["head"].per_token_p50
    assert "ms a token, 1 in flight: no speculation p50" in text and "ms a token, 32 in flight" in text
    assert f"head 1: {each:.0f} and {rate:.0f}, 8: {each / 2:.0f} and 150, 32: {each / 2:.0f} and 150" in text
    assert len(set(Reader(text).ids)) == len(Reader(text).ids)


def test_a_load_at_which_the_head_is_slower_is_a_finding():
    rows = [replace(r, total_s=r.total_s * 2) if r.phase == "speed" and r.arm == "head" else r for r in traffic()]
    made = record(rows, recipe())
    said = [f for f in judge(made, rows, recipe(), unchanged(made)).findings if "slower than no speculation" in f]
    assert len(said) == 1 and "at 1 in flight 0.8" in said[0]
    fast = judge(record(traffic(), recipe()), traffic(), recipe(), unchanged(record(traffic(), recipe())))
    assert not any("slower" in f for f in fast.findings)
