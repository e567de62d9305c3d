"""One run at a time in a run directory: a lock file that names its holder, taken over only from the dead."""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil


@contextmanager
def locked(run: Path) -> Generator[None, None, None]:
    """Hold `run/lock` for the duration. Raises ValueError while a living process, or another machine, holds it."""
    run.mkdir(parents=True, exist_ok=True)
    lock = run / "lock"
    mine = run / f"lock.{os.getpid()}"
    me = psutil.Process()
    mine.write_text(json.dumps({"pid": me.pid, "started": me.create_time(), "host": socket.gethostname()}))
    guard = os.open(run, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no flock
            fcntl.flock(
                guard, fcntl.LOCK_EX
            )  # of two that find a dead holder, one takes its place and the other sees it
        _take(mine, lock)
    finally:
        os.close(guard)
        mine.unlink()
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)


def _take(mine: Path, lock: Path) -> None:
    for _ in range(3):
        try:
            os.link(mine, lock)  # atomic, on NFS too: fails where the name exists
            return
        except FileExistsError:
            holder = _holder(lock)
            if holder:
                raise ValueError(
                    f"{lock.parent}: a run is already under way ({holder}); wait for it or stop it"
                ) from None
            lock.rename(lock.with_name(f"lock.dead.{os.getpid()}.{time.time_ns()}"))
            for dead in lock.parent.glob("lock.dead.*"):
                dead.unlink(missing_ok=True)
    raise ValueError(f"{lock}: another run took it at the same moment; try again")


def _holder(lock: Path) -> str:
    """Who holds the lock, or an empty string where that process is gone."""
    try:
        held = json.loads(lock.read_text())
    except (OSError, ValueError):
        return ""
    if held["host"] != socket.gethostname():
        return f"pid {held['pid']} on {held['host']}; delete {lock.name} if that machine is gone"
    return f"pid {held['pid']}" if alive(held["pid"], held["started"]) else ""


def alive(pid: int, started: float) -> bool:
    """True while the process with this pid and start time (seconds since the epoch) lives."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
