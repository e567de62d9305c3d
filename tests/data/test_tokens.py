from collections import Counter
from pathlib import Path

import pytest
import torch

from data.answers import Turn
from data.tokens import Row, coverage, merge, read_rows, supervised_counts, vocabulary, write_rows


def turn(number: int, prompt: list[int], output: list[int], finish: str = "stop", prompt_id: str = "p") -> Turn:
    return Turn(
        prompt_id=prompt_id, domain="chat", split="train", turn=number, prompt_ids=tuple(prompt),
        output_ids=tuple(output), finish=finish,
    )  # fmt: skip


def row(ids: list[int], mask: list[int], split: str = "train", domain: str = "chat") -> Row:
    return Row(row_id="r", domain=domain, split=split, input_ids=tuple(ids), loss_mask=tuple(mask))


def test_turns_merge_where_the_next_prompt_begins_with_what_was_served() -> None:
    rows = merge([turn(0, [1, 2], [3, 4]), turn(1, [1, 2, 3, 4, 5], [6])])
    assert [(r.input_ids, r.loss_mask) for r in rows] == [((1, 2, 3, 4, 5, 6), (0, 0, 1, 1, 0, 1))]


def test_turns_stay_apart_where_the_template_gave_other_ids() -> None:
    rows = merge([turn(0, [1, 2], [3, 4]), turn(1, [1, 2, 9, 5], [6])])
    assert [(r.row_id, r.input_ids, r.loss_mask) for r in rows] == [
        ("p-0", (1, 2, 3, 4), (0, 0, 1, 1)),
        ("p-1", (1, 2, 9, 5, 6), (0, 0, 0, 0, 1)),
    ]


def test_a_prompt_shorter_than_what_was_served_does_not_merge() -> None:
    assert len(merge([turn(0, [1, 2], [3, 4]), turn(1, [1, 2, 3], [6])])) == 2


def test_dropped_turns_make_no_row() -> None:
    assert merge([turn(0, [], [], "dropped:prompt_too_long")]) == []


def test_other_conversations_never_merge() -> None:
    assert len(merge([turn(0, [1], [2]), turn(1, [1, 2, 3], [4], prompt_id="q")])) == 2


def test_vocabulary_keeps_the_most_frequent_with_ties_to_the_lowest_and_maps_by_offset() -> None:
    d2t, t2d = vocabulary(Counter({7: 5, 3: 2, 9: 2, 1: 2}), 3, 12)
    kept = (torch.arange(3) + d2t).tolist()
    assert kept == [1, 3, 7] and t2d.nonzero().squeeze(-1).tolist() == [1, 3, 7]


def test_a_vocabulary_larger_than_what_occurs_is_filled_from_the_lowest_ids() -> None:
    d2t, t2d = vocabulary(Counter({8: 1}), 4, 10)
    assert (torch.arange(4) + d2t).tolist() == [0, 1, 2, 8] and int(t2d.sum()) == 4


def test_counts_take_answer_tokens_only_and_weigh_domains() -> None:
    rows = [row([1, 2, 2], [0, 1, 1]), row([3, 1], [1, 0], domain="code")]
    assert supervised_counts(rows, {"code": 3.0}) == {2: 2, 3: 3}


def test_coverage_by_domain_and_split() -> None:
    t2d = torch.tensor([False, True, False, True])
    rows = [row([1, 2, 3], [1, 1, 1]), row([0, 1], [1, 0], "held_out")]
    assert coverage(rows, t2d) == {"chat": {"train": pytest.approx(2 / 3, abs=1e-4), "held_out": 0.0}}


def test_rows_round_trip_and_give_the_same_bytes(tmp_path: Path) -> None:
    rows = [row([1, 2, 3], [0, 1, 1]), row([5], [1], "held_out")]
    for name in ("rows.parquet", "again.parquet"):
        write_rows(tmp_path / name, rows)
    assert read_rows(tmp_path) == rows
    assert (tmp_path / "rows.parquet").read_bytes() == (tmp_path / "again.parquet").read_bytes()
