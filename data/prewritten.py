"""Answers that the data already holds (off-policy), rendered by the target's chat template."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from data.prompts import Prompt
from recipes.schema import Answers

Rendered = tuple[list[int], list[int], str]


def prewritten_turns(target: Path, prompts: list[Prompt], answers: Answers) -> Iterator[tuple[Prompt, list[Rendered]]]:
    """Each prompt with (prompt ids, answer ids, finish) per assistant turn, cut at answers.max_tokens.

    Raises ValueError where the template rewrites history: then no prefix of a conversation is what was served.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(target)
    for prompt in prompts:
        yield (
            prompt,
            [_turn(tokenizer, target, prompt, i, answers) for i in _assistant_turns(prompt)[: answers.max_turns]],
        )


def _assistant_turns(prompt: Prompt) -> list[int]:
    return [i for i, message in enumerate(prompt.messages) if message["role"] == "assistant"]


def _turn(tokenizer: Any, target: Path, prompt: Prompt, i: int, answers: Answers) -> Rendered:
    messages = list(prompt.messages)
    before = tokenizer.apply_chat_template(messages[:i], tokenize=False, add_generation_prompt=True)
    after = tokenizer.apply_chat_template(messages[: i + 1], tokenize=False)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    if not after.startswith(before) or not whole.startswith(after.rstrip("\n")):
        raise ValueError(
            f"{target.name}: its chat template rewrites history (prompt {prompt.id}, turn {i}), so prewritten answers "
            "cannot be masked exactly; use answers.mode: target"
        )
    prompt_ids = tokenizer(before, add_special_tokens=False).input_ids
    output_ids = tokenizer(after[len(before) :].rstrip("\n"), add_special_tokens=False).input_ids
    if len(prompt_ids) > answers.max_prompt_tokens:
        return [], [], "dropped:prompt_too_long"
    cut = len(output_ids) > answers.max_tokens
    return prompt_ids, output_ids[: answers.max_tokens], "length" if cut else "stop"
