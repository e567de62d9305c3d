from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recipes.schema import Train
from tests.train.test_eagle3 import CONFIG, random_head
from train.optim import make_optimizers, restore_state, set_rate, share, state_tensors
from train.state import checkpoints, cut_metrics, load_state, save_state


def test_muon_takes_the_hidden_matrices_and_adamw_the_rest() -> None:
    head = random_head(CONFIG)
    adamw, muon = make_optimizers(head, Train(epochs=1.0))
    names = {p: n for n, p in head.named_parameters()}
    held = {names[p] for p in muon.param_groups[0]["params"]}
    rest = {names[p] for p in adamw.param_groups[0]["params"]}
    assert "fc.weight" in held and "layers.0.mlp.up_proj.weight" in held
    assert "lm_head.weight" in rest and "norm.weight" in rest
    assert held | rest == set(names.values()) and not held & rest
    (only,) = make_optimizers(head, Train(epochs=1.0, optimizer="adamw"))
    assert len(only.param_groups[0]["params"]) == len(names)


def test_a_frozen_lm_head_is_not_trained() -> None:
    head = random_head(CONFIG)
    head.lm_head.weight.requires_grad_(False)
    held = [p for o in make_optimizers(head, Train(epochs=1.0)) for g in o.param_groups for p in g["params"]]
    assert all(p is not head.lm_head.weight for p in held)


def test_the_rate_warms_up_linearly_and_falls_to_its_last_share() -> None:
    settings = Train(epochs=1.0, warmup_steps=4, final_lr=0.1)
    shares = [share(settings, step, 104) for step in range(104)]
    assert shares[:4] == [0.25, 0.5, 0.75, 1.0]
    assert shares[54] == pytest.approx(0.55) and shares[-1] == pytest.approx(0.1, abs=1e-3)
    head = random_head(CONFIG)
    both = make_optimizers(head, replace(settings, lr=1e-3, muon_lr=0.02))
    set_rate(both, 0.5)
    assert [o.param_groups[0]["lr"] for o in both] == [5e-4, 0.01]


def step(head: torch.nn.Module, optimizers: list[torch.optim.Optimizer], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    for optimizer in optimizers:
        optimizer.step()


def test_a_restored_state_goes_on_bit_for_bit(tmp_path: Path) -> None:
    head = random_head(CONFIG)
    optimizers = make_optimizers(head, Train(epochs=1.0))
    for seed in range(3):
        step(head, optimizers, seed)
    save_state(tmp_path, head, optimizers, 3, 77)
    step(head, optimizers, 9)
    other = random_head(CONFIG, seed=5)
    others = make_optimizers(other, Train(epochs=1.0))
    assert load_state(tmp_path, other, others) == (3, 77)
    step(other, others, 9)
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), other.parameters(), strict=True))


def test_a_fused_optimizers_step_counters_go_to_its_device() -> None:
    head = random_head(CONFIG)
    optimizers = make_optimizers(head, Train(epochs=1.0, optimizer="adamw"))
    step(head, optimizers, 0)
    state = state_tensors(head, optimizers)
    for fused, device in ((True, "meta"), (False, "cpu")):
        elsewhere = random_head(CONFIG).to("meta")
        others = make_optimizers(elsewhere, Train(epochs=1.0, optimizer="adamw"))
        others[0].param_groups[0]["fused"] = fused
        restore_state(elsewhere, others, state)
        restored = others[0].state[elsewhere.fc.weight]
        assert restored["step"].device.type == device and restored["exp_avg"].device.type == "meta"


def test_only_the_newest_checkpoint_stays(tmp_path: Path) -> None:
    head = random_head(CONFIG)
    optimizers = make_optimizers(head, Train(epochs=1.0))
    assert load_state(tmp_path, head, optimizers) == (0, 0)
    for number in (5, 10):
        save_state(tmp_path, head, optimizers, number, 1)
    assert [c.name for c in checkpoints(tmp_path)] == ["checkpoint-0000010.safetensors"]


def test_metrics_of_steps_to_be_run_again_are_cut(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    cut_metrics(log, 2)
    assert log.read_text() == '{"step": 1}\n{"step": 2}\n'
    cut_metrics(tmp_path / "none.jsonl", 2)
