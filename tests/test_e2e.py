"""The whole chain for real, at a small budget: real target, traffic and vLLM; then every way in which it must refuse.

One run is made once and copied for each test that spoils it.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from data import capture_hf
from data.engine import serving
from data.target import embedding, served_path
from data.tokens import read_rows
from export.record import read_record, read_verdict
from export.reload import reload_faults, speculators_logits
from export.validate import validate
from recipes.artifact import hash_file, read_manifest, write_json
from recipes.load import load
from train.head import open_head
from train.places import places

pytestmark = pytest.mark.served
ROOT = Path(__file__).parent.parent
SMALL = [
    "domains.sharegpt.train=240", "domains.sharegpt.held_out=24", "domains.mt_bench.held_out=8",
    "domains.humaneval.held_out=8", "answers.held_out=4", "answers.max_tokens=128", "train.tokens=90000",
    "gate.prompts=24", "gate.min_requests=6", "gate.max_tokens=128", "gate.speed_prompts=3", "gate.loads=[3]",
    "gate.speed_max_tokens=32", "gate.speed_domain=sharegpt", "gate.rules.sharegpt.min_acceptance=1.1",
    "gate.rules.sharegpt.min_acceptance_unrepeated=0.0", "gate.rules.sharegpt.min_speedup=0.0",
    "gate.rules.sharegpt.min_median_speedup=0.0",
]  # fmt: skip
# Enough for a verdict, without what a spoilt head need not be asked.
QUICK = [*SMALL, "gate.prompts=8", "gate.ngram=false", "gate.speed_domain=''"]


def start(runs: Path, verb: str, options: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "draftsmith.py", verb, "smollm2-chat", "--runs", str(runs), *options]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(runs: Path, verb: str, options: list[str]) -> tuple[int, str]:
    """draftsmith in its own process: exit code and what it said."""
    process = start(runs, verb, options)
    said, _ = process.communicate(timeout=1500)
    print(said)
    return process.returncode, said


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """runs/ of a finished small run."""
    runs = tmp_path_factory.mktemp("made")
    code, said = run(runs, "run", SMALL)
    assert code == 0, said
    return runs


@pytest.fixture()
def copy(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "runs")
    return tmp_path / "runs"


def test_the_chain_ends_in_a_publication_that_the_record_bears_out(made: Path) -> None:
    folder = made / "smollm2-chat"
    record, verdict = read_record(folder), read_verdict(folder)
    assert verdict.passed and record.parity is not None
    windows = sum(p.windows for p in record.parity.values())
    assert sum(p.equal for p in record.parity.values()) / windows >= 0.985
    acceptance = verdict.domains["sharegpt"].acceptance
    assert acceptance.low >= 1.1 and acceptance.low < acceptance.value < acceptance.high
    counted = record.counters["head"]["sharegpt"]
    assert 1 + counted.accepted / counted.drafts == pytest.approx(acceptance.value, rel=0.01)
    timed = verdict.speed
    assert timed and timed.p99 and timed.same and timed.same.answers == 9 and timed.same.none_answers == 6
    assert timed.loads["3"].speedup and set(timed.loads["3"].throughput) == {"none", "head"}
    names = {p.name for p in (folder / "publication").iterdir()}
    assert {"README.md", "config.json", "model.safetensors", "record.json", "verdict.json"} <= names
    card = (folder / "publication" / "README.md").read_text()
    assert f"{acceptance.value:.2f}" in card and "dequantised" in card and "not portable" in card.lower()
    assert str(made) not in card
    assert (folder / "verdict" / "report.html").stat().st_size > 10_000


def test_a_second_run_has_nothing_to_do(made: Path) -> None:
    before = read_manifest(made / "smollm2-chat" / "publication")
    started = time.monotonic()
    assert run(made, "run", SMALL) == (0, "")
    assert time.monotonic() - started < 30
    assert read_manifest(made / "smollm2-chat" / "publication") == before


def test_speculators_loads_the_folder_and_gives_our_logits(made: Path) -> None:
    folder = made / "smollm2-chat"
    target = served_path(folder)
    assert validate(folder / "checkpoint", target=target, local_target=True) == []
    assert reload_faults(folder / "checkpoint", target) == []
    head, _, _ = open_head(folder / "head")
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(parameter.bfloat16())  # as exported
    row = next(r for r in read_rows(folder / "tokens") if r.split == "held_out")
    session = capture_hf.open_target(target, head.config.aux_layers, torch.float32)
    features = capture_hf.forward(session, [row])[0]
    ids, size = features.input_ids_S, len(row.input_ids)
    theirs = speculators_logits(folder / "checkpoint", target, features.aux_SAH, torch.cat([ids[1:], ids[:1]]))
    table = embedding(target).float()
    with torch.no_grad():
        at = places([(0, size)], torch.arange(size))
        ours = head.logits(features.aux_SAH, [table[torch.cat([ids[1:], ids[:1]])]], at)[0]
    torch.testing.assert_close(ours, theirs.float(), atol=2e-3, rtol=1e-3)


def test_vllm_serves_the_publication_alone(made: Path, tmp_path: Path) -> None:
    recipe = load("smollm2-chat", SMALL)
    folder = made / "smollm2-chat" / "publication"
    log = tmp_path / "log"
    with serving(recipe.engine, run=tmp_path, target=recipe.target, path=folder, log=log) as server:
        body = {"model": "target", "messages": [{"role": "user", "content": "Count to ten."}], "max_tokens": 24,
                "temperature": 0}  # fmt: skip
        request = urllib.request.Request(
            f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            assert json.loads(reply.read())["usage"]["completion_tokens"] > 1
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as page:
            drafts = [line for line in page.read().decode().splitlines() if "spec_decode_num_drafts_total{" in line]
    assert float(drafts[0].split()[-1]) > 0  # it did speculate


def test_a_random_head_is_measured_and_refused(copy: Path) -> None:
    untrained = [*QUICK, "train.tokens=1", "train.lr=1e-9", "train.muon_lr=1e-9"]
    code, said = run(copy, "run", untrained)
    assert code == 2 and "sharegpt" in said and "acceptance" in said.lower()
    assert not _published(copy, untrained)
    assert run(copy, "publish", untrained)[0] == 2


def test_a_head_of_another_target_does_not_get_served_or_published(copy: Path) -> None:
    folder = copy / "smollm2-chat" / "checkpoint"
    config = json.loads((folder / "config.json").read_text())
    config["transformer_layer_config"]["hidden_size"] = 512
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t[..., :512].contiguous() if t.dim() == 2 else t for n, t in tensors.items()},
              folder / "model.safetensors")  # fmt: skip
    _reseal(folder)
    code, said = run(copy, "measure", QUICK)
    assert code == 3 and "engine" in said
    code, said = run(copy, "gate", QUICK)
    assert code == 2 and not _published(copy, QUICK)


def test_a_truncated_checkpoint_is_refused(copy: Path) -> None:
    weights = copy / "smollm2-chat" / "checkpoint" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4096])
    for verb in ("gate", "publish"):
        code, said = run(copy, verb, SMALL)
        assert code == 2 and "model.safetensors" in said


def test_a_recipe_edited_after_the_measurement_is_refused(copy: Path) -> None:
    edited = [*SMALL, "gate.rules.sharegpt.min_acceptance=1.01"]
    for verb in ("gate", "publish"):
        code, said = run(copy, verb, edited)
        assert code == 2 and "min_acceptance: 1.1 -> 1.01" in said


def test_a_server_that_dies_half_way_is_no_measurement(copy: Path) -> None:
    published = read_manifest(copy / "smollm2-chat" / "publication")
    process = start(copy, "measure", QUICK)
    for pid in _engines_once_rows_exist(copy, process):
        os.killpg(pid, signal.SIGKILL)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 3 and "engine" in said, said
    code, said = run(copy, "gate", QUICK)
    assert code == 2 and read_manifest(copy / "smollm2-chat" / "publication") == published


def test_a_killed_measurement_keeps_its_rows_and_its_orphans_are_ended(copy: Path) -> None:
    process = start(copy, "measure", QUICK)
    orphans = _engines_once_rows_exist(copy, process)
    process.kill()
    process.wait()
    rows = (copy / "smollm2-chat" / "record.partial" / "rows.jsonl").read_text()
    kept = rows[: rows.rfind("\n") + 1].count('"prompt_id"')
    assert any(psutil.pid_exists(pid) for pid in orphans)
    code, said = run(copy, "measure", QUICK)
    assert code == 0 and "ended an engine that a killed run left behind" in said
    assert not any(psutil.pid_exists(pid) for pid in orphans)
    manifest = read_manifest(copy / "smollm2-chat" / "record")
    assert manifest is not None and manifest["accounting"]["kept_from_before"] >= min(1, kept)


def test_parity_sees_every_planted_export_error(made: Path) -> None:
    command = [sys.executable, "-m", "eval.controls", str(made / "smollm2-chat"), "--prompts", "12"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    print(done.stdout, done.stderr[-2000:])
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == 8 and found[0]["control"] == "good"
    assert done.returncode == 0, {f["control"]: f["fails"] for f in found}


def _engines_once_rows_exist(runs: Path, process: subprocess.Popen[str]) -> list[int]:
    """Pids of the engines, as soon as the measurement has a finished row."""
    rows = runs / "smollm2-chat" / "record.partial" / "rows.jsonl"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        if rows.exists() and rows.read_text().count('"prompt_id"') >= 1:
            marks = (runs / "smollm2-chat" / "engines").glob("*.json")
            return [json.loads(mark.read_text())["pid"] for mark in marks]
        time.sleep(0.1)
    raise AssertionError("the measurement gave no row")


def _published(runs: Path, options: list[str]) -> bool:
    """True where the publication is of the present checkpoint."""
    manifest: dict[str, Any] | None = read_manifest(runs / "smollm2-chat" / "publication")
    checkpoint = hash_file(runs / "smollm2-chat" / "checkpoint" / "model.safetensors")
    return bool(manifest) and manifest["files"]["model.safetensors"]["sha256"] == checkpoint


def _reseal(folder: Path) -> None:
    """Write the manifest anew over changed files, as if the stage had made them: then only the engine can tell."""
    manifest = read_manifest(folder)
    assert manifest is not None
    for name in manifest["files"]:
        manifest["files"][name] = {"sha256": hash_file(folder / name), "bytes": (folder / name).stat().st_size}
    write_json(folder / "manifest.json", manifest)
