"""Training speed at real shapes, beside Speculators' own trainer on the same documents (a CUDA GPU is needed).

    python -m tests.bench.train --shapes 30b-a3b,8b,70b --ttt 3,7 --optimizers adamw,muon

Each cell is a process of its own; `--together` of them compile and warm up at the same time, then each has the GPU to
itself while it is timed. A step is host-to-device copy, forward, backward, clip and optimiser, by device events.
tokens/s counts all packed positions on both sides. MFU = flop computed / (step time * 989 Tflop/s); what a side skips
is not counted (tests/bench/shapes.py holds the formulas). The last lines are ratios from this run.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from recipes.schema import Train
from tests.bench.shapes import PEAK, SHAPES, Shape, documents, full_flops, head_config, our_flops, vocabulary
from train.eagle3 import Eagle3
from train.feed import feed
from train.loop import optimise
from train.optim import make_optimizers
from train.pack import pack
from train.step import Frozen, Step, compiled

TOKENS, WARM, STEPS = 8192, 5, 16
READY = "ready"
"""said by a cell that waits for its turn"""


def ours(shape: Shape, ttt: int, optimizer: str, profiled: bool = False) -> dict[str, Any]:
    """One cell of ours; `profiled`: the kernels that take longest go to stderr."""
    device = torch.device("cuda")
    settings = Train(epochs=1.0, ttt_steps=ttt, optimizer=optimizer, pack_tokens=TOKENS)  # pyright: ignore[reportArgumentType]
    d2t_D, t2d_V = vocabulary(shape)
    generator = torch.Generator(device).manual_seed(1)
    rows_DH = torch.randn(shape.draft, shape.hidden, device=device, generator=generator).mul_(0.02).bfloat16()
    embed_VH = torch.randn(shape.vocab, shape.hidden, device=device, generator=generator, dtype=torch.bfloat16) * 0.02
    frozen = Frozen(embed_VH=embed_VH, teacher_DH=rows_DH, d2t_D=d2t_D.to(device), t2d_V=t2d_V.to(device))
    with device:
        head = Eagle3(head_config(shape))
    head.lm_head.weight.data.copy_(rows_DH)
    head.lm_head.weight.requires_grad_(False)
    optimizers = make_optimizers(head, settings)
    accelerator = Accelerator()
    model = accelerator.prepare(compiled(Step(head, frozen, settings)))
    packs = [pack(documents(shape, TOKENS, seed), pin=True) for seed in range(3)]
    fed = feed((([packs[n % 3]], 0.0) for n in range(WARM + STEPS)), device)
    marks: list[torch.cuda.Event] = []
    started = first = time.perf_counter()
    for number, (batch, _) in enumerate(fed):
        figures = optimise(accelerator, model, optimizers, batch, frozen, settings)
        marks.append(torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True)))
        if number == 0:
            torch.cuda.synchronize()
            first = time.perf_counter() - started
        if number == WARM - 1:
            await_turn()
    torch.cuda.synchronize()
    if profiled:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for batch, _ in feed((([packs[0]], 0.0) for _ in range(2)), device):
                optimise(accelerator, model, optimizers, batch, frozen, settings)
            torch.cuda.synchronize()
        print(seen.key_averages().table(sort_by="cuda_time_total", row_limit=40), file=sys.stderr)
    flops = statistics.mean(our_flops(shape, one, ttt) for one in packs)
    full = statistics.mean(full_flops(shape, one, ttt) for one in packs)
    return result(marks, flops, full, first, float(figures["loss"]))


def await_turn() -> None:
    """Warm: wait until the other cells are, and the GPU is free."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    print(READY, flush=True)
    sys.stdin.readline()


def result(marks: list[Any], flops: float, full: float, first: float, loss: float) -> dict[str, Any]:
    """Figures of a cell from its step marks."""
    times = [a.elapsed_time(b) for a, b in zip(marks[WARM:-1], marks[WARM + 1 :], strict=True)]
    median = statistics.median(times)
    return {
        "step_ms": round(median, 2), "min_ms": round(min(times), 2), "max_ms": round(max(times), 2),
        "tokens_per_s": round(TOKENS / median * 1e3), "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "tflop": round(flops / 1e12, 2), "tflop_all_positions": round(full / 1e12, 2),
        "mfu": round(flops / (median / 1e3) / PEAK, 4), "first_step_s": round(first, 1), "loss": loss,
    }  # fmt: skip


def main() -> None:
    """Run every cell in a process of its own and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="30b-a3b,8b,70b")
    parser.add_argument("--ttt", default="3,7")
    parser.add_argument("--optimizers", default="adamw")
    parser.add_argument("--sides", default="ours,peer")
    parser.add_argument("--together", type=int, default=2, help="cells that compile at once; each needs its memory")
    parser.add_argument("--out", type=Path, default=Path("bench-train.jsonl"))
    parser.add_argument("--profile", action="store_true", help="print our slowest kernels")
    parser.add_argument("--cell", help="SIDE:SHAPE:TTT:OPTIMIZER, run here and printed as JSON")
    given = parser.parse_args()
    if given.cell:
        side, name, ttt, optimizer = given.cell.split(":")
        if side == "peer":
            from tests.bench.peer import peer

            print(json.dumps(peer(SHAPES[name], int(ttt), optimizer)))
        else:
            print(json.dumps(ours(SHAPES[name], int(ttt), optimizer, given.profile)))
        return
    labels = [
        f"{side}:{name}:{ttt}:{optimizer}"
        for name in given.shapes.split(",")
        for ttt in given.ttt.split(",")
        for optimizer in given.optimizers.split(",")
        for side in given.sides.split(",")
    ]
    found: dict[str, dict[str, Any]] = {}
    for first in range(0, len(labels), given.together):
        for label, figures in timed(labels[first : first + given.together], command):
            found[label] = figures
            say(label, figures, given.out)
            compare(label, found)


def command(label: str) -> list[str]:
    """What runs a cell."""
    return [sys.executable, "-m", "tests.bench.train", "--cell", label]


def timed(labels: list[str], command: Callable[[str], list[str]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(label, figures) of cells that warm up together and are timed one after the other.

    Empty figures where a cell's process failed; its last lines are shown.
    """
    with ExitStack() as stack:
        errors = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in labels]
        cells = [
            subprocess.Popen(command(label), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=error, text=True)
            for label, error in zip(labels, errors, strict=True)
        ]
        for cell in cells:
            assert cell.stdout is not None
            while (line := cell.stdout.readline()) and line.strip() != READY:
                pass
        for label, cell, error in zip(labels, cells, errors, strict=True):
            said, _ = cell.communicate("go\n")
            if cell.returncode:
                error.seek(0)
                print(f"{label}: failed\n{error.read()[-3000:]}", flush=True)
            yield label, {} if cell.returncode else json.loads(said.splitlines()[-1])


def say(label: str, figures: dict[str, Any], out: Path) -> None:
    """Print a cell's figures and keep them."""
    if figures:
        side, name, ttt, optimizer = label.split(":")
        line = json.dumps({"side": side, "shape": name, "ttt": int(ttt), "optimizer": optimizer, **figures})
        print(line, flush=True)
        with open(out, "a", encoding="utf-8") as file:
            file.write(line + "\n")


def compare(label: str, found: dict[str, dict[str, Any]]) -> None:
    """Print the ratios once both sides of a cell are there."""
    what = label.partition(":")[2]
    a, b = found.get(f"ours:{what}"), found.get(f"peer:{what}")
    if a and b:
        print(
            f"{what}: {a['tokens_per_s'] / b['tokens_per_s']:.2f} times the peer's tokens/s, "
            f"{a['peak_gib'] / b['peak_gib']:.2f} of its peak memory", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
