"""Capture against transformers itself, on a tiny model with real formats."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from data import capture, capture_hf
from data.capture_check import QUANTISED_BOUND, picked, state_errors, teacher_error
from data.target import final_norm, output_matrix
from data.tokens import Row
from tests.tiny import make_target


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> capture_hf.Session:
    folder = make_target(tmp_path_factory.mktemp("target"))
    return capture_hf.open_target(folder, (1, 3, 5), torch.float32)


def rows(lengths: list[int]) -> list[Row]:
    torch.manual_seed(1)
    return [
        Row(row_id=f"r{i}", domain="chat", split="train", input_ids=tuple(torch.randint(3, 300, (n,)).tolist()),
            loss_mask=(0,) * (n // 2) + (1,) * (n - n // 2))
        for i, n in enumerate(lengths)
    ]  # fmt: skip


def test_states_are_transformers_own_for_each_row_alone(session: capture_hf.Session) -> None:
    batch = rows([7, 12, 5])
    for row, got in zip(batch, capture_hf.forward(session, batch), strict=True):
        alone = session.model(input_ids=torch.tensor([row.input_ids]), output_hidden_states=True)
        want = torch.cat([alone.hidden_states[i][0] for i in (1, 3, 5)], -1)
        assert got.aux_SAH.shape == (len(row.input_ids), 192)
        torch.testing.assert_close(got.aux_SAH, want, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(got.final_SH, alone.hidden_states[-1][0], atol=1e-5, rtol=1e-4)
        assert got.loss_mask_S.int().tolist() == list(row.loss_mask)


def test_the_target_names_its_gpu_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream captures in another thread, where the current GPU is the first one again."""
    placed: list[torch.device] = []
    model = SimpleNamespace(to=lambda device: placed.append(device) or SimpleNamespace(eval=lambda: None))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: model)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    session = capture_hf.open_target(Path("x"), (1,), torch.float32)
    assert placed == [session.device] == [torch.device("cuda", 1)]


def test_the_teacher_is_checked_against_the_models_own_logits(session: capture_hf.Session, tmp_path: Path) -> None:
    folder = make_target(tmp_path)
    assert teacher_error(session, output_matrix(folder).float(), rows([9, 14])) < 0.01
    wrong = output_matrix(folder).float() * 1.1
    with pytest.raises(ValueError, match="teacher's logits differ .* nothing was captured"):
        teacher_error(session, wrong, rows([9, 14]))


def test_a_family_that_caps_its_logits_is_refused(session: capture_hf.Session, tmp_path: Path) -> None:
    class Capped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = session.model

        def get_decoder(self) -> torch.nn.Module:
            return self.inner.get_decoder()

        def forward(self, **inputs: object) -> object:
            out = self.inner(**inputs)
            out.logits = torch.tanh(out.logits / 2) * 2  # Gemma's final_logit_softcapping
            return out

    with pytest.raises(ValueError, match="logit cap"):
        teacher_error(replace(session, model=Capped()), output_matrix(make_target(tmp_path)), rows([9]))


def test_states_of_another_layer_or_position_are_refused(session: capture_hf.Session) -> None:
    batch = rows([40, 60])
    every = [capture_hf.forward(replace(session, layers=tuple(range(6))), [row])[0] for row in batch]
    right = [capture_hf.forward(session, [row])[0] for row in batch]
    noisy = [replace(f, aux_SAH=f.aux_SAH * (1 + 0.01 * torch.randn_like(f.aux_SAH))) for f in right]
    errors = state_errors(noisy, every, (1, 3, 5))
    assert set(errors) == {"layer 1", "layer 3", "layer 5", "final"}
    assert 0.005 < errors["layer 3"] < 0.02 and errors["final"] == 0
    lower = [capture_hf.forward(replace(session, layers=(1, 2, 5)), [row])[0] for row in batch]
    with pytest.raises(
        ValueError, match="as layer 3 is nearer to layer 2 .*counts its layers otherwise; nothing was captured"
    ):
        state_errors(lower, every, (1, 3, 5))
    moved = [replace(f, final_SH=f.final_SH.roll(1, 0)) for f in right]
    with pytest.raises(ValueError, match=r"differ from a transformers forward by .*other positions; nothing"):
        state_errors(moved, every, (1, 3, 5))


def test_a_quantised_engine_may_be_further_off_but_not_in_another_layer(session: capture_hf.Session) -> None:
    every = [capture_hf.forward(replace(session, layers=tuple(range(6))), [rows([60])[0]])[0]]
    one = capture_hf.forward(session, [rows([60])[0]])[0]
    coarse = replace(one, final_SH=one.final_SH * (1 + 0.3 * torch.randn_like(one.final_SH)))
    with pytest.raises(ValueError, match=r"bound 0\.15"):
        state_errors([coarse], every, (1, 3, 5))
    assert 0.2 < state_errors([coarse], every, (1, 3, 5), QUANTISED_BOUND)["final"] < 0.4
    unnormed = replace(one, final_SH=one.final_SH * 2)
    with pytest.raises(ValueError, match=r"bound 0\.6"):
        state_errors([unnormed], every, (1, 3, 5), QUANTISED_BOUND)
    lower = capture_hf.forward(replace(session, layers=(1, 2, 5)), [rows([60])[0]])
    with pytest.raises(ValueError, match="as layer 3 is nearer to layer 2"):
        state_errors(lower, every, (1, 3, 5), QUANTISED_BOUND)


def test_rows_are_picked_over_all_lengths() -> None:
    every = rows([30, 4, 9, 16, 22, 5, 7, 11])
    assert [len(r.input_ids) for r in picked(every, 4)] == [4, 7, 11, 22]
    assert picked(every, 0) == []


def test_gemma_norms_multiply_by_one_plus_w(tmp_path: Path) -> None:
    folder = make_target(tmp_path)
    w = AutoModelForCausalLM.from_pretrained(folder).model.norm.weight.float()
    torch.testing.assert_close(final_norm(folder, "rms"), w)
    torch.testing.assert_close(final_norm(folder, "rms_plus_one"), 1 + w)


def test_shards_and_batches_follow_length_and_hold_every_row_once() -> None:
    every = rows([30, 4, 9, 16, 22, 5, 7])
    groups = capture.shard_rows(every, 32)
    flat = [r for g in groups for r in g]
    assert [len(r.input_ids) for r in flat] == [4, 5, 7, 9, 16, 22, 30]
    assert all(sum(len(r.input_ids) for r in g) <= 32 for g in groups)
    cut = capture.batches(flat, 24)
    assert [r for b in cut for r in b] == flat
    assert all(len(b) == 1 or len(b) * len(b[-1].input_ids) <= 24 for b in cut)
