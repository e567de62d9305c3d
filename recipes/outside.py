"""Fingerprints of what stages read but no stage made: source files, the target's folder. They decide staleness too."""

from pathlib import Path

from recipes.artifact import hash_bytes, hash_file, hash_json
from recipes.estimate_files import local_file
from recipes.schema import Recipe

_SAMPLE = 2**20  # bytes at either end of a weights file: hashing 70 GB at every status would not pay


def sources(recipe: Recipe) -> dict[str, str]:
    """{source path: fingerprint} of every domain's sources; Hub sources are known by their revision."""
    return {
        source.path: source.revision if source.path.startswith("hub:") else _file(source.path)
        for domain in recipe.domains.values()
        for source in domain.sources
    }


def target(recipe: Recipe) -> dict[str, str]:
    """{target.path: fingerprint}: of the file, or of the folder's names, sizes, small files and weights' ends."""
    path = recipe.target.path
    return {path: _file(path)} if path else {}


def incumbent(recipe: Recipe) -> dict[str, str]:
    """{gate.incumbent: fingerprint} of the head beside which the new one is measured, where it is a folder."""
    path = recipe.gate.incumbent
    return {path: found} if path and (found := _file(path)) else {}


def prices(recipe: Recipe) -> dict[str, str]:
    """{cost.prices: fingerprint} of the recipe's own list prices."""
    path = recipe.cost.prices
    return {path: _file(path)} if path else {}


def _file(path: str) -> str:
    """Empty where it is missing or unreadable: the stage itself says what is wrong."""
    try:
        found = local_file(path)
        if found.is_dir():
            return hash_json([[f.name, f.stat().st_size, _ends(f)] for f in sorted(found.iterdir()) if f.is_file()])
        return hash_file(found)
    except (OSError, ValueError):
        return ""


def _ends(file: Path) -> str:
    with open(file, "rb") as data:
        first = data.read(_SAMPLE)
        data.seek(max(0, file.stat().st_size - _SAMPLE))
        return hash_bytes(first + data.read(_SAMPLE))
