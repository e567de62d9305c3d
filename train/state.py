"""Everything a training run needs to go on, in one object: weights, optimiser state, step.

The order of the data and the learning rate are functions of the step (train.pack.schedule, train.optim.share), and
nothing else is random, so a resumed run on one CPU gives the same bits as an unbroken one.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from data.tensors import write_tensors
from recipes.artifact import write_bytes
from train.optim import restore_state, state_tensors
from train.shard import placed, whole


def save_state(
    folder: Path, head: nn.Module, optimizers: list[torch.optim.Optimizer], step: int, seen: int, *, write: bool = True
) -> None:
    """Write checkpoint-<step>.safetensors whole, then drop older ones. `seen`: supervised tokens so far; `write`: of
    several processes all must call, since each holds a part where they are sharded, and one writes.
    """
    tensors = {f"weight|{n}": p.detach() for n, p in head.named_parameters()} | state_tensors(head, optimizers)
    full: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        gathered = whole(tensor)
        if write:
            full[name] = gathered.contiguous().cpu()
    if not write:
        return
    write_tensors(folder / f"checkpoint-{step:07d}.safetensors", full, {"step": str(step), "seen": str(seen)})
    for old in checkpoints(folder)[:-1]:
        old.unlink()


def load_state(folder: Path, head: nn.Module, optimizers: list[torch.optim.Optimizer]) -> tuple[int, int]:
    """Restore the newest checkpoint in place, sharded or not; (step, seen), (0, 0) where there is none."""
    files = checkpoints(folder)
    if not files:
        return 0, 0
    with safe_open(files[-1], "pt") as stored:
        meta = stored.metadata()
        tensors: dict[str, torch.Tensor] = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(placed(tensors[f"weight|{name}"], parameter))
    restore_state(head, optimizers, {n: t for n, t in tensors.items() if n.startswith("state|")})
    return int(meta["step"]), int(meta["seen"])


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints, oldest first."""
    return sorted(folder.glob("checkpoint-*.safetensors"))


def cut_metrics(path: Path, step: int) -> None:
    """Drop logged lines of steps that will be run again, and a torn last line."""
    if not path.exists():
        return
    kept: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry: dict[str, Any] = json.loads(line)
        except ValueError:
            break
        if entry["step"] <= step:
            kept.append(line)
    write_bytes(path, "".join(f"{line}\n" for line in kept).encode())
