"""Tensors as a safetensors file: whole or not at all, from where they lie in memory."""

import os
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write contiguous CPU tensors: temporary name, fsync, rename. Other threads go on meanwhile.

    Same tensors, same bytes, with one metadata key at most: safetensors orders several at random. Raises ValueError
    where a tensor is not contiguous.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "wb") as file:
        mode = os.fstat(file.fileno()).st_mode
    cast(Any, safetensors.torch).save_file(tensors, temporary, metadata=metadata)
    temporary.chmod(mode)  # safetensors lets nobody but the owner read
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
