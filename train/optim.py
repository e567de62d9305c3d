"""The optimisers of a head, their shared schedule, and their state as named tensors."""

import math

import torch
from torch import nn

from recipes.schema import Train
from train.shard import placed


def make_optimizers(head: nn.Module, settings: Train) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the hidden matrices and AdamW for norms and lm_head.

    At the demo's budget Muon is worth 0.1-0.15 of acceptance length over AdamW at its best rate (LOG.md).
    """
    trained = [(name, p) for name, p in head.named_parameters() if p.requires_grad]
    matrices = [p for name, p in trained if settings.optimizer == "muon" and p.dim() == 2 and name != "lm_head.weight"]
    others = [p for _, p in trained if all(p is not m for m in matrices)]
    made: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            others,
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
            fused=others[0].is_cuda,
        )
    ]
    if matrices:
        made.append(
            torch.optim.Muon(
                matrices,
                lr=settings.muon_lr,
                weight_decay=settings.weight_decay,
                ns_steps=settings.muon_steps,
                adjust_lr_fn="original",
            )
        )
    for optimizer in made:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return made


def share(settings: Train, step: int, total: int) -> float:
    """Learning rate at `step` as a share of its peak: linear warm-up, then a cosine to final_lr."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, total - settings.warmup_steps)
    return settings.final_lr + (1 - settings.final_lr) * 0.5 * (1 + math.cos(math.pi * done))


def set_rate(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Set every group's learning rate to `factor` times its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor


def state_tensors(head: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Every tensor of the optimisers' state, as `state|<key>|<parameter name>`."""
    names: dict[torch.Tensor, str] = {p: name for name, p in head.named_parameters()}
    return {
        f"state|{key}|{names[p]}": torch.as_tensor(value)
        for optimizer in optimizers
        for p, entries in optimizer.state.items()
        for key, value in entries.items()
    }


def restore_state(head: nn.Module, optimizers: list[torch.optim.Optimizer], tensors: dict[str, torch.Tensor]) -> None:
    """Put `state_tensors` back."""
    owner: dict[torch.Tensor, torch.optim.Optimizer] = {
        p: optimizer for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
    }
    parameters = dict(head.named_parameters())
    for label, value in tensors.items():
        _, key, name = label.split("|")
        parameter = parameters[name]
        state = owner[parameter].state.setdefault(parameter, {})
        # Step counters stay on the CPU, where the optimisers expect them, but for fused ones.
        fused = any(group.get("fused") for group in owner[parameter].param_groups)
        if key == "step":
            state[key] = value.to(parameter.device) if fused else value
        else:
            state[key] = placed(value, parameter)
