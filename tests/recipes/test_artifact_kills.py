"""A stage directory under kills: what was finished stays, whatever the instant."""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.artifact import build, damaged, digest, state, write_bytes
from recipes.schema import Recipe
from tests.recipes.stages import Killed, dies, first, recipe, writes


def test_a_kill_leaves_the_old_output_whole(tmp_path: Path) -> None:
    build(first(), recipe(), tmp_path)
    before = digest(tmp_path / "first")
    with pytest.raises(Killed):
        build(first(dies("a.txt")), recipe(train__lr=0.5), tmp_path)
    assert digest(tmp_path / "first") == before
    assert damaged(tmp_path / "first", deep=True) == []
    assert state(first(), recipe(), tmp_path).status == "done"
    assert state(first(), recipe(train__lr=0.5), tmp_path).status == "stale"


def test_a_kill_leaves_a_partial_that_the_same_plan_resumes(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        build(first(dies("shard-0")), recipe(), tmp_path)
    assert not (tmp_path / "first").exists()
    assert state(first(), recipe(), tmp_path).why == "begun, will go on"
    seen: list[str] = []

    def goes_on(_recipe: Recipe, _run: Path, out: Path) -> dict[str, Any]:
        seen.extend(sorted(f.name for f in out.iterdir()))
        (out / "shard-1").write_text("shard-1")
        return {}

    build(first(goes_on), recipe(), tmp_path)
    assert seen == ["plan.json", "shard-0"]
    assert sorted(f.name for f in (tmp_path / "first").iterdir()) == ["manifest.json", "shard-0", "shard-1"]
    assert set(json.loads((tmp_path / "first" / "manifest.json").read_text())["files"]) == {"shard-0", "shard-1"}


def losses(run: Path, monkeypatch: pytest.MonkeyPatch, begin: Callable[[Path], Any]) -> list[str]:
    """Instants at which a kill makes the next run do finished work again: before or after the n-th rename, unlink, ...

    The stage writes `work` where it is missing, so `work` written twice is work lost.
    """
    lost: list[str] = []
    for n in range(1, 40):
        for moment in ("before", "after"):
            place = run / f"{n}-{moment}"
            begin(place)
            written: list[int] = []

            def make(_recipe: Recipe, _run: Path, out: Path, written: list[int] = written) -> dict[str, Any]:
                if not (out / "work").exists():
                    written.append(1)
                    write_bytes(out / "work", b"hours")
                write_bytes(out / "end", b"x")
                return {}

            with monkeypatch.context() as patch:
                reached = arm(patch, n, moment)
                with contextlib.suppress(Killed):
                    build(first(make), recipe(), place)
            if not reached:
                return lost
            if state(first(), recipe(), place).status != "done":
                stood, times = any(place.glob("*/work")), len(written)
                build(first(make), recipe(), place)
                if stood and len(written) > times:
                    lost.append(f"{moment} {reached[0]}")
            if state(first(), recipe(), place, deep=True).status != "done":
                lost.append(f"{moment} {reached[0]}: finished as damaged")
    raise AssertionError("the stage never ended")


def arm(patch: pytest.MonkeyPatch, n: int, moment: str) -> list[str]:
    """Make the n-th change of a directory the last; the list says which it was, once reached."""
    count, reached = [0], list[str]()

    def wrap(name: str) -> None:
        original = getattr(Path, name)

        def changed(self: Path, *args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] == n:
                reached.append(f"{name} {self.name}")
                if moment == "before":
                    raise Killed
            done = original(self, *args, **kwargs)
            if count[0] == n:
                raise Killed
            return done

        patch.setattr(Path, name, changed)

    for name in ("rename", "replace", "unlink", "mkdir"):
        wrap(name)
    return reached


def nothing(_: Path) -> None:
    """No earlier output."""


def an_older_plan(run: Path) -> None:
    build(first(writes("old")), recipe(train__lr=0.5), run)


@pytest.mark.parametrize("begin", [nothing, an_older_plan])
def test_a_kill_at_any_instant_loses_no_finished_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: Callable[[Path], Any]
) -> None:
    assert losses(tmp_path, monkeypatch, begin) == []


def test_a_kill_at_any_instant_of_a_salvage_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[str] = []
    for n in range(1, 40):
        for moment in ("before", "after"):
            place = tmp_path / f"{n}-{moment}"
            build(first(), recipe(), place)
            (place / "first" / "a.txt").unlink()
            with monkeypatch.context() as patch:
                reached = arm(patch, n, moment)
                with contextlib.suppress(Killed):
                    build(first(mends_a), recipe(), place)
            if not reached:
                assert lost == []
                return
            if state(first(), recipe(), place).status != "done":
                build(first(mends_a), recipe(), place)
            if not (place / "first" / "sub" / "b.txt").exists():
                lost.append(f"{moment} {reached[0]}")
            elif state(first(), recipe(), place, deep=True).status != "done":
                lost.append(f"{moment} {reached[0]}: finished as damaged")
    raise AssertionError("the stage never ended")


def mends_a(_recipe: Recipe, _run: Path, out: Path) -> dict[str, Any]:
    """Writes only what is missing of what the test knows to be damaged."""
    write_bytes(out / "a.txt", b"one")
    return {}


CHILD = """
import os, signal, sys
from pathlib import Path
from recipes.artifact import Stage, build
from recipes.load import build as recipe_of
from tests.recipes.small import small

def make(recipe, run, out):
    for i in range(100):
        file = out / f"shard-{i}"
        if not file.exists():
            file.write_text(str(i))
            if i == int(sys.argv[2]):
                os.kill(os.getpid(), signal.SIGKILL)
    return {}

build(Stage(name="first", verb="v", make=make, inputs=(), keys=("train",)), recipe_of(small()), Path(sys.argv[1]))
"""


def test_a_real_kill_is_survived(tmp_path: Path) -> None:
    def go(at: int) -> int:
        return subprocess.run([sys.executable, "-c", CHILD, str(tmp_path), str(at)], check=False).returncode

    assert go(10) == -signal.SIGKILL
    assert go(57) == -signal.SIGKILL
    stamps = {f.name: f.stat().st_mtime_ns for f in (tmp_path / "first.partial").glob("shard-*")}
    assert len(stamps) == 58
    assert go(-1) == 0
    assert len(list((tmp_path / "first").glob("shard-*"))) == 100
    kept = {name: (tmp_path / "first" / name).stat().st_mtime_ns for name in stamps}
    assert kept == stamps, "a finished shard was written again"
