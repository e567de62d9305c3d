"""rows.jsonl: what a measurement has so far, line by line, so that a killed one goes on where it was.

- `{"conditions": ...}`: a session (one life of the servers) begins
- `{"job": KEY, "row": ...}`: an acceptance row, as soon as its answer is finished
- `{"job": KEY, "batch": ..., "counters": ...}`: a job ended; a timed job's line holds its rows too, so that it is there
  whole or not at all
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter

from data.prompts import Prompt
from eval.traffic import Load, total
from export.record import Batch, Conditions, Counters
from export.requests import Request

_REQUEST, _BATCH = TypeAdapter(Request), TypeAdapter(Batch)
_COUNTERS, _CONDITIONS = TypeAdapter(Counters), TypeAdapter(Conditions)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One set of prompts for one arm."""

    key: str
    domain: str
    prompts: tuple[Prompt, ...]
    load: Load

    @property
    def timed(self) -> bool:
        """True where it counts only whole."""
        return self.load.phase == "speed"


@dataclass(frozen=True, kw_only=True)
class Session:
    """What one life of the servers gave."""

    conditions: Conditions
    rows: dict[str, list[Request]] = field(default_factory=dict[str, list[Request]])
    """by job"""
    ends: dict[str, tuple[Batch, Counters]] = field(default_factory=dict[str, tuple[Batch, Counters]])
    """by job that ran to its end in this session"""


def begin(file: Path, conditions: Conditions) -> None:
    """A session begins."""
    _append(file, {"conditions": _CONDITIONS.dump_python(conditions, mode="json")})


def add_row(file: Path, job: Job, row: Request) -> None:
    """An answer is finished."""
    _append(file, {"job": job.key, "row": _REQUEST.dump_python(row, mode="json")})


def end(file: Path, job: Job, batch: Batch, counters: Counters, rows: Sequence[Request]) -> None:
    """A job is finished; the rows are written where it is timed (the others are there already)."""
    line: dict[str, Any] = {
        "job": job.key,
        "batch": _BATCH.dump_python(batch, mode="json"),
        "counters": _COUNTERS.dump_python(counters, mode="json"),
    }
    if job.timed:
        line["rows"] = [_REQUEST.dump_python(row, mode="json") for row in rows]
    _append(file, line)


def read(file: Path) -> list[Session]:
    """The sessions so far. A torn last line, of a kill in mid-write, is cut off the file."""
    data = file.read_bytes() if file.exists() else b""
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(file, len(whole))
    sessions: list[Session] = []
    for text in whole.splitlines():
        line = cast(dict[str, Any], json.loads(text))
        if "conditions" in line:
            sessions.append(Session(conditions=_CONDITIONS.validate_python(line["conditions"])))
            continue
        rows = sessions[-1].rows.setdefault(line["job"], [])
        rows.extend(_REQUEST.validate_python(row) for row in line.get("rows", [line["row"]] if "row" in line else []))
        if "batch" in line:
            ended = _BATCH.validate_python(line["batch"]), _COUNTERS.validate_python(line["counters"])
            sessions[-1].ends[line["job"]] = ended
    return sessions


def remaining(job: Job, sessions: Sequence[Session]) -> list[Prompt]:
    """Prompts of a job that are still to be asked: those without a good row; of a timed job all or none."""
    good = {row.prompt_id for row in latest(job, sessions).values() if not row.error}
    left = [prompt for prompt in job.prompts if prompt.id not in good]
    return list(job.prompts) if left and job.timed else left


def assemble(
    jobs: Sequence[Job], sessions: Sequence[Session]
) -> tuple[list[Request], dict[str, dict[str, Counters]], list[Batch]]:
    """Rows in the order of jobs and prompts, counters by arm and domain, and the batches that ran whole.

    Depends on nothing but the arguments. Counters and rows of a batch that was interrupted cannot be compared, so its
    rows are marked as not counted.
    """
    requests: list[Request] = []
    counters: dict[str, dict[str, Counters]] = {}
    batches: list[Batch] = []
    for job in jobs:
        rows = latest(job, sessions)
        requests += [rows[prompt.id] for prompt in job.prompts if prompt.id in rows]
        for session in sessions:
            if not _countable(job, session):
                continue
            batch, counted = session.ends[job.key]
            if batch.requests == len(job.prompts):
                batches.append(batch)
            if job.load.unseen:
                continue  # its rows hold no windows to set beside the counters
            by_domain = counters.setdefault(job.load.arm, {})
            by_domain[job.domain] = total(by_domain[job.domain], counted) if job.domain in by_domain else counted
    return requests, counters, batches


def latest(job: Job, sessions: Sequence[Session]) -> dict[str, Request]:
    """The last row of each prompt, by prompt id."""
    rows: dict[str, Request] = {}
    for session in sessions:
        counted = _countable(job, session)
        rows.update({row.prompt_id: replace(row, counted=counted) for row in session.rows.get(job.key, [])})
    return rows


def _countable(job: Job, session: Session) -> bool:
    """A failed request is asked again, so the counters of its batch hold windows that no row holds."""
    return job.key in session.ends and not any(row.error for row in session.rows.get(job.key, []))


def _append(file: Path, line: dict[str, Any]) -> None:
    # Flushed, which outlives a kill; not synced, which would hold up the answers that are being timed.
    with open(file, "ab") as sink:
        sink.write((json.dumps(line, ensure_ascii=True) + "\n").encode())
        sink.flush()
