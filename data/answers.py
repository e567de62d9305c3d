"""The target's own answers, with the engine's own token ids, in a ledger that survives a kill.

One ledger line an answered turn. A line that stands is never written again and its turn never asked again; a torn last
line (killed in mid-write) is cut off and its turn asked again.
"""

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import aiohttp
from tqdm import tqdm

from data.engine import Server, check_alive, reachable, serving
from data.prewritten import prewritten_turns
from data.prompts import Prompt, read_prompts
from data.target import read_target, served_path
from recipes.artifact import hash_json
from recipes.faults import EnvironmentFault
from recipes.schema import Answers, Recipe


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One answered user turn."""

    prompt_id: str
    domain: str
    split: str
    turn: int
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    """where finish is stop, the end-of-turn token is the last"""
    finish: str
    """stop, length, or dropped:REASON (then both id lists are empty)"""


def make(recipe: Recipe, run: Path, out: Path) -> dict[str, Any]:
    """Answer the prompts into out/ledger.jsonl. Raises EnvironmentFault where the engine fails for good."""
    prompts = wanted(read_prompts(run / "prompts"), recipe.answers.held_out)
    ledger = Ledger(out / "ledger.jsonl", _salt(recipe.answers, identity(read_target(run))))
    ledger.adopt(run / "answers" / "ledger.jsonl", prompts)
    if recipe.answers.mode == "prewritten":
        for prompt, turns in prewritten_turns(served_path(run), prompts, recipe.answers):
            for turn, (prompt_ids, output_ids, finish) in enumerate(turns):
                if ledger.row(prompt, turn) is None:
                    ledger.add(prompt, turn, prompt_ids, output_ids, finish)
    else:
        _ask_all(recipe, run, out, prompts, ledger)
    ledger.close()
    return _accounting(prompts, read_turns(out))


def wanted(prompts: list[Prompt], held_out: int) -> list[Prompt]:
    """All training prompts, and the first `held_out` held-out prompts of each domain."""
    taken: dict[str, int] = {}
    chosen: list[Prompt] = []
    for prompt in prompts:
        if prompt.split == "held_out":
            taken[prompt.domain] = taken.get(prompt.domain, 0) + 1
        if prompt.split == "train" or taken[prompt.domain] <= held_out:
            chosen.append(prompt)
    return chosen


def read_turns(folder: Path) -> list[Turn]:
    """The ledger's turns, ordered by prompt id and turn, whatever the order in which they were answered."""
    turns: list[Turn] = []
    for line in (folder / "ledger.jsonl").read_text(encoding="utf-8").splitlines():
        row = cast(dict[str, Any], json.loads(line))
        del row["key"], row["text"]
        row |= {name: tuple(row[name]) for name in ("prompt_ids", "output_ids")}
        turns.append(Turn(**row))
    return sorted(turns, key=lambda t: (t.prompt_id, t.turn))


class Ledger:
    """Append-only JSON lines, each flushed to disk before it counts."""

    def __init__(self, path: Path, salt: str) -> None:
        """Open `path`, cutting off a torn last line. `salt` names what the answers depend on beside the prompt."""
        self._salt = salt
        self._rows: dict[str, dict[str, Any]] = {}
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        for line in whole.splitlines():
            row = cast(dict[str, Any], json.loads(line))
            self._rows[row["key"]] = row
        if len(whole) < len(data):
            os.truncate(path, len(whole))
        self._file = open(path, "ab")  # noqa: SIM115 - lives as long as the ledger

    def key(self, prompt: Prompt, turn: int) -> str:
        """Identity of a turn's answer: what was asked, of whom, with which sampling."""
        return hash_json([self._salt, prompt.id, prompt.domain, prompt.split, turn])[:16]

    def row(self, prompt: Prompt, turn: int) -> dict[str, Any] | None:
        """The finished row of this turn, if any."""
        return self._rows.get(self.key(prompt, turn))

    def add(self, prompt: Prompt, turn: int, prompt_ids: list[int], output_ids: list[int], finish: str,
            text: str = "") -> dict[str, Any]:  # fmt: skip
        """Write one row, to the disk."""
        row = {
            "key": self.key(prompt, turn), "prompt_id": prompt.id, "domain": prompt.domain, "split": prompt.split,
            "turn": turn, "prompt_ids": prompt_ids, "output_ids": output_ids, "finish": finish, "text": text,
        }  # fmt: skip
        self._write(row)
        return row

    def adopt(self, old: Path, prompts: list[Prompt]) -> None:
        """Take over rows of an earlier ledger that answer the same questions (more prompts, other sizes)."""
        if not old.exists():
            return
        earlier = {row["key"]: row for row in map(json.loads, old.read_text(encoding="utf-8").splitlines())}
        for prompt in prompts:
            turn = 0
            while (key := self.key(prompt, turn)) in earlier:
                if key not in self._rows:
                    self._write(earlier[key])
                turn += 1

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write((json.dumps(row, ensure_ascii=True) + "\n").encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._rows[row["key"]] = row


def _ask_all(recipe: Recipe, run: Path, out: Path, prompts: list[Prompt], ledger: Ledger) -> None:
    open_prompts = [p for p in prompts if _next_turn(p, ledger) is not None]
    if not open_prompts:
        return
    if recipe.answers.url:
        context = nullcontext(reachable(recipe.answers.url))
    else:
        log = out / "engine.log"
        context = serving(recipe.engine, run=run, target=recipe.target, path=served_path(run), log=log)
    with context as server:
        asyncio.run(_ask(recipe.answers, server, open_prompts, ledger))


async def _ask(answers: Answers, server: Server, prompts: list[Prompt], ledger: Ledger) -> None:
    gate = asyncio.Semaphore(answers.concurrency)
    bar = tqdm(total=len(prompts), desc="answers", unit="conversation", disable=None)

    async def conversation(session: aiohttp.ClientSession, prompt: Prompt) -> None:
        async with gate:
            while (turn := _next_turn(prompt, ledger)) is not None:
                await _ask_turn(answers, server, session, prompt, turn, ledger)
        bar.update()

    faults: list[BaseException] = []
    try:
        async with _session() as session, asyncio.TaskGroup() as group:
            for prompt in prompts:
                group.create_task(conversation(session, prompt))
    except* EnvironmentFault as group:
        faults.extend(group.exceptions)
    bar.close()
    if faults:
        raise faults[0]


@asynccontextmanager
async def _session() -> AsyncGenerator[aiohttp.ClientSession, None]:
    timeout = aiohttp.ClientTimeout(total=3600)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


def _next_turn(prompt: Prompt, ledger: Ledger) -> int | None:
    """The first user turn without an answer; None where all have one or one was dropped."""
    for turn in range(sum(m["role"] == "user" for m in prompt.messages)):
        row = ledger.row(prompt, turn)
        if row is None:
            return turn
        if row["finish"] != "stop":  # a cut or dropped answer cannot be followed by the next turn
            return None
    return None


async def _ask_turn(answers: Answers, server: Server, session: aiohttp.ClientSession, prompt: Prompt, turn: int,
                    ledger: Ledger) -> None:  # fmt: skip
    body = {
        "model": server.model, "messages": _history(prompt, turn, ledger), "max_tokens": answers.max_tokens,
        "temperature": answers.temperature, "top_p": answers.top_p, "return_token_ids": True,
        "seed": int(ledger.key(prompt, turn), 16) % 2**31 + answers.seed,
    }  # fmt: skip
    reply = await _post(answers, server, session, body)
    if reply is None:
        ledger.add(prompt, turn, [], [], "dropped:refused_by_engine")
        return
    choice, prompt_ids = reply["choices"][0], reply.get("prompt_token_ids")
    if prompt_ids is None or choice.get("token_ids") is None:
        raise EnvironmentFault("the engine returned no token ids (return_token_ids); it needs vLLM 0.10.2 or newer")
    if len(prompt_ids) > answers.max_prompt_tokens:
        ledger.add(prompt, turn, [], [], "dropped:prompt_too_long")
        return
    ledger.add(prompt, turn, prompt_ids, choice["token_ids"], choice["finish_reason"], choice["message"]["content"])


def _history(prompt: Prompt, turn: int, ledger: Ledger) -> list[dict[str, str]]:
    """System and user turns up to `turn`, with the target's own answers between them."""
    messages: list[dict[str, str]] = []
    asked = 0
    for message in prompt.messages:
        messages.append(message)
        if message["role"] == "user":
            if asked == turn:
                return messages
            row = ledger.row(prompt, asked)
            assert row is not None
            messages.append({"role": "assistant", "content": row["text"]})
            asked += 1
    return messages


async def _post(answers: Answers, server: Server, session: aiohttp.ClientSession, body: dict[str, Any]) -> Any:
    """The reply, or None where the engine refuses this very request (400, 413, 422). Retries what may pass."""
    said = ""
    for attempt in range(answers.retries + 1):
        try:
            async with session.post(f"{server.url}/v1/chat/completions", json=body) as response:
                if response.status == 200:
                    return await response.json(content_type=None)
                said = f"HTTP {response.status}: {(await response.text())[:200]}"
                if response.status in (400, 413, 422):
                    return None
                if response.status in (401, 403, 404):
                    raise EnvironmentFault(f"the engine at {server.url} refuses: {said}")
        except (aiohttp.ClientError, TimeoutError) as error:
            said = repr(error)
        check_alive(server)
        await asyncio.sleep(min(30.0, 0.5 * 2**attempt))
    raise EnvironmentFault(f"the engine at {server.url} failed {answers.retries + 1} times: {said}")


def identity(target: dict[str, Any]) -> str:
    """What decides the target's answers: weights, config, tokenizer, template; not where they lie."""
    return hash_json({k: target[k] for k in ("weights", "config_sha256", "tokenizer_sha256", "template_sha256")})


def _salt(answers: Answers, target: str) -> str:
    return hash_json([target, answers.mode, answers.temperature, answers.top_p, answers.seed, answers.max_tokens,
                      answers.max_prompt_tokens])  # fmt: skip


def _accounting(prompts: list[Prompt], turns: list[Turn]) -> dict[str, Any]:
    dropped: dict[str, int] = {}
    for turn in turns:
        if turn.finish.startswith("dropped:"):
            reason = turn.finish.removeprefix("dropped:")
            dropped[reason] = dropped.get(reason, 0) + 1
    return {
        "conversations": len(prompts),
        "turns": len(turns),
        "dropped": dropped,
        "cut_at_max_tokens": sum(t.finish == "length" for t in turns),
        "prompt_tokens": sum(len(t.prompt_ids) for t in turns),
        "answer_tokens": sum(len(t.output_ids) for t in turns),
    }
