"""The head now published, beside which the new one is measured: a folder, or ORG/NAME@REVISION on the Hub."""

import re
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import snapshot_download

from eval.refusal import no
from export.figures import Figure, Measured
from export.record import Refusal
from recipes.artifact import hash_file, hash_json
from recipes.estimate_files import local_file
from recipes.faults import EnvironmentFault
from recipes.schema import Recipe, Rule

_HUB = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_READ = ("*.json", "*.safetensors")


def incumbent_folder(recipe: Recipe) -> Path | None:
    """Where its files are, absolute, fetched from the Hub if need be; None where the recipe names none.

    Raises ValueError where it is no folder of a head, EnvironmentFault where the Hub has no such head for us.
    """
    named = recipe.gate.incumbent
    if not named:
        return None
    folder = local_file(named)
    if not folder.is_dir():
        if not _HUB.fullmatch(named):
            raise ValueError(
                f"gate.incumbent: {named!r} is no folder and no Hub name; give a head's folder, or ORG/NAME@REVISION"
            )
        folder = _fetched(named)
    if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
        raise ValueError(
            f"gate.incumbent: {named} holds no config.json with .safetensors weights; name the folder of a head that "
            "`vllm serve` loads"
        )
    return folder.resolve()


def identity(recipe: Recipe, folder: Path) -> str:
    """Its name and the hash of its configuration and weights, without this machine's folders."""
    files = sorted(f for pattern in _READ for f in folder.glob(pattern))
    named = recipe.gate.incumbent
    shown = folder.name if local_file(named).is_dir() else named
    return f"{shown}, sha256 {hash_json([[f.name, hash_file(f)] for f in files])}"


def kept_up(recipe: Recipe, domains: Mapping[str, Measured]) -> list[Refusal]:
    """A refusal wherever the head may be further below the incumbent than the domain's rule allows."""
    refusals: list[Refusal] = []
    for name, figures in domains.items():
        most = recipe.gate.rules.get(name, Rule()).max_below_incumbent
        if most is None:
            continue
        for temperature, figure in figures.over_incumbent.items() or [("", None)]:
            refusals += _behind(name, temperature, figure, most)
            if figure and figure.n < recipe.gate.min_requests:
                why = f"{figure.n} prompts were answered by both heads, gate.min_requests is {recipe.gate.min_requests}"
                refusals.append(no("max_below_incumbent", why, name, float(figure.n)))
    return refusals


def _behind(name: str, temperature: str, figure: Figure | None, most: float) -> list[Refusal]:
    at = f" at T={temperature}" if temperature not in ("", "0") else ""
    if figure is None:
        why = f"acceptance length beside the incumbent's{at} was not measured, at most {most:g} below it is allowed"
        return [no("max_below_incumbent", why, name, threshold=-most)]
    if figure.low >= -most:
        return []
    why = (
        f"{name}: acceptance length less the incumbent's{at} {figure.value:+.3f} [{figure.low:+.3f}, "
        f"{figure.high:+.3f}], its lower end must reach {-most:g}"
    )
    return [Refusal(rule="max_below_incumbent", domain=name, figure=figure.value, low=figure.low, high=figure.high,
                    threshold=-most, why=why)]  # fmt: skip


def _fetched(named: str) -> Path:
    repo, _, revision = named.partition("@")
    try:
        return Path(snapshot_download(repo, revision=revision or None, allow_patterns=list(_READ)))
    except Exception as error:  # the client raises its own errors and its transport's
        said = " ".join(str(error).split())[:200]
        raise EnvironmentFault(
            f"gate.incumbent: {named} cannot be fetched from the Hub ({type(error).__name__}: {said}); check its name "
            "and your login, or name a folder"
        ) from error
