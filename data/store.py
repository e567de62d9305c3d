"""Features on disk: safetensors shards of whole rows, without padding, with checksums.

Shapes: T tokens of a shard, A aux layers, H hidden size.
A shard holds aux [T, A*H], final [T, H] (after the target's final norm), input_ids [T], loss_mask [T] and, for fp8,
aux_scale [T, A] and final_scale [T, 1]. index.json lists shards, their rows and hashes.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

from data.tensors import write_tensors
from recipes.artifact import hash_file, write_bytes, write_json

FP8_MAX = 448.0  # largest finite float8_e4m3fn


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Where a row's features are."""

    row_id: str
    domain: str
    split: str
    start: int
    """first token in its shard"""
    length: int
    """tokens"""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of features."""

    file: str
    sha256: str
    entries: tuple[Entry, ...]
    quarantined: tuple[str, ...]
    """row ids left out because a state was not finite"""


@dataclass(frozen=True, kw_only=True)
class Features:
    """One row's features. aux_SAH [S, A*H], final_SH [S, H], input_ids_S, loss_mask_S (bool)."""

    aux_SAH: torch.Tensor
    final_SH: torch.Tensor
    input_ids_S: torch.Tensor
    loss_mask_S: torch.Tensor


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"features-{number:05d}.safetensors"


def write_shard(
    folder: Path, number: int, rows: list[tuple[Entry, Features]], dtype: torch.dtype, layers: int
) -> Shard:
    """Write one shard of finite rows and, last, its sidecar; rows with NaN or Inf are left out and named."""
    kept: list[tuple[Entry, Features]] = []
    bad: list[str] = []
    start = 0
    for entry, features in rows:
        if bool(torch.isfinite(features.aux_SAH).all() & torch.isfinite(features.final_SH).all()):
            kept.append((replace(entry, start=start), features))
            start += entry.length
        else:
            bad.append(entry.row_id)
    file = folder / shard_name(number)
    if kept:
        write_tensors(file, _tensors([f for _, f in kept], dtype, layers))
    else:
        write_bytes(file, b"")
    shard = Shard(file=file.name, sha256=hash_file(file), entries=tuple(e for e, _ in kept), quarantined=tuple(bad))
    write_json(_sidecar(folder, number), asdict(shard))
    return shard


def finished_shard(folder: Path, number: int) -> Shard | None:
    """The shard if it stands whole and undamaged, else None. A sealed folder's index.json speaks for its shards."""
    try:
        sidecar = _sidecar(folder, number)
        shard = (
            _shard(json.loads(sidecar.read_text(encoding="utf-8"))) if sidecar.exists() else read_index(folder)[number]
        )
        return shard if hash_file(folder / shard.file) == shard.sha256 else None
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def write_index(folder: Path, shards: list[Shard], hidden_size: int, layers: int) -> None:
    """Seal the folder: index.json takes the sidecars' place."""
    write_json(
        folder / "index.json",
        {"hidden_size": hidden_size, "layers": layers, "shards": [asdict(s) for s in shards]},
    )


def read_index(folder: Path) -> list[Shard]:
    """The shards of a features directory, in order."""
    return [_shard(s) for s in json.loads((folder / "index.json").read_text(encoding="utf-8"))["shards"]]


def read_row(folder: Path, shard: Shard, entry: Entry) -> Features:
    """One row, dequantised to the dtype it is trained in. Raises ValueError naming a damaged shard."""
    part = slice(entry.start, entry.start + entry.length)
    try:
        with safe_open(folder / shard.file, "pt") as tensors:
            got: dict[str, torch.Tensor] = {name: tensors.get_slice(name)[part] for name in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{folder.name}/{shard.file}: damaged ({error}); `draftsmith capture` makes it again"
        ) from error
    return Features(
        aux_SAH=_unscaled(got["aux"], got.get("aux_scale")),
        final_SH=_unscaled(got["final"], got.get("final_scale")),
        input_ids_S=got["input_ids"].long(),
        loss_mask_S=got["loss_mask"].bool(),
    )


def bytes_per_token(hidden_size: int, layers: int, dtype: str) -> float:
    """On disk: A+1 states of H values (fp8: one more 4-byte scale a state), a 4-byte id, a 1-byte mask."""
    width = {"bfloat16": 2, "float32": 4, "float8_e4m3fn": 1}[dtype]
    scales = 4 * (layers + 1) if width == 1 else 0
    return (layers + 1) * hidden_size * width + scales + 5


def _tensors(rows: list[Features], dtype: torch.dtype, layers: int) -> dict[str, torch.Tensor]:
    aux, final = torch.cat([r.aux_SAH for r in rows]), torch.cat([r.final_SH for r in rows])
    tensors = {
        "input_ids": torch.cat([r.input_ids_S for r in rows]).int(),
        "loss_mask": torch.cat([r.loss_mask_S for r in rows]).to(torch.uint8),
    }
    if dtype == torch.float8_e4m3fn:
        tensors["aux"], tensors["aux_scale"] = _scaled(aux, layers)
        tensors["final"], tensors["final_scale"] = _scaled(final, 1)
    else:
        tensors |= {"aux": aux.to(dtype), "final": final.to(dtype)}
    return {name: t.contiguous() for name, t in tensors.items()}


def _scaled(x_TN: torch.Tensor, states: int) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 values and one fp32 scale a token and state: the first token's states are 100 times the others'."""
    x_TSH = x_TN.float().unflatten(1, (states, -1))
    scale_TS1 = x_TSH.abs().amax(-1, keepdim=True).clamp_min(1e-12) / FP8_MAX
    return (x_TSH / scale_TS1).to(torch.float8_e4m3fn).flatten(1), scale_TS1.squeeze(-1)


def _unscaled(x_TN: torch.Tensor, scale_TS: torch.Tensor | None) -> torch.Tensor:
    if scale_TS is None:
        return x_TN
    return (x_TN.float().unflatten(1, (scale_TS.shape[1], -1)) * scale_TS[..., None]).flatten(1).to(torch.bfloat16)


def _sidecar(folder: Path, number: int) -> Path:
    return folder / f"{shard_name(number)}.json"


def _shard(raw: Any) -> Shard:
    entries = tuple(Entry(**cast(dict[str, Any], e)) for e in raw["entries"])
    return Shard(file=raw["file"], sha256=raw["sha256"], entries=entries, quarantined=tuple(raw["quarantined"]))
