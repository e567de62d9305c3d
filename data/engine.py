"""Start, watch and stop an OpenAI-compatible serving engine; end one that a killed run left behind."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import psutil

from recipes.artifact import write_json
from recipes.faults import EnvironmentFault
from recipes.lock import alive
from recipes.schema import Engine, Target

SERVED_NAME = "target"
PATIENCE_S = (10.0, 5.0)
"""seconds between TERM and KILL, and after KILL"""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that answered its health check. `pid` 0: somebody else's, named by URL."""

    url: str
    model: str
    pid: int
    command: tuple[str, ...]
    version: str
    log: Path


@contextmanager
def serving(
    engine: Engine, *, run: Path, target: Target, path: Path, log: Path, extra: Sequence[str] = ()
) -> Generator[Server, None, None]:
    """Serve the model at `path` as "target" on a free loopback port; stop it in every case, keep its log.

    Raises EnvironmentFault with the log's last line where it dies or is not healthy in time.
    """
    port = free_port()
    command = (*_program(engine), *_arguments(target, path, port), *engine.args, *extra)
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as sink:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=_environment(engine),
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise EnvironmentFault(f"engine.command: {command[0]!r} cannot be started ({error.strerror})") from error
    mark = mark_engine(run, process.pid)
    try:
        url = f"http://127.0.0.1:{port}"
        _await_health(process, url, log, engine.start_timeout_s)
        version = str(json.loads(_get(f"{url}/version"))["version"])
        yield Server(url=url, model=SERVED_NAME, pid=process.pid, command=command, version=version, log=log)
    finally:
        end_group(process.pid)
        process.wait()
        mark.unlink(missing_ok=True)


def check_alive(server: Server) -> None:
    """Raises EnvironmentFault where the server's process is gone."""
    if server.pid and not psutil.pid_exists(server.pid):
        raise EnvironmentFault(f"the engine died: {last_line(server.log)} (log: {server.log.name})")
    if server.pid and psutil.Process(server.pid).status() == psutil.STATUS_ZOMBIE:
        raise EnvironmentFault(f"the engine died: {last_line(server.log)} (log: {server.log.name})")


def reachable(url: str) -> Server:
    """A server that somebody else runs. Raises EnvironmentFault where it does not answer."""
    try:
        models = json.loads(_get(f"{url.rstrip('/')}/v1/models"))
        return Server(url=url.rstrip("/"), model=models["data"][0]["id"], pid=0, command=(), version="", log=Path())
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise EnvironmentFault(
            f"answers.url: {url} does not answer as an OpenAI-compatible server ({error})"
        ) from error


def end_orphans(run: Path) -> list[int]:
    """End engines that a killed run of this directory left behind, by recorded pid and start time; their pids."""
    ended: list[int] = []
    for mark in sorted((run / "engines").glob("*.json")):
        with contextlib.suppress(ValueError):  # a torn mark names nobody
            held = cast(dict[str, Any], json.loads(mark.read_text()))
            if "owner" in held and alive(held["owner"], held["owner_started"]):
                continue  # no orphan: who started it still runs
            if alive(held["pid"], held["started"]):
                end_group(held["pid"])
                ended.append(held["pid"])
        mark.unlink()
    return ended


def on_gpu() -> bool:
    """True where an NVIDIA driver is here; the CPU settings below apply elsewhere."""
    return Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None


def last_line(log: Path) -> str:
    """The last line of a log that says what went wrong, else its last line at all."""
    lines = [x.strip() for x in log.read_text(errors="replace").splitlines() if x.strip()] if log.is_file() else []
    telling = [x for x in lines if "Error" in x or "error:" in x]
    return (telling or lines or ["it wrote nothing"])[-1][-300:]


def _program(engine: Engine) -> tuple[str, ...]:
    return tuple(part.replace("{python}", sys.executable) for part in engine.command)


def _arguments(target: Target, path: Path, port: int) -> tuple[str, ...]:
    quantization = ("--quantization", target.quantization) if target.quantization else ()
    # Compiling costs a minute and gains little on a CPU.
    cpu = () if on_gpu() else ("--enforce-eager", "--max-num-seqs", "256")
    return (
        "--model", str(path), "--served-model-name", SERVED_NAME, "--dtype", target.dtype,
        "--max-model-len", str(target.max_model_len), "--host", "127.0.0.1", "--port", str(port),
        "--generation-config", "vllm", *quantization, *cpu,
    )  # fmt: skip


def _environment(engine: Engine) -> dict[str, str]:
    env = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    if not on_gpu():
        cores = sorted(os.sched_getaffinity(0))
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}-{cores[-1]}")
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
        # Idle threads must not spin: 1 ms of it costs a tenth of a streamed answer's speed, more of it halves it.
        env.setdefault("KMP_BLOCKTIME", "0")
        openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
        if openmp.is_file():
            env.setdefault("LD_PRELOAD", str(openmp))
    return {**env, **engine.env}


def _await_health(process: subprocess.Popen[bytes], url: str, log: Path, timeout_s: int) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EnvironmentFault(f"the engine ended at start (code {process.returncode}): {last_line(log)}")
        with contextlib.suppress(OSError):
            _get(f"{url}/health")
            return
        time.sleep(0.25)
    raise EnvironmentFault(f"the engine was not healthy within engine.start_timeout_s = {timeout_s}: {last_line(log)}")


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as response:
        return bytes(response.read())


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def mark_engine(run: Path, pid: int) -> Path:
    """Record a process that this one started, so that a later run can end it; the record's path."""
    mark = run / "engines" / f"{pid}.json"
    mark.parent.mkdir(parents=True, exist_ok=True)
    owner = psutil.Process()
    held = {"pid": pid, "started": psutil.Process(pid).create_time()}
    write_json(mark, {**held, "owner": owner.pid, "owner_started": owner.create_time()})
    return mark


def end_group(pid: int) -> None:
    """TERM, then KILL, for the engine and all that it started (it leads its own session)."""
    for sig, patience in zip((signal.SIGTERM, signal.SIGKILL), PATIENCE_S, strict=True):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, sig)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and _group_lives(pid):
            time.sleep(0.05)
        if not _group_lives(pid):
            return


def _group_lives(pgid: int) -> bool:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == pgid and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False
