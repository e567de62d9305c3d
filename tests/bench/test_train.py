"""The order of the benchmark's cells: warm together, timed alone."""

import json
import sys
from pathlib import Path

import pytest

from tests.bench.train import compare, say, timed

CELL = """
import json, sys, time
from pathlib import Path
name, log = sys.argv[1:]
def note(what):
    with open(log, "a") as file: file.write(f"{what} {name}\\n")
note("warm")
if name == "peer:a:3:adamw": sys.exit("no memory")
print("noise"); print("ready", flush=True); sys.stdin.readline()
note("start"); time.sleep(0.05); note("end")
print(json.dumps({"tokens_per_s": 200 if "ours" in name else 100, "peak_gib": 1.0}))
"""


def test_cells_warm_up_together_and_are_timed_one_after_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = ["ours:a:3:adamw", "peer:a:3:adamw", "ours:b:7:muon", "peer:b:7:muon"]
    log, found = tmp_path / "log", {}
    for label, figures in timed(labels, lambda name: [sys.executable, "-c", CELL, name, str(log)]):
        found[label] = figures
        say(label, figures, tmp_path / "out.jsonl")
        compare(label, found)
    lines = [line.split() for line in log.read_text().splitlines()]
    assert {name for what, name in lines[:4] if what == "warm"} == set(labels)
    running = ["ours:a:3:adamw", "ours:b:7:muon", "peer:b:7:muon"]
    assert lines[4:] == [[what, name] for name in running for what in ("start", "end")]
    assert found["peer:a:3:adamw"] == {}
    shown = capsys.readouterr().out
    assert "peer:a:3:adamw: failed\nno memory" in shown and "a:3:adamw: 2" not in shown
    assert "b:7:muon: 2.00 times the peer's tokens/s, 1.00 of its peak memory" in shown
    kept = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(one["side"], one["shape"], one["ttt"]) for one in kept] == [
        ("ours", "a", 3),
        ("ours", "b", 7),
        ("peer", "b", 7),
    ]
