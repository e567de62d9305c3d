"""Files of tensors: whole or not at all, readable by who may read their folder."""

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from data.tensors import write_tensors


def test_tensors_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, tensors = tmp_path / "a.safetensors", {"x": torch.arange(6).view(2, 3), "y": torch.ones(2).bfloat16()}
    write_tensors(file, tensors, {"step": "3"})
    assert file.read_bytes() == save(tensors, {"step": "3"})
    with safe_open(file, "pt") as stored:
        assert stored.metadata() == {"step": "3"} and torch.equal(stored.get_tensor("x"), tensors["x"])
    before = file.read_bytes()

    def dead(_: int) -> None:
        raise OSError

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", dead)
        with pytest.raises(OSError):
            write_tensors(file, {"x": torch.zeros(1)})
    assert file.read_bytes() == before
    write_tensors(file, {"x": torch.zeros(1)})
    assert [f.name for f in tmp_path.iterdir()] == ["a.safetensors"]


def test_who_may_read_other_files_may_read_tensors(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write_tensors(tmp_path / "a.safetensors", {"x": torch.zeros(1)})
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode
