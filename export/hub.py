"""The stage `publication`: a verdict that says yes -> a folder laid out like a Hub repo, or one commit on a Hub.

Refused unless the verdict is about the very files and the very recipe that are here now.
"""

import io
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, cast

import pyarrow
import pyarrow.parquet
from pydantic import TypeAdapter

from data.target import read_target, served_path
from export.ask import repo_at
from export.card import card
from export.checks import listing
from export.index import Head, head_of
from export.preview import preview
from export.push import push
from export.record import Record, Verdict, read_record, read_verdict, recipe_hash, to_json
from export.remote import Local
from export.scrub import scrub
from export.validate import validate
from recipes.artifact import damaged, digest, hash_file, hash_json, read_manifest, write_bytes, write_json
from recipes.faults import GateRefused
from recipes.load import plain
from recipes.schema import Recipe

_STAGES = ("target", "prompts", "head", "checkpoint", "record")
_HEAD = ("config.json", "model.safetensors")


def make(recipe: Recipe, run: Path, out: Path) -> dict[str, Any]:
    """Lay the repo out in `out`; with publish.repo_id push it, and leave receipt.json instead of the weights.

    Raises GateRefused where the verdict is missing, says no, or is about something else than what is here; ValueError
    for a local-only target with a repo_id and for what the Hub refuses; EnvironmentFault where the Hub fails.
    """
    files, head = ready(recipe, run, out)
    if not recipe.publish.repo_id:
        for name in _HEAD:
            shutil.copyfile(files[name].path, out / name)
        return {"files": len(files), "bytes": sum(file.path.stat().st_size for file in files.values())}
    receipt = push(
        repo_at(recipe.publish), files, head, private=recipe.publish.private,
        message=f"Draft head for {head.target}@{head.revision}, measured {head.date}",
    )  # fmt: skip
    write_json(out / "receipt.json", receipt | {"files": {name: file.sha256 for name, file in files.items()}})
    return {"commit": receipt["commit"], "tag": receipt["tag"], "url": receipt["url"]}


def dry_run(recipe: Recipe, run: Path) -> str:
    """What :func:`make` would commit, and where. Changes nothing, here or there; raises what `make` would."""
    with tempfile.TemporaryDirectory() as folder:
        files, head = ready(recipe, run, Path(folder))
        return preview(recipe.publish, files, head, str(run / "publication"))


def ready(recipe: Recipe, run: Path, out: Path) -> tuple[dict[str, Local], Head]:
    """The repo's files, those that are not in the run yet written into `out`, and the head's entry in heads.json.

    Raises GateRefused where they may not be published, ValueError where the target is local only.
    """
    target = read_target(run)
    if recipe.publish.repo_id and target["local"]:
        raise ValueError(
            f"publish.repo_id: {recipe.publish.repo_id!r}, but nobody can fetch the target {target['id']} as it was "
            "served here, so the head is not portable; leave publish.repo_id empty for a local folder"
        )
    record, verdict = require_pass(recipe, run)
    require_sound(run, target)
    shown = _portable(verdict, run)
    paths = lay_out(recipe, run, out, (_portable(record, run), shown))
    files = {name: Local(path=path, sha256=hash_file(path)) for name, path in paths.items()}
    return files, head_of(shown, target, files["model.safetensors"].sha256, tag_name(target["revision"]))


def require_pass(recipe: Recipe, run: Path) -> tuple[Record, Verdict]:
    """The record and verdict of what is here now. Raises GateRefused where they are missing, say no, or are of else."""
    try:
        record, verdict = read_record(run), read_verdict(run)
        present = {name: digest(run / name) for name in _STAGES} | {"recipe": recipe_hash(recipe)}
    except ValueError as error:
        raise GateRefused(f"nothing is published: {error}") from error
    if not verdict.passed:
        why = "".join(f"\n  {refusal.why}" for refusal in verdict.refusals)
        raise GateRefused(f"nothing is published: the gate said no{why}")
    changed = [name for name, value in present.items() if verdict.made_from.get(name) != value]
    changed += [name for name, value in record.made_from.items() if name not in changed and present.get(name) != value]
    if changed:
        raise GateRefused(f"nothing is published: changed since the measurement: {', '.join(changed)}; measure again")
    for name in (*_STAGES, "verdict"):
        bad = damaged(run / name, deep=True)
        if bad:
            raise GateRefused(f"nothing is published: {name}/ is damaged ({', '.join(bad[:3])}); make it again")
    return record, verdict


def require_sound(run: Path, target: dict[str, Any]) -> None:
    """Raises GateRefused where the checkpoint has a fault."""
    faults = validate(run / "checkpoint", target=served_path(run), local_target=bool(target["local"]))
    if faults:
        raise GateRefused(f"nothing is published: the checkpoint has faults:\n{listing(faults)}")


def lay_out(recipe: Recipe, run: Path, out: Path, measured: tuple[Record, Verdict]) -> dict[str, Path]:
    """Write the card, the measurement and its rows into `out`. Returns the repo's files: name -> path."""
    record, verdict = measured
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "record.json", to_json(record))
    write_json(out / "verdict.json", to_json(verdict))
    write_bytes(out / "requests.parquet", public_rows(run / "record" / "requests.parquet", recipe.publish.data_licence))
    files = {name: run / "checkpoint" / name for name in _HEAD}
    files |= {name: out / name for name in ("record.json", "verdict.json", "requests.parquet")}
    hashes = {name: hash_file(path) for name, path in files.items()}
    text = card(record, verdict, plain(recipe), read_target(run), hashes, _packages(run))
    write_bytes(out / "README.md", text.encode())
    return files | {"README.md": out / "README.md"}


def public_rows(file: Path, data_licence: str) -> bytes:
    """requests.parquet as it may be published: no error texts, and without a data licence hashes for token ids."""
    parquet = cast(Any, pyarrow.parquet)
    rows = cast(list[dict[str, Any]], parquet.read_table(file).to_pylist())
    public = [_public(row, hashed=not data_licence) for row in rows]
    buffer = io.BytesIO()
    parquet.write_table(cast(Any, pyarrow).Table.from_pylist(public), buffer, compression="zstd")
    return buffer.getvalue()


def tag_name(revision: str) -> str:
    """The target's revision as a git tag."""
    return "target-" + re.sub(r"[^A-Za-z0-9._-]+|\.\.+|\.lock$", "-", revision).strip(".-")


def _public(row: dict[str, Any], *, hashed: bool) -> dict[str, Any]:
    ids = ("prompt_ids", "output_ids")
    kept = {key: value for key, value in row.items() if key not in (*ids, "error")}
    shown = {f"{key}_sha256": hash_json(row[key]) for key in ids} if hashed else {key: row[key] for key in ids}
    return kept | shown | {"failed": bool(row["error"])}


def _portable(value: Any, run: Path) -> Any:
    """The record or verdict without this machine's paths."""
    names = {
        str(served_path(run)): "TARGET",
        str((run / "checkpoint").resolve()): "checkpoint",
        str(run.resolve()): "RUN",
    }
    return TypeAdapter(type(value)).validate_python(scrub(to_json(value), names))


def _packages(run: Path) -> dict[str, dict[str, str]]:
    """Versions of the packages that trained and that measured."""
    manifests = {"trained with": read_manifest(run / "head"), "measured with": read_manifest(run / "record")}
    return {when: manifest["packages"] for when, manifest in manifests.items() if manifest}
