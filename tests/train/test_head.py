from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recipes.load import build
from tests.tiny import recipe_data
from tests.train.test_eagle3 import CONFIG, random_head
from train.eagle3 import Eagle3
from train.head import head_config, open_head, save_head, vocab_hash


def test_a_head_round_trips_in_fp32_with_its_map(tmp_path: Path) -> None:
    head, d2t, t2d = random_head(CONFIG), torch.arange(128), torch.arange(320) % 2 == 0
    save_head(tmp_path, head, d2t, t2d, {"chat": {"length": 1.5}})
    again, d2t_again, t2d_again = open_head(tmp_path)
    assert again.config == CONFIG
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), again.parameters(), strict=True))
    assert torch.equal(d2t, d2t_again) and torch.equal(t2d, t2d_again)
    assert vocab_hash(d2t) != vocab_hash(d2t + 1)


def test_tensors_of_another_head_are_refused(tmp_path: Path) -> None:
    save_head(tmp_path, random_head(CONFIG), torch.arange(128), torch.ones(320, dtype=torch.bool), {})
    other = tmp_path / "other"
    other.mkdir()
    save_head(other, random_head(replace(CONFIG, num_layers=2)), torch.arange(128), torch.ones(320).bool(), {})
    (other / "head.json").write_bytes((tmp_path / "head.json").read_bytes())
    with pytest.raises(ValueError, match="its tensors are not those of head.json"):
        open_head(other)


def test_what_a_recipe_leaves_open_is_the_targets(tmp_path: Path) -> None:
    plain = recipe_data(tmp_path, tmp_path)
    config = head_config(build(plain))
    assert (config.intermediate_size, config.aux_layers, config.max_position_embeddings) == (96, (1, 3, 5), 512)
    plain["head"]["intermediate_size"] = 200
    assert head_config(build(plain)).intermediate_size == 200
    Eagle3(config)
