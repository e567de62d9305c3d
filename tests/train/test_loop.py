"""The loop on a tiny target: it learns, it says when it cannot, and it refuses a warm start with another vocabulary."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from data import capture, capture_hf, target, tokens
from data.answers import Turn
from data.tensors import write_tensors
from recipes.artifact import Stage, build
from recipes.load import build as checked
from recipes.schema import Recipe
from tests.tiny import make_target, recipe_data
from train import loop, losses
from train.head import open_head, save_head

TARGET = Stage(name="target", verb="prepare", make=target.make, inputs=(), keys=("target",))
TOKENS = Stage(name="tokens", verb="prepare", make=tokens.make, inputs=(), keys=())
FEATURES = Stage(name="features", verb="capture", make=capture.make, inputs=("target", "tokens"), keys=("capture",))


@pytest.fixture(autouse=True)
def _fresh_accelerator() -> None:
    """accelerate keeps one state a process; each run of the product has its own process."""
    AcceleratorState._reset_state(reset_partial_state=True)


def recipe_of(folder: Path, **train: Any) -> Recipe:
    path = folder / "target"
    plain = recipe_data(path if path.exists() else make_target(path), folder / "p")
    plain["train"].update(train)
    return checked(plain)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A captured run whose text repeats four sentences, so that a head can learn it."""
    folder = tmp_path_factory.mktemp("loop")
    recipe, run = recipe_of(folder), folder / "run"
    run.mkdir()
    build(TARGET, recipe, run)
    generator = torch.Generator().manual_seed(0)
    sentences = [torch.randint(5, 300, (30,), generator=generator).tolist() for _ in range(4)]
    rows = tokens.merge([
        Turn(prompt_id=f"{i:03}", domain="chat", split="train" if i % 6 else "held_out", turn=0,
             prompt_ids=(3, 4, 5 + i % 9), output_ids=tuple(sentences[i % 4]), finish="stop")
        for i in range(36)
    ])  # fmt: skip
    made = run / "tokens"
    made.mkdir()
    tokens.write_rows(made / "rows.parquet", rows)
    d2t, t2d = tokens.vocabulary(tokens.supervised_counts(rows, {}), 128, 320)
    write_tensors(made / "vocab.safetensors", {"d2t": d2t, "t2d": t2d})
    (made / "manifest.json").write_text(json.dumps({"plan": {}, "files": {}}))
    build(FEATURES, recipe, run)
    return folder


def train(folder: Path, out: Path, **settings: Any) -> dict[str, Any]:
    out.mkdir()
    return loop.make(recipe_of(folder, **settings), folder / "run", out)


def test_the_loss_falls_and_the_head_is_saved_whole(folder: Path, tmp_path: Path) -> None:
    counts = train(folder, tmp_path / "head", epochs=30.0, muon_lr=0.01)
    lines = [json.loads(line) for line in (tmp_path / "head" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    assert all(torch.isfinite(torch.tensor(line["grad_norm"])) for line in lines if "loss" in line)
    head, _, _ = open_head(tmp_path / "head")
    assert head.config.draft_vocab_size == 128
    assert counts["supervised_tokens_seen"] == lines[-2]["seen"]
    assert counts["simulated"]["chat"] >= 1.0
    assert not list((tmp_path / "head").glob("checkpoint-*"))


def test_the_time_spent_waiting_for_data_is_told(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = loop.feed
    monkeypatch.setattr(loop, "feed", lambda *given: ((packs, waited + 2) for packs, waited in late(*given)))
    counts = train(folder, tmp_path / "head", epochs=1.0)
    assert 2 * counts["steps"] <= counts["seconds_waited_for_data"] < 2 * counts["steps"] + 1


def test_the_loss_does_not_depend_on_how_rows_are_packed(folder: Path, tmp_path: Path) -> None:
    """One optimiser step over the same rows, as one pack or as several: divided once, by all supervised tokens."""
    first: list[float] = []
    for name, pack_tokens, accumulate in (("one", 4000, 1), ("many", 70, 100)):
        train(folder, tmp_path / name, epochs=1.0, pack_tokens=pack_tokens, accumulate=accumulate, precision="fp32")
        first.append(json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0])["loss"])
    assert first[0] == pytest.approx(first[1], rel=1e-4)


def test_divergence_stops_the_run_before_the_weights_are_spoilt(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(losses.LOSSES, "kl", lambda draft, _teacher: draft.sum(-1) * float("nan"))
    with pytest.raises(ValueError, match=r"training diverged: loss nan, .*lower train.lr"):
        train(folder, tmp_path / "head")
    assert not (tmp_path / "head" / "head.safetensors").exists()


def test_a_streamed_run_trains_as_one_from_disk(folder: Path, tmp_path: Path) -> None:
    """The same rows in the same order; states differ by the rounding of other batch shapes only."""
    losses_of: list[list[float]] = []
    for mode in ("disk", "stream"):
        out = tmp_path / mode
        out.mkdir()
        recipe = recipe_of(folder, epochs=3.0, pack_tokens=70, accumulate=2)
        recipe = replace(recipe, capture=replace(recipe.capture, mode=mode, check_rows=0))
        counts = loop.make(recipe, folder / "run", out)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses_of.append([line["loss"] for line in lines if "loss" in line])
        assert counts["steps"] == len(losses_of[-1])
        AcceleratorState._reset_state(reset_partial_state=True)
    assert losses_of[0] == pytest.approx(losses_of[1], rel=0.02)


def test_a_streamed_state_that_is_not_finite_stops_the_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = capture_hf.forward

    def spoilt(session: Any, rows: Any) -> Any:
        aux_SAH = (found := whole(session, rows))[0].aux_SAH.clone()
        aux_SAH[1, 2] = float("inf")
        return [replace(found[0], aux_SAH=aux_SAH), *found[1:]]

    monkeypatch.setattr(capture_hf, "forward", spoilt)
    recipe = recipe_of(folder)
    recipe = replace(recipe, capture=replace(recipe.capture, mode="stream", check_rows=0))
    with pytest.raises(
        ValueError, match=r"a captured state is not finite \(rows .*capture.mode: disk leaves such rows"
    ):
        loop.make(recipe, folder / "run", tmp_path)


def test_a_warm_start_goes_on_from_the_head_it_names(folder: Path, tmp_path: Path) -> None:
    train(folder, tmp_path / "first", epochs=10.0)
    train(folder, tmp_path / "second", epochs=1.0, warm_start=str(tmp_path / "first"), muon_lr=1e-9, lr=1e-9)
    first, second = (open_head(tmp_path / name)[0] for name in ("first", "second"))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_a_warm_start_with_another_vocabulary_or_shape_is_refused(folder: Path, tmp_path: Path) -> None:
    train(folder, tmp_path / "head", epochs=1.0)
    head, d2t, t2d = open_head(tmp_path / "head")
    (tmp_path / "moved").mkdir()
    save_head(tmp_path / "moved", head, d2t + 1, t2d, {})
    with pytest.raises(ValueError, match="another draft vocabulary"):
        train(folder, tmp_path / "x", warm_start=str(tmp_path / "moved"))
    head.config = replace(head.config, norm_output=False)
    save_head(tmp_path / "moved", head, d2t, t2d, {})
    with pytest.raises(ValueError, match="other settings than the recipe's head"):
        train(folder, tmp_path / "y", warm_start=str(tmp_path / "moved"))


def test_simulation_leaves_the_fp32_weights_alone(folder: Path, tmp_path: Path) -> None:
    train(folder, tmp_path / "head", epochs=1.0)
    recipe = recipe_of(folder)
    frozen = loop._frozen(recipe, folder / "run", torch.device("cpu"))
    head, _, _ = open_head(tmp_path / "head")
    before = [p.clone() for p in head.parameters()]
    found = loop.simulate(head, folder / "run" / "features", frozen, 3)
    assert all(torch.equal(a, b) for a, b in zip(before, head.parameters(), strict=True))
    assert found["chat"]["length"] == json.loads((tmp_path / "head" / "simulated.json").read_text())["chat"]["length"]
