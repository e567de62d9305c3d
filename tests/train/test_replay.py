import random

import torch

from data.store import Features
from train.pack import pack
from train.replay import summary, walk


def one_answer(prompt: int, answer: list[int]) -> Features:
    size = prompt + len(answer)
    mask = torch.zeros(size, dtype=torch.bool)
    mask[prompt:] = True
    ids = torch.tensor([900] * prompt + answer)
    return Features(aux_SAH=torch.zeros(size, 3), final_SH=torch.zeros(size, 1), input_ids_S=ids, loss_mask_S=mask)


def by_hand(answer: list[int], drafted: dict[int, list[int]], prompt: int, steps: int) -> list[tuple[int, int]]:
    """Serve: one token from the prefill, then draft, verify, add the target's own."""
    emitted, windows = 1, []
    while emitted < len(answer):
        anchor = prompt + emitted - 2
        accepted = 0
        while accepted < steps and emitted + accepted < len(answer):
            if drafted[anchor][accepted] != answer[emitted + accepted]:
                break
            accepted += 1
        windows.append((anchor, accepted))
        emitted += accepted + 1
    return windows


def test_walk_is_serving_done_by_hand() -> None:
    chance = random.Random(0)
    for _ in range(50):
        prompt, steps = chance.randint(1, 4), chance.randint(1, 4)
        answer = [chance.randint(0, 2) for _ in range(chance.randint(2, 30))]
        one = pack([one_answer(prompt, answer)])
        drafted = {t: [chance.randint(0, 2) for _ in range(steps)] for t in one.at.kept_M.tolist()}
        table = torch.tensor([[drafted[t][k] for t in one.at.kept_M.tolist()] for k in range(steps)])
        found = walk(table, one)
        assert [(w.anchor, w.accepted) for w in found] == by_hand(answer, drafted, prompt, steps)


def test_walk_starts_anew_at_each_document() -> None:
    one = pack([one_answer(2, [1, 2, 3, 4, 5]), one_answer(1, [7, 8])])
    wrong = torch.full((2, len(one.at.kept_M)), -1)
    assert [w.anchor for w in walk(wrong, one)] == [1, 2, 3, 4, 7]
    right = torch.stack([one.input_ids_S[one.following(2 + k)] for k in range(2)])
    assert [(w.anchor, w.accepted, w.judged) for w in walk(right, one)] == [(1, 2, 2), (4, 1, 1), (7, 1, 1)]


def test_summary_counts_tokens_over_windows_not_accuracy_by_step() -> None:
    # Four easy tokens (one window of 3), then misses: slots average 1 + 3/6 + ..., the walk says 8 tokens / 5 windows.
    one = pack([one_answer(1, [1, 1, 1, 1, 1, 2, 3, 4, 5])])
    hit = torch.stack([one.input_ids_S[one.following(2 + k)] for k in range(3)])
    hit[:, 3:] = -1
    got = summary(walk(hit, one), 3)
    assert got["windows"] == 5 and got["tokens"] == 8 and got["length"] == 1.6
    assert got["per_position"] == [0.2, 0.2, 0.2]
