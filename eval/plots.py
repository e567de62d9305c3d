"""A verdict's figures as inline SVG. Ink is currentColor, so one drawing serves light and dark pages."""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import matplotlib as mpl
from matplotlib.figure import Figure as Canvas

from export.figures import Figure, Latency, Measured, Speed
from recipes.schema import Rule

_INK = "#010203"  # stands for currentColor, which matplotlib does not know
_COLOURS = ("#3b82d6", "#d9730d", "#2a9d6f", "#b05fc2", "#8a8f98")
_ARMS = {"none": ("no speculation", 4), "head": ("head", 0), "incumbent": ("incumbent", 2), "ngram": ("n-gram", 1)}
_MARKS = ("o", "s", "^", "D", "v")
_SETTINGS = {
    "svg.fonttype": "none", "svg.hashsalt": "draftsmith", "font.family": "sans-serif", "font.size": 9,
    "text.color": _INK, "axes.edgecolor": _INK, "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "savefig.transparent": True,
    "text.parse_math": False,
}  # fmt: skip


def acceptance(domains: Mapping[str, Measured], rules: Mapping[str, Rule]) -> str:
    """Acceptance length by domain with intervals, thresholds and the simulated length."""
    with cast(Any, mpl).rc_context(_SETTINGS):
        canvas, axes = _canvas(1.2 + 0.6 * len(domains))
        for row, (name, figures) in enumerate(domains.items()):
            rule = rules.get(name, Rule())
            for shift, figure, bound, kind in (
                (-0.14, figures.acceptance, rule.min_acceptance, 0),
                (0.14, figures.acceptance_unrepeated, rule.min_acceptance_unrepeated, 1),
            ):
                _interval(axes, row + shift, figure, kind)
                if bound:
                    axes.plot([bound, bound], [row + shift - 0.12, row + shift + 0.12], color=_COLOURS[3], linewidth=2)
            if figures.simulated is not None:
                axes.plot(figures.simulated, row - 0.14, "x", color=_COLOURS[4])
        for mark, colour, label in (
            ("o", 0, "all answers"), ("s", 1, "without a repeated 4-gram"), ("|", 3, "threshold"),
            ("x", 4, "simulated"),
        ):  # fmt: skip
            axes.plot([], [], mark, color=_COLOURS[colour], label=label)
        axes.set_yticks(range(len(domains)), list(domains))
        axes.set_ylim(len(domains) - 0.5, -0.5)
        axes.set_xlim(left=1.0)
        axes.set_xlabel("acceptance length, tokens a target step")
        axes.legend(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=2, fontsize=8)
        return _svg(canvas, "a")


def positions(domains: Mapping[str, Measured]) -> str:
    """Cumulative acceptance rate by draft position, a line a domain."""
    with cast(Any, mpl).rc_context(_SETTINGS):
        canvas, axes = _canvas(2.6)
        for i, (name, figures) in enumerate(domains.items()):
            steps = range(1, len(figures.per_position) + 1)
            axes.plot(
                steps, figures.per_position, color=_COLOURS[i % 5], marker=_MARKS[i % 5], label=name,
                linestyle=("-", "--", ":")[i // 5 % 3],
            )  # fmt: skip
        longest = max((len(f.per_position) for f in domains.values()), default=0)
        axes.set_xticks(range(1, longest + 1))
        axes.set_ylim(0, 1)
        axes.set_xlabel("draft position")
        axes.set_ylabel("accepted / windows")
        axes.legend(fontsize=8)
        return _svg(canvas, "p")


def rounds(speed: Speed) -> str:
    """Output tokens/s of each arm in each round."""
    with cast(Any, mpl).rc_context(_SETTINGS):
        canvas, axes = _canvas(2.6)
        arms = [arm for arm in _ARMS if all(arm in shown for shown in speed.rounds)]
        width = 0.8 / max(1, len(arms))
        for i, arm in enumerate(arms):
            places = [r + (i - (len(arms) - 1) / 2) * width for r in range(len(speed.rounds))]
            label, colour = _ARMS[arm]
            bars = axes.bar(
                places, [shown[arm] for shown in speed.rounds], width * 0.92, color=_COLOURS[colour], label=label
            )
            axes.bar_label(bars, fmt="%.0f", fontsize=8)
        axes.set_xticks(range(len(speed.rounds)), _round_names(speed.rounds))
        axes.set_ylabel("output tokens/s")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.04), ncols=2, fontsize=8)
        return _svg(canvas, "r")


def token_times(by_arm: Mapping[str, Latency], prefix: str) -> str:
    """Distribution over answers of the time a token, a line an arm, p50 and p99 marked; `prefix` keeps ids apart."""
    with cast(Any, mpl).rc_context(_SETTINGS):
        canvas, axes = _canvas(2.6)
        for arm, x in by_arm.items():
            label, colour = _ARMS[arm]
            shares = [i / (len(x.per_token) - 1) for i in range(len(x.per_token))]
            axes.plot([1000 * s for s in x.per_token], shares, color=_COLOURS[colour], label=label)
            axes.plot(
                [1000 * x.per_token_p50, 1000 * x.per_token_p99], [0.5, 0.99], _MARKS[colour], color=_COLOURS[colour]
            )
        axes.set_xlim(left=0)
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("ms a token of an answer")
        axes.set_ylabel("share of answers")
        axes.legend(loc="lower center", bbox_to_anchor=(0.45, 1.04), ncols=2, fontsize=8)
        return _svg(canvas, prefix)


def frontier(by_arm: Mapping[str, Sequence[tuple[str, float, float]]]) -> str:
    """Each arm's loads as (requests in flight, tokens/s of one answer, of all together); best is up and right."""
    with cast(Any, mpl).rc_context(_SETTINGS):
        canvas, axes = _canvas(2.8)
        for arm, points in by_arm.items():
            label, colour = _ARMS[arm]
            x, y = [p[1] for p in points], [p[2] for p in points]
            axes.plot(x, y, color=_COLOURS[colour], marker=_MARKS[colour], label=label)
            for load, at_x, at_y in points:
                axes.annotate(load, (at_x, at_y), xytext=(4, 4), textcoords="offset points", fontsize=8)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens/s of one answer (median)")
        axes.set_ylabel("output tokens/s together")
        axes.legend(loc="lower center", bbox_to_anchor=(0.45, 1.04), ncols=2, fontsize=8)
        return _svg(canvas, "f")


def _round_names(shown: Sequence[Mapping[str, float]]) -> list[str]:
    return [f"round {i + 1}" + (f"\n{r['ratio']:.2f}x" if "ratio" in r else "") for i, r in enumerate(shown)]


def _interval(axes: Any, row: float, figure: Figure | None, kind: int) -> None:
    if figure is None:
        return
    axes.plot([figure.low, figure.high], [row, row], color=_COLOURS[kind], linewidth=2)
    axes.plot(figure.value, row, _MARKS[kind], color=_COLOURS[kind])


def _canvas(height: float) -> tuple[Canvas, Any]:
    canvas = Canvas(figsize=(4.2, height))  # inches; narrow, so that a phone shows it near its own size
    return canvas, cast(Any, canvas).subplots()


def _svg(canvas: Canvas, prefix: str) -> str:
    """The drawing as an element for a page: own ids, no size, no prolog, the same bytes each time."""
    buffer = io.StringIO()
    cast(Any, canvas).savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg ") :].replace(_INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(
        r'(<svg [^>]*?)width="[^"]*" height="[^"]*"', r"\1", re.sub(r'(<svg [^>]*?)\s+xmlns:xlink="[^"]*"', r"\1", text)
    )
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", text).replace("xlink:href", "href").strip()
