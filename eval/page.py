"""One page as Markdown and as a single HTML file: escaped, light and dark, readable on a phone, loading nothing."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --soft: #5b6168; --line: #d5d9de; --band: #f3f5f7;
  --yes: #146c43; --no: #b02a37; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --paper: #15171a; --soft: #a2a9b1; --line: #3a4048;
  --band: #1e2227; --yes: #6fcf97; --no: #ff8a8a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 52rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.verdict { border-left: .4rem solid; padding: .5rem 1rem; background: var(--band); font-size: 1.15rem;
  font-weight: 600; }
.yes { border-color: var(--yes); color: var(--yes); } .no { border-color: var(--no); color: var(--no); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap;
  overflow-wrap: normal; }
th { white-space: normal; vertical-align: bottom; } th:first-child, td:first-child { text-align: left; }
th.text, td.text { text-align: left; white-space: normal; min-width: 14rem; overflow-wrap: anywhere; }
figure { margin: 1rem 0; } figure svg { width: 100%; height: auto; max-width: 32rem; display: block; }
figcaption, .note { color: var(--soft); font-size: .9rem; }
""".strip()


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of cells; the first column names the row, columns in `prose` hold sentences."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    prose: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Plot:
    """An SVG element and what it shows, in words."""

    svg: str
    alt: str


@dataclass(frozen=True, kw_only=True)
class Points:
    """A list of sentences."""

    items: Sequence[str]


Block = str | Table | Plot | Points


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading and what stands under it; a string is a paragraph."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True, kw_only=True)
class Page:
    """A whole report: `passed` colours the sentence that stands first."""

    title: str
    passed: bool
    verdict: str
    sections: Sequence[Section]


def markdown(page: Page) -> str:
    """The page as Markdown, without its plots (the tables hold the same figures)."""
    parts = [f"# {_md(page.title)}", f"**{_md(page.verdict)}**"]
    for section in page.sections:
        parts.append(f"## {_md(section.title)}")
        parts += [_block_md(block) for block in section.blocks if not isinstance(block, Plot)]
    return "\n\n".join(parts) + "\n"


def web(page: Page) -> str:
    """The page as one HTML file."""
    colour = "yes" if page.passed else "no"
    body = [f"<h1>{_h(page.title)}</h1>", f'<p class="verdict {colour}">{_h(page.verdict)}</p>']
    for section in page.sections:
        body += [f"<h2>{_h(section.title)}</h2>", *(_block_html(block) for block in section.blocks)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{_h(page.title)}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _block_md(block: str | Table | Points) -> str:
    if isinstance(block, str):
        return _md(block)
    if isinstance(block, Points):
        return "\n".join(f"- {_md(item)}" for item in block.items)
    ruler = [":---" if i == 0 or i in block.prose else "---:" for i in range(len(block.header))]
    lines = [[_md(cell) for cell in block.header], ruler, *[[_md(cell) for cell in row] for row in block.rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _block_html(block: Block) -> str:
    if isinstance(block, str):
        return f'<p class="note">{_h(block)}</p>'
    if isinstance(block, Points):
        return f"<ul>{''.join(f'<li>{_h(item)}</li>' for item in block.items)}</ul>"
    if isinstance(block, Plot):
        svg = block.svg.replace("<svg ", f'<svg role="img" aria-label="{_h(block.alt)}" ', 1)
        return f"<figure>{svg}<figcaption>{_h(block.alt)}</figcaption></figure>"
    head = _row("th", block.header, block.prose)
    rows = "".join(_row("td", row, block.prose) for row in block.rows)
    return f'<div class="wide"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>'


def _row(tag: str, cells: Sequence[str], prose: Sequence[int]) -> str:
    marks = [' class="text"' if i in prose else "" for i in range(len(cells))]
    return f"<tr>{''.join(f'<{tag}{mark}>{_h(cell)}</{tag}>' for mark, cell in zip(marks, cells, strict=True))}</tr>"


def _h(text: str) -> str:
    return html.escape(" ".join(text.split()), quote=True)


def _md(text: str) -> str:
    return re.sub(r"([\\`*_<>|\[\]#])", r"\\\1", " ".join(text.split()))
