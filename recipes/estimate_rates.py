"""How fast a machine is at each kind of work: a CPU in shares of a quick probe, GPUs at published rates."""

import functools
import importlib
import itertools
import os
import subprocess
import time
from dataclasses import dataclass
from typing import Any

import psutil

from recipes.schema import Recipe

GIB = 2.0**30
CPU = {
    # Calibrated on 2 cores of an AMD EPYC with avx512_bf16, alone on the machine, with SmolLM2-135M (LOG.md).
    "unprobed_flops": 4.7e11,  # FLOP/s of a core, taken where torch is missing and none can be measured
    "capture": 0.57,  # of the probe times the cores, in a transformers forward: 2,000 tokens/s
    "train": 0.29,  # the same in the head's training: 1,864 supervised tokens/s
    "product": 0.60,  # the same in large products alone, as Muon's
    "decode": 0.56,  # the same in the engine's decoding: 840-1,020 answer tokens/s at 256 in flight, its drain included
    "pass_s": 0.0,  # fixed seconds of one forward and backward pass
    "decode_bytes": 2e10,  # bytes/s at which a decoding step reads the weights
    "step_s": 0.003,  # fixed seconds of a decoding step: 16.5 ms alone, of which 13.5 read the weights
    "draft_s": 0.0017,  # seconds of one draft step of the head
    "engine_start_s": 35,  # one engine, compiling nothing
    "process_s": 8,  # start of capture, training, export or judging: imports, weights, first step
    "process_bytes": 0.9 * GIB,  # RAM of a process that has imported torch and transformers
    "engine_bytes": 2.0 * GIB,  # RAM of an engine beside weights and cache
    "cache_bytes": 2.0 * GIB,  # VLLM_CPU_KVCACHE_SPACE, as data/engine.py sets it
    "in_flight": 256,  # the engine's --max-num-seqs, as data/engine.py sets it
}
H200 = {
    # Not measured by us: peak rates (NVIDIA) and shares of them as published.
    "flops": 989e12,  # bf16 dense
    "fp8_flops": 1979e12,  # fp8 dense
    "dense": 0.50,  # of the peak of its dtype, in a dense target's prefill (70B FP8: 7.1k tokens/s)
    "sparse": 0.20,  # of the bf16 peak, in a mixture's prefill (half of a generous 40%)
    "train": 0.45,  # of the bf16 peak, in head training (SpecForge measured 43.5%)
    "product": 0.56,  # of the bf16 peak, in large products alone: Newton-Schulz at 500-620e12
    "pass_s": 0.03,  # fixed seconds of one forward and backward pass: about 2,000 launches; a guess
    "decode_bytes": 2.9e12,  # bytes/s: 60% of HBM3e's 4.8e12
    "step_s": 0.005,  # fixed seconds of a decoding step over several GPUs; a guess
    "draft_s": 0.0007,  # fixed seconds of one draft step; a guess
    "engine_start_s": 240,  # load, compile, capture graphs; a guess
    "process_s": 60,  # imports, weights to the GPUs; a guess
    "process_bytes": 2.0 * GIB,  # GPU memory of a process before its tensors
    "in_flight": 1024,  # vLLM's default --max-num-seqs there
}
DISK = {
    "convert_bytes": 1.5e7,  # bytes/s of bf16 weights out of a GGUF file: 18 s for 269 MB
    "hub_bytes": 2e8,  # bytes/s from the Hub
    "hash_bytes": 1.2e9,  # bytes/s of SHA-256; every finished file is hashed once
    "source_bytes": 2e7,  # bytes/s of a source file read, split and cleared of duplicates: 8 s for 125 MB
    "row_s": 2e-4,  # seconds a conversation in prompts, and again in tokens
    "report_s": 15,  # seconds for intervals, plots and pages
}


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of all devices together."""

    name: str
    devices: int
    """GPUs; 0 = the CPU"""
    capture_flops: float
    train_flops: float
    product_flops: float
    pass_s: float
    decode_flops: float
    decode_bytes: float
    step_s: float
    draft_s: float
    engine_start_s: float
    process_s: float
    process_bytes: float
    engine_bytes: float
    in_flight: float
    hash_bytes: float
    """SHA-256 of a stage's files, several at a time"""


def rates_for(recipe: Recipe) -> Rates:
    """H200s where the engine is told to use several GPUs or one is here; else this machine's cores, probed."""
    wanted = gpus_wanted(recipe)
    if wanted or gpus_here():
        return gpu_rates(recipe, wanted or 1)
    flops = probe_flops()
    return cpu_rates(flops or CPU["unprobed_flops"], cores=len(os.sched_getaffinity(0)), probed=bool(flops))


def gpu_rates(recipe: Recipe, devices: int) -> Rates:
    """`devices` H200s at this recipe's target."""
    facts = recipe.target.facts
    sparse = facts.active_params_b < 0.9 * facts.total_params_b
    prefill = H200["sparse"] * H200["flops"] if sparse else H200["dense"] * (
        H200["fp8_flops"] if facts.weight_bytes < 1.5 else H200["flops"]
    )  # fmt: skip
    return Rates(
        name=f"{devices} x H200, at published rates (not measured here)",
        devices=devices,
        capture_flops=devices * prefill,
        train_flops=devices * H200["train"] * H200["flops"],
        decode_flops=devices * prefill,
        product_flops=devices * H200["product"] * H200["flops"],
        pass_s=H200["pass_s"],
        decode_bytes=devices * H200["decode_bytes"],
        step_s=H200["step_s"],
        draft_s=H200["draft_s"],
        engine_start_s=H200["engine_start_s"],
        process_s=H200["process_s"],
        process_bytes=devices * H200["process_bytes"],
        engine_bytes=devices * H200["process_bytes"],
        in_flight=H200["in_flight"],
        hash_bytes=8 * DISK["hash_bytes"],
    )


def cpu_rates(flops: float, *, cores: int, probed: bool = True) -> Rates:
    """A CPU of which one core alone does bf16 matrix products at `flops` FLOP/s."""
    how = "bf16 products" if probed else "assumed, torch is not here to ask"
    return Rates(
        name=f"{cores} CPU cores of {flops / 1e9:.0f} GFLOP/s ({how})",
        devices=0,
        capture_flops=CPU["capture"] * flops * cores,
        train_flops=CPU["train"] * flops * cores,
        decode_flops=CPU["decode"] * flops * cores,
        product_flops=CPU["product"] * flops * cores,
        pass_s=CPU["pass_s"],
        decode_bytes=CPU["decode_bytes"],
        step_s=CPU["step_s"],
        draft_s=CPU["draft_s"],
        engine_start_s=CPU["engine_start_s"],
        process_s=CPU["process_s"],
        process_bytes=CPU["process_bytes"],
        engine_bytes=CPU["engine_bytes"] + CPU["cache_bytes"],
        in_flight=CPU["in_flight"],
        hash_bytes=min(8, cores) * DISK["hash_bytes"],
    )


def gpus_wanted(recipe: Recipe) -> int:
    """GPUs that engine.args name: tensor- times data- times pipeline-parallel; 0 = none named."""
    product, named = 1, False
    args = [part for arg in recipe.engine.args for part in arg.split("=", 1)]
    for name, value in itertools.pairwise(args):
        if name in ("--tensor-parallel-size", "-tp", "--data-parallel-size", "-dp", "--pipeline-parallel-size", "-pp"):
            named, product = True, product * (int(value) if value.isdigit() else 1)
    return product if named else 0


@functools.cache
def gpus_here() -> tuple[float, ...]:
    """Memory of each NVIDIA GPU of this machine, bytes; empty where there is none."""
    command = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(float(line) * 2**20 for line in said.split() if line.strip().isdigit())


@functools.cache
def probe_flops(seconds: float = 0.4) -> float:
    """FLOP/s of the best bf16 product [2048, 576] x [576, 1536] within `seconds`, on one core; 0 without torch.

    On one core, because there the best of many is the machine's own speed even while other work goes on.
    """
    try:
        torch: Any = importlib.import_module("torch")
    except ModuleNotFoundError:
        return 0.0
    a, b = torch.ones(2048, 576, dtype=torch.bfloat16), torch.ones(576, 1536, dtype=torch.bfloat16)
    threads, best = torch.get_num_threads(), float("inf")
    torch.set_num_threads(1)
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        started = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - started)
    torch.set_num_threads(threads)
    return 2 * 2048 * 576 * 1536 / best


def ram_bytes() -> float:
    """This machine's RAM."""
    return float(psutil.virtual_memory().total)
