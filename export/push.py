"""A head's files -> one commit and one tag on a Hub, with heads.json in the same commit."""

import itertools
from dataclasses import replace
from typing import Any

from export.ask import Repo, ask
from export.index import FILE, Head, to_bytes, with_head
from export.remote import Change, Local, Main, holds, look, settle, tags, tree
from export.validate import PICKLES

_WEIGHTS = (".safetensors", ".safetensors.index.json", *PICKLES)


def push(repo: Repo, files: dict[str, Local], head: Head, *, private: bool, message: str) -> dict[str, Any]:
    """Publish `files` (name in the repo -> file) as one commit on main and tag it. Returns the receipt.

    A tag that exists is never moved: another head gets `tag.2`, `tag.3`, ... The same files again make no second
    commit. Raises ValueError for what the user can mend (login, rights, names, an index that cannot be read, a repo
    that changes all the time), EnvironmentFault for a Hub that is down, busy or out of reach.
    """
    ask(repo, lambda: repo.api.create_repo(repo.repo_id, private=private, exist_ok=True))
    change, commit = settle(repo, lambda: publication(repo, files, head, private=private, message=message))
    if not change.tagged:
        ask(repo, lambda: _tag(repo, change.tag, commit))
    return {
        "repo_id": repo.repo_id,
        "endpoint": repo.api.endpoint,
        "commit": commit,
        "tag": change.tag,
        "url": f"{repo.api.endpoint}/{repo.repo_id}/tree/{change.tag}",
        "private": change.private,
    }


def publication(repo: Repo, files: dict[str, Local], head: Head, *, private: bool, message: str) -> Change:
    """What publishing would make of main as it is now. Raises ValueError where the repo is not fit for it."""
    main = look(repo)
    if private and not main.private:
        raise ValueError(
            f"{repo.where} exists and is public, but publish.private is true; make it private or say false"
        )
    stray = sorted(n for n in main.files.keys() - files.keys() if n.endswith(_WEIGHTS))
    if stray:
        raise ValueError(
            f"{repo.where} already holds {', '.join(stray)}, which loaders would read beside the head; delete it "
            "there, or name another publish.repo_id"
        )
    named = replace(head, tag=_free_tag(repo, main, files, head))
    index = with_head(main.index, named)
    changed = {name: file.path for name, file in files.items() if not holds(main.files.get(name), file)}
    return Change(
        parent=main.commit,
        private=main.private,
        message=message,
        tag=named.tag,
        tagged=named.tag in main.tags,
        add=changed | ({FILE: to_bytes(index)} if index != main.index else {}),
    )


def _free_tag(repo: Repo, main: Main, files: dict[str, Local], head: Head) -> str:
    """The first of `tag`, `tag.2`, ... that is free, or under which this very head was published before."""
    held = {entry.tag: entry for entry in main.index.heads} if main.index else {}
    for number in itertools.count(1):
        name = head.tag if number == 1 else f"{head.tag}.{number}"
        if name in held and held[name] != replace(head, tag=name):
            continue
        if name not in main.tags:
            return name
        there = tree(repo, main.tags[name])
        if all(holds(there.get(file), files[file]) for file in files):
            return name
    raise AssertionError("unreachable")


def _tag(repo: Repo, name: str, commit: str) -> None:
    found = tags(repo).get(name)
    if found is None:
        repo.api.create_tag(repo.repo_id, tag=name, revision=commit)
    elif found != commit:
        raise ValueError(f"somebody else set the tag {name} meanwhile; delete it there, and try again")
