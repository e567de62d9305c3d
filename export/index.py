"""heads.json at the root of a Hub repo: the heads published there, with their figures, and which is on main.

It holds ids, hashes and figures, never texts or paths. It comes from the Hub, so it is read strictly: what is not
understood whole is refused, and never written over.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from export.figures import Figure, Steps
from export.record import Verdict

FILE = "heads.json"
SCHEMA = 1
MAX_BYTES = 8 << 20
"""a larger index is refused unread; the Hub keeps larger files elsewhere anyway"""
_STRICT = ConfigDict(extra="forbid")
Word = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]*$", max_length=300)]
"""printed to terminals, so without control characters"""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Shown:
    """A domain's figures."""

    acceptance: Figure | None
    """tokens a target step, 1 + accepted / drafts, pooled"""
    tokens_per_step: Steps
    """by arm, the incumbent's where it was measured"""
    over_incumbent: dict[Word, Figure | None]
    """temperature -> acceptance length less the incumbent's, same prompts; empty without an incumbent"""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Head:
    """One published head."""

    tag: Annotated[Word, Field(min_length=1)]
    target: Word
    revision: Word
    """the target's"""
    date: Word
    """of the measurement, UTC, ISO 8601: the same head published again is the same entry"""
    weights: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of model.safetensors"""
    domains: dict[Word, Shown]
    speedup: Figure | None
    """output tokens/s over no speculation, one request in flight"""
    speed_domain: Word
    engine: Word
    engine_version: Word
    gpu: Word
    """empty = measured on a CPU"""
    incumbent: Word
    """the head beside which it was measured, name and hash; empty = none"""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Index:
    """heads.json."""

    schema: int = SCHEMA
    current: Word
    """tag of the head on main"""
    heads: list[Head]
    """oldest publication first"""


def head_of(verdict: Verdict, target: Mapping[str, Any], weights: str, tag: str) -> Head:
    """The entry of a head that passed, under the tag that it would have; `weights` is model.safetensors' SHA-256."""
    conditions, speed = verdict.conditions, verdict.speed
    return Head(
        tag=tag,
        target=target["id"],
        revision=target["revision"],
        date=conditions.date,
        weights=weights,
        domains={
            name: Shown(
                acceptance=m.acceptance, tokens_per_step=m.tokens_per_step, over_incumbent=dict(m.over_incumbent)
            )
            for name, m in verdict.domains.items()
        },
        speedup=speed.speedup if speed else None,
        speed_domain=speed.domain if speed else "",
        engine=conditions.engine,
        engine_version=conditions.engine_version,
        gpu=conditions.machine.gpu,
        incumbent=conditions.incumbent,
    )


def with_head(index: Index | None, head: Head) -> Index:
    """The index with `head` on main; every earlier entry stays. Raises ValueError where its tag is another head's."""
    if index is None:
        return Index(current=head.tag, heads=[head])
    held = {entry.tag: entry for entry in index.heads}
    if held.get(head.tag, head) != head:
        raise ValueError(f"{FILE}: {head.tag} is another head there; mend {FILE} in the repo, then try again")
    more = [] if head.tag in held else [head]
    return replace(index, current=head.tag, heads=[*index.heads, *more])


def with_current(index: Index, tag: str) -> Index:
    """The index with another of the published heads on main."""
    return replace(index, current=tag)


def to_bytes(index: Index) -> bytes:
    """The file; reading it back gives an equal index."""
    return (json.dumps(TypeAdapter(Index).dump_python(index, mode="json"), indent=1) + "\n").encode()


def parse(data: bytes, where: str) -> Index:
    """The index in a file's bytes. Raises ValueError, naming `where`, for all that is not understood whole."""
    mend = f"restore {FILE} from an earlier commit of the repo, then try again; nothing was written"
    try:
        _known_schema(json.loads(data, parse_constant=_no_number))
        index = TypeAdapter(Index).validate_json(data, strict=True)
    except (ValueError, RecursionError) as error:  # ValidationError and JSONDecodeError are ValueErrors
        raise ValueError(f"{where}: {FILE} cannot be read ({_fault(error)}); {mend}") from None
    tags = [head.tag for head in index.heads]
    if len(set(tags)) != len(tags):
        raise ValueError(f"{where}: {FILE} cannot be read (a tag stands there twice); {mend}")
    return index


def _known_schema(raw: Any) -> None:
    found = cast(dict[str, Any], raw).get("schema") if isinstance(raw, dict) else None
    if found != SCHEMA:
        raise ValueError(f"schema {str(found)[:20]!r}, this draftsmith knows {SCHEMA}; a newer one may read it")


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no figure")


def _fault(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(str(p) for p in first['loc'])}: {first['msg']}"[:200]
    return "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0][:200]
