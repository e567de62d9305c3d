import torch
import torch.nn.functional as F

from train.losses import soft_kl


def test_soft_kl_is_torchs_kl_over_the_masked_positions() -> None:
    torch.manual_seed(0)
    draft, teacher = torch.randn(7, 50), torch.randn(7, 50) * 3
    mask = torch.tensor([True, False, True, True, False, True, True])
    loss, count = soft_kl(draft, teacher, mask)
    expected = F.kl_div(draft[mask].log_softmax(-1), teacher[mask].log_softmax(-1), reduction="sum", log_target=True)
    torch.testing.assert_close(loss, expected)
    assert int(count) == 5


def test_soft_kl_is_zero_for_the_teacher_itself_and_its_gradient_reaches_only_masked_rows() -> None:
    teacher = torch.randn(4, 9)
    draft = teacher.clone().requires_grad_()
    mask = torch.tensor([True, True, False, True])
    assert abs(float(soft_kl(draft, teacher, mask)[0].detach())) < 1e-5
    loss, _ = soft_kl(draft + torch.arange(9.0), teacher, mask)
    loss.backward()
    assert draft.grad is not None and (draft.grad[2] == 0).all() and (draft.grad[0] != 0).any()
