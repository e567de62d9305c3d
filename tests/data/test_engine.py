"""Starting, watching and ending real processes that answer like an engine."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest

from data import engine
from data.engine import Server, check_alive, end_orphans, last_line, serving
from recipes.faults import EnvironmentFault
from recipes.load import build
from recipes.schema import Engine, Recipe
from tests.tiny import recipe_data

COMMAND = ("{python}", "-m", "tests.fake_server")


@pytest.fixture()
def recipe(tmp_path: Path) -> Recipe:
    return build(recipe_data(tmp_path, tmp_path / "p.jsonl"))


def start(recipe: Recipe, run: Path, *args: str, timeout: int = 20) -> AbstractContextManager[Server]:
    settings = Engine(command=COMMAND, args=args, start_timeout_s=timeout)
    return serving(settings, run=run, target=recipe.target, path=run, log=run / "engine.log")


def test_a_server_is_healthy_inside_and_gone_with_its_children_outside(recipe: Recipe, tmp_path: Path) -> None:
    with start(recipe, tmp_path, "--spawn") as server:
        check_alive(server)
        assert server.version == "9.9" and server.url.startswith("http://127.0.0.1:")
        child = int((tmp_path / "engine.log").read_text().split("child ")[1].split()[0])
        assert psutil.pid_exists(child) and list((tmp_path / "engines").glob("*.json"))
    assert not psutil.pid_exists(server.pid)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert not list((tmp_path / "engines").glob("*.json"))


def test_it_is_ended_where_the_body_raises_and_where_it_ignores_term(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "PATIENCE_S", (0.3, 5.0))
    with pytest.raises(RuntimeError, match="mine"), start(recipe, tmp_path, "--deaf") as server:
        raise RuntimeError("mine")
    assert not psutil.pid_exists(server.pid)


def test_death_at_start_is_told_with_the_logs_line(recipe: Recipe, tmp_path: Path) -> None:
    with (
        pytest.raises(EnvironmentFault, match="ended at start .*no memory for the cache"),
        start(recipe, tmp_path, "--die-at-start"),
    ):
        pass


def test_a_server_that_never_gets_healthy_is_ended(recipe: Recipe, tmp_path: Path) -> None:
    with (
        pytest.raises(EnvironmentFault, match="not healthy within engine.start_timeout_s = 2"),
        start(recipe, tmp_path, "--never-healthy", timeout=2),
    ):
        pass
    assert not list((tmp_path / "engines").glob("*.json"))


def test_a_missing_program_is_one_line(recipe: Recipe, tmp_path: Path) -> None:
    settings = Engine(command=("/no/such/python",))
    with (
        pytest.raises(EnvironmentFault, match=r"engine.command: '/no/such/python' cannot be started"),
        serving(settings, run=tmp_path, target=recipe.target, path=tmp_path, log=tmp_path / "log"),
    ):
        pass


def test_a_dead_server_is_noticed(recipe: Recipe, tmp_path: Path) -> None:
    with start(recipe, tmp_path) as server:
        os.kill(server.pid, signal.SIGKILL)
        time.sleep(0.2)
        with pytest.raises(EnvironmentFault, match="the engine died"):
            check_alive(server)


def test_an_orphan_is_found_by_pid_and_start_time_and_ended(tmp_path: Path) -> None:
    orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    marks = tmp_path / "engines"
    marks.mkdir()
    started = psutil.Process(orphan.pid).create_time()
    (marks / "1.json").write_text(json.dumps({"pid": orphan.pid, "started": started}))
    # Another process has taken a dead engine's pid: its start time differs, and it must live.
    (marks / "2.json").write_text(json.dumps({"pid": stranger.pid, "started": started - 500}))
    (marks / "3.json").write_text("torn")
    # Its owner still runs: somebody else's, or this run directory was copied from a live one.
    owner = psutil.Process()
    kept = {"pid": stranger.pid, "started": psutil.Process(stranger.pid).create_time()}
    kept |= {"owner": owner.pid, "owner_started": owner.create_time()}
    (marks / "4.json").write_text(json.dumps(kept))
    assert end_orphans(tmp_path) == [orphan.pid]
    assert orphan.wait(5) != 0 and stranger.poll() is None
    assert [m.name for m in marks.iterdir()] == ["4.json"]
    stranger.kill()
    stranger.wait()


def test_the_telling_line_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_line(log) == "it wrote nothing"
    log.write_text("start\nValueError: too large\nbye\n\n")
    assert last_line(log) == "ValueError: too large"
