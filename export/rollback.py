"""An earlier head on main again: one atomic commit that makes main hold what its tag holds."""

from huggingface_hub.hf_api import RepoFile

from export.ask import Repo, repo_at
from export.index import FILE, to_bytes, with_current
from export.remote import Change, Main, look, settle, tree
from recipes.schema import Publish

_WEIGHTS = "model.safetensors"


def rollback(publish: Publish, tag: str) -> str:
    """Make main hold exactly the files of `tag` again, heads.json apart, which then says so. Returns what was done.

    Files are copied on the Hub, weights without a download. Raises ValueError for a tag that is not there, holds no
    head, or holds other weights than heads.json says, and for what the user can mend; EnvironmentFault where
    the Hub fails.
    """
    repo = repo_at(publish)
    change, commit = settle(repo, lambda: restoration(repo, tag))
    if change.empty:
        return f"{repo.where}: {tag} is what main holds already; nothing to do"
    return f"{repo.where}: main holds {tag} again (commit {commit})"


def restoration(repo: Repo, tag: str) -> Change:
    """What makes main, as it is now, hold `tag` again."""
    main = look(repo)
    if tag not in main.tags:
        raise ValueError(f"{repo.where} has no tag {tag!r}; it has {', '.join(sorted(main.tags)) or 'none'}")
    at = main.tags[tag]
    wanted = tree(repo, at)
    _require_head(repo, main, tag, wanted)
    index = {}
    if main.index:  # it knows of later heads than the tag's own copy does
        wanted = {name: file for name, file in wanted.items() if name != FILE}
        index = {FILE: to_bytes(with_current(main.index, tag))} if main.index.current != tag else {}
    kept = {FILE} if main.index else set[str]()
    return Change(
        parent=main.commit,
        private=main.private,
        message=f"Back to {tag}",
        tag=tag,
        tagged=True,
        add={**index},
        copy={name: at for name, file in sorted(wanted.items()) if not _same(main.files.get(name), file)},
        delete=tuple(sorted(main.files.keys() - wanted.keys() - kept)),
    )


def _require_head(repo: Repo, main: Main, tag: str, files: dict[str, RepoFile]) -> None:
    """Raises ValueError where the tag's weights are missing, or are not those that were published under it."""
    weights = files.get(_WEIGHTS)
    if weights is None:
        raise ValueError(f"{repo.where}: {tag} holds no {_WEIGHTS}, so it is no head; nothing was changed")
    entry = next((head for head in main.index.heads if head.tag == tag), None) if main.index else None
    found = weights.lfs.sha256 if weights.lfs else "unknown"
    if entry and found != entry.weights:  # a tag from before heads.json has no entry to be compared with
        raise ValueError(
            f"{repo.where}: {_WEIGHTS} of {tag} is not what was published under it (SHA-256 {found}, {FILE} says "
            f"{entry.weights}); nothing was changed"
        )


def _same(there: RepoFile | None, wanted: RepoFile) -> bool:
    return there is not None and there.blob_id == wanted.blob_id
