"""What is published in a Hub repo, as its heads.json says: one line a head."""

import json

from export.ask import repo_at
from export.figures import Figure
from export.index import FILE, Head, Index, to_bytes
from export.remote import look
from recipes import show
from recipes.schema import Publish


def heads(publish: Publish, as_json: bool) -> str:
    """The published heads: heads.json itself, or a table of them.

    Raises ValueError where the repo or its index is missing or cannot be read, EnvironmentFault for a Hub that fails.
    """
    repo = repo_at(publish)
    index = look(repo).index
    if index is None:
        raise ValueError(f"{repo.where} holds no {FILE}; the next `draftsmith publish` writes it, with that head in it")
    if as_json:
        return json.dumps(json.loads(to_bytes(index)), indent=1)
    return f"{repo.where}, * = on main\n{table(index)}"


def table(index: Index) -> str:
    """Acceptance length a domain and speed-up, each with its interval, and where they were measured."""
    domains = list(dict.fromkeys(name for head in index.heads for name in head.domains))
    titles = ("tag", "target", "measured", *domains, "speed-up", "engine", "GPU")
    rows = [titles, *(_row(head, domains, head.tag == index.current) for head in index.heads)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(titles))]
    lines = ["  ".join(show.aligned(row, widths)).rstrip() for row in rows]
    if index.current not in {head.tag for head in index.heads}:
        lines.append(f"on main: {index.current}, published before there was a {FILE}")
    return "\n".join(lines)


def _row(head: Head, domains: list[str], current: bool) -> tuple[str, ...]:
    return (
        f"{head.tag}{' *' if current else ''}",
        f"{head.target}@{head.revision}",
        head.date[:10],
        *(_figure(head.domains[name].acceptance if name in head.domains else None) for name in domains),
        _figure(head.speedup, "x"),
        f"{head.engine} {head.engine_version}",
        head.gpu or "none (CPU)",
    )


def _figure(figure: Figure | None, unit: str = "") -> str:
    return f"{figure.value:.2f}{unit} [{figure.low:.2f}, {figure.high:.2f}]" if figure else "-"
