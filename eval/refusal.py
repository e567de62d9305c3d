"""How a rule says no: one line with the figure, its interval and the bound."""

import math

from eval.loads import sound
from export.figures import Figure
from export.record import Refusal


def below(rule: str, domain: str, what: str, figure: Figure | None, threshold: float) -> list[Refusal]:
    """A refusal where a bound is set and the figure's lower end does not reach it."""
    if not threshold:
        return []
    known = sound(figure)
    if known is None:
        return [no(rule, f"{what} was not measured, {threshold:g} is needed", domain, threshold=threshold)]
    if known.low >= threshold:
        return []
    return [_interval(rule, domain, f"{what} %s, its lower end must reach {threshold:g}", known, threshold)]


def above(rule: str, domain: str, what: str, figure: Figure | None, threshold: float) -> list[Refusal]:
    """A refusal where a bound is set and the figure's upper end exceeds it."""
    if not threshold:
        return []
    known = sound(figure)
    if known is None:
        return [no(rule, f"{what} was not measured, at most {threshold:g} is allowed", domain, threshold=threshold)]
    if known.high <= threshold:
        return []
    return [_interval(rule, domain, f"{what} %s, its upper end may be {threshold:g} at most", known, threshold)]


def no(
    rule: str, why: str, domain: str = "", figure: float | None = None, *, threshold: float | None = None
) -> Refusal:
    """A refusal without an interval."""
    known = figure if figure is not None and math.isfinite(figure) else None
    said = f"{domain}: {why}" if domain else why
    return Refusal(rule=rule, domain=domain, figure=known, low=None, high=None, threshold=threshold, why=said)


def _interval(rule: str, domain: str, why: str, known: Figure, threshold: float) -> Refusal:
    said = f"{domain}: {why % f'{known.value:.3f} [{known.low:.3f}, {known.high:.3f}]'}"
    return Refusal(
        rule=rule, domain=domain, figure=known.value, low=known.low, high=known.high, threshold=threshold, why=said
    )
