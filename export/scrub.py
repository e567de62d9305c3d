"""What leaves this machine names no path and no secret of it."""

import re
from collections.abc import Mapping
from typing import Any, cast

_PATH = re.compile(r"(?<![\w./~)\]-])~?/(?:[\w.@+~-]+/)*([\w.@+~-]+)/?")
_SECRET = re.compile(r"(^|[_-])(token|key|apikey|password|credentials?)$|secret", re.IGNORECASE)
_OPTION = re.compile(r"(--[\w-]*(?:token|api-key|secret|password))=\S+")
HIDDEN = "***"


def scrub(value: Any, names: Mapping[str, str]) -> Any:
    """JSON data with known paths replaced by their names, other absolute paths by their last part, secrets by ***.

    A secret is the value of a key, or the word after an option, whose name says so.
    """
    if isinstance(value, dict):
        held = cast(dict[str, Any], value)
        return {k: HIDDEN if is_secret(k, v) else scrub(v, names) for k, v in held.items()}
    if isinstance(value, list | tuple):
        items = [scrub(item, names) for item in cast(list[Any], value)]
        return [HIDDEN if _names_secret(before) else item for before, item in zip(["", *items], items, strict=False)]
    return scrub_text(value, names) if isinstance(value, str) else value


def scrub_text(text: str, names: Mapping[str, str]) -> str:
    """One string of it."""
    for path in sorted(names, key=len, reverse=True):
        text = text.replace(path, names[path])
    return _PATH.sub(r"\1", _OPTION.sub(rf"\1={HIDDEN}", text))


def is_secret(name: str, value: Any) -> bool:
    """True for a text under a name like HF_TOKEN or api_key."""
    return isinstance(value, str) and bool(value) and bool(_SECRET.search(name))


def _names_secret(option: Any) -> bool:
    return isinstance(option, str) and option.startswith("--") and bool(_SECRET.search(option))
