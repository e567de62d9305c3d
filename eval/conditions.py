"""How it was measured: engine, command, machine. Without this machine's paths, since records are published."""

import json
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import psutil

from data.engine import Server
from export.record import Conditions, Machine
from recipes.schema import Recipe

_SECRET = re.compile(r"token|key|secret|password|credential", re.IGNORECASE)
_FOLDERS = re.compile(r"""(?<![\w.}])/(?:[^/\s"']+/)+""")
"""the folders of an absolute path, wherever in an argument it stands"""
_SPECULATIVE = ("--speculative-config", "--speculative_config", "-sc")


def describe(recipe: Recipe, names: Mapping[str, str], servers: Mapping[str, Server]) -> Conditions:
    """The conditions of a measurement on these servers, by arm; `names` stand for the paths in their commands."""
    drafting = speculative_settings(servers["head"].command)
    return Conditions(
        engine="vllm",
        engine_version=servers["head"].version,
        command={arm: portable(server.command, names) for arm, server in servers.items()},
        env={
            name: "***" if _SECRET.search(name) else _FOLDERS.sub(".../", value)
            for name, value in sorted(recipe.engine.env.items())
        },
        machine=machine(),
        dtype=recipe.target.dtype,
        quantization=recipe.target.quantization,
        max_tokens=recipe.gate.max_tokens,
        speed_max_tokens=recipe.gate.speed_max_tokens,
        concurrency=recipe.gate.concurrency,
        speculative_tokens=recipe.export.speculative_tokens,
        rejection_sample_method=str(drafting.get("rejection_sample_method", "standard")),
        draft_sample_method=str(drafting.get("draft_sample_method", "greedy")),
        temperatures=list(recipe.gate.temperatures),
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def portable(command: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """argv with known paths replaced by their names, other absolute paths by their last part, the port by PORT."""
    said: list[str] = []
    for before, argument in zip(("", *command), command, strict=False):
        for path, name in names.items():
            argument = argument.replace(path, name)
        said.append("PORT" if before == "--port" else _FOLDERS.sub(".../", argument))
    return said


def speculative_settings(command: Sequence[str]) -> dict[str, Any]:
    """What an argv says of speculation: `--speculative-config JSON`, `=JSON` and `--speculative-config.KEY VALUE`.

    All occurrences together, later ones winning; what cannot be read is kept under its own text as a key.
    """
    settings: dict[str, Any] = {}
    for i, argument in enumerate(command):
        flag, equals, value = argument.partition("=")
        name, _, key = flag.partition(".")
        if name not in _SPECULATIVE:
            continue
        text = value if equals else command[i + 1] if i + 1 < len(command) else ""
        try:
            settings.update({key: text} if key else cast(dict[str, Any], json.loads(text)))
        except (ValueError, TypeError):
            settings[text] = "unreadable"
    return settings


def machine() -> Machine:
    """This machine: processor, usable cores, graphics processors, memory in GiB."""
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        gpu=_gpu(),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
    )


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _gpu() -> str:
    """Names of the GPUs, joined; empty without an NVIDIA driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ", ".join(line.strip() for line in done.stdout.splitlines() if line.strip())
