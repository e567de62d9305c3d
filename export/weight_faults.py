"""Faults that the safetensors show: against config.json's own list of tensors, and in the values."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

from export.checks import Fault, fault
from export.layout import Tensor

_open = cast(Any, safe_open)
Files = dict[str, Path]
"""tensor's name -> the file that holds it"""


def tensor_files(paths: list[Path]) -> tuple[Files, list[Fault]]:
    """Which file holds which tensor, and a fault for each file that cannot be read whole."""
    files: Files = {}
    faults: list[Fault] = []
    for path in paths:
        try:
            with _open(path, "pt") as stored:
                names = list(stored.keys())
        except (OSError, SafetensorError) as error:
            faults.append(fault("weights-file", f"{path.name} cannot be read ({_line(error)})"))
            continue
        faults += [
            fault("weights-file", f"{name} is in {files[name].name} and {path.name}") for name in names if name in files
        ]
        files |= dict.fromkeys(names, path)
    return files, faults


def list_faults(files: Files, expected: dict[str, Tensor]) -> Iterator[Fault]:
    """Missing, superfluous, misshaped and wrongly typed tensors."""
    for name in sorted(expected):
        if expected[name].required and name not in files:
            yield fault("missing-tensor", f"{name} {list(expected[name].shape)} is missing")
    for name in sorted(files):
        if name not in expected:
            yield fault("extra-tensor", f"{name} is not expected")
            continue
        with _open(files[name], "pt") as stored:
            piece = stored.get_slice(name)
            shape, dtype = tuple(piece.get_shape()), piece.get_dtype()
        if shape != expected[name].shape:
            yield fault("tensor-shape", f"{name} is {list(shape)}, config.json implies {list(expected[name].shape)}")
        if dtype != expected[name].dtype:
            yield fault("tensor-dtype", f"{name} is {dtype}, config.json implies {expected[name].dtype}")


def value_faults(files: Files) -> Iterator[Fault]:
    """NaN, Inf, and matrices or norms that no training leaves behind."""
    for name in sorted(files):
        values = read(files, name)
        if not values.is_floating_point() or not values.numel():
            continue
        bad = int((~values.isfinite()).sum())
        if bad:
            yield fault("nonfinite", f"{name} holds {bad} NaN or Inf of {values.numel()}")
        elif not bool(values.any()):
            yield fault("untrained", f"{name} is all zero")
        elif values.numel() > 1 and values.dim() > 1 and bool((values == values.flatten()[0]).all()):
            yield fault("untrained", f"{name} is {float(values.flatten()[0]):g} everywhere")


def map_faults(files: Files, config: dict[str, Any]) -> Iterator[Fault]:
    """Whether d2t and t2d are one map, with d2t as offsets. Both must have passed `list_faults`."""
    vocab = int(config["transformer_layer_config"]["vocab_size"])
    d2t, t2d = read(files, "d2t"), read(files, "t2d")
    marked, count = int(t2d.sum()), d2t.numel()
    if marked != count:
        yield fault("t2d-count", f"t2d marks {marked} tokens, draft_vocab_size is {count}")
    ids = torch.arange(count) + d2t
    if _is_map(d2t, vocab) and not _is_map(ids, vocab):
        yield fault("d2t-absolute", f"d2t holds absolute ids {[int(i) for i in d2t[:3]]}...")
        return
    outside = int(((ids < 0) | (ids >= vocab)).sum())
    if outside:
        yield fault("d2t-range", f"{outside} of {count} draft tokens lie outside 0..{vocab - 1}")
        return
    disordered = int((ids.diff() <= 0).sum())
    if disordered:
        yield fault("d2t-order", f"{disordered} of {count} draft tokens are not above the one before")
    wrong = int((~t2d[ids]).sum())
    if wrong:
        yield fault("d2t-t2d", f"{wrong} of {count} draft tokens are not marked in t2d")
    mask = config.get("mask_token_id")
    if isinstance(mask, int) and mask < vocab and bool(t2d[mask]):
        yield fault("peagle-mask", f"mask_token_id {mask} is a draft token")


def draft_ids(files: Files, vocab: int) -> torch.Tensor:
    """The target's id of each draft token [D], or of every token where there is no map."""
    if "d2t" not in files:
        return torch.arange(vocab)
    d2t = read(files, "d2t")
    return torch.arange(d2t.numel()) + d2t


def read(files: Files, name: str) -> torch.Tensor:
    """One tensor."""
    with _open(files[name], "pt") as stored:
        return stored.get_tensor(name)


def _is_map(ids: torch.Tensor, vocab: int) -> bool:
    """Strictly ascending token ids."""
    return bool((ids.diff() > 0).all()) and int(ids.min()) >= 0 and int(ids.max()) < vocab


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
