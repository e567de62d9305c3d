"""An engine that speaks vLLM's streamed answers, /metrics and /health on loopback, without a model."""

import asyncio
import json
import threading
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from data.engine import Server
from data.prompts import Prompt


@dataclass
class Engine:
    """How it behaves; `asked` and `most` tell what came in."""

    drafts: bool = True
    refuse: str = ""
    """a question with this in it gets HTTP 400"""
    break_off: str = ""
    """one with this loses its connection in mid-answer"""
    sick_after: int = 10**9
    """answers until /health says 503 and every stream breaks off"""
    pause_s: float = 0.0
    metrics: bool = True
    joins: int = 0
    """answers of which two steps still go out as one chunk"""
    asked: list[dict[str, Any]] = field(default_factory=list)
    most: int = 0
    flying: int = 0
    answered: int = 0
    sums: dict[str, int] = field(default_factory=lambda: {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0})
    positions: list[int] = field(default_factory=lambda: [0, 0, 0])

    @property
    def sick(self) -> bool:
        return self.answered >= self.sick_after


def prompts(n: int, domain: str = "chat", split: str = "held_out") -> list[Prompt]:
    """n prompts of one question each."""
    return [
        Prompt(id=f"{zlib.crc32(f'{domain}{split}{i}'.encode()):016x}", domain=domain, split=split,
               messages=({"role": "user", "content": f"{domain} {split} question {i}"},), source="x")
        for i in range(n)
    ]  # fmt: skip


def windows_of(question: str, limit: int) -> list[int]:
    """Accepted counts of the answer to a question, from the question alone."""
    state, windows = zlib.crc32(question.encode()), []
    while 1 + len(windows) + sum(windows) < limit and len(windows) < 8:
        state = (1103515245 * state + 12345) % 2**31
        windows.append((state >> 16) % 4)
    return windows


@contextmanager
def running(engine: Engine, pid: int = 0, command: tuple[str, ...] = ("serve",)) -> Generator[Server, None, None]:
    """Serve on a free port; `pid` is what check_alive looks at, 0 = nobody's."""
    loop, started, runners = asyncio.new_event_loop(), threading.Event(), list[web.AppRunner]()

    async def begin() -> None:
        app = web.Application()
        app.add_routes(
            [
                web.post("/v1/chat/completions", lambda r: _answer(engine, r)),
                web.get("/metrics", lambda r: _metrics(engine, r)),
                web.get("/health", lambda r: _health(engine, r)),
            ]
        )
        runners.append(web.AppRunner(app, shutdown_timeout=0.1))
        await runners[0].setup()
        await web.TCPSite(runners[0], "127.0.0.1", 0).start()

    def serve() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(begin())
        loop.call_soon(started.set)
        loop.run_forever()
        loop.run_until_complete(runners[0].cleanup())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        url = f"http://127.0.0.1:{runners[0].addresses[0][1]}"
        yield Server(url=url, model="target", pid=pid, command=command, version="0.32.0", log=Path("engine.log"))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)


async def _health(engine: Engine, request: web.Request) -> web.Response:
    return web.Response(status=503 if engine.sick else 200)


async def _metrics(engine: Engine, request: web.Request) -> web.Response:
    lines: list[str] = []
    for name, value in engine.sums.items() if engine.drafts else ():
        metric = f"vllm:spec_decode_num_{name}"
        lines += [f"# HELP {metric}_total x", f"# TYPE {metric}_total counter",
                  f'{metric}_total{{engine="0",model_name="target"}} {float(value)}',
                  f'{metric}_created{{engine="0",model_name="target"}} 1.7e9']  # fmt: skip
    metric = "vllm:spec_decode_num_accepted_tokens_per_pos"
    if engine.drafts:
        lines += [f"# HELP {metric}_total x", f"# TYPE {metric}_total counter"]
        lines += [f'{metric}_total{{engine="0",position="{i}"}} {float(v)}' for i, v in enumerate(engine.positions)]
    return web.Response(text="\n".join([*lines, ""]))


async def _answer(engine: Engine, request: web.Request) -> web.StreamResponse:
    body = await request.json()
    engine.asked.append(body)
    question = body["messages"][-1]["content"]
    if engine.refuse and engine.refuse in question:
        return web.json_response({"error": {"message": "longer than max_model_len"}}, status=400)
    engine.flying += 1
    engine.most = max(engine.most, engine.flying)
    try:
        return await _stream(engine, request, body, question)
    finally:
        engine.flying -= 1


async def _stream(engine: Engine, request: web.Request, body: dict[str, Any], question: str) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)

    async def say(event: dict[str, Any]) -> None:
        await response.write(f"data: {json.dumps(event)}\n\n".encode())

    limit = body["max_tokens"]
    windows = windows_of(question, limit)
    sent = 0
    first = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    await say({**first, "prompt_token_ids": [len(w) for w in question.split()]})
    chunks = [1, *[a + 1 for a in windows]] if engine.drafts else [1] * (1 + len(windows) + sum(windows))
    if engine.joins and len(chunks) > 2:
        engine.joins -= 1
        chunks[1:3] = [chunks[1] + chunks[2]]
    for i, size in enumerate(chunks):
        await asyncio.sleep(engine.pause_s)
        if engine.sick or (engine.break_off and engine.break_off in question and i == 2):
            request.transport.close()
            return response
        ids = [(1000 * i + j) % 49000 for j in range(min(size, limit - sent))]
        sent += len(ids)
        finish = ("length" if sent == limit else "stop") if i == len(chunks) - 1 or sent == limit else None
        await say({"choices": [{"index": 0, "delta": {"content": "x"}, "token_ids": ids, "finish_reason": finish}]})
        if finish:
            break
    last: dict[str, Any] = {
        "choices": [],
        "usage": {"prompt_tokens": 4, "completion_tokens": sent, "total_tokens": 4 + sent},
    }
    if engine.drafts:
        _count(engine, windows)
        if engine.metrics:
            last["metrics"] = {"speculative_decoding": {
                "num_spec_steps": len(windows), "num_accepted_draft_tokens": sum(windows),
                "num_draft_tokens": 3 * len(windows), "num_spec_tokens": 3,
                **({"per_step_accepted": windows} if windows else {}),
            }}  # fmt: skip
    engine.answered += 1
    await say(last)
    await response.write(b"data: [DONE]\n\n")
    return response


def _count(engine: Engine, windows: list[int]) -> None:
    engine.sums["drafts"] += len(windows)
    engine.sums["draft_tokens"] += 3 * len(windows)
    engine.sums["accepted_tokens"] += sum(windows)
    for k in range(3):
        engine.positions[k] += sum(a > k for a in windows)
