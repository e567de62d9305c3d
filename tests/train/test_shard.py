"""A head sharded over a world of one: still DTensors, so what is gathered and put back is seen without other processes
(tests/train/test_launch.py has two).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from recipes.schema import Train
from tests.train.test_eagle3 import CONFIG, random_head
from train.eagle3 import Eagle3
from train.optim import make_optimizers
from train.shard import placed, shared, whole_head
from train.state import checkpoints, load_state, save_state
from train.step import Frozen, Step

pytestmark = pytest.mark.timeout(120)
SETTINGS = Train(epochs=1.0, optimizer="adamw", sharding="fsdp2")


@pytest.fixture(autouse=True)
def _world(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(seed: int, sharded: bool) -> tuple[Eagle3, list[torch.optim.Optimizer]]:
    """A head with a frozen lm_head, and its optimisers."""
    head, nothing = random_head(CONFIG, seed=seed), torch.zeros(0)
    head.lm_head.weight.requires_grad_(False)
    if sharded:
        frozen = Frozen(embed_VH=nothing, teacher_DH=nothing, d2t_D=nothing, t2d_V=nothing)
        shared(cast(Any, None), Step(head, frozen, SETTINGS))
    return head, make_optimizers(head, SETTINGS)


def step(head: Eagle3, optimizers: list[torch.optim.Optimizer], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        if parameter.requires_grad:
            parameter.grad = placed(torch.randn(parameter.shape, generator=generator), parameter)
    for optimizer in optimizers:
        optimizer.step()


def test_a_checkpoint_is_the_same_sharded_or_not_and_either_goes_on_from_the_others(tmp_path: Path) -> None:
    folders, ends = [tmp_path / name for name in ("whole", "sharded")], list[Eagle3]()
    for sharded, folder in enumerate(folders):
        folder.mkdir()
        head, optimizers = made(0, bool(sharded))
        for seed in range(3):
            step(head, optimizers, seed)
        save_state(folder, head, optimizers, 3, 77, write=False)
        assert checkpoints(folder) == []
        save_state(folder, head, optimizers, 3, 77)
    one, other = (load_file(checkpoints(folder)[0]) for folder in folders)
    assert sorted(one) == sorted(other) and all(torch.equal(one[name], other[name]) for name in one)
    for sharded, folder in enumerate(reversed(folders)):
        head, optimizers = made(5, bool(sharded))
        assert load_state(folder, head, optimizers) == (3, 77)
        step(head, optimizers, 9)
        ends.append(whole_head(head))
    assert all(torch.equal(a, b) for a, b in zip(*(head.parameters() for head in ends), strict=True))


def test_what_is_trained_is_sharded_and_what_is_frozen_is_not() -> None:
    head, (adamw,) = made(0, True)
    sharded = {name for name, p in head.named_parameters() if isinstance(p, DTensor)}
    assert sharded == {name for name, _ in head.named_parameters()} - {"lm_head.weight"}
    step(head, [adamw], 0)
    assert all(isinstance(state["exp_avg"], DTensor) for state in adamw.state.values())
    assert not any(isinstance(p, DTensor) for p in whole_head(head).parameters())
    plain, _ = made(0, False)
    assert whole_head(plain) is plain
