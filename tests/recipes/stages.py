"""Two small stages, for tests of what becomes of their directories."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipes.artifact import Stage
from recipes.load import build
from recipes.schema import Recipe
from tests.recipes.small import small

Make = Callable[[Recipe, Path, Path], dict[str, Any]]


def recipe(**changes: Any) -> Recipe:
    return build(small(**changes))


def writes(text: str = "one") -> Make:
    """A stage function that writes a.txt and sub/b.txt."""

    def make(_recipe: Recipe, _run: Path, out: Path) -> dict[str, Any]:
        (out / "sub").mkdir(exist_ok=True)
        (out / "a.txt").write_text(text)
        (out / "sub" / "b.txt").write_text(text * 2)
        return {"rows": 3}

    return make


def first(make: Make | None = None, **changes: Any) -> Stage:
    return Stage(
        **{"name": "first", "verb": "v", "make": make or writes(), "inputs": (), "keys": ("train",), **changes}
    )


def second(make: Make | None = None) -> Stage:
    return Stage(name="second", verb="v", make=make or writes("two"), inputs=("first",), keys=("gate.prompts",))


class Killed(BaseException):
    """What a kill looks like from inside: nothing after it runs."""


def dies(*files: str) -> Make:
    """A stage function that writes `files` and is killed."""

    def make(_recipe: Recipe, _run: Path, out: Path) -> dict[str, Any]:
        for name in files:
            (out / name).write_text(name)
        raise Killed

    return make
