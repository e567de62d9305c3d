"""The measurement record and the verdict: the one schema that eval writes and that card and hub read.

Both hold ids, counts, times and hashes, never text or tokens; the rows behind them are in :mod:`export.requests`.
"""

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from export.figures import Measured, Parity, Speed
from export.requests import Arm, Phase
from recipes.artifact import hash_json, write_json
from recipes.load import plain
from recipes.schema import Recipe

SCHEMA = 1
INPUTS = ("target", "prompts", "head", "checkpoint")
"""stages whose digests a record holds"""
UNMEASURED = ("cost", "publish", "tracking")
"""parts of a recipe that may change without another measurement"""
CHECKPOINT, INCUMBENT = "checkpoint", "incumbent"
"""stand for the measured folders' paths in the recorded commands"""
_STRICT = ConfigDict(extra="forbid")
_Form = TypeVar("_Form")


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Machine:
    """Where it was measured."""

    cpu: str
    cores: int
    gpu: str
    memory_gib: float


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Conditions:
    """How it was measured."""

    engine: str
    engine_version: str
    command: dict[str, list[str]]
    """argv of each arm's server, without this machine's paths"""
    env: dict[str, str]
    machine: Machine
    dtype: str
    quantization: str
    max_tokens: int
    """an answer, while acceptance is measured"""
    speed_max_tokens: int
    concurrency: int
    speculative_tokens: int
    rejection_sample_method: str
    draft_sample_method: str
    temperatures: list[float]
    incumbent: str = ""
    """the head now published, name and hash; empty = none was set beside this one"""
    date: str
    """UTC, ISO 8601"""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Counters:
    """The engine's own counters, after minus before."""

    drafts: int
    draft_tokens: int
    accepted: int
    per_position: list[int]


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Batch:
    """One batch of requests that ran whole: an arm's round, or an arm's acceptance run on a domain."""

    phase: Phase
    domain: str
    round: int
    arm: Arm
    temperature: float
    concurrency: int
    output_tokens: int
    seconds: float
    requests: int


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="ignore"))
class Simulated:
    """Training's own figure of a domain, on held-out features."""

    length: float
    tokens: int
    windows: int
    per_position: list[float]


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Record:
    """record.json."""

    schema: int = SCHEMA
    made_from: dict[str, str]
    """stage -> digest; recipe -> :func:`recipe_hash`"""
    conditions: Conditions
    counters: dict[str, dict[str, Counters]]
    """arm -> domain"""
    speed: list[Batch]
    simulated: dict[str, Simulated]
    parity: dict[str, Parity] | None
    looks: dict[str, list[int]] = Field(default_factory=dict[str, list[int]])
    """domain -> requests asked by each look, planned before the first; one look is an interval of a fixed number"""
    text: str = "ids, counts and hashes only"


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Refusal:
    """One reason why the gate said no."""

    rule: str
    domain: str
    figure: float | None
    low: float | None
    high: float | None
    threshold: float | None
    why: str
    """one line"""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Verdict:
    """verdict.json."""

    schema: int = SCHEMA
    passed: bool
    refusals: list[Refusal]
    made_from: dict[str, str]
    domains: dict[str, Measured]
    speed: Speed | None
    conditions: Conditions
    findings: list[str]


def recipe_hash(recipe: Recipe) -> str:
    """What of the recipe a measurement stands for: all of it but UNMEASURED."""
    return hash_json({k: v for k, v in plain(recipe).items() if k not in UNMEASURED})


def to_json(value: Record | Verdict) -> dict[str, Any]:
    """JSON-ready data; reading it back gives an equal value."""
    return TypeAdapter(type(value)).dump_python(value, mode="json")


def write_record(folder: Path, record: Record) -> None:
    """Write record.json into `folder`."""
    write_json(folder / "record.json", to_json(record))


def write_verdict(folder: Path, verdict: Verdict) -> None:
    """Write verdict.json into `folder`."""
    write_json(folder / "verdict.json", to_json(verdict))


def read_record(run: Path) -> Record:
    """The measurement of a run. Raises ValueError where it is missing or no record."""
    return _read(run / "record" / "record.json", Record)


def read_verdict(run: Path) -> Verdict:
    """The verdict of a run. Raises ValueError where it is missing or no verdict."""
    return _read(run / "verdict" / "verdict.json", Verdict)


def _read(file: Path, form: type[_Form]) -> _Form:
    try:
        return TypeAdapter(form).validate_python(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:  # ValidationError and JSONDecodeError are ValueErrors
        raise ValueError(f"{file}: {_first_fault(error)}; run that stage again") from error


def _first_fault(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(str(p) for p in first['loc'])}: {first['msg']}"
    return "missing" if isinstance(error, FileNotFoundError) else str(error).splitlines()[0]
