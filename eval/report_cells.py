"""What the report's tables are made of."""

from export.figures import Figure, Latency

ARMS = {"none": "no speculation", "head": "head", "incumbent": "incumbent", "ngram": "n-gram"}


def figure(figure: Figure | None) -> str:
    """Value and interval."""
    return f"{figure.value:.3f} [{figure.low:.3f}, {figure.high:.3f}]" if figure else "not measured"


def bound(threshold: float) -> str:
    """A threshold; a dash where none is set."""
    return f"{threshold:g}" if threshold else "-"


def share(share: float | None) -> str:
    """A share; a dash where it is unknown."""
    return "-" if share is None else f"{share:.0%}"


def gap(gap: float | None) -> str:
    """A signed share; a dash where it is unknown."""
    return "-" if gap is None else f"{gap:+.1%}"


def number(value: float | None, digits: int) -> str:
    """With so many digits; a dash where it is unknown."""
    return "-" if value is None else f"{value:.{digits}f}"


def milliseconds(x: Latency) -> list[str]:
    """All of a latency's percentiles."""
    seconds = (x.ttft_p50, x.ttft_p99, x.gap_p50, x.gap_p99, x.per_token_p50, x.per_token_p99)
    return [f"{1000 * s:.1f}" for s in seconds]
