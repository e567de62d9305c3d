"""The replay, against windows that a head's own serving would give, and with every kind of disagreement planted."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data import capture_hf
from data.target import embedding
from data.tokens import Row
from export.parity import ROUNDINGS, Difference, Served, agreement, replay, summarise
from tests.tiny import make_target
from tests.train.test_eagle3 import CONFIG, random_head
from train.eagle3 import Eagle3
from train.pack import Pack, pack
from train.replay import drafts, walk

D2T = torch.arange(128)  # target id = 2 i


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


def served_by(head: Eagle3, target: Path, seed: int) -> Served:
    """A request whose answer often follows the head's own drafts, and the windows that an engine would report."""
    session = capture_hf.open_target(target, head.config.aux_layers, torch.bfloat16)
    model, table = head.to(torch.bfloat16), embedding(target).bfloat16()
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(3, 300, (6,), generator=generator).tolist()
    answer = torch.randint(3, 300, (30,), generator=generator).tolist()
    for place in range(2, 30, 3):  # copy what the head would draft there, now and then
        one = features(session, prompt, answer)
        anchor = len(prompt) + place - 2
        column = one.at.kept_M.tolist().index(anchor)
        answer[place] = int(drafts(model, one, table, D2T, 1)[0, column])
    one = features(session, prompt, answer)
    windows = walk(drafts(model, one, table, D2T, 3), one)
    head.float()
    return Served(
        domain="chat", prompt_ids=tuple(prompt), output_ids=tuple(answer), accepted=tuple(w.accepted for w in windows)
    )


def features(session: capture_hf.Session, prompt: list[int], answer: list[int]) -> Pack:
    mask = (0,) * len(prompt) + (1,) * len(answer)
    row = Row(row_id="", domain="chat", split="", input_ids=(*prompt, *answer), loss_mask=mask)
    return pack(capture_hf.forward(session, [row]))


def test_a_faithful_engine_agrees_in_every_window(target: Path) -> None:
    head = random_head(CONFIG)
    found = agreement(head, D2T, target, [served_by(head, target, s) for s in range(3)], 3)["chat"]
    assert found["windows"] > 20 and found["equal"] == found["windows"] and found["length_error"] == 0
    assert found["served_length"] > 1.1


def test_an_engine_that_runs_another_head_does_not(target: Path) -> None:
    head = random_head(CONFIG)
    served = [served_by(head, target, s) for s in range(3)]
    found = agreement(random_head(CONFIG, seed=9), D2T, target, served, 3)["chat"]
    assert found["equal_share"] < 0.9 and found["not_ties"]


def test_tokens_trimmed_at_the_answers_end_are_not_judged(target: Path) -> None:
    head = random_head(CONFIG)
    served = served_by(head, target, 0)
    more = replace(served, accepted=(*served.accepted[:-1], 3))  # the engine counts before it trims
    found = agreement(head, D2T, target, [more], 3)["chat"]
    assert found["windows"] - found["equal"] <= 1


def test_a_last_window_read_off_a_cut_answer_may_have_had_one_more(target: Path) -> None:
    head = random_head(CONFIG)
    served = served_by(head, target, 0)
    last = max(n for n, a in enumerate(served.accepted) if a)
    ends = len(served.prompt_ids) + sum(a + 1 for a in served.accepted[: last + 1])
    output = served.output_ids[: ends - len(served.prompt_ids)]
    cut = replace(served, output_ids=output, accepted=(*served.accepted[:last], served.accepted[last] - 1))
    whole, told = (agreement(head, D2T, target, [replace(cut, cut=c)], 3)["chat"] for c in (False, True))
    assert (whole["windows"] - whole["equal"], told["windows"] - told["equal"]) == (1, 0)


def test_a_request_too_short_to_judge_counts_nothing(target: Path) -> None:
    head = random_head(CONFIG).to(torch.bfloat16)
    session = capture_hf.open_target(target, CONFIG.aux_layers, torch.bfloat16)
    short = Served(domain="chat", prompt_ids=(5, 6, 7), output_ids=(8,), accepted=(0,))
    assert replay(head, D2T, embedding(target).bfloat16(), session, short, 3).windows == 0


def test_a_tie_is_within_one_bf16_quantum() -> None:
    assert Difference(anchor=3, ours=0, served=1, gap=0.0625, quantum=0.0625).tie
    far = Difference(anchor=3, ours=0, served=1, gap=0.125, quantum=0.0625)
    assert not far.tie and not replace(far, again=(0.07, 0.1)).tie
    assert replace(far, again=(0.07, 0.05)).tie  # another rounding puts them closer: it moved one of them


def test_doubtful_requests_are_replayed_in_every_rounding(target: Path) -> None:
    head = random_head(CONFIG)
    served = served_by(head, target, 0)
    wrong = replace(served, accepted=tuple((a + 1) % 3 for a in served.accepted))
    found = agreement(head, D2T, target, [wrong], 3)["chat"]
    assert found["not_ties"] and all(len(d["again"]) == len(ROUNDINGS) - 1 for d in found["not_ties"])


def test_the_summary_pools_windows() -> None:
    assert summarise([])["equal_share"] == 0.0
