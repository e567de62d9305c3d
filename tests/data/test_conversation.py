"""One row as a conversation: every form, and a reason for every kind of bad row."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from data.conversation import Row, parse
from data.sources import read
from recipes.schema import Source

Form = Literal["sharegpt", "messages", "prompt"]


def talk(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": who, "value": what} for who, what in turns]}


GOOD = talk(("human", "hello there"), ("gpt", "hi"))


def row_of(value: object, form: Form = "sharegpt", field: str = "conversations") -> Row:
    return parse(value, Source(path="x.jsonl", form=form, field=field))


def test_sharegpt_roles_become_ours() -> None:
    value = talk(("system", "be kind"), ("human", "one"), ("GPT", "two"), ("user", "three"), ("bing", "four"))
    row = row_of(value)
    assert [m["role"] for m in row.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [m["content"] for m in row.messages] == ["be kind", "one", "two", "three", "four"]
    assert row.dropped is None and not row.repaired


def test_messages_take_openai_content_parts() -> None:
    content = [{"type": "text", "text": "what "}, {"type": "text", "text": "is this"}]
    row = row_of({"m": [{"role": "user", "content": content}]}, "messages", "m")
    assert row.messages == ({"role": "user", "content": "what is this"},)


def test_prompt_is_a_string_or_the_first_of_a_list() -> None:
    for held in ("one", ["one", "two"]):
        assert row_of({"text": held}, "prompt", "text").messages == ({"role": "user", "content": "one"},)
    assert [row_of({"text": held}, "prompt", "text").dropped for held in ([], "", [3])] == [
        "empty_turn",
        "empty_turn",
        "not_text",
    ]


def test_greeting_is_taken_off_logs_but_later_parts_of_sharegpt_are_dropped() -> None:
    turns = [{"role": "system", "content": ""}, {"role": "assistant", "content": "hi"}]
    log = {"messages": [*turns, {"role": "user", "content": "a question"}]}
    row = row_of(log, "messages", "messages")
    assert row.messages == ({"role": "user", "content": "a question"},)
    assert set(row.repaired) == {"leading_assistant", "empty_system"}
    part = talk(("gpt", "... and so on"), ("human", "please continue"), ("gpt", "sure"))
    assert row_of(part).dropped == "assistant_first"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "not_an_object"),
        ([GOOD], "not_an_object"),
        ({"id": 1}, "no_field"),
        ({"conversations": None}, "no_field"),
        ({"conversations": "hello"}, "bad_form"),
        ({"conversations": ["hello"]}, "bad_form"),
        (talk(("narrator", "hello")), "bad_role"),
        ({"conversations": [{"value": "hello"}]}, "bad_role"),
        (talk(("human", 3)), "not_text"),
        (talk(("human", float("nan"))), "not_text"),
        (talk(("human", None)), "not_text"),
        (talk(("human", [{"type": "image_url", "image_url": "x"}])), "not_text"),
        (talk(("human", "half \ud83d")), "lone_surrogate"),
        (talk(("human", "fine"), ("gpt", "half \ude00")), "lone_surrogate"),
        (talk(("human", " \n")), "empty_turn"),
        (talk(("human", "fine"), ("gpt", "")), "empty_turn"),
        (talk(("human", "one"), ("gpt", "two"), ("system", "")), "empty_turn"),
        (talk(), "no_user_turn"),
        (talk(("system", "be kind")), "no_user_turn"),
        (talk(("gpt", "hello")), "no_user_turn"),
        (talk(("human", "one"), ("human", "two")), "not_alternating"),
        (talk(("human", "one"), ("gpt", "two"), ("gpt", "three")), "not_alternating"),
        (talk(("human", "one"), ("system", "two"), ("human", "three")), "not_alternating"),
        (talk(("system", "one"), ("system", "two"), ("human", "three")), "not_alternating"),
    ],
)
def test_each_kind_of_bad_row_has_its_reason_and_stops_nothing(tmp_path: Path, value: Any, reason: str) -> None:
    for name, content in {
        "a.jsonl": "".join(json.dumps(v) + "\n" for v in (GOOD, value, GOOD)),
        "a.json": json.dumps([GOOD, value, GOOD], indent=2),
    }.items():
        (tmp_path / name).write_text(content)
        found = list(read(Source(path=str(tmp_path / name), form="sharegpt", field="conversations")))
        assert [row.dropped for row in found] == [None, reason, None]
