"""Prewritten answers, masked exactly through the template."""

from pathlib import Path

import pytest

from data.prewritten import prewritten_turns
from data.prompts import Prompt
from recipes.schema import Answers
from tests.tiny import make_target, tokenizer


def conversation(*texts: str) -> Prompt:
    roles = ("user", "assistant")
    messages = tuple({"role": roles[i % 2], "content": text} for i, text in enumerate(texts))
    return Prompt(id="0" * 16, domain="chat", split="train", messages=messages, source="x")


def test_each_answer_follows_its_own_prompt_and_ends_the_turn(tmp_path: Path) -> None:
    folder, tok = make_target(tmp_path / "t"), tokenizer()
    prompt = conversation("hello", "hi there", "more?", "no more")
    ((_, turns),) = prewritten_turns(folder, [prompt], Answers(max_turns=4))
    assert [tok.decode(answer) for _, answer, _ in turns] == ["hi there<|im_end|>", "no more<|im_end|>"]
    assert tok.decode(turns[1][0]).endswith("more?<|im_end|>\n<|im_start|>assistant\n")
    assert turns[1][0][: len(turns[0][0] + turns[0][1])] == turns[0][0] + turns[0][1]  # so the two merge into one row


def test_long_answers_are_cut_and_long_prompts_dropped(tmp_path: Path) -> None:
    folder = make_target(tmp_path / "t")
    prompt = conversation("hello", "hi there friend")
    ((_, ((_, answer, finish),)),) = prewritten_turns(folder, [prompt], Answers(max_tokens=3))
    assert len(answer) == 3 and finish == "length"
    ((_, ((_, _, finish),)),) = prewritten_turns(folder, [prompt], Answers(max_prompt_tokens=2))
    assert finish == "dropped:prompt_too_long"


def test_a_template_that_rewrites_history_is_refused_by_name(tmp_path: Path) -> None:
    folder = make_target(tmp_path / "forgetful")
    rewriting = (
        "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}<|im_start|>{{ m['role'] }}\n"
        "{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(rewriting)
    with pytest.raises(ValueError, match="forgetful: its chat template rewrites history"):
        list(prewritten_turns(folder, [conversation("a", "b", "c", "d")], Answers(max_turns=2)))
