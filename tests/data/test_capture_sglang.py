"""The worker and its seam as real processes, with a stand-in for SGLang's classes (tests/fake_sglang.py)."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from data import capture, capture_sglang
from data.store import read_index, read_row
from data.tokens import Row, write_rows
from recipes.faults import EnvironmentFault
from recipes.load import build as checked
from recipes.schema import Recipe
from tests.data.test_capture import rows
from tests.fake_sglang import states, write_fake_sglang
from tests.tiny import make_target, recipe_data

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and the stand-in."""
    folder = tmp_path_factory.mktemp("sglang")
    make_target(folder / "target")
    write_fake_sglang(folder / "engine")
    return folder


def recipe_of(folder: Path, env: dict[str, str] | None = None, **settings: Any) -> Recipe:
    plain = recipe_data(folder / "target", folder / "p")
    path = f"{folder / 'engine'}{os.pathsep}{ROOT}"
    plain["capture"] = {
        **plain.get("capture", {}), "backend": "sglang", "batch_tokens": 64, "env": {"PYTHONPATH": path, **(env or {})},
        **settings,
    }  # fmt: skip
    return checked(plain)


def captured(recipe: Recipe, folder: Path, run: Path, batches: list[list[Row]]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    with capture_sglang.session(recipe, run, folder / "target", run / "logs" / "capture.log") as opened:
        for batch in capture_sglang.stream(opened, batches):
            found += [torch.cat([one.aux_SAH, one.final_SH], -1).clone() for one in batch]
        assert not list(capture_sglang.SHARED.glob(f"draftsmith-{os.getpid()}-*"))  # a kill now would leave nothing
    return found


def test_states_come_back_row_by_row_in_order_through_all_slots(folder: Path, tmp_path: Path) -> None:
    recipe = recipe_of(folder)
    batches = [rows([7, 12, 5]), rows([30]), rows([9, 9]), rows([3]), rows([20, 21]), rows([64]), rows([2])]
    found = captured(recipe, folder, tmp_path, batches)
    for ours, row in zip(found, [row for batch in batches for row in batch], strict=True):
        assert torch.equal(ours, torch.cat([states(list(row.input_ids), layer) for layer in (1, 3, 5, 100)], -1))
    assert not list((tmp_path / "engines").glob("*.json"))


def test_several_ranks_get_the_same_batches_and_one_answers(folder: Path, tmp_path: Path) -> None:
    assert len(captured(recipe_of(folder, tensor_parallel=2), folder, tmp_path, [rows([7]), rows([8, 9])])) == 3


def test_several_engines_share_the_batches_and_the_order_stays(folder: Path, tmp_path: Path) -> None:
    recipe = recipe_of(folder, engines=2)
    batches = [rows([7 + i, 3]) for i in range(13)]
    with capture_sglang.session(recipe, tmp_path, folder / "target", tmp_path / "logs" / "capture.log") as opened:
        assert len({worker.pid for engine in opened.engines for worker in engine.workers}) == 2
        found = [one.aux_SAH.clone() for batch in capture_sglang.stream(opened, batches) for one in batch]
    for ours, row in zip(found, [row for batch in batches for row in batch], strict=True):
        assert torch.equal(ours, torch.cat([states(list(row.input_ids), layer) for layer in (1, 3, 5)], -1))


def test_each_engine_and_rank_has_a_gpu_of_its_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    launched = {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(capture_sglang, "_write", lambda _engine, _worker, line: told.append(line["gpu"]))
    monkeypatch.setattr(capture_sglang, "_answer", lambda _engine: {"ready": True})
    recipe = recipe_of(folder, engines=2, tensor_parallel=2)
    with capture_sglang.session(recipe, tmp_path, folder / "target", tmp_path / "logs" / "capture.log") as opened:
        assert told == [4, 5, 6, 7]
        environment = psutil.Process(opened.engines[0].workers[0].pid).environ()
        assert "PATH" in environment and not launched.keys() & environment.keys()


def test_a_worker_that_cannot_start_is_one_clear_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        EnvironmentFault, match=r"worker (died|did not start): .*no such attention backend.*capture.log"
    ):
        captured(recipe_of(folder, {"FAKE_FAILS": "1"}), folder, tmp_path, [rows([3])])
    with pytest.raises(EnvironmentFault, match="capture.command: '/nowhere/python' cannot be started"):
        captured(recipe_of(folder, command=["/nowhere/python"]), folder, tmp_path, [rows([3])])
    assert not list((tmp_path / "engines").glob("*.json"))


def test_a_worker_that_dies_half_way_stops_the_capture(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="the SGLang worker died"):
        captured(recipe_of(folder, {"FAKE_DIES_AFTER": "3"}), folder, tmp_path, [rows([4 + i]) for i in range(9)])


def test_a_cached_prefix_is_noticed(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="a prefix was cached or a prompt cut"):
        captured(recipe_of(folder, {"FAKE_CACHED": "2"}), folder, tmp_path, [rows([6])])


def test_a_batch_longer_than_a_slot_is_refused(folder: Path, tmp_path: Path) -> None:
    recipe = recipe_of(folder)
    with pytest.raises(
        ValueError, match=r"a batch of 9000 tokens does not fit a slot of \d+; raise capture.batch_tokens"
    ):
        captured(recipe, folder, tmp_path, [rows([9000])])


def test_a_streamed_pack_fits_a_slot_though_it_is_longer_than_a_batch(folder: Path, tmp_path: Path) -> None:
    recipe = recipe_of(folder, mode="stream")
    pack_tokens = recipe.answers.max_prompt_tokens + recipe.answers.max_tokens + 2000
    longer = replace(recipe, train=replace(recipe.train, pack_tokens=pack_tokens))
    (found,) = captured(longer, folder, tmp_path, [rows([pack_tokens])])
    assert len(found) == pack_tokens


def test_too_little_shared_memory_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentFault, match=r"MiB free, capture needs .*; lower capture.batch_tokens"):
        capture_sglang._make_slots(4, 2**50)


def test_the_store_is_the_one_that_hf_writes(folder: Path, tmp_path: Path) -> None:
    """The whole stage through both backends: the same rows, shards and states, and the check's errors noted."""
    stored: list[Path] = []
    for name in ("sglang", "hf"):
        run = tmp_path / name
        (run / "tokens").mkdir(parents=True)
        (run / "target").mkdir()
        (run / "target" / "target.json").write_text(f'{{"path": "{folder / "target"}"}}')
        write_rows(run / "tokens" / "rows.parquet", rows([9, 30, 14, 41, 8, 22]))
        recipe = recipe_of(folder, {"FAKE_REAL": "1"}, backend=name, shard_tokens=64)
        (run / "features").mkdir()
        counts = capture.make(recipe, run, run / "features")
        assert counts["rows"] == 6 and counts["tokens"] == 124 and counts["backend"] == name
        assert ("state_errors" in counts) == (name == "sglang")
        stored.append(run / "features")
    ours, theirs = ([(s, e) for s in read_index(f) for e in s.entries] for f in stored)
    assert [e for _, e in ours] == [e for _, e in theirs]
    for a, b in zip(ours, theirs, strict=True):
        one, two = read_row(stored[0], *a), read_row(stored[1], *b)
        torch.testing.assert_close(one.aux_SAH, two.aux_SAH, atol=0.05, rtol=0.05)
        assert torch.equal(one.loss_mask_S, two.loss_mask_S)
