"""Training in one process, or in several that share each optimiser step (train.processes; train/shard.py).

Several are started by torch's own launcher as `python -m train.launch RECIPE RUN OUT SAID`: RECIPE is the resolved
recipe as JSON, SAID a folder where each process leaves what it has to say.
"""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from data.engine import end_group, mark_engine
from recipes.artifact import write_json
from recipes.faults import EnvironmentFault
from recipes.load import build, plain
from recipes.schema import Recipe
from train import loop

FAULTS = {"ValueError": ValueError, "EnvironmentFault": EnvironmentFault}
PR_SET_PDEATHSIG = 1
"""of prctl, from linux/prctl.h"""


def make(recipe: Recipe, run: Path, out: Path) -> dict[str, Any]:
    """Train run's head into `out` in as many processes as the recipe says. Raises what a process of it raised,
    EnvironmentFault where one dies otherwise.
    """
    if recipe.train.processes == 1:
        return loop.make(recipe, run, out)
    log = run / "logs" / "train.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, open(log, "ab") as sink:
        said, start = Path(scratch), sink.tell()
        write_json(said / "recipe.json", plain(recipe))
        command = (
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
            str(recipe.train.processes), "-m", "train.launch", str(said / "recipe.json"), str(run), str(out), scratch,
        )  # fmt: skip
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True,
            env={"OMP_NUM_THREADS": str(_threads(recipe.train.processes)), **os.environ},
        )  # fmt: skip
        mark = mark_engine(run, process.pid)
        try:
            process.wait()
        finally:
            end_group(process.pid)
            process.wait()
            mark.unlink(missing_ok=True)
        return _answer(said, log, start, process.returncode)


def _answer(said: Path, log: Path, start: int, code: int) -> dict[str, Any]:
    """What the first process made; raises the first fault that one of them named. `start`: where its log begins."""
    for file in sorted(said.glob("fault-*.json")):
        fault = json.loads(file.read_text(encoding="utf-8"))
        raise FAULTS[fault["kind"]](fault["message"])
    made = said / "made.json"
    if not made.exists():
        text = log.read_bytes()[start:].decode(errors="replace")
        raise EnvironmentFault(f"a training process died: {_cause(text, code)} (log: {log.name})")
    return json.loads(made.read_text(encoding="utf-8"))


def _cause(text: str, code: int) -> str:
    """Why the first one died, by the launcher's summary: its signal, else what it said last. The others die of that."""
    if code < 0:
        return f"the launcher was ended by {signal.Signals(-code).name}"
    summary = text.partition("Root Cause (first observed failure)")[2]
    if ended := re.search(r"Signal \d+ \((\w+)\)", summary):
        return f"it was ended by {ended[1]}" + (", as where memory runs out" if ended[1] == "SIGKILL" else "")
    rank = re.search(r"rank\s*: (\d+)", summary)
    own = f"[rank{rank[1] if rank else ''}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    said = [line.partition(": ")[2].strip() for line in telling if line.startswith(own)]
    return (said or telling or lines or ["it wrote nothing"])[-1][:300]


def _threads(processes: int) -> int:
    """Of each process: on a CPU they share the cores."""
    cores = len(os.sched_getaffinity(0))
    return max(1, cores // processes) if not torch.cuda.is_available() else 4


def main(argv: list[str]) -> int:
    """One of several processes."""
    # torch's launcher gives each process a session of its own: one that is killed would leave them training for ever.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    recipe, run, out, said = (Path(part) for part in argv)
    rank = os.environ["RANK"]
    try:
        made = loop.make(build(json.loads(recipe.read_text(encoding="utf-8"))), run, out)
    except (ValueError, EnvironmentFault) as fault:
        kind = "EnvironmentFault" if isinstance(fault, EnvironmentFault) else "ValueError"
        write_json(said / f"fault-{rank}.json", {"kind": kind, "message": str(fault)})
        return 1
    if rank == "0":
        write_json(said / "made.json", made)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
