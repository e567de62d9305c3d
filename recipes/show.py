"""Plain text for people: one line a stage."""

from typing import Any, cast


def brief(accounting: dict[str, Any]) -> str:
    """The accounting on one line; nested counts (rows dropped by reason) included, lists by their length."""
    parts: list[str] = []
    for key, value in accounting.items():
        if isinstance(value, dict):
            inner = brief(cast(dict[str, Any], value))
            parts += [f"{key} ({inner})"] if inner else []
        elif isinstance(value, str) and len(value) > 40:
            continue  # hashes are in the manifest
        else:
            parts.append(f"{key} {len(cast(list[Any], value)) if isinstance(value, list) else value}")
    return ", ".join(parts)


def status(rows: dict[str, dict[str, Any]]) -> str:
    """Stage, state, and why it is not done or what it holds."""
    lines = [
        f"{name:12} {row['status']:6} {row['why'] or brief(cast(dict[str, Any], row.get('accounting', {})))}"
        for name, row in rows.items()
    ]
    return "\n".join(lines)


def aligned(row: tuple[str, ...], widths: list[int]) -> list[str]:
    """Words to the left, figures to the right."""
    return [c.ljust(w) if i < 3 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
