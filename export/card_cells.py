"""What the model card's tables are made of."""

from export.figures import Figure

ARMS = {"none": "no speculation", "head": "this head", "incumbent": "the head before it", "ngram": "n-gram"}
Table = list[list[str]]


def table(header: list[str], rows: Table) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def figure(figure: Figure | None) -> str:
    """Value, interval and count; a dash where it was not measured."""
    return f"{figure.value:.3f} [{figure.low:.3f}, {figure.high:.3f}], n={figure.n}" if figure else "-"


def number(value: float | None, digits: int = 2) -> str:
    """With so many digits; a dash where it was not measured."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share; a dash where it was not measured."""
    return "-" if value is None else f"{value:.0%}"


def cell(text: str) -> str:
    """Text that stands in a table's cell."""
    return line(text).replace("|", "\\|")


def line(text: str) -> str:
    """Text on one line."""
    return " ".join(str(text).split())
