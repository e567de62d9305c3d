"""What a recipe would take, before anything starts: tokens, bytes on disk, memory and seconds of each stage.

Everything comes from the recipe (its target's facts included) and from what the machine can do, so it works offline and
without the target's weights. estimate_sizes.py says how much there is to do, estimate_rates.py how fast it goes,
estimate_preflight.py what would stop it.
"""

from recipes.check import aux_layers
from recipes.estimate_files import source_bytes
from recipes.estimate_memory import capture_gpu_bytes, training_cpu_bytes, training_gpu_bytes
from recipes.estimate_preflight import preflight
from recipes.estimate_rates import CPU, DISK, Rates, rates_for
from recipes.estimate_sizes import (
    TEMPLATE_TOKENS,
    Figures,
    answer_length,
    feature_bytes_per_token,
    head_parameters,
    id_bytes,
    kv_bytes_per_token,
    optimizer_bytes,
    optimizer_flops,
    split_counts,
    stored_splits,
    supervised_tokens,
    training_flops,
    weight_bytes,
)
from recipes.schema import Recipe
from recipes.show import aligned

__all__ = ["Figures", "estimate", "feature_bytes_per_token", "preflight", "table"]

SHARDS_HELD = 8
"""shards in memory while capture writes: four being written, the next being filled, copies on the way"""
EXPECTED_LENGTH = 1.7
"""tokens a target step before anything is known, for the time that measuring takes (a prototype reached 1.6 to 1.8)"""
PROMPT_TOKENS = 100.0
"""of a measured prompt"""


def estimate(recipe: Recipe, rates: Rates | None = None) -> Figures:
    """Expected cost of every stage; `rates` replaces those of the machine that :func:`rates_for` picks."""
    rates = rates or rates_for(recipe)
    stages = {
        "target": _target(recipe),
        "prompts": _prompts(recipe),
        "answers": _answers(recipe, rates),
        "tokens": _tokens(recipe),
        "features": _features(recipe, rates),
        "head": _head(recipe, rates),
        "checkpoint": _checkpoint(recipe, rates),
        "record": _record(recipe, rates),
        "verdict": _stage(disk=7e4, memory=CPU["process_bytes"] / 2, seconds=DISK["report_s"]),
    }
    stages["publication"] = _publication(recipe, stages)
    totals = {
        "tokens": stages["features"]["tokens"],
        "disk_bytes": sum(s["disk_bytes"] for s in stages.values()),
        "memory_bytes": max(s["memory_bytes"] for s in stages.values()),
        "seconds": sum(s["seconds"] for s in stages.values()),
        "spare_disk_bytes": _checkpoints_bytes(recipe),
    }
    return Figures(stages=stages, totals=totals, machine=rates.name, devices=rates.devices)


def table(states: dict[str, tuple[str, str]], figures: Figures) -> str:
    """Aligned text: stage, status, why, tokens, disk, memory, time; then what is left to do, and the whole."""
    rows = [("stage", "status", "why", "tokens", "disk", "memory", "time")]
    for name, (status, why) in states.items():
        rows.append((name, status, why if len(why) <= 40 else why[:37] + "...", *_cells(figures.stages[name])))
    left = [figures.stages[name] for name, (status, _) in states.items() if status != "done"]
    remaining = {key: sum(s[key] for s in left) for key in ("disk_bytes", "seconds")}
    peak = max((s["memory_bytes"] for s in left), default=0.0)
    rows.append(("to do", "", f"{len(left)} stages", *_cells({"tokens": 0.0, **remaining, "memory_bytes": peak})))
    rows.append(("total", "", "", *_cells(figures.totals)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(aligned(row, widths)).rstrip() for row in rows]
    where = f"of {figures.devices} GPUs together where a model runs, else RAM" if figures.devices else "RAM"
    return "\n".join([*lines, f"expected on {figures.machine}; memory: {where}"])


def readable_bytes(count: float) -> str:
    """E.g. `1.1 GiB`; `-` for nothing."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1000 and len(units) > 1:
        count /= 1024
        del units[0]
    return f"{count:.3g} {units[0]}" if count else "-"


def readable_seconds(seconds: float) -> str:
    """E.g. `40 s`, `12.0 min`, `3.4 h`; `-` for nothing."""
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds else "-"
    return f"{seconds / 60:.1f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def readable_count(count: float) -> str:
    """E.g. `540`, `12.3 k`, `4.5 M`; `-` for nothing."""
    for unit in ("", " k", " M"):
        if count < 1000:
            return f"{count:.3g}{unit}" if count else "-"
        count /= 1000
    return f"{count:.3g} G"


def decoding_seconds(recipe: Recipe, rates: Rates, *, in_flight: float, drafted: int = 0) -> float:
    """One decoding step of `in_flight` sequences, each with `drafted` draft tokens to verify.

    Fixed cost + reading the weights (of a mixture, the experts that so many tokens touch) and the cache + arithmetic.
    """
    facts, tokens = recipe.target.facts, in_flight * (1 + drafted)
    touched = min(facts.total_params_b, facts.active_params_b * tokens) * 1e9 * facts.weight_bytes
    context = PROMPT_TOKENS + answer_length(recipe, recipe.answers.max_tokens) / 2
    read = touched + in_flight * context * kv_bytes_per_token(recipe)
    arithmetic = 2e9 * facts.active_params_b * tokens / rates.decode_flops
    return rates.step_s + drafted * rates.draft_s + read / rates.decode_bytes + arithmetic


def _stage(*, tokens: float = 0.0, disk: float = 0.0, memory: float = 0.0, seconds: float = 0.0) -> dict[str, float]:
    return {"tokens": float(tokens), "disk_bytes": float(disk), "memory_bytes": float(memory), "seconds": seconds}


def _target(recipe: Recipe) -> dict[str, float]:
    """A GGUF file is converted, a folder only hashed, a Hub repository fetched first."""
    size = weight_bytes(recipe)
    if recipe.target.path.endswith(".gguf"):
        seconds, memory, disk = size / DISK["convert_bytes"], CPU["process_bytes"] + 3 * size, size + 4e6
    elif recipe.target.path:
        seconds, memory, disk = 0.0, CPU["process_bytes"] / 2, 2e3
    else:
        seconds, memory, disk = size / DISK["hub_bytes"], CPU["process_bytes"] / 2, size
    return _stage(disk=disk, memory=memory, seconds=5 + seconds + size / DISK["hash_bytes"])


def _prompts(recipe: Recipe) -> dict[str, float]:
    held = sum(d.held_out for d in recipe.domains.values())
    train = split_counts(recipe, "train")
    conversations = train.conversations + held
    # A token is about 4 characters, the template's are not written; ids, roles and the source's name are 240.
    disk = 240 * conversations + 4 * (train.prompt_tokens + held * PROMPT_TOKENS - TEMPLATE_TOKENS * conversations)
    seconds = 2 + source_bytes(recipe) / DISK["source_bytes"] + conversations * DISK["row_s"]
    return _stage(disk=disk, memory=0.5e9 + 2e3 * conversations, seconds=seconds)


def _answers(recipe: Recipe, rates: Rates) -> dict[str, float]:
    answers, parts = recipe.answers, [split_counts(recipe, s) for s in ("train", "held_out")]
    conversations, prompt, answer = (
        sum(getattr(p, name) for p in parts) for name in ("conversations", "prompt_tokens", "answer_tokens")
    )
    disk = id_bytes(recipe) * (prompt + answer) + 5 * answer + 250 * conversations
    if answers.mode == "prewritten":
        return _stage(tokens=answer, disk=disk, memory=CPU["process_bytes"], seconds=5 + 2e-3 * conversations)
    in_flight = max(1.0, min(answers.concurrency, rates.in_flight, conversations))
    # The last answers finish with ever fewer beside them: as long as half an answer at full width.
    steps = answer / in_flight + answers.max_tokens / 2
    seconds = steps * decoding_seconds(recipe, rates, in_flight=in_flight)
    seconds += prompt * 2e9 * recipe.target.facts.active_params_b / rates.capture_flops
    if answers.url:  # somebody else's server, taken to be as fast as ours would be
        return _stage(tokens=answer, disk=disk, memory=CPU["process_bytes"], seconds=seconds)
    cache = in_flight * (PROMPT_TOKENS + answers.max_tokens) * kv_bytes_per_token(recipe) if rates.devices else 0.0
    memory = weight_bytes(recipe) + cache + rates.engine_bytes
    return _stage(tokens=answer, disk=disk, memory=memory, seconds=rates.engine_start_s + seconds)


def _tokens(recipe: Recipe) -> dict[str, float]:
    parts = [split_counts(recipe, s) for s in ("train", "held_out")]
    rows, conversations = sum(p.row_tokens for p in parts), sum(p.conversations for p in parts)
    vocabulary = 8 * recipe.head.draft_vocab_size + recipe.target.facts.vocab_size
    # Parquet with zstd: 1.24 bytes a token and mask, measured.
    return _stage(
        tokens=rows, disk=1.25 * rows + vocabulary, memory=0.7e9 + 120 * rows, seconds=6 + DISK["row_s"] * conversations
    )


def _features(recipe: Recipe, rates: Rates) -> dict[str, float]:
    facts, capture, layers = recipe.target.facts, recipe.capture, len(aux_layers(recipe))
    parts = [split_counts(recipe, s) for s in stored_splits(recipe)]
    rows, conversations = sum(p.row_tokens for p in parts), sum(p.conversations for p in parts)
    width = feature_bytes_per_token(facts.hidden_size, layers, capture.dtype)
    gpus = capture.engines * capture.tensor_parallel if rates.devices else 1
    if rates.devices and capture.backend != "hf":
        memory = gpus * capture_gpu_bytes(recipe)
    else:
        # All layers' states of a batch, and the shards that are gathered, joined or written.
        states = capture.batch_tokens * 2.0 * facts.hidden_size * (facts.num_hidden_layers + 1)
        memory = rates.process_bytes + weight_bytes(recipe) + states + SHARDS_HELD * capture.shard_tokens * width
    passes = rows / capture.batch_tokens / capture.engines * rates.pass_s
    compute = rows * 2e9 * facts.active_params_b / _capture_flops(recipe, rates) + passes
    hashing = 2 * rows * width / rates.hash_bytes  # as each shard is written, and for the manifest
    return _stage(
        tokens=rows, disk=rows * width + 132 * conversations, memory=memory,
        seconds=rates.process_s + compute + hashing,
    )  # fmt: skip


def _head(recipe: Recipe, rates: Rates) -> dict[str, float]:
    facts, train = recipe.target.facts, split_counts(recipe, "train")
    held, seen = split_counts(recipe, "held_out"), supervised_tokens(recipe)
    trained, frozen = head_parameters(recipe)
    everywhere, supervised = training_flops(recipe)
    packed = seen * train.row_tokens / max(1.0, train.answer_tokens)
    processes = recipe.train.processes
    # One process simulates while the others wait.
    simulated = _simulations(recipe) * held.answer_tokens * supervised / 3 * processes
    flops = packed * everywhere + seen * supervised + simulated
    width = feature_bytes_per_token(facts.hidden_size, len(aux_layers(recipe)), recipe.capture.dtype)
    # Stored features are checked before use; streamed ones are captured again each time they are seen.
    stored = sum(split_counts(recipe, s).row_tokens for s in stored_splits(recipe))
    hashing = 2 * stored * width / rates.hash_bytes
    streamed = packed if recipe.capture.mode == "stream" else 0.0
    beside = processes if rates.devices else 1
    # Target and trainer share the devices, and each process has a capture of its own.
    capturing = streamed * 2e9 * facts.active_params_b / _capture_flops(recipe, rates) / beside
    share = processes / rates.devices if rates.devices else 1.0
    packs = packed / recipe.train.pack_tokens / beside  # of one process
    # Every process makes the whole optimiser step.
    steps = packs / recipe.train.accumulate * optimizer_flops(recipe) * max(1, rates.devices) / rates.product_flops
    memory = processes * (training_gpu_bytes(recipe) if rates.devices else training_cpu_bytes(recipe))
    disk = 4 * (trained + frozen) + 8 * recipe.head.draft_vocab_size + facts.vocab_size
    seconds = rates.process_s + flops / rates.train_flops / share + packs * rates.pass_s + steps + capturing + hashing
    return _stage(tokens=seen, disk=disk, memory=memory, seconds=seconds)


def _capture_flops(recipe: Recipe, rates: Rates) -> float:
    """Of the devices that capture."""
    used = recipe.capture.engines * recipe.capture.tensor_parallel
    return rates.capture_flops * (used / rates.devices if rates.devices else 1.0)


def _simulations(recipe: Recipe) -> float:
    """Passes over the held-out features: one at the end, one every `simulate_steps`."""
    train = split_counts(recipe, "train")
    packs = recipe.train.accumulate * recipe.train.processes
    step = recipe.train.pack_tokens * packs * train.answer_tokens / max(1.0, train.row_tokens)
    every = recipe.train.simulate_steps
    return 1 + (supervised_tokens(recipe) / max(1.0, every * step) if every else 0)


def _checkpoints_bytes(recipe: Recipe) -> float:
    """Two training checkpoints: the new one is whole before the old one goes."""
    return 2 * (4 * sum(head_parameters(recipe)) + optimizer_bytes(recipe))


def _checkpoint(recipe: Recipe, rates: Rates) -> dict[str, float]:
    facts, parameters = recipe.target.facts, sum(head_parameters(recipe))
    embedding = facts.vocab_size * facts.hidden_size if recipe.export.include_embeddings else 0
    disk = 2 * (parameters + embedding) + 8 * recipe.head.draft_vocab_size + facts.vocab_size + 4e3
    memory = CPU["process_bytes"] + 8 * parameters + 2.0 * facts.vocab_size * facts.hidden_size
    return _stage(disk=disk, memory=memory, seconds=rates.process_s + disk / DISK["hash_bytes"])


def _record(recipe: Recipe, rates: Rates) -> dict[str, float]:
    """Acceptance on every domain with each arm that drafts, then rounds at each load with all arms."""
    gate, k = recipe.gate, recipe.export.speculative_tokens
    prompts = sum(min(gate.prompts, d.held_out) for d in recipe.domains.values())
    few = gate.ngram_prompts or gate.prompts
    answer = answer_length(recipe, gate.max_tokens) * len(gate.temperatures)
    asked, heads = prompts * answer, 2 if gate.incumbent else 1
    by_ngram = sum(min(gate.prompts, few, d.held_out) for d in recipe.domains.values()) * answer
    timed = gate.speed_rounds * gate.speed_prompts * answer_length(recipe, gate.speed_max_tokens)
    together, seconds = min(gate.concurrency, rates.in_flight), 0.0
    arms_asked = [(k, asked, True)] * heads + [(3, by_ngram, gate.speed_ngram)] * gate.ngram
    for drafted, tokens, timed_too in arms_asked:
        step = decoding_seconds(recipe, rates, in_flight=together, drafted=drafted)
        seconds += tokens / EXPECTED_LENGTH / together * step
        if timed_too:
            seconds += timed / EXPECTED_LENGTH * _each_load(recipe, rates, drafted)
    seconds += timed * _each_load(recipe, rates, 0)
    arms = 1 + len(arms_asked)
    # Side by side; on a CPU each further one adds a quarter (3 take 52 s where 1 takes 35).
    starts = rates.engine_start_s * (1 if rates.devices else 1 + 0.25 * (arms - 1))
    read = asked + prompts * PROMPT_TOKENS
    replay = rates.process_s + read * 2e9 * recipe.target.facts.active_params_b / rates.capture_flops
    rounds = timed * (1 + len(gate.loads)) * (arms - (gate.ngram and not gate.speed_ngram))
    answered = asked * heads + by_ngram * gate.ngram + rounds
    memory = arms * (weight_bytes(recipe) + rates.engine_bytes) + 8.0 * sum(head_parameters(recipe))
    return _stage(tokens=answered, disk=5 * answered + 1.5e5, memory=memory, seconds=starts + seconds + replay)


def _each_load(recipe: Recipe, rates: Rates, drafted: int) -> float:
    """Seconds of a target step a request, summed over the loads at which the arms are timed."""
    loads = [min(load, rates.in_flight) for load in (1, *recipe.gate.loads)]
    return sum(decoding_seconds(recipe, rates, in_flight=n, drafted=drafted) / n for n in loads)


def _publication(recipe: Recipe, stages: dict[str, dict[str, float]]) -> dict[str, float]:
    size = stages["checkpoint"]["disk_bytes"] + stages["record"]["disk_bytes"]
    pushed = bool(recipe.publish.repo_id)
    return _stage(
        disk=2e3 if pushed else size, memory=0.5e9, seconds=5 + size / DISK["hub_bytes"] * (10 if pushed else 0)
    )


def _cells(figures: dict[str, float]) -> tuple[str, str, str, str]:
    return (
        readable_count(figures["tokens"]), readable_bytes(figures["disk_bytes"]),
        readable_bytes(figures["memory_bytes"]), readable_seconds(figures["seconds"]),
    )  # fmt: skip
