"""The folder through speculators' own classes: what they load, what they complain of, which logits they compute.

Their loader is lenient (missing tensors become random ones), so the loaded bits are compared with the file's.
"""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from loguru import logger
from transformers.utils import logging as transformers_logging

from data.target import embedding
from export.checks import Fault, fault
from export.config_faults import CHECKED
from export.weight_faults import read, tensor_files


def reload_faults(folder: Path, target: Path) -> list[Fault]:
    """Faults that speculators' own loader shows, with the target's folder as verifier; empty where all bits arrive."""
    try:
        with _complaints() as complaints:
            model = _load(folder, target, torch.bfloat16)
    except Exception as error:  # whatever speculators, pydantic, transformers or torch raise
        return [fault("reload", f"it raises {type(error).__name__}: {_line(str(error))}")]
    faults = [fault("reload-warning", _line(text)) for text in complaints]
    loaded = cast(dict[str, torch.Tensor], model.state_dict())
    files, _ = tensor_files(sorted(folder.glob("*.safetensors")))
    for name in sorted(files):
        if name not in loaded:
            faults.append(fault("reload-dropped", f"{name} is in the file, not in the loaded model"))
        elif not _same_bits(read(files, name), loaded[name]):
            faults.append(fault("reload-differs", f"{name} is not what was loaded"))
    unset = sorted(name for name, tensor in loaded.items() if not bool(tensor.isfinite().all()))
    return faults + [fault("reload-differs", f"{name} holds NaN or Inf after loading") for name in unset]


def speculators_logits(folder: Path, target: Path, aux_SAH: torch.Tensor, input_ids_S: torch.Tensor) -> torch.Tensor:
    """Logits [S, D] of speculators' own model at TTT step 0 in float32, over one document.

    aux_SAH [S, A, H] are the target's states in the order of the ids; input_ids_S [S] are the tokens embedded beside
    them, so x_{t+1} at position t. S positions, A aux states, H hidden size, D draft vocabulary.
    Raises ValueError for other heads than eagle3's.
    """
    model = _load(folder, target, torch.float32).eval()
    if model.config.speculators_model_type != "eagle3":
        raise ValueError(f"{folder}: {model.config.speculators_model_type} has no TTT step; only eagle3 heads have")
    kept: list[torch.Tensor] = []
    # forward returns only argmaxes; lm_head's output are the logits
    handle = model.lm_head.register_forward_hook(lambda _module, _inputs, logits: kept.append(logits))  # pyright: ignore
    with torch.no_grad():
        model(
            hidden_states=aux_SAH.float().flatten(1)[None],
            input_ids=input_ids_S[None],
            document_ids=torch.zeros_like(input_ids_S)[None],
            ttt_steps=1,
        )
    handle.remove()
    return kept[0][0]


def _load(folder: Path, target: Path, dtype: torch.dtype) -> Any:
    """The model, with the served folder as verifier (the named one may only exist on the Hub) and eager attention."""
    from speculators import SpeculatorModel, SpeculatorModelConfig  # five seconds, so only where it is needed

    config = cast(Any, SpeculatorModelConfig).from_pretrained(str(folder))
    if config.speculators_model_type not in CHECKED:
        raise ValueError(f"{config.speculators_model_type} heads are not reloaded here, only {' and '.join(CHECKED)}")
    config.speculators_config.verifier.name_or_path = str(target)
    config.transformer_layer_config._attn_implementation = "eager"
    bars = cast(Any, transformers_logging)
    logger.disable("speculators")
    bars.disable_progress_bar()
    try:
        model = cast(Any, SpeculatorModel).from_pretrained(str(folder), config=config, dtype=dtype)
    finally:
        logger.enable("speculators")
        bars.enable_progress_bar()
    if "embed_tokens.weight" not in tensor_files(sorted(folder.glob("*.safetensors")))[0]:
        # They come from the verifier only where they are NaN, and transformers 5 hands over uninitialised memory.
        with torch.no_grad():
            model.embed_tokens.weight.copy_(embedding(target))
    return model


@contextmanager
def _complaints() -> Generator[list[str]]:
    """Collects what transformers' loader logs as a warning or worse."""
    kept: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept.append(record.getMessage())

    loader, handler = logging.getLogger("transformers"), Keep(logging.WARNING)
    level = loader.level
    loader.addHandler(handler)
    loader.setLevel(min(level, logging.WARNING) if level else logging.WARNING)
    try:
        yield kept
    finally:
        loader.removeHandler(handler)
        loader.setLevel(level)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) if a.dim() else bool(a == b)


def _line(text: str) -> str:
    return " ".join(text.split())[:300]
