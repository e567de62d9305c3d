from pathlib import Path

import pytest
import torch

from data.store import (
    Entry,
    Features,
    bytes_per_token,
    finished_shard,
    read_index,
    read_row,
    write_index,
    write_shard,
)


def features(size: int, seed: int = 0) -> Features:
    generator = torch.Generator().manual_seed(seed)
    aux = torch.randn(size, 24, generator=generator)
    aux[0] *= 100  # real first tokens are outliers
    return Features(
        aux_SAH=aux.bfloat16(), final_SH=torch.randn(size, 8, generator=generator).bfloat16(),
        input_ids_S=torch.arange(size), loss_mask_S=torch.arange(size) > 1,
    )  # fmt: skip


def entry(name: str, size: int) -> Entry:
    return Entry(row_id=name, domain="chat", split="train", start=0, length=size)


def test_bf16_rows_come_back_bit_for_bit_without_padding(tmp_path: Path) -> None:
    rows = [(entry("a", 5), features(5)), (entry("b", 3), features(3, 1))]
    shard = write_shard(tmp_path, 0, rows, torch.bfloat16, 3)
    write_index(tmp_path, [shard], 8, 3)
    (read,) = read_index(tmp_path)
    assert [e.start for e in read.entries] == [0, 5]
    for (_, wrote), place in zip(rows, read.entries, strict=True):
        got = read_row(tmp_path, read, place)
        assert torch.equal(got.aux_SAH, wrote.aux_SAH) and torch.equal(got.final_SH, wrote.final_SH)
        assert torch.equal(got.input_ids_S, wrote.input_ids_S) and torch.equal(got.loss_mask_S, wrote.loss_mask_S)
    header = 1024
    assert (tmp_path / shard.file).stat().st_size <= 8 * bytes_per_token(8, 3, "bfloat16") + header


def test_fp8_keeps_every_state_within_its_own_scale(tmp_path: Path) -> None:
    row = features(6)
    shard = write_shard(tmp_path, 0, [(entry("a", 6), row)], torch.float8_e4m3fn, 3)
    got = read_row(tmp_path, shard, shard.entries[0])
    assert got.aux_SAH.dtype == torch.bfloat16
    for part in range(3):
        want = row.aux_SAH[:, part * 8 : part * 8 + 8].float()
        error = (got.aux_SAH[:, part * 8 : part * 8 + 8].float() - want).norm(dim=-1) / want.norm(dim=-1)
        assert error.max() < 0.05


def test_rows_that_are_not_finite_are_quarantined_by_name(tmp_path: Path) -> None:
    bad = features(4)
    bad.final_SH[2, 1] = float("nan")
    shard = write_shard(tmp_path, 0, [(entry("good", 5), features(5)), (entry("bad", 4), bad)], torch.bfloat16, 3)
    assert [e.row_id for e in shard.entries] == ["good"] and shard.quarantined == ("bad",)


def test_a_shard_of_only_bad_rows_is_written_empty(tmp_path: Path) -> None:
    bad = features(4)
    bad.aux_SAH[0, 0] = float("inf")
    shard = write_shard(tmp_path, 0, [(entry("bad", 4), bad)], torch.bfloat16, 3)
    assert shard.entries == () and finished_shard(tmp_path, 0) == shard


def test_a_changed_or_missing_shard_is_not_finished(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, 0, [(entry("a", 5), features(5))], torch.bfloat16, 3)
    assert finished_shard(tmp_path, 0) == shard
    data = bytearray((tmp_path / shard.file).read_bytes())
    data[-3] ^= 1
    (tmp_path / shard.file).write_bytes(data)
    assert finished_shard(tmp_path, 0) is None
    (tmp_path / shard.file).unlink()
    assert finished_shard(tmp_path, 0) is None


def test_reading_a_truncated_shard_names_it(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, 7, [(entry("a", 5), features(5))], torch.bfloat16, 3)
    (tmp_path / shard.file).write_bytes((tmp_path / shard.file).read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"features-00007.safetensors: damaged .*draftsmith capture"):
        read_row(tmp_path, shard, shard.entries[0])
