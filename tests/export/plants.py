"""Ways to plant a fault in a Speculators folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from export.validate import validate
from tests.export.tiny import edit_config, edit_tensors

LC = "transformer_layer_config"
Plant = Callable[[Path], object]


def config(change: Callable[[dict[str, Any]], object]) -> Plant:
    return lambda folder: edit_config(folder, change)


def layer(**values: Any) -> Plant:
    return config(lambda c: c["transformer_layer_config"].update(values))


def spec(**values: Any) -> Plant:
    return config(lambda c: c["speculators_config"].update(values))


def method(**values: Any) -> Plant:
    return config(lambda c: c["speculators_config"]["proposal_methods"][0].update(values))


def verifier(**values: Any) -> Plant:
    return config(lambda c: c["speculators_config"]["verifier"].update(values))


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Plant:
    return lambda folder: edit_tensors(folder, change)


def file(name: str, data: bytes = b"x") -> Plant:
    return lambda folder: (folder / name).write_bytes(data)


def without(*path: str) -> Plant:
    def drop(c: dict[str, Any]) -> None:
        for key in path[:-1]:
            c = c[key]
        del c[path[-1]]

    return config(drop)


def checks(folder: Path, target: Path | None = None, **options: Any) -> set[str]:
    """Names of the checks that find a fault."""
    return {item.check for item in validate(folder, target=target, **options)}
