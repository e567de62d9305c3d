"""What a Hub repo's main holds, and one atomic commit that applies only to the main that was looked at."""

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.sha import git_hash

from export.ask import CHANGED, Repo, ask, status
from export.index import FILE, MAX_BYTES, Index, parse

_TRIES = 3
"""main is looked at, while others write too"""


@dataclass(frozen=True, kw_only=True)
class Local:
    """A file to publish."""

    path: Path
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Main:
    """A repo's main at one moment."""

    commit: str
    private: bool
    files: dict[str, RepoFile]
    tags: dict[str, str]
    """tag -> commit"""
    index: Index | None
    """None where the repo holds no heads.json"""


@dataclass(frozen=True, kw_only=True)
class Change:
    """What one commit makes of main."""

    parent: str
    """the main that was looked at"""
    private: bool
    message: str
    tag: str
    """of the head that main holds afterwards"""
    tagged: bool
    """True where the tag is there already"""
    add: dict[str, Path | bytes] = field(default_factory=dict[str, Path | bytes])
    copy: dict[str, str] = field(default_factory=dict[str, str])
    """name -> commit that holds the file"""
    delete: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """True where main is as it should be."""
        return not (self.add or self.copy or self.delete)


def look(repo: Repo) -> Main:
    """The repo's main, its tags and its index, all of one commit. Raises ValueError where the index cannot be read."""
    found = ask(repo, lambda: repo.api.model_info(repo.repo_id))
    commit = str(found.sha)
    files = tree(repo, commit)
    return Main(
        commit=commit,
        private=found.private is not False,
        files=files,
        tags=ask(repo, lambda: tags(repo)),
        index=_index(repo, commit, files[FILE]) if FILE in files else None,
    )


def tree(repo: Repo, commit: str) -> dict[str, RepoFile]:
    """The files of a commit: name -> size and hashes."""
    listed = ask(repo, lambda: list(repo.api.list_repo_tree(repo.repo_id, revision=commit, recursive=True)))
    return {entry.path: entry for entry in listed if isinstance(entry, RepoFile)}


def tags(repo: Repo) -> dict[str, str]:
    """The repo's tags: name -> commit. Asks once; a caller's :func:`ask` tries again."""
    return {ref.name: ref.target_commit for ref in repo.api.list_repo_refs(repo.repo_id).tags}


def holds(found: RepoFile | None, file: Local) -> bool:
    """True where the repo's file is this very file."""
    if found is None or found.size != file.path.stat().st_size:
        return False
    if found.lfs:
        return found.lfs.sha256 == file.sha256
    return found.blob_id == git_hash(file.path.read_bytes())


def settle(repo: Repo, prepare: Callable[[], Change]) -> tuple[Change, str]:
    """Commit what `prepare` asks of main as it is now; where main changes meanwhile, prepare and commit again.

    Returns the change that was made and main's commit; an empty change makes none. Raises ValueError where main changed
    every time, and what :func:`ask` raises.
    """
    for _ in range(_TRIES):
        change = prepare()
        commit = change.parent if change.empty else ask(repo, lambda change=change: _send(repo, change))
        if commit is not None:
            return change, commit
    raise ValueError(f"{repo.where}: it changed meanwhile, {_TRIES} times; somebody else publishes there, try again")


def _send(repo: Repo, change: Change) -> str | None:
    """The new commit, or None where main is no longer the change's parent."""
    operations = [
        *(CommitOperationAdd(path_in_repo=n, path_or_fileobj=held) for n, held in sorted(change.add.items())),
        *(CommitOperationCopy(src_path_in_repo=n, path_in_repo=n, src_revision=at) for n, at in change.copy.items()),
        *(CommitOperationDelete(path_in_repo=n, is_folder=False) for n in change.delete),
    ]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*commit a data file.*")  # the measurement's rows belong here
            done = repo.api.create_commit(
                repo.repo_id, operations, commit_message=change.message, parent_commit=change.parent
            )
    except Exception as error:  # the client raises its own errors, its transport's, and RuntimeError around both
        if status(error) in CHANGED:
            return None
        raise
    return str(done.oid)


def _index(repo: Repo, commit: str, found: RepoFile) -> Index:
    if found.size > MAX_BYTES:
        raise ValueError(
            f"{repo.where}: {FILE} has {found.size} bytes, at most {MAX_BYTES} are read; restore it from an earlier "
            "commit of the repo, then try again"
        )
    with tempfile.TemporaryDirectory() as folder:
        file = ask(repo, lambda: repo.api.hf_hub_download(repo.repo_id, FILE, revision=commit, local_dir=folder))
        return parse(Path(file).read_bytes(), repo.where)
