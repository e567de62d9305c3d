"""The step as several processes share it: DDP, or FSDP2, where each keeps its part of every trained tensor.

With FSDP2 (torch's fully_shard) a trained parameter, its gradient and its optimiser state are DTensors, cut along the
first dimension. A step gathers all parameters in fp32 before its first forward, so that the curve is DDP's, and shares
the gradients out after its last backward. What is frozen stays whole.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from train.eagle3 import Eagle3
from train.step import Step, compiled


def shared(accelerator: Accelerator, step: Step) -> Any:
    """What every process calls in the step's place. With FSDP2 the head's parameters become DTensors, so optimisers are
    made afterwards.
    """
    if step.settings.sharding == "ddp":
        return accelerator.prepare(compiled(step))
    # Not through accelerate's FSDP plugin, which it heeds on GPUs only: no test on a CPU would see what it does.
    frozen = {p for p in step.parameters() if not p.requires_grad}
    return fully_shard(compiled(step), reshard_after_forward=False, ignored_params=frozen)


def joining(accelerator: Accelerator, model: Any, last: bool) -> AbstractContextManager[None]:
    """Around a pack's forward and backward: gradients are summed over processes with the step's last pack only."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        # Processes may have different numbers of packs, and all must take part in a gather: it is one a step.
        model.set_reshard_after_backward(last)
    elif not last:
        return accelerator.no_sync(model)
    return nullcontext()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor. Of a sharded one all processes must ask together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A full tensor where `like` is: on its device, this process's part of it where `like` is sharded."""
    value = value.to(like.device)
    if isinstance(like, DTensor):
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return value


def whole_head(head: Eagle3) -> Eagle3:
    """The head itself, or a full copy of a sharded one, for which all processes must ask together."""
    if not any(isinstance(p, DTensor) for p in head.parameters()):
        return head
    full = {name: whole(p.detach()) for name, p in head.named_parameters()}
    copied = Eagle3(head.config).to(next(iter(full.values())).device)
    copied.load_state_dict(full)
    return copied
