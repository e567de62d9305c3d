import pytest
import torch

from data.store import Features
from recipes.schema import Train
from train.pack import Pack, answer_runs, epoch_packs, pack, schedule


def features(mask: list[int], first_id: int = 10) -> Features:
    size = len(mask)
    return Features(
        aux_SAH=torch.randn(size, 12), final_SH=torch.randn(size, 4),
        input_ids_S=torch.arange(first_id, first_id + size),
        loss_mask_S=torch.tensor(mask).bool(),
    )  # fmt: skip


def test_answer_runs_count_to_the_end_of_each_answer() -> None:
    assert answer_runs(torch.tensor([0, 1, 1, 1, 0, 1]).bool()).tolist() == [0, 3, 2, 1, 0, 1]


def test_a_position_drafts_where_the_next_two_tokens_are_one_answers() -> None:
    # Prompt of 3, answer of 4: anchors 2, 3, 4 (x_{t+2} at 4, 5, 6).
    one = pack([features([0, 0, 0, 1, 1, 1, 1])])
    assert one.at.kept_M.tolist() == [2, 3, 4]
    assert [one.valid(k).tolist() for k in range(4)] == [
        [True] * 3,
        [True, True, False],
        [True, False, False],
        [False] * 3,
    ]
    assert one.input_ids_S[one.following(2)].tolist() == [14, 15, 16]


def test_documents_do_not_leak_into_each_other() -> None:
    # The second row begins with an answer token: it must not continue the first row's answer.
    one: Pack = pack([features([0, 1, 1]), features([1, 1, 1], 50)])
    assert one.at.docs == ((0, 3), (3, 6))
    assert one.at.kept_M.tolist() == [0, 3]
    assert one.run_M.tolist() == [2, 2]


def test_the_teacher_and_token_of_a_later_step_are_those_of_step_0_further_on() -> None:
    one = pack([features([0, 0, 1, 1, 1, 1, 0, 1, 1, 1])])
    final_SH = one.final_MH.new_zeros(10, 4)
    final_SH[one.at.kept_M + 1] = one.final_MH
    for k in range(3):
        for m in one.valid(k).nonzero().flatten().tolist():
            assert torch.equal(one.final_MH[m + k], final_SH[one.at.kept_M[m] + 1 + k])
            assert one.input_ids_S[one.following(2)[m + k]] == one.input_ids_S[one.following(2 + k)[m]]


def test_two_answers_in_one_row_stay_apart() -> None:
    one = pack([features([0, 1, 1, 0, 0, 1, 1, 1])])
    assert one.at.kept_M.tolist() == [0, 4, 5]
    assert one.run_M.tolist() == [2, 3, 2]


def test_epochs_hold_every_row_once_within_the_budget_in_a_new_order() -> None:
    lengths = [5, 9, 3, 7, 4, 20, 6]
    first, second = (epoch_packs(lengths, [1.0] * 7, epoch, 0, 16) for epoch in (0, 1))
    assert sorted(n for p in first for n in p) == list(range(7))
    assert first != second
    assert first == epoch_packs(lengths, [1.0] * 7, 0, 0, 16)
    assert all(sum(lengths[n] for n in p) <= 16 or p == [5] for p in first)


def test_weights_repeat_rows() -> None:
    counts = [0, 0, 0]
    for epoch in range(400):
        for one in epoch_packs([1, 1, 1], [0.0, 2.0, 0.5], epoch, 0, 100):
            for n in one:
                counts[n] += 1
    assert counts[0] == 0 and counts[1] == 800
    assert counts[2] == pytest.approx(200, abs=40)


def test_schedule_stops_at_the_tokens_or_epochs_asked_for() -> None:
    by_epochs = schedule([5] * 8, [3] * 8, [1.0] * 8, Train(epochs=2.0, pack_tokens=10), 2)
    assert sum(3 for step in by_epochs for one in step for _ in one) == 48
    by_tokens = schedule([5] * 8, [3] * 8, [1.0] * 8, Train(tokens=30, pack_tokens=10), 2)
    seen = sum(3 for step in by_tokens for one in step for _ in one)
    assert 30 <= seen < 30 + 12


def test_every_process_has_a_pack_in_every_step() -> None:
    for processes, accumulate in ((2, 1), (3, 2), (4, 3)):
        steps = schedule(
            [10] * 7, [5] * 7, [1.0] * 7, Train(epochs=3.0, pack_tokens=10, accumulate=accumulate), processes
        )
        assert all(len(step) >= processes for step in steps)
        assert sorted(n for step in steps for one in step for n in one) == sorted([*range(7)] * 3)
    with pytest.raises(ValueError, match="gives 7 packs an epoch for 8 processes; lower it, or use fewer processes"):
        schedule([10] * 7, [5] * 7, [1.0] * 7, Train(epochs=1.0, pack_tokens=10), 8)
