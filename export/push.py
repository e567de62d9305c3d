"""Files -> one commit and one tag on a Hub, through huggingface_hub. Other Hubs are named by their endpoint.

The login is huggingface_hub's own (HF_TOKEN, or `hf auth login`) and is never read into a message. A Hub that does not
speak Xet needs HF_HUB_DISABLE_XET=1 in the environment.
"""

import itertools
import re
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import huggingface_hub
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.utils import disable_progress_bars

from export.validate import PICKLES
from recipes.faults import EnvironmentFault

_Answer = TypeVar("_Answer")
_PAUSES_S = (1.0, 4.0)
"""between tries; the client itself tries uploads again more often"""
_PASSING = (408, 429, 500, 502, 503, 504)


def push(
    files: dict[str, Path], *, repo_id: str, private: bool, endpoint: str, tag: str, message: str
) -> dict[str, Any]:
    """Publish `files` (name in the repo -> path) as one commit on main and tag it. Returns the receipt.

    A tag that exists is never moved: another publication gets `tag.2`, `tag.3`, ... The same files again make no second
    commit. Raises ValueError for what the user can mend (login, rights, names, a repo that changed meanwhile),
    EnvironmentFault for a Hub that is down, busy or out of reach.
    """
    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi(endpoint=endpoint.rstrip("/") or None)
    where = f"{repo_id} at {api.endpoint}"
    _ask(where, lambda: api.create_repo(repo_id, private=private, exist_ok=True))
    found = _ask(where, lambda: api.model_info(repo_id))
    if private and found.private is False:
        raise ValueError(f"{where} exists and is public, but publish.private is true; make it private or say false")
    commit = _ask(where, lambda: _commit(api, repo_id, files, message))
    named = _ask(where, lambda: _tag(api, repo_id, tag, commit))
    return {
        "repo_id": repo_id,
        "endpoint": api.endpoint,
        "commit": commit,
        "tag": named,
        "url": f"{api.endpoint}/{repo_id}/tree/{named}",
        "private": bool(found.private),
    }


def _commit(api: HfApi, repo_id: str, files: dict[str, Path], message: str) -> str:
    """The commit that holds the files; it applies only to the state of main that was looked at."""
    head = api.model_info(repo_id)
    present = {sibling.rfilename for sibling in head.siblings or []}
    stray = sorted(n for n in present - set(files) if n.endswith((".safetensors", ".safetensors.index.json", *PICKLES)))
    if stray:
        raise ValueError(
            f"{repo_id} already holds {', '.join(stray)}, which loaders would read beside the head; delete it there, "
            "or name another publish.repo_id"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*commit a data file.*")  # the measurement's rows belong here
        done = api.create_commit(
            repo_id,
            [CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(path)) for name, path in sorted(files.items())],
            commit_message=message,
            parent_commit=head.sha,
        )
    return str(done.oid)


def _tag(api: HfApi, repo_id: str, wanted: str, commit: str) -> str:
    """The first of `wanted`, `wanted.2`, ... that is on this commit or free, which is then created."""
    tags = {ref.name: ref.target_commit for ref in api.list_repo_refs(repo_id).tags}
    for number in itertools.count(1):
        name = wanted if number == 1 else f"{wanted}.{number}"
        if tags.get(name) == commit:
            return name
        if name not in tags:
            api.create_tag(repo_id, tag=name, revision=commit)
            return name
    raise AssertionError("unreachable")


def _ask(where: str, call: Callable[[], _Answer]) -> _Answer:
    for pause in (*_PAUSES_S, None):
        try:
            return call()
        except Exception as error:  # the client raises its own errors, its transport's, and RuntimeError around both
            status, later = _status(error)
            passing = (
                status in _PASSING if status else not isinstance(_origin(error), ValueError) and not _no_xet(error)
            )
            if pause is None or not passing:
                _explain(where, error, status)
        time.sleep(later or pause)
    raise AssertionError("unreachable")


def _explain(where: str, error: Exception, status: int | None) -> NoReturn:
    said = _line(error)
    known = {
        401: "the login was refused (401): set HF_TOKEN to a token with write access, or run `hf auth login`",
        403: "this login may not write there (403): use a token with write access, or correct publish.repo_id",
        404: "not found (404): correct publish.repo_id or publish.endpoint, or create the organisation",
        409: "it changed meanwhile (409): publish again",
        412: "it changed meanwhile (412): publish again",
    }
    if _no_xet(error):
        raise ValueError(f"{where}: this Hub does not speak Xet; set HF_HUB_DISABLE_XET=1 and publish again") from None
    if status in known:
        raise ValueError(f"{where}: {known[status]}") from None
    if status == 429:
        raise EnvironmentFault(f"{where}: too many requests (429); wait, then publish again") from None
    if status and status >= 500:
        raise EnvironmentFault(f"{where}: the Hub failed ({status}); publish again later") from None
    if status or isinstance(_origin(error), ValueError):
        raise ValueError(f"{where}: {said}") from None
    raise EnvironmentFault(f"{where}: cannot be reached ({type(_origin(error)).__name__}: {said})") from None


def _status(error: BaseException) -> tuple[int | None, float]:
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
    return re.sub(r"\?[^\s'\"]*", "", text.replace(token, "***") if token else text)[:300]
