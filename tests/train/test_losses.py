"""The losses against torch's own functions, by finite differences, and the Triton kernel (interpreted) against them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from train.losses import LK_DECAY, LOSSES, acceptance, kl, lk_alpha, lk_lambda, taught


def test_kl_is_torchs_kl_position_by_position() -> None:
    torch.manual_seed(0)
    draft, teacher = torch.randn(7, 50), torch.randn(7, 50) * 3
    expected = F.kl_div(draft.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(kl(draft, teacher), expected)
    assert kl(teacher, teacher).abs().max() < 1e-5


def test_acceptance_is_what_rejection_sampling_accepts() -> None:
    """Draw from the draft, accept with min(1, p/q): the share accepted is the formula's."""
    torch.manual_seed(1)
    draft, teacher = torch.randn(1, 12) * 2, torch.randn(1, 12) * 2
    q, p = draft.softmax(-1)[0], teacher.softmax(-1)[0]
    drawn = torch.multinomial(q, 400_000, replacement=True)
    accepted = (torch.rand(len(drawn)) < (p / q)[drawn]).double().mean()
    assert float(acceptance(draft, teacher)) == pytest.approx(float(accepted), abs=0.004)
    torch.testing.assert_close(lk_alpha(draft, teacher), -acceptance(draft, teacher).log())


def test_lk_lambda_goes_from_kl_to_the_acceptance_alone() -> None:
    torch.manual_seed(2)
    teacher = torch.randn(5, 40) * 3
    for draft in (torch.randn(5, 40) * 8, teacher + 0.01 * torch.randn(5, 40)):
        a, w = acceptance(draft, teacher), (-LK_DECAY * acceptance(draft, teacher)).exp()
        torch.testing.assert_close(lk_lambda(draft, teacher), w * kl(draft, teacher) + (1 - w) * (1 - a))


@pytest.mark.parametrize("kind", LOSSES)
def test_taught_weighs_rows_and_takes_the_teacher_further_on(kind: str) -> None:
    torch.manual_seed(3)
    normed, matrix, teacher = torch.randn(6, 8, requires_grad=True), torch.randn(30, 8), torch.randn(6, 30)
    weight = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0, 0.0])
    loss, ids = taught(normed, matrix, teacher, 2, weight, kind)
    each = LOSSES[kind](normed @ matrix.T, teacher[[2, 3, 4, 5, 5, 5]])
    torch.testing.assert_close(loss, (each * weight).sum())
    assert torch.equal(ids, (normed @ matrix.T).argmax(-1))
    loss.backward()
    assert normed.grad is not None
    assert (normed.grad[weight == 0] == 0).all() and (normed.grad[weight > 0] != 0).any(-1).all()


KERNEL = """
import torch
from train import losses
from train.loss_kernel import rows
torch.manual_seed(0)
for size in (130, 5000):
    draft, teacher = torch.randn(9, size) * 2, torch.randn(9, size) * 3
    weight = torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0, 0.25, 0.0, 1.0, 1.0])
    for number, kind in enumerate(losses.LOSSES):
        ours = draft.clone()
        loss, ids = rows(ours, teacher, 3, weight, number)
        twin = draft.clone().requires_grad_()
        each = losses.LOSSES[kind](twin, teacher[[3, 4, 5, 6, 7, 8, 8, 8, 8]]) * weight
        each.sum().backward()
        torch.testing.assert_close(loss, each.detach(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours, twin.grad, atol=1e-6, rtol=1e-4)
        assert (ids == draft.argmax(-1))[weight > 0].all()
print("equal")
"""


def test_the_kernel_equals_autograd_of_the_losses() -> None:
    """Interpreted, in a process of its own: Triton decides that when it is imported."""
    root = Path(__file__).parents[2]
    environment = {"TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", KERNEL], capture_output=True, text=True, env=environment, cwd=root)
    assert done.stdout.strip() == "equal", done.stderr[-2000:]
