"""Are the GPU paths the eager ones? Attention, losses and a whole compiled step against their fp32 twins, on a GPU.

    python -m tests.bench.exact

Exits 1 where an error is above bf16's rounding.
"""

import sys

import torch

from recipes.schema import Train
from tests.bench.shapes import SHAPES, documents, head_config, vocabulary
from train import attention_eager, attention_flash, losses, losses_fused
from train.eagle3 import Eagle3
from train.feed import feed
from train.pack import pack
from train.places import places
from train.step import Frozen, Step, compiled, mark

BOUND = 0.02
DOCS = [(0, 300), (300, 1000), (1000, 1024)]


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """|ours - theirs| / |theirs|."""
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def attention(heads: int, groups: int, size: int, window: int, later: int) -> float:
    """Worst relative error of output and gradients."""
    kept = torch.tensor([t for a, b in DOCS for t in range(a + (b - a) // 4, b - 2)], device="cuda")
    at, m = places(DOCS, kept), len(kept)
    shapes = [(m, heads, size), *[(1024, groups, size)] * 2, *[(m, groups, size)] * (2 * later)]
    values = [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]
    weights = torch.randn(m, heads * size, device="cuda")
    found: list[list[torch.Tensor]] = []
    for module, dtype in ((attention_flash, torch.bfloat16), (attention_eager, torch.float32)):
        q, *rest = leaves = [v.to(dtype, copy=True).requires_grad_() for v in values]
        out = module.attend(q, list(zip(rest[::2], rest[1::2], strict=True)), at, window)
        out.backward(weights.to(dtype))
        found.append([out.detach(), *(x.grad for x in leaves if x.grad is not None)])
    return max(relative(a, b) for a, b in zip(*found, strict=True))


def loss(kind: str) -> float:
    """Worst relative error of the loss and the gradient."""
    matrix = (torch.randn(32000, 2048, device="cuda") * 0.02).bfloat16()
    normed, weight = torch.randn(700, 2048, device="cuda").bfloat16(), (torch.rand(700, device="cuda") > 0.3).float()
    teacher = (torch.randn(700, 32000, device="cuda") * 2).bfloat16()
    found: list[list[torch.Tensor]] = []
    for module, dtype in ((losses_fused, torch.bfloat16), (losses, torch.float32)):
        leaf = normed.to(dtype, copy=True).requires_grad_()
        value, _ = module.taught(leaf, matrix.to(dtype), teacher.to(dtype), 1, weight, kind)
        value.backward()
        assert leaf.grad is not None
        found.append([value.detach(), leaf.grad])
    return max(relative(a, b) for a, b in zip(*found, strict=True))


def step() -> tuple[float, float]:
    """(relative error of the loss, of all gradients) of the compiled bf16 step against the eager one in fp32."""
    shape, device = SHAPES["30b-a3b"], torch.device("cuda")
    d2t_D, t2d_V = (x.to(device) for x in vocabulary(shape))
    rows_DH = torch.randn(shape.draft, shape.hidden, device=device).mul_(0.02)
    embed_VH = torch.randn(shape.vocab, shape.hidden, device=device) * 0.02
    settings = Train(epochs=1.0)
    found: list[tuple[float, torch.Tensor]] = []
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(7)
        with device:
            head = Eagle3(head_config(shape))
        head.lm_head.weight.data.copy_(rows_DH)
        head.lm_head.weight.requires_grad_(False)
        frozen = Frozen(embed_VH=embed_VH.to(dtype), teacher_DH=rows_DH.to(dtype), d2t_D=d2t_D, t2d_V=t2d_V)
        model = compiled(Step(head, frozen, settings))
        ready = iter([([pack(documents(shape, 2048, 5))], 0.0)])
        for packs, _ in feed(ready, device):
            parts = model(mark(packs[0]))
        parts["loss"].backward()
        grads = torch.cat([p.grad.float().flatten() for p in head.parameters() if p.grad is not None])
        found.append((float(parts["loss"].detach()), grads))
    (ours, our_grads), (theirs, their_grads) = found
    return abs(ours - theirs) / abs(theirs), relative(our_grads, their_grads)


def main() -> None:
    """Print every error."""
    torch.manual_seed(0)
    worst = 0.0
    for heads, groups, size in ((9, 3, 64), (32, 4, 128)):
        for window in (0, 200):
            for later in (0, 1, 3):
                error = attention(heads, groups, size, window, later)
                worst = max(worst, error)
                print(f"attention {heads}/{groups}x{size} window {window} later {later}: {error:.5f}", flush=True)
    for kind in losses.LOSSES:
        error = loss(kind)
        worst = max(worst, error / (2 if kind == "lk_alpha" else 1))  # its slope has jumps where q = p
        print(f"loss {kind}: {error:.5f}", flush=True)
    of_loss, of_grads = step()
    print(f"compiled step: loss {of_loss:.5f}, gradients {of_grads:.5f}", flush=True)
    sys.exit(max(worst, of_loss, of_grads / 2) > BOUND)


if __name__ == "__main__":
    main()
