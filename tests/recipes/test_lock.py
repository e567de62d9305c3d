"""One run at a time: held by the living, taken over from the dead, left to another machine."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from recipes import lock
from recipes.lock import alive, locked

HOLDER = """
import sys, time
from pathlib import Path
from recipes.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def holder(run: Path) -> subprocess.Popen[str]:
    """Another process that holds the lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(run)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_second_run_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    process = holder(tmp_path)
    try:
        message = rf"a run is already under way \(pid {process.pid}\); wait for it or stop it"
        with pytest.raises(ValueError, match=message), locked(tmp_path):
            pytest.fail("entered")
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "lock").exists(), "a killed run leaves its lock"
    with locked(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_two_that_find_a_dead_holder_do_not_both_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lock").write_text(json.dumps({"pid": 2**22 + 1, "started": 0.0, "host": socket.gethostname()}))
    others: list[subprocess.Popen[str]] = []

    def found_dead(_: Path) -> str:
        others.append(subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE,
                                       stderr=subprocess.DEVNULL, text=True))  # fmt: skip
        time.sleep(1.0)  # time for the other to find the same and to take the lock
        return ""

    monkeypatch.setattr(lock, "_holder", found_dead)
    try:
        with locked(tmp_path):
            assert others[0].wait(10) != 0, "the other was let in as well"
    finally:
        for other in others:
            other.kill()
            other.communicate()


def test_a_zombie_holds_nothing(tmp_path: Path) -> None:
    process = holder(tmp_path)
    process.kill()
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    with locked(tmp_path):
        pass
    process.wait()


def test_another_machine_is_not_guessed_about(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text(json.dumps({"pid": 1, "started": 0.0, "host": "elsewhere"}))
    message = r"already under way \(pid 1 on elsewhere; delete lock if that machine is gone\)"
    with pytest.raises(ValueError, match=message), locked(tmp_path):
        pytest.fail("entered")
    assert (tmp_path / "lock").exists()


def test_a_reused_pid_is_another_process(tmp_path: Path) -> None:
    me = psutil.Process()
    held = {"pid": me.pid, "started": me.create_time() - 1000, "host": socket.gethostname()}
    (tmp_path / "lock").write_text(json.dumps(held))
    with locked(tmp_path):
        pass
    assert alive(me.pid, me.create_time())
    assert not alive(me.pid, me.create_time() - 1000)
    assert not alive(2**22 + 1, 0.0)


def test_a_torn_lock_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text('{"pid": ')
    with locked(tmp_path):
        pass


def test_freed_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), locked(tmp_path / "run"):
        raise RuntimeError
    with locked(tmp_path / "run"):
        pass
    assert list((tmp_path / "run").iterdir()) == []


def test_the_holder_is_refused_too(tmp_path: Path) -> None:
    with locked(tmp_path):
        with pytest.raises(ValueError, match="already under way"), locked(tmp_path):
            pytest.fail("entered")
        assert (tmp_path / "lock").exists()
