"""A small head to publish on the loopback Hub."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from export.ask import Repo
from export.index import Head, Index, head_of, parse
from export.push import push
from export.remote import Local
from recipes.artifact import hash_file
from recipes.schema import Publish
from tests.export.measured import verdict
from tests.hub_server import Hub

REPO = "org/head"
LATER = "2026-02-02T00:00:00Z"


def small(folder: Path, **texts: str) -> dict[str, Local]:
    """Files to push, one of them large in the Hub's eyes."""
    folder.mkdir(parents=True, exist_ok=True)
    held = {"README.md": "---\nlicense: mit\n---\n", "model.safetensors": "weights" * 100, **texts}
    for name, text in held.items():
        (folder / name).write_text(text)
    return {name: Local(path=folder / name, sha256=hash_file(folder / name)) for name in held}


def entry(files: dict[str, Local], **changes: Any) -> Head:
    """The head's line in heads.json."""
    target = {"id": "org/target", "revision": "v1"}
    return replace(head_of(verdict({}), target, files["model.safetensors"].sha256, "target-v1"), **changes)


def send(hub: Hub, files: dict[str, Local], *, api: HfApi | None = None, repo_id: str = REPO, **changes: Any) -> Any:
    """Publish them; `changes` go into the head's entry, but for `private`."""
    private = changes.pop("private", True)
    repo = Repo(api=api or HfApi(endpoint=hub.url), repo_id=repo_id)
    return push(repo, files, entry(files, **changes), private=private, message="a head")


def two_heads(hub: Hub, folder: Path) -> None:
    """target-v1, then target-v2 with one file more and one less."""
    send(hub, small(folder / "1", **{"old.txt": "of the first"}))
    send(hub, small(folder / "2", **{"model.safetensors": "better" * 100, "new.txt": "second"}), tag="target-v2",
         revision="v2", date=LATER)  # fmt: skip


def on_main(hub: Hub) -> dict[str, bytes]:
    """What main holds, heads.json apart."""
    return {n: data for n, data in hub.state.repos[REPO].commits[-1].files.items() if n != "heads.json"}


def index_of(hub: Hub) -> Index:
    """heads.json on main."""
    return parse(hub.state.repos[REPO].commits[-1].files["heads.json"], "main")


def settings(hub: Hub) -> Publish:
    """Of a recipe."""
    return Publish(repo_id=REPO, endpoint=hub.url)


def racing(hub: Hub, act: Any, times: int = 1) -> HfApi:
    """A client before whose first `times` commits somebody else does `act`."""
    left = [times]

    class Late(HfApi):
        def create_commit(self, *args: Any, **more: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            if left[0]:
                left[0] -= 1
                act()
            return super().create_commit(*args, **more)

    return Late(endpoint=hub.url)
