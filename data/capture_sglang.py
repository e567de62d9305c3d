"""Capture through SGLang: a worker process in SGLang's own environment, hidden states back through shared memory.

Shapes: T tokens of a batch, A aux layers, H hidden size.
"""

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data import sglang_worker
from data.engine import end_group, free_port, last_line, mark_engine
from data.store import Features
from data.tokens import Row
from recipes.check import aux_layers
from recipes.estimate_memory import slot_tokens
from recipes.faults import EnvironmentFault
from recipes.schema import Recipe

SLOTS = 4
"""of an engine: batches in flight"""
SHARED = Path("/dev/shm")
LAUNCHED = re.compile(r"TORCHELASTIC_\w+|MASTER_(ADDR|PORT)|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME")
"""what torch's launcher tells a training process: a worker that inherits it would look for its ranks there, and hang"""


@dataclass(kw_only=True)
class Engine:
    """One copy of the target: a worker process a rank, and the slots that rank 0 writes to."""

    workers: list[subprocess.Popen[str]]
    slots: list[torch.Tensor]
    """[slot tokens, (A+1)*H]"""
    log: Path


@dataclass(kw_only=True)
class Session:
    """Running engines, each on GPUs of its own."""

    engines: list[Engine]
    hidden: int


@contextmanager
def session(recipe: Recipe, run: Path, model: Path, log: Path, plain: bool = False) -> Generator[Session, None, None]:
    """Engines that capture the recipe's layers of the target at `model`; ended in every case. `plain`: they only
    prefill, for a measure of the engine alone. Of several processes each takes the GPUs after the one before.

    Raises EnvironmentFault where one cannot start, with what its log says.
    """
    capture, hidden, layers = recipe.capture, recipe.target.facts.hidden_size, aux_layers(recipe)
    tokens, width = slot_tokens(recipe), (len(layers) + 1) * hidden
    settings: dict[str, Any] = {
        "model": str(model), "dtype": recipe.target.dtype, "layers": [] if plain else list(layers),
        "ranks": capture.tensor_parallel, "memory": capture.memory, "slot_tokens": tokens, "width": width,
        "options": dict(capture.options),
    }  # fmt: skip
    first = int(os.environ.get("LOCAL_RANK", "0")) * capture.engines
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as sink, contextlib.ExitStack() as ending:
        paths = _make_slots(SLOTS * capture.engines, tokens * width * 2)
        for path in paths:
            ending.callback(path.unlink, missing_ok=True)
        opened = Session(engines=[], hidden=hidden)
        for number in range(capture.engines):
            own = paths[SLOTS * number : SLOTS * (number + 1)]
            engine = Engine(workers=[], slots=[_map(p, tokens, width) for p in own], log=log)
            opened.engines.append(engine)
            given = {**settings, "port": free_port(), "slots": [str(p) for p in own]}
            for rank in range(capture.tensor_parallel):
                worker = _start(recipe, sink)
                engine.workers.append(worker)
                ending.callback(_end, worker, mark_engine(run, worker.pid))
                gpu = (first + number) * capture.tensor_parallel + rank
                _write(engine, worker, {**given, "rank": rank, "gpu": gpu})
        for engine in opened.engines:
            if not _answer(engine).get("ready"):
                raise EnvironmentFault(f"the SGLang worker did not start: {last_line(log)} (log: {log.name})")
        for path in paths:
            path.unlink()  # both sides hold it open: a kill leaves nothing behind
        yield opened


def stream(opened: Session, batches: Iterable[list[Row]]) -> Iterator[list[Features]]:
    """Features of each batch, in order, several batches in flight. They are views: use or copy them before the next.

    Raises EnvironmentFault where the worker dies, ValueError where a batch is longer than a slot.
    """
    waiting: deque[tuple[Engine, int, list[Row]]] = deque()
    free = deque((engine, slot) for slot in range(SLOTS) for engine in opened.engines)
    upcoming = iter(batches)
    while True:
        for batch in itertools.islice(upcoming, len(free)):
            engine, slot = free.popleft()
            _ask(engine, slot, batch)
            waiting.append((engine, slot, batch))
        if not waiting:
            return
        engine, slot, batch = waiting.popleft()
        _check(_answer(engine), slot, batch)
        yield _views(engine.slots[slot], opened.hidden, batch)
        free.append((engine, slot))


def _ask(engine: Engine, slot: int, batch: list[Row]) -> None:
    size, room = sum(len(r.input_ids) for r in batch), len(engine.slots[slot])
    if size > room:
        raise ValueError(f"a batch of {size} tokens does not fit a slot of {room}; raise capture.batch_tokens")
    for worker in engine.workers:
        _write(engine, worker, {"slot": slot, "rows": [r.input_ids for r in batch]})


def _check(reply: dict[str, Any], slot: int, batch: list[Row]) -> None:
    lengths = [len(r.input_ids) for r in batch]
    if reply != {"slot": slot, "lengths": lengths}:
        raise EnvironmentFault(f"the SGLang worker answered {str(reply)[:200]} for slot {slot}, rows of {lengths[:5]}")


def _views(slot: torch.Tensor, hidden: int, batch: list[Row]) -> list[Features]:
    parts = slot[: sum(len(r.input_ids) for r in batch)].split([len(r.input_ids) for r in batch])
    return [
        Features(
            aux_SAH=part[:, :-hidden], final_SH=part[:, -hidden:],
            input_ids_S=torch.tensor(row.input_ids), loss_mask_S=torch.tensor(row.loss_mask).bool(),
        )
        for row, part in zip(batch, parts, strict=True)
    ]  # fmt: skip


def _map(path: Path, tokens: int, width: int) -> torch.Tensor:
    """The slot [tokens, width] in a shared file."""
    return torch.from_file(str(path), shared=True, size=tokens * width, dtype=torch.bfloat16).view(tokens, width)


def _start(recipe: Recipe, sink: Any) -> subprocess.Popen[str]:
    command = [part.replace("{python}", sys.executable) for part in recipe.capture.command]
    script = str(Path(sglang_worker.__file__).resolve())
    own = {name: value for name, value in os.environ.items() if not LAUNCHED.fullmatch(name)}
    try:
        return subprocess.Popen(
            [*command, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink, text=True,
            # Without the safe path this folder's own names (store, tokens, ...) would stand before SGLang's imports.
            env={**own, "PYTHONSAFEPATH": "1", **recipe.capture.env}, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise EnvironmentFault(f"capture.command: {command[0]!r} cannot be started ({error.strerror})") from error


def _end(worker: subprocess.Popen[str], mark: Path) -> None:
    with contextlib.suppress(OSError):
        assert worker.stdin is not None
        worker.stdin.close()
    end_group(worker.pid)
    worker.wait()
    mark.unlink(missing_ok=True)


def _write(engine: Engine, worker: subprocess.Popen[str], line: dict[str, Any]) -> None:
    assert worker.stdin is not None
    try:
        worker.stdin.write(json.dumps(line) + "\n")
        worker.stdin.flush()
    except OSError as error:
        raise _death(engine) from error


def _answer(engine: Engine) -> dict[str, Any]:
    """Rank 0's next line."""
    stdout = engine.workers[0].stdout
    assert stdout is not None
    line = stdout.readline()
    if not line:
        raise _death(engine)
    return json.loads(line)


def _death(engine: Engine) -> EnvironmentFault:
    return EnvironmentFault(f"the SGLang worker died: {last_line(engine.log)} (log: {engine.log.name})")


def _make_slots(count: int, size: int) -> list[Path]:
    """Files of `size` bytes in memory. Raises EnvironmentFault where there is no room for them."""
    folder = SHARED if SHARED.is_dir() else Path(tempfile.gettempdir())
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if free < count * size:
        raise EnvironmentFault(
            f"{folder}: {free / 2**20:.0f} MiB free, capture needs {count * size / 2**20:.0f}; lower "
            "capture.batch_tokens, or give the container more shared memory"
        )
    paths: list[Path] = []
    for _ in range(count):
        handle, name = tempfile.mkstemp(prefix=f"draftsmith-{os.getpid()}-", dir=folder)
        os.truncate(handle, size)
        os.close(handle)
        paths.append(Path(name))
    return paths
