"""What the peer is given: our schedule, a pack a step, whole, in its own collator's form, at the right norm."""

import argparse
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data.store import Entry, Features, shard_name, write_index, write_shard
from data.tokens import Row, write_rows
from recipes.load import build as checked
from recipes.load import plain
from recipes.schema import Recipe
from tests.bench import equal
from tests.bench.equal import Losses, Packs, Plan, average, plan_of, recipe_of
from tests.tiny import recipe_data
from train.source import steps_of, training_rows

HIDDEN = 8
LENGTHS = [5, 30, 31, 60, 61, 90, 120, 200, 17, 44, 52, 9]


def recipe(folder: Path, **train: Any) -> Recipe:
    data = recipe_data(folder / "target", folder / "prompts")
    data["train"] |= {"epochs": 3.0, "pack_tokens": 128, "seed": 3, **train}
    return checked(data)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of known lengths, one of them longer than a pack, with features that say where they are from."""
    run = tmp_path_factory.mktemp("equal")
    rows = [
        Row(
            row_id=f"{i:02}", domain="chat", split="train", input_ids=tuple(range(1000 * i, 1000 * i + length)),
            loss_mask=tuple(int(place >= length // 3) for place in range(length)),
        )
        for i, length in enumerate(LENGTHS)
    ]  # fmt: skip
    rows.sort(key=lambda row: (len(row.input_ids), row.row_id))
    (run / "tokens").mkdir()
    write_rows(run / "tokens" / "rows.parquet", rows)
    (run / "features").mkdir()
    shards = [
        write_shard(run / "features", n, [(entry(row), features(row)) for row in rows[6 * n : 6 * n + 6]],
                    torch.bfloat16, 3)
        for n in range(2)
    ]  # fmt: skip
    assert shards[1].file == shard_name(1)
    write_index(run / "features", shards, HIDDEN, 3)
    return run


def entry(row: Row) -> Entry:
    return Entry(row_id=row.row_id, domain=row.domain, split=row.split, start=0, length=len(row.input_ids))


def features(row: Row) -> Features:
    ids = torch.tensor(row.input_ids)
    states = (ids % 1000)[:, None].expand(-1, HIDDEN)  # what bf16 holds exactly
    return Features(
        aux_SAH=states.repeat(1, 3).bfloat16(), final_SH=-states.bfloat16(), input_ids_S=ids,
        loss_mask_S=torch.tensor(row.loss_mask).bool(),
    )  # fmt: skip


def manifest(folder: Path, recipe: Recipe, **accounting: Any) -> None:
    folder.mkdir(exist_ok=True)
    held = {"recipe": plain(recipe), "accounting": accounting}
    (folder / "manifest.json").write_text(json.dumps(held))


def test_the_plan_is_our_schedule_and_no_batch_is_cut(run: Path):
    settings = recipe(run)
    rows, plan = training_rows(settings, run), plan_of(settings, run)
    assert [[pack] for pack in plan.packs] == steps_of(settings, rows, 1)
    assert sorted(n for pack in plan.packs for n in pack) == sorted(3 * list(range(len(LENGTHS))))
    assert plan.tokens == 3 * sum(LENGTHS)
    assert plan.supervised == 3 * sum(length - length // 3 - 1 for length in LENGTHS)
    assert plan.length == 256  # the row of 200 stands alone, above pack_tokens; whole blocks of 128


def test_a_trial_takes_the_first_steps(run: Path):
    whole, short = plan_of(recipe(run), run), plan_of(recipe(run), run, most=2)
    assert short.packs == whole.packs[:2] and short.tokens < whole.tokens


@pytest.mark.parametrize(
    ("train", "capture", "trained", "said"),
    [
        ({"accumulate": 2}, {}, 0, r"train\.accumulate"),
        ({}, {"mode": "stream"}, 0, r"capture\.mode: stream"),
        ({}, {}, 7, "our head took 7 steps"),
    ],
)
def test_what_is_not_equal_is_refused(run: Path, train: Any, capture: Any, trained: int, said: str):
    data = plain(recipe(run, **train))
    data["capture"] |= capture
    with pytest.raises(ValueError, match=said):
        plan_of(checked(data), run, trained)


def test_the_recipe_is_the_heads_even_where_features_were_captured_under_another(tmp_path: Path):
    with pytest.raises(ValueError, match="no finished features"):
        recipe_of(tmp_path)
    manifest(tmp_path / "features", recipe(tmp_path, epochs=1.0), rows=3)
    assert recipe_of(tmp_path) == (recipe(tmp_path, epochs=1.0), 0)
    manifest(tmp_path / "head", recipe(tmp_path, epochs=2.0), steps=11)
    assert recipe_of(tmp_path) == (recipe(tmp_path, epochs=2.0), 11)


def test_a_batch_is_the_pack_as_the_peer_shifts_it(run: Path):
    settings = recipe(run)
    plan, rows = plan_of(settings, run), training_rows(settings, run)
    loader = Packs(run / "features", plan, HIDDEN)
    assert len(loader) == len(plan.packs)
    for pack, batch in zip(plan.packs, loader, strict=True):
        taken = [rows[n] for n in pack]
        used = sum(len(row.input_ids) - 1 for row in taken)
        ids, aux, final = (batch[k][0] for k in ("input_ids", "hidden_states", "verifier_last_hidden_states"))
        assert len(ids) == len(aux) == len(final) == plan.length
        assert ids[:used].tolist() == [token for row in taken for token in row.input_ids[1:]]
        assert torch.equal(aux[:used, 0].long(), ids[:used] % 1000 - 1)  # g_t beside x_{t+1}
        assert torch.equal(-final[:used, 0].long(), ids[:used] % 1000)  # and y_{t+1}
        assert batch["loss_mask"][0, :used].tolist() == [m for row in taken for m in row.loss_mask[1:]]
        assert not batch["loss_mask"][0, used:].any()
        documents = [d for d, row in enumerate(taken) for _ in row.input_ids[1:]]
        assert batch["document_ids"][0].tolist() == documents + [-1] * (plan.length - used)


def test_a_batch_that_the_collator_cuts_is_refused(run: Path):
    plan = plan_of(recipe(run), run)
    short = Plan(packs=plan.packs, length=128, tokens=plan.tokens, supervised=plan.supervised)
    with pytest.raises(ValueError, match="kept 128 of 199"):
        list(Packs(run / "features", short, HIDDEN))


def test_the_peer_gets_our_layers_and_its_teacher_is_normed_once(run: Path, monkeypatch: pytest.MonkeyPatch):
    config = SimpleNamespace(eagle_aux_hidden_state_layer_ids=[2, 3, 3])
    model = SimpleNamespace(config=config, target_layer_ids=[2, 3, 3], verifier_norm=torch.nn.RMSNorm(HIDDEN))
    asked, seeds = list[Any](), list[int]()
    monkeypatch.setattr(equal, "build_for", lambda *given: (asked.append(given), (model, argparse.Namespace()))[1])
    monkeypatch.setattr(equal, "read_vocab", lambda folder: (folder.name, "t2d"))
    monkeypatch.setattr(equal, "served_path", lambda folder: folder / "target" / "model")
    cli, rotary = SimpleNamespace(set_seed=seeds.append), SimpleNamespace(install_partial_neox_rotary=lambda: None)
    monkeypatch.setitem(sys.modules, "speculators.train.cli", cli)
    monkeypatch.setitem(sys.modules, "speculators.models.eagle3.rotary_partial", rotary)
    made, _ = equal.model_of(recipe(run), run, 256, "cpu")
    assert asked == [(str(run / "target" / "model"), 3, 256, ("tokens", "t2d"), "cpu")]
    assert seeds == [42]  # its own default
    assert made.config.eagle_aux_hidden_state_layer_ids == [1, 3, 5]
    state = torch.full((2, HIDDEN), 7.0)
    assert torch.equal(made.verifier_norm(state), state)
    data = plain(recipe(run))
    data["capture"]["aux_layers"] = [1, 5]
    with pytest.raises(ValueError, match="the peer reads 3"):
        equal.model_of(checked(data), run, 256, "cpu")


def test_losses_are_heard_and_averaged():
    heard = Losses()
    for said in ({"train": {"loss": 2.0}}, {"val": {"loss": 9.0}}, "text", {"train": {"loss": 4.0}}):
        heard.emit(logging.LogRecord("x", logging.INFO, "", 0, said, None, None))
    assert heard.found == [2.0, 4.0] and average(heard.found) == 3.0
    assert average([]) is None and average([1.0, float("nan")]) is None


def test_nothing_is_trained_over_what_stands_there(run: Path):
    with pytest.raises(ValueError, match="exists already"):
        equal.train(recipe(run), run, run / "features", plan_of(recipe(run), run), 1.0)
