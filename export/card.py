"""Record and verdict -> the model card: nothing on it that was not measured or hashed."""

import json
import shlex
from collections.abc import Mapping
from typing import Any, cast

import yaml

from export.record import Figure, Measured, Parity, Record, Verdict
from export.scrub import scrub

_ARMS = {"none": "no speculation", "head": "this head", "ngram": "n-gram"}
Table = list[list[str]]


def card(
    record: Record,
    verdict: Verdict,
    recipe: dict[str, Any],
    target: dict[str, Any],
    files: Mapping[str, str],
    packages: Mapping[str, Mapping[str, str]],
) -> str:
    """README.md. `recipe` is the plain recipe, `target` target.json, `files` the folder's names -> SHA-256, `packages`
    package versions by occasion (trained, measured). Absolute paths in any of them are cut to their last part.
    """
    recipe, target = scrub(recipe, {}), scrub(target, {})
    parts = [
        _front(verdict, recipe, target),
        f"# {_name(recipe)}\n",
        _opening(verdict, recipe, target),
        _serving(record),
        "## Measured\n",
        _acceptance(verdict, recipe),
        _speed(verdict),
        _worse(verdict),
        _agreement(verdict),
        _conditions(record),
        _traffic(recipe),
        _origin(verdict, recipe, target, files, packages),
    ]
    return "\n".join(part for part in parts if part)


def _front(verdict: Verdict, recipe: dict[str, Any], target: dict[str, Any]) -> str:
    tags = ["speculators", "eagle3", "speculative-decoding", "draft-model", "vllm"]
    front = {
        "library_name": "speculators",
        "license": recipe["publish"]["licence"],
        "base_model": target["id"],
        "tags": tags + (["not-portable"] if target["local"] else []),
        "model-index": [{"name": _name(recipe), "results": _results(verdict)}],
    }
    return f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n"


def _results(verdict: Verdict) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for name, measured in verdict.domains.items():
        metrics = [
            _metric("acceptance_length", "tokens a target step", measured.acceptance),
            _metric(
                "acceptance_length_unrepeated", "the same without repeated 4-grams", measured.acceptance_unrepeated
            ),
        ]
        if verdict.speed and verdict.speed.domain == name:
            metrics.append(_metric("speedup", "output tokens/s against no speculation", verdict.speed.speedup))
        results.append(
            {
                "task": {"type": "text-generation"},
                "dataset": {"name": f"{name} (held out)", "type": name},
                "metrics": [metric for metric in metrics if metric],
            }
        )
    return [result for result in results if result["metrics"]]


def _metric(kind: str, name: str, figure: Figure | None) -> dict[str, Any] | None:
    if figure is None:
        return None
    interval = {"low": round(figure.low, 4), "high": round(figure.high, 4), "n": figure.n}
    return {"type": kind, "name": name, "value": round(figure.value, 4), "args": interval}


def _opening(verdict: Verdict, recipe: dict[str, Any], target: dict[str, Any]) -> str:
    measured = verdict.conditions
    said = [
        f"An EAGLE-3 draft head for `{target['id']}` at revision `{target['revision']}`, in Speculators format. It was "
        f"measured in {measured.engine} {measured.engine_version} on {measured.date} and "
        f"{'passed' if verdict.passed else 'did not pass'} its gate. Each draft token is verified by the target: the "
        "head changes the speed of answers, and what they say only where two tokens tie numerically."
    ]
    if target["note"]:
        said.append(f"The target: {_line(target['note'])}")
    if target["local"]:
        said.append(
            "**Not portable.** The weights that this head was trained and measured with exist only where it was made; "
            "config.json names them by their path there. With the published weights of that id the figures below are "
            "not promised."
        )
    if recipe["answers"]["mode"] == "prewritten":
        said.append(
            "**Off-policy.** It was trained on answers that came with the data, not on the target's own; such heads "
            "accept less on the target's own answers."
        )
    return "\n\n".join(said) + "\n"


def _serving(record: Record) -> str:
    conditions = record.conditions
    command = shlex.join(cast(list[str], scrub(conditions.command.get("head", []), {})))
    env = "".join(f"{k}={shlex.quote(v)} " for k, v in cast(dict[str, str], scrub(conditions.env, {})).items())
    return (
        "## Serve\n\nThe command that was measured (`checkpoint` stands for this folder):\n\n"
        f"```\n{env}{command}\n```\n"
    )


def _acceptance(verdict: Verdict, recipe: dict[str, Any]) -> str:
    head = ["domain", "requests", "acceptance length", "without repeated 4-grams", "repeating", "per position",
            "tokens a step: this head", "tokens a step: n-gram", "simulated in training"]  # fmt: skip
    rows = [[_label(name, m), str(m.requests), _figure(m.acceptance), _figure(m.acceptance_unrepeated),
             _percent(m.repeated_share), ", ".join(f"{rate:.2f}" for rate in m.per_position) or "-",
             _figure(m.tokens_per_step.head), _figure(m.tokens_per_step.ngram), _number(m.simulated)]
            for name, m in verdict.domains.items()]  # fmt: skip
    further = [[name, t, _figure(f)] for name, m in verdict.domains.items() for t, f in m.temperatures.items()]
    text = (
        f"Acceptance length is tokens a target step: 1 + accepted draft tokens / windows, pooled over the held-out "
        f"requests, the bonus token counted. Brackets are {recipe['gate']['confidence']:.0%} intervals over requests. "
        "Per position: share of windows that accept at least so many draft tokens. n-gram drafts only where it finds "
        "a match, so compare the two by tokens a step. Simulated is training's own figure, on held-out features.\n\n"
    )
    also = "\n" + _table(["domain", "temperature", "acceptance length"], further) if further else ""
    return text + _table(head, rows) + also


def _speed(verdict: Verdict) -> str:
    speed = verdict.speed
    if speed is None:
        return "Speed against no speculation was not measured.\n"
    arms = [arm for arm in _ARMS if any(arm in shown for shown in speed.rounds)]
    rows = [[str(i + 1), *[_number(shown.get(arm), 1) for arm in arms], _number(shown.get("ratio"))]
            for i, shown in enumerate(speed.rounds)]  # fmt: skip
    text = (
        f"Output tokens/s on {speed.domain} at concurrency {speed.concurrency}, arms alternated: "
        f"**{_figure(speed.speedup)}** times no speculation, median of the rounds.\n\n"
    )
    latencies = [[_ARMS.get(arm, arm), *[f"{1000 * seconds:.1f}" for seconds in (
        latency.ttft_p50, latency.ttft_p99, latency.gap_p50, latency.gap_p99, latency.per_token_p50,
        latency.per_token_p99)]] for arm, latency in speed.latency.items()]  # fmt: skip
    names = ["arm, ms", "first token p50", "p99", "gap p50", "p99", "per token p50", "p99"]
    served = [
        [concurrency, *[_number(by_arm.get(arm), 1) for arm in _ARMS]] for concurrency, by_arm in speed.served.items()
    ]
    return (
        text
        + _table(["round", *[_ARMS[arm] for arm in arms], "ratio"], rows)
        + (f"\n{_table(names, latencies)}" if latencies else "")
        + (f"\n{_table(['concurrency, tokens/s', *_ARMS.values()], served)}" if served else "")
    )


def _worse(verdict: Verdict) -> str:
    """Where the head loses, from the measured arms alone."""
    said: list[str] = []
    speed = verdict.speed
    if speed and speed.speedup and speed.speedup.low < 1:
        said.append(f"{speed.domain} at concurrency {speed.concurrency}: the speed-up's interval reaches below 1.")
    for concurrency, arms in speed.served.items() if speed else []:
        if "head" in arms and "none" in arms and arms["head"] < arms["none"]:
            said.append(f"Concurrency {concurrency}: {arms['head']:.1f} tokens/s against {arms['none']:.1f} without.")
    latency = speed.latency if speed else {}
    if "head" in latency and "none" in latency:
        for field, label in (("ttft_p50", "first token, median"), ("gap_p99", "gap between chunks, p99")):
            own, none = (getattr(latency[arm], field) for arm in ("head", "none"))
            if own > none:
                said.append(f"{label}: {1000 * own:.1f} ms against {1000 * none:.1f} ms without.")
    for name, measured in verdict.domains.items():
        head, ngram = measured.tokens_per_step.head, measured.tokens_per_step.ngram
        if head and ngram and ngram.value > head.value:
            said.append(f"{name}: n-gram speculation, which needs no head, makes more tokens a step.")
    listed = "".join(f"- {line}\n" for line in said) or "Nowhere among what was measured; other loads were not.\n"
    return f"## Where it does not help\n\n{listed}"


def _agreement(verdict: Verdict) -> str:
    rows = [[name, *_parity_cells(m.parity)] for name, m in verdict.domains.items() if m.parity]
    table = _table(["domain", "windows replayed", "equal", "served length", "replayed length"], rows) if rows else ""
    text = "Our own forward of the trained state, replayed on the token ids that were served:\n\n" if rows else ""
    findings = "".join(f"- {_line(finding)}\n" for finding in verdict.findings)
    return f"## Checks and findings\n\n{text}{table}\n{findings}" if rows or findings else ""


def _parity_cells(parity: Parity) -> list[str]:
    share = f"{parity.equal / parity.windows:.2%}" if parity.windows else "-"
    return [str(parity.windows), share, _number(parity.served_length, 3), _number(parity.replayed_length, 3)]


def _conditions(record: Record) -> str:
    c = record.conditions
    temperatures = ", ".join(f"{t:g}" for t in c.temperatures)
    rows = [
        ["engine", f"{c.engine} {c.engine_version}"],
        ["machine", f"{c.machine.cpu}, {c.machine.cores} cores, {c.machine.gpu or 'no GPU'}"],
        ["memory", f"{c.machine.memory_gib} GiB"],
        ["type, quantisation", f"{c.dtype}, {c.quantization or 'none'}"],
        ["draft tokens", str(c.speculative_tokens)],
        ["temperatures", temperatures],
        ["samplers", f"rejection {c.rejection_sample_method}, draft {c.draft_sample_method}"],
        ["answers", f"at most {c.max_tokens} tokens, {c.concurrency} requests in flight"],
        ["answers for speed", f"at most {c.speed_max_tokens} tokens"],
        ["date", c.date],
    ]
    return f"## Conditions\n\n{_table(['', ''], [[a, _cell(b)] for a, b in rows])}"


def _traffic(recipe: dict[str, Any]) -> str:
    rows = [
        [name, domain["role"], str(domain["train"] or "-"), _cell(source["path"]), _cell(source["licence"])]
        for name, domain in recipe["domains"].items()
        for source in domain["sources"]
    ]
    text = (
        "Meant for traffic like the domains with the role traffic; on other traffic it is slower or useless, never "
        "wrong. Benchmarks were measured and never trained on.\n\n"
    )
    return f"## Intended traffic and data\n\n{text}" + _table(
        ["domain", "role", "conversations trained on, at most", "source", "licence"], rows
    )


def _origin(
    verdict: Verdict,
    recipe: dict[str, Any],
    target: dict[str, Any],
    files: Mapping[str, str],
    packages: Mapping[str, Mapping[str, str]],
) -> str:
    known = {
        "target": f"{target['id']}@{target['revision']}",
        "target config": target["config_sha256"],
        "target tokenizer": target["tokenizer_sha256"],
        "target chat template": target["template_sha256"],
        **{name if name == "recipe" else f"stage {name}": v for name, v in sorted(verdict.made_from.items())},
        **dict(sorted(files.items())),
    }
    versions = [
        [when, _cell(", ".join(f"{k} {v}" for k, v in sorted(held.items())))] for when, held in packages.items()
    ]
    return (
        "## Made from\n\nSHA-256, where not said otherwise. The measurement is in `record.json`, `verdict.json` and "
        f"`requests.parquet` beside this file: {_rows(recipe)}.\n\n"
        + _table(["", ""], [[name, f"`{value}`"] for name, value in known.items() if value])
        + (f"\n{_table(['versions', ''], versions)}" if versions else "")
        + f"\nHead settings: `{json.dumps(recipe['head'], sort_keys=True)}`\n"
    )


def _rows(recipe: dict[str, Any]) -> str:
    licence = recipe["publish"]["data_licence"]
    return f"token ids of prompts and answers too, under {licence}" if licence else "ids, counts and hashes only"


def _name(recipe: dict[str, Any]) -> str:
    return (recipe["publish"]["repo_id"] or recipe["name"]).rsplit("/", 1)[-1]


def _label(name: str, measured: Measured) -> str:
    return name if measured.role == "traffic" else f"{name} ({measured.role})"


def _table(header: list[str], rows: Table) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _figure(figure: Figure | None) -> str:
    return f"{figure.value:.3f} [{figure.low:.3f}, {figure.high:.3f}], n={figure.n}" if figure else "-"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _cell(text: str) -> str:
    return _line(text).replace("|", "\\|")


def _line(text: str) -> str:
    return " ".join(str(text).split())
