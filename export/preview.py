"""What `draftsmith publish` would commit, told without doing it: the Hub is only read."""

from export.ask import ask, repo_at
from export.index import FILE, Head
from export.push import publication
from export.remote import Local
from recipes.schema import Publish


def preview(publish: Publish, files: dict[str, Local], head: Head, folder: str) -> str:
    """Where the files would go, which are new there, their sizes and the tag; `folder` is where they go without a Hub.

    Raises what publishing would, as far as reading tells.
    """
    if not publish.repo_id:
        return _listing(f"would write {folder}", files, "written")
    repo = repo_at(publish)
    if not ask(repo, lambda: repo.api.repo_exists(repo.repo_id)):
        kind = "private" if publish.private else "public"
        title = f"would create {repo.where} ({kind}) and commit, tag {head.tag}, with {FILE}"
        return _listing(title, files, "new")
    change = publication(repo, files, head, private=publish.private, message="a preview")
    kind = "private" if change.private else "public"
    if change.empty and change.tagged:
        return f"{repo.where} ({kind}) holds these files already, tag {change.tag}; nothing would change"
    sent = {name: file for name, file in files.items() if name in change.add}
    title = f"would commit to {repo.where} ({kind}), tag {change.tag}{', with ' + FILE if FILE in change.add else ''}"
    return _listing(title, sent, "new or changed")


def _listing(title: str, files: dict[str, Local], word: str) -> str:
    sizes = {name: file.path.stat().st_size for name, file in sorted(files.items())}
    lines = [f"  {name:20} {size:>15,} bytes" for name, size in sizes.items()]
    return "\n".join([f"{title}: {len(sizes)} files {word}, {sum(sizes.values()):,} bytes", *lines])
