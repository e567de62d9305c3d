"""One row of a source as a conversation: its messages, or the reason why it has none."""

from dataclasses import dataclass
from typing import Literal, cast

from recipes.schema import Source

ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
}
FORMS = {
    "sharegpt": "a list of {from, value}",
    "messages": "a list of {role, content}",
    "prompt": "a string, or a list whose first item is one",
}

Reason = Literal[
    "cut_off",  # the file ends inside this row
    "undecodable",  # not UTF-8
    "not_json",
    "not_an_object",
    "no_field",  # absent or null
    "bad_form",  # not what the source's form says
    "bad_role",
    "not_text",  # a turn that is no string, e.g. an image or NaN
    "lone_surrogate",  # half a character, which no tokenizer takes
    "empty_turn",
    "no_user_turn",
    "assistant_first",  # sharegpt: a later part of a chat, whose turns refer to what is not there
    "not_alternating",  # a system turn that is not the first counts here too
]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a source: its messages (a system message or none, then user, assistant, user, ...), or why none.

    Where the assistant speaks first: in the form messages (logs with a greeting) that turn is taken off, which
    `repaired` says; in the form sharegpt the row is dropped, because there (35% of ShareGPT) long chats were cut in
    parts, and a later part, "please continue", is nobody's first request. An empty system turn is taken off too.
    """

    messages: tuple[dict[str, str], ...] = ()
    dropped: Reason | None = None
    repaired: tuple[str, ...] = ()
    """what was taken off a row that is kept: leading_assistant, empty_system"""


def parse(value: object, source: Source) -> Row:
    """The conversation that `value`, one decoded row, holds in the source's field, in the source's form.

    Every turn must be sound, used later or not: a row that is broken somewhere is not trusted elsewhere.
    """
    if not isinstance(value, dict):
        return Row(dropped="not_an_object")
    held = cast(dict[str, object], value).get(source.field)
    if held is None:
        return Row(dropped="no_field")
    if source.form == "prompt":
        if isinstance(held, list):
            held = cast(list[object], held)[0] if held else ""
        fault = _text_fault(held)
        return Row(dropped=fault) if fault else Row(messages=({"role": "user", "content": cast(str, held)},))
    return _conversation(held, source.form)


def _conversation(held: object, form: str) -> Row:
    who, what = ("from", "value") if form == "sharegpt" else ("role", "content")
    messages: list[dict[str, str]] = []
    repaired: list[str] = []
    if not isinstance(held, list):
        return Row(dropped="bad_form")
    for turn in cast(list[object], held):
        if not isinstance(turn, dict):
            return Row(dropped="bad_form")
        fields = cast(dict[str, object], turn)
        role = ROLES.get(str(fields.get(who)).lower())
        text = _joined(fields.get(what))
        fault = _text_fault(text)
        if role is None:
            return Row(dropped="bad_role")
        if fault == "empty_turn" and role == "system" and not messages:
            repaired.append("empty_system")
        elif fault:
            return Row(dropped=fault)
        else:
            messages.append({"role": role, "content": cast(str, text)})
    return _alternating(messages, repaired, form)


def _alternating(messages: list[dict[str, str]], repaired: list[str], form: str) -> Row:
    roles = [m["role"] for m in messages]
    start = int(roles[:1] == ["system"])
    if "user" not in roles:
        return Row(dropped="no_user_turn")
    if roles[start] == "assistant":
        if form == "sharegpt":
            return Row(dropped="assistant_first")
        del messages[start], roles[start]
        repaired.append("leading_assistant")
    if any(role != ("user", "assistant")[i % 2] for i, role in enumerate(roles[start:])):
        return Row(dropped="not_alternating")
    return Row(messages=tuple(messages), repaired=tuple(repaired))


def _joined(content: object) -> object:
    """OpenAI's content parts as one text where all are text, else unchanged."""
    if not isinstance(content, list):
        return content
    parts = cast(list[object], content)
    fields = [cast(dict[str, object], part) if isinstance(part, dict) else {} for part in parts]
    texts = [part["text"] for part in fields if part.get("type") == "text" and isinstance(part.get("text"), str)]
    return "".join(cast(list[str], texts)) if len(texts) == len(parts) else parts


def _text_fault(text: object) -> Reason | None:
    if not isinstance(text, str):
        return "not_text"
    if not text.strip():
        return "empty_turn"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "lone_surrogate"
    return None
