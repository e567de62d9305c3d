"""Asking a Hub, through huggingface_hub: tries again what passes, says in one line what does not.

Other Hubs are named by their endpoint. The login is huggingface_hub's own (HF_TOKEN, or `hf auth login`) and is never
read into a message. A Hub that does not speak Xet needs HF_HUB_DISABLE_XET=1 in the environment.
"""

import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import huggingface_hub
from huggingface_hub import HfApi
from huggingface_hub.utils import disable_progress_bars

from recipes.faults import EnvironmentFault
from recipes.schema import Publish

CHANGED = (409, 412)
"""statuses that say: main is no longer what was looked at"""
_Answer = TypeVar("_Answer")
_PAUSES_S = (1.0, 4.0)
"""between tries; the client itself tries uploads again more often"""
_PASSING = (408, 429, 500, 502, 503, 504)
_KNOWN = {
    401: "the login was refused (401): set HF_TOKEN to a token with write access, or run `hf auth login`",
    403: "this login may not write there (403): use a token with write access, or correct publish.repo_id",
    404: "not found (404): correct publish.repo_id or publish.endpoint, create the organisation, or use a login that "
    "may see it",
    409: "it changed meanwhile (409): try again",
    412: "it changed meanwhile (412): try again",
}


@dataclass(frozen=True, kw_only=True)
class Repo:
    """A repo on a Hub."""

    api: HfApi
    repo_id: str

    @property
    def where(self) -> str:
        """Its name and its Hub, for messages."""
        return f"{self.repo_id} at {self.api.endpoint}"


def repo_at(publish: Publish) -> Repo:
    """The repo that a recipe publishes to. Raises ValueError where it names none. Asks nothing yet."""
    if not publish.repo_id:
        raise ValueError("publish.repo_id: empty, so there is no Hub to ask; name ORG/NAME")
    if not sys.stderr.isatty():
        disable_progress_bars()
    return Repo(api=HfApi(endpoint=publish.endpoint.rstrip("/") or None), repo_id=publish.repo_id)


def ask(repo: Repo, call: Callable[[], _Answer]) -> _Answer:
    """What `call` returns, tried three times while the Hub is busy, down or out of reach.

    Raises ValueError for what the user can mend (login, rights, names, a repo that changed meanwhile), EnvironmentFault
    for a Hub that stays down, busy or out of reach; both in one line that names the repo and never the login.
    """
    for pause in (*_PAUSES_S, None):
        try:
            return call()
        except Exception as error:  # the client raises its own errors, its transport's, and RuntimeError around both
            found, later = _response(error)
            passing = found in _PASSING if found else not isinstance(_origin(error), ValueError) and not _no_xet(error)
            if pause is None or not passing:
                _explain(repo.where, error, found)
        time.sleep(later or pause)
    raise AssertionError("unreachable")


def status(error: BaseException) -> int | None:
    """HTTP status of the response behind an error; None where there was none."""
    return _response(error)[0]


def _explain(where: str, error: Exception, found: int | None) -> NoReturn:
    said = _line(error)
    if _no_xet(error):
        raise ValueError(f"{where}: this Hub does not speak Xet; set HF_HUB_DISABLE_XET=1 and try again") from None
    if found in _KNOWN:
        raise ValueError(f"{where}: {_KNOWN[found]}") from None
    if found == 429:
        raise EnvironmentFault(f"{where}: too many requests (429); wait, then try again") from None
    if found and found >= 500:
        raise EnvironmentFault(f"{where}: the Hub failed ({found}); try again later") from None
    if found or isinstance(_origin(error), ValueError):
        raise ValueError(f"{where}: {said}") from None
    raise EnvironmentFault(f"{where}: cannot be reached ({type(_origin(error)).__name__}: {said})") from None


def _response(error: BaseException) -> tuple[int | None, float]:
    """HTTP status of the response behind an error, and the seconds that it asks to wait (60 at most)."""
    cause: BaseException | None = error
    while cause is not None:
        response: Any = getattr(cause, "response", None)
        if response is not None:
            after = str(response.headers.get("Retry-After", ""))
            return int(response.status_code), min(60.0, float(after)) if after.isdigit() else 0.0
        cause = cause.__cause__
    return None, 0.0


def _origin(error: BaseException) -> BaseException:
    """The error under the client's wrapping."""
    while error.__cause__ is not None and isinstance(error, RuntimeError):
        error = error.__cause__
    return error


def _no_xet(error: BaseException) -> bool:
    """True where the Hub has no token to give for Xet; the Xet client reports that as a network error."""
    return "xet-write-token" in str(error) and "404" in str(error)


def _line(error: BaseException) -> str:
    """The error in one line, without the login should a server echo it, and without the rights in signed URLs."""
    text, token = " ".join(str(error).split()), huggingface_hub.get_token()
    text = "".join(letter for letter in text if letter.isprintable())  # a server's words must not steer a terminal
    return re.sub(r"\?[^\s'\"]*", "", text.replace(token, "***") if token else text)[:300]
