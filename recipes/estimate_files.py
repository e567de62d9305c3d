"""Local files that a recipe names: found without importing the packages that ship them."""

import importlib.util
from pathlib import Path

from recipes.schema import Recipe


def local_file(path: str) -> Path:
    """The file or folder behind `package:PKG/FILE` or a path; it need not exist.

    Raises ValueError where the package is not installed or the path leaves it.
    """
    if not path.startswith("package:"):
        return Path(path).expanduser()
    package, _, inner = path.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    roots = [Path(root).resolve() for root in (spec.submodule_search_locations or ())] if spec else []
    if not roots:
        raise ValueError(f"package {package!r} is not installed; pip install it, or name a file by path")
    file = (roots[0] / inner).resolve()
    if not file.is_relative_to(roots[0]):
        raise ValueError(f"{path} leaves the package's folder")
    return file


def source_bytes(recipe: Recipe) -> float:
    """Bytes of the local source files that are here; Hub data is not counted."""
    total = 0.0
    for domain in recipe.domains.values():
        for source in domain.sources:
            if source.path.startswith("hub:"):
                continue
            try:
                file = local_file(source.path)
            except ValueError:
                continue
            total += file.stat().st_size if file.is_file() else 0
    return total
