# pyright: basic, reportMissingImports=false
"""Runs in SGLang's own environment, as a program: token ids in on stdin, hidden states out in shared memory.

    python sglang_worker.py      one JSON line of settings, then one line a batch: {"slot": 0, "rows": [[1, 2], [3]]}

Each batch is one unpadded prefill of an in-process ModelRunner, without prefix cache, chunking or CUDA graphs. For each
finished batch a line {"slot": 0, "lengths": [2, 1]} says that the slot holds [tokens, (A+1)*H] in bf16: the residual
stream after each asked layer, then the state after the final norm. With several ranks each gets the same lines, and
rank 0 alone answers. Imports nothing of the project. Written for SGLang 0.5.14.
"""

import json
import os
import queue
import sys
import threading
from array import array
from typing import Any

import torch


def open_runner(settings: dict[str, Any]) -> Any:
    """A ModelRunner of SGLang that captures the asked layers; `kept` on it receives (aux states, final state)."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    args = ServerArgs(
        model_path=settings["model"], skip_tokenizer_init=True, dtype=settings["dtype"], disable_cuda_graph=True,
        chunked_prefill_size=-1, disable_radix_cache=True, tp_size=settings["ranks"],
        mem_fraction_static=settings["memory"], max_total_tokens=settings["slot_tokens"] + 1024, **settings["options"],
    )  # fmt: skip
    set_global_server_args_for_scheduler(args)
    runner = ModelRunner(
        model_config=ModelConfig.from_server_args(args), mem_fraction_static=args.mem_fraction_static,
        gpu_id=settings["gpu"] if args.device == "cuda" else 0, tp_rank=settings["rank"], tp_size=settings["ranks"],
        moe_ep_rank=0, moe_ep_size=1, pp_rank=0, pp_size=1,
        nccl_port=settings["port"], server_args=args,
    )  # fmt: skip
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    runner.init_cuda_graphs()
    runner.kept = {}
    if not settings["layers"]:
        return runner
    # SGLang names a layer by its own number; the states asked for are those after i layers.
    runner.model.set_eagle3_layers_to_capture([i - 1 for i in settings["layers"]])

    def keep(_module: Any, given: Any) -> None:
        runner.kept = {"final": given[1], "aux": given[4]}

    runner.model.logits_processor.register_forward_pre_hook(keep)
    return runner


@torch.no_grad()
def prefill(runner: Any, rows: list[list[int]]) -> None:
    """One forward over whole prompts, side by side; the pools are emptied again."""
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    requests = []
    for number, ids in enumerate(rows):
        one = Req(
            rid=str(number), origin_input_text="", origin_input_ids=array("q", ids),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
        )  # fmt: skip
        one.full_untruncated_fill_ids, one.fill_len, one.logprob_start_len = one.origin_input_ids, len(ids), -1
        one.set_extend_input_len(len(ids))
        requests.append(one)
    pools = {
        "req_to_token_pool": runner.req_to_token_pool, "token_to_kv_pool_allocator": runner.token_to_kv_pool_allocator,
    }  # fmt: skip
    cache = RadixCache(CacheInitParams(disable=True, page_size=runner.server_args.page_size, **pools))
    batch = ScheduleBatch.init_new(
        reqs=requests, **pools, model_config=runner.model_config, enable_overlap=False, tree_cache=cache,
        spec_algorithm=SpeculativeAlgorithm.NONE,
    )  # fmt: skip
    batch.prepare_for_extend()
    batch.input_ids, batch.prefill_input_ids_cpu = batch.prefill_input_ids_cpu.to(batch.device), None
    try:
        runner.forward(ForwardBatch.init_new(batch, runner))
    finally:
        for pool in pools.values():
            pool.clear()


def open_slots(settings: dict[str, Any]) -> list[torch.Tensor]:
    """The shared slots [slot_tokens, width], page-locked where CUDA allows it."""
    size = settings["slot_tokens"] * settings["width"]
    slots = [torch.from_file(path, shared=True, size=size, dtype=torch.bfloat16) for path in settings["slots"]]
    if torch.cuda.is_available():
        for slot in slots:
            cudart: Any = torch.cuda.cudart()
            cudart.cudaHostRegister(slot.data_ptr(), slot.numel() * 2, 0)
    return [slot.view(settings["slot_tokens"], settings["width"]) for slot in slots]


def states(runner: Any, lengths: list[int]) -> torch.Tensor:
    """[tokens, (A+1)*H] of the last prefill; checks that nothing was cut."""
    packed = torch.cat([*runner.kept["aux"], runner.kept["final"]], -1).to(torch.bfloat16)
    if len(packed) != sum(lengths):
        raise RuntimeError(f"captured {len(packed)} positions of {sum(lengths)}: a prefix was cached or a prompt cut")
    return packed


def listen(asked: queue.Queue[str | None]) -> None:
    """Queue the lines of stdin, and None at its end."""
    for line in sys.stdin:
        asked.put(line)
    asked.put(None)


def serve(runner: Any, slots: list[torch.Tensor], say: Any) -> None:
    """Answer batches until stdin ends; a copy to its slot runs beside the next prefill."""
    asked: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=listen, args=(asked,), daemon=True).start()
    side = torch.cuda.Stream() if torch.cuda.is_available() else None
    copied: tuple[Any, dict[str, Any]] | None = None
    while True:
        line = asked.get() if copied is None or not asked.empty() else ""
        if line:
            request = json.loads(line)
            lengths = [len(ids) for ids in request["rows"]]
            prefill(runner, request["rows"])
            packed = states(runner, lengths) if runner.kept else None
        if copied is not None:
            event, reply = copied
            if event is not None:
                event.synchronize()
            say(reply)
            copied = None
        if line is None:
            return
        if line:
            event = copy(packed, slots[request["slot"]], side) if slots else None
            copied = (event, {"slot": request["slot"], "lengths": lengths})


def copy(packed: torch.Tensor | None, slot: torch.Tensor, side: Any) -> Any:
    """Start the copy; an event to wait for, None where it is done."""
    if packed is None:  # nothing is captured
        return torch.cuda.current_stream().record_event() if side else None
    if side is None:
        slot[: len(packed)] = packed
        return None
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        slot[: len(packed)].copy_(packed, non_blocking=True)
        packed.record_stream(side)
        return side.record_event()


def main() -> None:
    """Read the settings, open the runner, say ready, serve."""
    settings = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # SGLang and its libraries print; stdout carries answers only

    def say(reply: dict[str, Any]) -> None:
        if settings["rank"] == 0:
            answers.write(json.dumps(reply) + "\n")
            answers.flush()

    runner = open_runner(settings)
    slots = open_slots(settings) if settings["rank"] == 0 else []
    prefill(runner, [[1] * 8])
    say({"ready": True})
    serve(runner, slots, say)


if __name__ == "__main__":
    main()
