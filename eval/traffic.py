"""One set of prompts to one server: bounded concurrency, streamed answers, one raw row a request.

A failed request is a row with an error, never an exception; a dead server is an EnvironmentFault. vLLM puts a streamed
answer's token ids on each chunk (`choices[0].token_ids`), the prompt's on the first (`prompt_token_ids`), and usage and
`metrics.speculative_decoding` on the last one (`stream_options.include_usage`; seen in 0.32,
entrypoints/openai/chat_completion/serving.py).
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from data.engine import Server, check_alive, last_line
from data.prompts import Prompt
from eval.acceptance import has_repeated_4gram
from export.record import Counters
from export.requests import Arm, Phase, Request
from recipes.faults import EnvironmentFault

STALL_S = 300.0
"""a stream that is silent for this long has failed"""
SETTLE_S = 0.1
"""between two readings of the counters that must agree"""
_PATIENCE_S = 10.0
_COUNTERS = {
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_draft_tokens_total": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
}
_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


@dataclass(frozen=True, kw_only=True)
class Load:
    """How a set of prompts is sent, and as what its rows are kept."""

    arm: Arm
    phase: Phase
    round: int = 0
    """of the speed arms; in acceptance the look, which part of a domain's prompts it is"""
    concurrency: int
    """requests in flight"""
    temperature: float
    max_tokens: int
    """an answer; it may stop earlier by itself"""
    chunk_drafts: int = 0
    """draft tokens a window, where each streamed chunk is taken for a window (Engine.windows); 0 = the engine says"""
    unseen: bool = False
    """neither tells this arm's windows: it is only timed"""


async def send(server: Server, prompts: Sequence[Prompt], load: Load) -> AsyncGenerator[Request, None]:
    """Rows in the order in which the answers finish; close it (contextlib.aclosing) to stop early.

    Raises EnvironmentFault as soon as a request failed and the server is found dead; that request gives no row.
    """
    places = asyncio.Semaphore(load.concurrency)
    async with _session() as session:
        tasks = [asyncio.create_task(_ask(session, places, server, prompt, load)) for prompt in prompts]
        try:
            for finished in asyncio.as_completed(tasks):
                row = await finished
                if row.error:
                    await _check_up(session, server)
                yield row
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def opening(prompt: Prompt) -> list[dict[str, str]]:
    """What is asked: the conversation up to its first user turn."""
    messages = list(prompt.messages)
    first = next(i for i, message in enumerate(messages) if message["role"] == "user")
    return messages[: first + 1]


async def read_counters(server: Server) -> Counters:
    """The engine's speculation counters, once they stand still (they lag the answers by a step); zeros without any.

    Raises EnvironmentFault where the server does not answer.
    """
    async with _session() as session:
        now = await _counters(session, server)
        for _ in range(20):
            await asyncio.sleep(SETTLE_S)
            before, now = now, await _counters(session, server)
            if now == before:
                break
        return now


def parse_counters(text: str) -> Counters:
    """vLLM's speculation counters in a /metrics page, summed over engines."""
    sums = dict.fromkeys(_COUNTERS.values(), 0.0)
    by_position: dict[int, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in _COUNTERS:
                sums[_COUNTERS[sample.name]] += sample.value
            elif sample.name == _BY_POSITION:
                position = int(sample.labels["position"])
                by_position[position] = by_position.get(position, 0.0) + sample.value
    per_position = [int(by_position[i]) for i in sorted(by_position)]
    return Counters(**{name: int(value) for name, value in sums.items()}, per_position=per_position)


async def _counters(session: aiohttp.ClientSession, server: Server) -> Counters:
    try:
        async with session.get(f"{server.url}/metrics") as response:
            return parse_counters(await response.text())
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        await _check_up(session, server)
        raise EnvironmentFault(f"the engine gives no counters at /metrics ({error!r})") from error


def difference(after: Counters, before: Counters) -> Counters:
    """What was counted in between."""
    return _combine(after, before, -1)


def total(first: Counters, second: Counters) -> Counters:
    """What was counted in both spans."""
    return _combine(first, second, 1)


def _combine(a: Counters, b: Counters, sign: int) -> Counters:
    length = max(len(a.per_position), len(b.per_position))
    left, right = ([*c.per_position, *[0] * (length - len(c.per_position))] for c in (a, b))
    return Counters(
        drafts=a.drafts + sign * b.drafts,
        draft_tokens=a.draft_tokens + sign * b.draft_tokens,
        accepted=a.accepted + sign * b.accepted,
        per_position=[x + sign * y for x, y in zip(left, right, strict=True)],
    )


def _session() -> aiohttp.ClientSession:
    # One chunk carries all prompt ids: with aiohttp's own 64 KiB buffer a long prompt's first line would not fit.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=STALL_S)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0), read_bufsize=2**23)


async def _ask(session: aiohttp.ClientSession, places: asyncio.Semaphore, server: Server, prompt: Prompt,
               load: Load) -> Request:  # fmt: skip
    body = {
        "model": server.model, "messages": opening(prompt), "max_tokens": load.max_tokens,
        "temperature": load.temperature, "return_token_ids": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    lines: list[tuple[float, bytes]] = []
    async with places:
        started = time.perf_counter()
        try:
            async with session.post(f"{server.url}/v1/chat/completions", json=body) as response:
                if response.status != 200:
                    said = f"HTTP {response.status}: {(await response.text())[:200]}"
                    return _row(prompt, load, error=said)
                async for line in response.content:
                    if line.startswith(b"data:"):
                        lines.append((time.perf_counter() - started, line[5:].strip()))
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            return _row(prompt, load, error=f"broke off: {error!r}"[:200])
    return row_from_stream(prompt, load, lines)


def row_from_stream(prompt: Prompt, load: Load, lines: Sequence[tuple[float, bytes]]) -> Request:
    """The row of a streamed answer: its `data:` lines, each with the seconds since the request was sent."""
    try:
        events = [(at, cast(dict[str, Any], json.loads(line))) for at, line in lines if line != b"[DONE]"]
    except ValueError:
        return _row(prompt, load, error="the stream holds a line that is no JSON")
    failed = [str(event["error"])[:200] for _, event in events if "error" in event]
    chunks = [(at, event["choices"][0]) for at, event in events if event.get("choices")]
    timed = [(at, cast(list[int], chunk["token_ids"])) for at, chunk in chunks if chunk.get("token_ids")]
    prompt_ids = [cast(list[int], event["prompt_token_ids"]) for _, event in events if event.get("prompt_token_ids")]
    finish = next((str(chunk["finish_reason"]) for _, chunk in chunks if chunk.get("finish_reason")), "")
    usage = next((event["usage"] for _, event in events if event.get("usage")), None)
    output_ids = [token for _, ids in timed for token in ids]
    if failed:
        return _row(prompt, load, error=f"the engine said: {failed[0]}")
    if not finish or usage is None or not timed or not lines or lines[-1][1] != b"[DONE]":
        return _row(prompt, load, error=f"the stream ended early, after {len(output_ids)} tokens")
    if not prompt_ids:
        return _row(prompt, load, error="no prompt ids (return_token_ids; it needs vLLM 0.10.2 or newer)")
    if usage["completion_tokens"] != len(output_ids):
        return _row(prompt, load, error=f"{len(output_ids)} token ids for {usage['completion_tokens']} tokens")
    windows = _windows(events)
    if windows is None and load.chunk_drafts:
        windows = _windows_of_chunks([ids for _, ids in timed], load.chunk_drafts)
    if windows is None and load.arm != "none" and not load.unseen:
        return _row(prompt, load, error="no speculation figures (--per-request-spec-decode-metrics detailed)")
    gaps = [later[0] - earlier[0] for earlier, later in pairwise(timed)]
    return _row(
        prompt, load, ttft_s=timed[0][0], total_s=lines[-1][0], gaps_s=tuple(gaps), finish=finish,
        prompt_ids=tuple(prompt_ids[0]), output_ids=tuple(output_ids), **(windows or {}),
    )  # fmt: skip


def _windows(events: Sequence[tuple[float, dict[str, Any]]]) -> dict[str, Any] | None:
    """What the engine says of a request's windows, None where it says nothing."""
    metrics = [cast(dict[str, Any], event["metrics"]) for _, event in events if event.get("metrics")]
    said = [cast(dict[str, Any], m["speculative_decoding"]) for m in metrics if m.get("speculative_decoding")]
    if not said:
        return None
    found = said[0]
    return {
        "drafts": found["num_spec_steps"],
        "draft_tokens": found["num_draft_tokens"],
        "accepted": found["num_accepted_draft_tokens"],
        "per_step_accepted": tuple(found.get("per_step_accepted") or ()),
    }


def _windows_of_chunks(chunks: Sequence[list[int]], drafted: int) -> dict[str, Any]:
    """A target step's tokens arrive as one chunk: the prefill's single token, then a window each.

    A first chunk of several tokens is the prefill's joined with the first window. Other steps that the server joined
    cannot be told apart; then there are fewer windows than the engine counted drafts (eval.measure asks again).
    """
    windows = [chunk for chunk in (chunks[0][1:], *chunks[1:]) if chunk]
    accepted = tuple(len(chunk) - 1 for chunk in windows)
    return {
        "drafts": len(accepted), "draft_tokens": drafted * len(accepted), "accepted": sum(accepted),
        "per_step_accepted": accepted,
    }  # fmt: skip


def _row(prompt: Prompt, load: Load, **seen: Any) -> Request:
    """A row of what was seen; the rest is empty."""
    empty: dict[str, Any] = {
        "drafts": 0, "draft_tokens": 0, "accepted": 0, "per_step_accepted": (), "ttft_s": 0.0, "total_s": 0.0,
        "gaps_s": (), "finish": "", "prompt_ids": (), "output_ids": (), "error": "",
    }  # fmt: skip
    values = {**empty, **seen}
    return Request(
        arm=load.arm, domain=prompt.domain, phase=load.phase, round=load.round, concurrency=load.concurrency,
        temperature=load.temperature, prompt_id=prompt.id, prompt_tokens=len(values["prompt_ids"]),
        output_tokens=len(values["output_ids"]), repeated_4gram=has_repeated_4gram(values["output_ids"]), **values,
    )  # fmt: skip


async def _check_up(session: aiohttp.ClientSession, server: Server) -> None:
    """Returns where the server is well. Raises EnvironmentFault where it died or stays silent.

    Its process may outlive its engine core by some seconds, so one look at the process is not enough.
    """
    deadline = time.monotonic() + _PATIENCE_S
    said = ""
    while time.monotonic() < deadline:
        check_alive(server)
        try:
            timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)
            async with session.get(f"{server.url}/health", timeout=timeout) as response:
                if response.status == 200:
                    return
                said = f"/health says {response.status}"
                break  # vLLM says so when its engine core is dead; it does not recover
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            said = repr(error)
        await asyncio.sleep(0.25)
    check_alive(server)
    raise EnvironmentFault(f"the engine does not work any more ({said}): {last_line(server.log)}")
