"""The step as a GPU runs it, on the CPU: flash attention and the loss kernel replaced by plain tensors, the rest ours.

One graph without breaks for packs of every size, and the eager step's loss and gradients.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel

from recipes.schema import Train
from tests.bench.shapes import SHAPES, documents, head_config, vocabulary
from tests.train import test_attention_flash as flash_on_cpu
from train import attention_flash, eagle3, losses, losses_fused, step
from train.eagle3 import Eagle3
from train.pack import Pack, pack
from train.shard import shared
from train.step import Frozen, Step, mark

SHAPE = SHAPES["tiny"]


def rows(
    logits: torch.Tensor, teacher: torch.Tensor, shift: int, weight: torch.Tensor, kind: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's contract (test_losses.py holds the kernel itself to it)."""
    target = teacher[(torch.arange(len(logits)) + shift).clamp_max(len(teacher) - 1)]
    q, p = logits.softmax(-1), target.softmax(-1)
    accepted, above = torch.minimum(p, q).sum(-1), torch.where(q < p, q, 0.0).sum(-1, keepdim=True)
    share = (-losses.LK_DECAY * accepted).exp() if kind == 2 else torch.ones_like(accepted)
    loss = (share * losses.kl(logits, target) + (1 - share) * (1 - accepted)) * weight
    ids = logits.argmax(-1)
    slope = share[:, None] * (q - p) - (1 - share[:, None]) * q * ((q < p).float() - above)
    logits.copy_(slope * weight[:, None])
    return loss, ids


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    assert flash_on_cpu  # its import gives the flash operators CPU kernels
    kernel: Any = ModuleType("train.loss_kernel")
    kernel.rows = rows
    monkeypatch.setitem(sys.modules, "train.loss_kernel", kernel)
    yield
    torch._dynamo.reset()


def made(settings: Train, trained: bool = False) -> Step:
    """A step of the tiny shape in fp32, so that only mistakes differ."""
    torch.manual_seed(0)
    head = Eagle3(head_config(SHAPE))
    head.lm_head.weight.requires_grad_(trained)
    d2t_D, t2d_V = vocabulary(SHAPE)
    frozen = Frozen(
        embed_VH=torch.randn(SHAPE.vocab, SHAPE.hidden) * 0.1, teacher_DH=torch.randn(SHAPE.draft, SHAPE.hidden) * 0.1,
        d2t_D=d2t_D, t2d_V=t2d_V,
    )  # fmt: skip
    return Step(head, frozen, settings)


def results(model: Any, one: Step, packs: list[Pack]) -> list[torch.Tensor]:
    """Loss, hits, judged and all gradients, pack by pack."""
    found: list[torch.Tensor] = []
    for each in packs:
        one.zero_grad()
        parts = model(mark(each))
        parts["loss"].backward()
        grads = torch.cat([p.grad.flatten() for p in one.parameters() if p.grad is not None])
        found += [parts["loss"].detach(), parts["hits"], parts["judged"], grads]
    return found


@pytest.mark.parametrize(
    ("loss", "trained", "recompute", "compiling"),
    [
        ("kl", False, False, False),
        ("kl", False, True, False),
        ("lk_lambda", True, False, False),
        pytest.param("kl", False, False, True, marks=pytest.mark.served),  # tracing takes 9 s
        pytest.param("kl", False, True, True, marks=pytest.mark.served),
    ],
)
def test_one_graph_for_every_pack_gives_the_eager_step(
    monkeypatch: pytest.MonkeyPatch, loss: Any, trained: bool, recompute: bool, compiling: bool
) -> None:
    settings = Train(epochs=1.0, ttt_steps=2 if trained else 3, loss=loss)
    packs = [pack(documents(SHAPE, tokens, seed)) for seed, tokens in enumerate((950, 1600))]
    eager = made(settings, trained)
    expected = results(eager, eager, packs)
    monkeypatch.setattr(eagle3, "_attend", attention_flash.attend)
    monkeypatch.setattr(step, "_taught", lambda _like: losses_fused.taught)
    fused = made(replace(settings, recompute=recompute), trained)
    graphs = CompileCounterWithBackend("aot_eager")
    model = torch.compile(fused, fullgraph=True, backend=graphs) if compiling else fused
    for ours, theirs in zip(results(model, fused, packs), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)
    assert graphs.frame_count == int(compiling)


def test_recompute_in_bf16_without_a_graph_changes_nothing() -> None:
    packs, found = [pack(documents(SHAPE, 950, 0))], list[list[torch.Tensor]]()
    for recompute in (False, True):
        one = made(Train(epochs=1.0, recompute=recompute))
        one.frozen = Frozen(**{**vars(one.frozen), "embed_VH": one.frozen.embed_VH.bfloat16(),
                               "teacher_DH": one.frozen.teacher_DH.bfloat16()})  # fmt: skip
        found.append(results(one, one, packs))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.served  # tracing takes 13 s
def test_several_processes_keep_the_step_one_graph(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch would cut it at the gradient buckets of the DDP around it."""
    monkeypatch.setattr(eagle3, "_attend", attention_flash.attend)
    monkeypatch.setattr(step, "_taught", lambda _like: losses_fused.taught)
    monkeypatch.setattr(step, "_fused", lambda _like: True)
    graphs, compiler = CompileCounterWithBackend("aot_eager"), Step.compile
    monkeypatch.setattr(Step, "compile", lambda self, **given: compiler(self, backend=graphs, **given))
    one, packs = made(Train(epochs=1.0)), [pack(documents(SHAPE, 950, 0))] * 2
    expected = results(one, one, packs)
    with torch._dynamo.config.patch(optimize_ddp=True):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        try:
            monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1)
            ddp = partial(DistributedDataParallel, bucket_cap_mb=0.05)
            model = shared(cast(Any, SimpleNamespace(prepare=ddp)), one)
            for ours, theirs in zip(results(model, one, packs), expected, strict=True):
                torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)
        finally:
            dist.destroy_process_group()
    assert graphs.frame_count == 1


def test_a_pack_in_which_nothing_drafts_costs_and_teaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one = made(Train(epochs=1.0))
    row = documents(SHAPE, 950, 0)[0]
    idle = pack([replace(row, loss_mask_S=torch.zeros_like(row.loss_mask_S))])
    for fused in (False, True):
        if fused:
            monkeypatch.setattr(eagle3, "_attend", attention_flash.attend)
            monkeypatch.setattr(step, "_taught", lambda _like: losses_fused.taught)
        parts = one(idle)
        parts["loss"].backward()
        assert float(parts["loss"].detach()) == 0 and parts["judged"].tolist() == [0, 0, 0]


def test_a_step_in_fp32_or_on_a_cpu_takes_the_eager_twins() -> None:
    like: Any = SimpleNamespace(is_cuda=True, dtype=torch.float32)
    assert step._taught(like) is losses.taught
    assert step._taught(torch.zeros(1, dtype=torch.bfloat16)) is losses.taught
