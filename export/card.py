"""Record and verdict -> the model card: nothing on it that was not measured or hashed."""

import json
import shlex
from collections.abc import Mapping
from typing import Any, cast

import yaml

from export.card_cells import cell, figure, line, number, percent, table
from export.card_speed import speed, worse
from export.figures import Figure, Measured, Parity
from export.record import Record, Verdict
from export.scrub import scrub


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
        speed(verdict),
        worse(verdict),
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
        said.append(f"The target: {line(target['note'])}")
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
    rows = [[_label(name, m), str(m.requests), figure(m.acceptance), figure(m.acceptance_unrepeated),
             percent(m.repeated_share), ", ".join(f"{rate:.2f}" for rate in m.per_position) or "-",
             figure(m.tokens_per_step.head), figure(m.tokens_per_step.ngram), number(m.simulated)]
            for name, m in verdict.domains.items()]  # fmt: skip
    further = [[name, t, figure(f)] for name, m in verdict.domains.items() for t, f in m.temperatures.items()]
    text = (
        f"Acceptance length is tokens a target step: 1 + accepted draft tokens / windows, pooled over the held-out "
        f"requests, the bonus token counted. Brackets are {recipe['gate']['confidence']:.0%} intervals over requests. "
        "Per position: share of windows that accept at least so many draft tokens. n-gram drafts only where it finds "
        "a match, so compare the two by tokens a step. Simulated is training's own figure, on held-out features.\n\n"
    )
    also = "\n" + table(["domain", "temperature", "acceptance length"], further) if further else ""
    return text + table(head, rows) + also + _incumbent(verdict)


def _incumbent(verdict: Verdict) -> str:
    """The head beside the one that was published before it; empty where none was measured."""
    rows = [[name, t, figure(d)] for name, m in verdict.domains.items() for t, d in m.over_incumbent.items()]
    said = f"\nBeside the head before it ({cell(verdict.conditions.incumbent)}), on the same prompts:\n\n"
    return said + table(["domain", "temperature", "acceptance length, more than it"], rows) if rows else ""


def _agreement(verdict: Verdict) -> str:
    rows = [[name, *_parity_cells(m.parity)] for name, m in verdict.domains.items() if m.parity]
    shown = table(["domain", "windows replayed", "equal", "served length", "replayed length"], rows) if rows else ""
    text = "Our own forward of the trained state, replayed on the token ids that were served:\n\n" if rows else ""
    findings = "".join(f"- {line(finding)}\n" for finding in verdict.findings)
    return f"## Checks and findings\n\n{text}{shown}\n{findings}" if rows or findings else ""


def _parity_cells(parity: Parity) -> list[str]:
    share = f"{parity.equal / parity.windows:.2%}" if parity.windows else "-"
    return [str(parity.windows), share, number(parity.served_length, 3), number(parity.replayed_length, 3)]


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
    return f"## Conditions\n\n{table(['', ''], [[a, cell(b)] for a, b in rows])}"


def _traffic(recipe: dict[str, Any]) -> str:
    rows = [
        [name, domain["role"], str(domain["train"] or "-"), cell(source["path"]), cell(source["licence"])]
        for name, domain in recipe["domains"].items()
        for source in domain["sources"]
    ]
    text = (
        "Meant for traffic like the domains with the role traffic; on other traffic it is slower or useless, never "
        "wrong. Benchmarks were measured and never trained on.\n\n"
    )
    return f"## Intended traffic and data\n\n{text}" + table(
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
    versions = [[when, cell(", ".join(f"{k} {v}" for k, v in sorted(held.items())))] for when, held in packages.items()]
    return (
        "## Made from\n\nSHA-256, where not said otherwise. The measurement is in `record.json`, `verdict.json` and "
        f"`requests.parquet` beside this file: {_rows(recipe)}.\n\n"
        + table(["", ""], [[name, f"`{value}`"] for name, value in known.items() if value])
        + (f"\n{table(['versions', ''], versions)}" if versions else "")
        + f"\nHead settings: `{json.dumps(recipe['head'], sort_keys=True)}`\n"
    )


def _rows(recipe: dict[str, Any]) -> str:
    licence = recipe["publish"]["data_licence"]
    return f"token ids of prompts and answers too, under {licence}" if licence else "ids, counts and hashes only"


def _name(recipe: dict[str, Any]) -> str:
    return (recipe["publish"]["repo_id"] or recipe["name"]).rsplit("/", 1)[-1]


def _label(name: str, measured: Measured) -> str:
    return name if measured.role == "traffic" else f"{name} ({measured.role})"
