"""The rows behind a record: one answered request each, kept in requests.parquet. They hold token ids and stay here."""

import io
from pathlib import Path
from typing import Any, Literal, cast

import pyarrow
import pyarrow.parquet
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from recipes.artifact import write_bytes

Arm = Literal["none", "head", "incumbent", "ngram"]
Phase = Literal["acceptance", "speed"]
ARMS: tuple[Arm, ...] = ("none", "head", "incumbent", "ngram")
"""in the order in which they are shown"""


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Request:
    """One answered request."""

    arm: Arm
    domain: str
    phase: Phase
    round: int
    concurrency: int
    """requests in flight, at most"""
    temperature: float
    prompt_id: str
    prompt_tokens: int
    output_tokens: int
    drafts: int
    """windows: target steps that verified draft tokens"""
    draft_tokens: int
    accepted: int
    """draft tokens, counted by the engine before it cut the answer at its end"""
    per_step_accepted: tuple[int, ...]
    ttft_s: float
    total_s: float
    gaps_s: tuple[float, ...]
    """between chunks that carry tokens"""
    finish: str
    repeated_4gram: bool
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    error: str = ""
    """empty = answered whole"""
    counted: bool = True
    """the record's counters cover it; false for rows of a batch that was interrupted"""


def write_requests(folder: Path, requests: list[Request]) -> None:
    """Write requests.parquet into `folder`; the same rows give the same bytes."""
    pa, parquet = cast(Any, pyarrow), cast(Any, pyarrow.parquet)
    names = list(Request.__dataclass_fields__)
    schema = pa.schema([(name, _types(pa).get(name, pa.int64())) for name in names])
    columns = {name: [getattr(request, name) for request in requests] for name in names}
    buffer = io.BytesIO()
    parquet.write_table(pa.table(columns, schema=schema), buffer, compression="zstd")
    write_bytes(folder / "requests.parquet", buffer.getvalue())


def read_requests(folder: Path) -> list[Request]:
    """The rows of `folder`. Raises ValueError where they are missing or are not such rows."""
    file = folder / "requests.parquet"
    try:
        rows = cast(list[dict[str, Any]], cast(Any, pyarrow.parquet).read_table(file).to_pylist())
        return TypeAdapter(list[Request]).validate_python(rows)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{file}: row {where}: {first['msg']}; measure again") from error
    except (OSError, ValueError) as error:  # pyarrow's own faults are ValueErrors
        said = "missing" if isinstance(error, FileNotFoundError) else str(error).splitlines()[0]
        raise ValueError(f"{file}: {said}; measure again") from error


def _types(pa: Any) -> dict[str, Any]:
    """Arrow types of the columns that are no plain integers."""
    texts = dict.fromkeys(("arm", "domain", "phase", "prompt_id", "finish", "error"), pa.string())
    reals = dict.fromkeys(("temperature", "ttft_s", "total_s"), pa.float64())
    flags = dict.fromkeys(("repeated_4gram", "counted"), pa.bool_())
    ids = dict.fromkeys(("per_step_accepted", "prompt_ids", "output_ids"), pa.list_(pa.int32()))
    return {**texts, **reals, **flags, **ids, "gaps_s": pa.list_(pa.float64())}
