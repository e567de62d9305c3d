"""The report in a real headless Chromium (Debian's), as a release manager sees it: desk and phone, light and dark."""

import os
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from eval.report import write_report
from tests.eval.test_incumbent import beside

pytestmark = pytest.mark.served
LOOKS = {"desk": (1280, 900), "phone": (360, 740)}
NARROW_TEXT = 9.0
"""px: the lowest line of letters, in a drawing on a phone too"""

# What a page may not show, as a list of sentences; contrast as WCAG 2.2 computes it (section 1.4.3, AA).
FAULTS = """(least) => {
  const faults = [], root = document.documentElement;
  const wide = root.scrollWidth - root.clientWidth;
  if (wide > 0) faults.push(`scrolls ${wide} px sideways`);
  const rgb = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = c => { const [r, g, b] = c.slice(0, 3).map(v => { v /= 255;
    return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = e => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
    if (c.length === 3 || c[3] > 0) return c; } return [255, 255, 255]; };
  for (const e of document.querySelectorAll("h1,h2,p,li,th,td,figcaption,svg text")) {
    if (!e.textContent.trim()) continue;
    const style = getComputedStyle(e);
    const [a, b] = [light(rgb(e instanceof SVGElement ? style.fill : style.color)), light(behind(e))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) faults.push(`contrast ${contrast.toFixed(2)}: ${e.textContent.trim().slice(0, 40)}`);
    if (e.getBoundingClientRect().height < least) faults.push(`tiny: ${e.textContent.trim().slice(0, 40)}`);
  }
  for (const svg of document.querySelectorAll("svg"))
    if (svg.getAttribute("role") !== "img" || (svg.getAttribute("aria-label") || "").length < 20)
      faults.push("a drawing without words");
  for (const cell of document.querySelectorAll("th"))
    for (const word of cell.textContent.matchAll(/[^\\s-]+/g)) {
      const range = document.createRange();
      range.setStart(cell.firstChild, word.index);
      range.setEnd(cell.firstChild, word.index + word[0].length);
      if (range.getClientRects().length > 1) faults.push(`a word is broken: ${word[0]}`);
    }
  for (const e of document.querySelectorAll("body > *")) {
    const box = e.getBoundingClientRect();
    if (box.right > root.clientWidth + 1) faults.push(`${e.tagName} reaches beyond the window`);
  }
  return faults;
}"""


@pytest.fixture(scope="module")
def browser():
    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    assert found, "no Chromium: `apt-get install chromium`, or name one in CHROMIUM"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A report that passes and one that refuses, with every section that there is."""
    found: dict[str, Path] = {}
    for name, more in (("passed", 0), ("refused", 6)):
        verdict, of = beside(more)
        of = replace(of, cost=replace(of.cost, usd_per_hour=2.5, source="a list price of 2026-11-30"))
        assert verdict.passed == (name == "passed")
        found[name] = tmp_path_factory.mktemp(name)
        write_report(found[name], replace(verdict, findings=["x" * 200, *verdict.findings]), of)
    return found


def seen(browser: Browser, file: Path, look: str, scheme: Any, shot: Path) -> list[str]:
    """What is wrong with the page in this window; a picture of it goes to `shot`."""
    width, height = LOOKS[look]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page, said = context.new_page(), list[str]()
    page.on("pageerror", lambda error: said.append(f"script: {error}"))
    page.on("console", lambda message: said.append(f"console: {message.text}"))
    page.on("request", lambda request: said.append(f"loads {request.url}") if request.url != file.as_uri() else None)
    page.goto(file.as_uri())
    page.screenshot(path=str(shot), full_page=True)
    said += page.evaluate(FAULTS, NARROW_TEXT)
    context.close()
    return said


@pytest.mark.parametrize(("name", "look", "scheme"), list(product(("passed", "refused"), LOOKS, ("light", "dark"))))
def test_the_report_is_sound_in_a_browser(browser, reports, tmp_path, name, look, scheme):
    assert seen(browser, reports[name] / "report.html", look, scheme, tmp_path / "shot.png") == []
    assert (tmp_path / "shot.png").stat().st_size > 20_000


def test_the_check_sees_what_it_is_for(browser, reports, tmp_path):
    text = (reports["passed"] / "report.html").read_text()
    broken = tmp_path / "broken.html"
    for good, bad in (
        ("overflow-x: auto", "overflow-x: visible"), ("--ink: #1c1e21", "--ink: #cccccc"), ('role="img"', ""),
        ("overflow-wrap: normal", ""), ("</body>", '<script>throw Error("no")</script><img src="x.png"></body>'),
    ):  # fmt: skip
        assert good in text
        text = text.replace(good, bad, 1)
    broken.write_text(text)
    said = " ".join(seen(browser, broken, "phone", "light", tmp_path / "shot.png"))
    for fault in ("sideways", "contrast", "without words", "word is broken", "console: "):
        assert fault in said
