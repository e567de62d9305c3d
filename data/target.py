"""Who the target is: its folder, its hashes, its final norm and output matrix."""

import difflib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.quantization_config import GgufConfig

from recipes.artifact import hash_bytes, hash_file, hash_json, write_json
from recipes.faults import EnvironmentFault
from recipes.schema import Facts, Recipe

_COMPARED = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
)


def make(recipe: Recipe, run: Path, out: Path) -> dict[str, Any]:
    """Bring the target's folder here (converting GGUF), compare it with the recipe's facts, write target.json.

    Raises ValueError where the folder is not the model that the recipe describes, EnvironmentFault where the Hub
    cannot be reached.
    """
    target = recipe.target
    folder, local = _obtain(recipe, out)
    config = _loaded(recipe, lambda: AutoConfig.from_pretrained(folder).get_text_config())
    faults = fact_faults(target.facts, config)
    if faults:
        raise ValueError(
            f"target {target.id}: the files at {target.path or target.id} differ from the recipe: {faults}; name the "
            "right target.path, or correct target.facts"
        )
    template = _loaded(recipe, lambda: AutoTokenizer.from_pretrained(folder)).chat_template or ""
    if not template:
        raise ValueError(f"target {target.id}: its tokenizer has no chat template; use an instruction-tuned model")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ValueError(f"target {target.id}: {folder} holds no *.safetensors; name a folder that has them")
    info = {
        "id": target.id,
        "revision": target.revision,
        "path": str(folder.relative_to(out)) if folder.is_relative_to(out) else str(folder),
        "local": local or target.local_only,
        "note": target.note,
        "config_sha256": hash_json(_config_json(folder)),
        "tokenizer_sha256": hash_file(folder / "tokenizer.json") if (folder / "tokenizer.json").exists() else "",
        "template_sha256": hash_bytes(str(template).encode()),
        "weights": {p.name: {"sha256": hash_file(p), "bytes": p.stat().st_size} for p in weights},
        "norm": target.facts.norm,
        "architecture": (_config_json(folder).get("architectures") or [target.facts.architecture])[0],
    }
    write_json(out / "target.json", info)
    return {"weight_bytes": sum(p.stat().st_size for p in weights)}


def read_target(run: Path) -> dict[str, Any]:
    """target.json of a run."""
    return cast(dict[str, Any], json.loads((run / "target" / "target.json").read_text(encoding="utf-8")))


def served_path(run: Path) -> Path:
    """The folder that engines and transformers load the target from, absolute."""
    path = Path(read_target(run)["path"])
    return path if path.is_absolute() else (run / "target" / path).resolve()


def package_file(path: str) -> Path:
    """`package:PKG/FILE` -> the file inside the installed package, which is not imported.

    Raises ValueError where the package or the file is missing or the path leaves the package.
    """
    package, _, inner = path.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or spec.origin is None:
        raise ValueError(f"{path}: package {package!r} is not installed; pip install it, or name a folder")
    root = Path(spec.origin).parent.resolve()
    file = (root / inner).resolve()
    if not file.is_relative_to(root):
        raise ValueError(f"{path}: leaves the package's folder")
    if not file.is_file():
        near = difflib.get_close_matches(inner, [str(p.relative_to(root)) for p in root.rglob("*.*")], 3, 0.4)
        raise ValueError(
            f"{path}: no such file in package {package!r}; it has, for example, {', '.join(near) or 'none'}"
        )
    return file


def fact_faults(facts: Facts, config: Any) -> str:
    """How a transformers config differs from the recipe's facts, e.g. `hidden_size 576, recipe 512`; empty if not."""
    differing: list[str] = []
    for key in _COMPARED:
        real = getattr(config, key, None)
        if key == "head_dim" and real is None:
            real = config.hidden_size // config.num_attention_heads
        if real is not None and real != getattr(facts, key):
            differing.append(f"{key} {real!r}, recipe {getattr(facts, key)!r}")
    return "; ".join(differing)


def weight(folder: Path, names: tuple[str, ...]) -> torch.Tensor:
    """The first of the named tensors that the folder's safetensors hold. Raises ValueError where none is there."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in names:
                if name in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                    return tensors.get_tensor(name)
    raise ValueError(f"{folder}: holds none of {', '.join(names)} in safetensors")


def output_matrix(folder: Path) -> torch.Tensor:
    """lm_head [V, H]; the embedding where the two are tied."""
    tied = bool(AutoConfig.from_pretrained(folder).get_text_config().tie_word_embeddings)
    return embedding(folder) if tied else weight(folder, ("lm_head.weight", "language_model.lm_head.weight"))


def embedding(folder: Path) -> torch.Tensor:
    """Input embedding [V, H]."""
    return weight(folder, ("model.embed_tokens.weight", "language_model.model.embed_tokens.weight"))


def final_norm(folder: Path, kind: str) -> torch.Tensor:
    """What the final norm multiplies by [H]: w, or 1 + w for `rms_plus_one` (Gemma, Qwen3.5)."""
    w = weight(folder, ("model.norm.weight", "language_model.model.norm.weight")).float()
    return 1 + w if kind == "rms_plus_one" else w


def _obtain(recipe: Recipe, out: Path) -> tuple[Path, bool]:
    path = recipe.target.path
    if not path:
        try:
            return Path(snapshot_download(recipe.target.id, revision=recipe.target.revision)), False
        except Exception as error:  # the client raises many kinds: offline, 401, 404, ...
            raise EnvironmentFault(
                f"target {recipe.target.id}@{recipe.target.revision}: cannot be fetched "
                f"({str(error).splitlines()[0]}); log in, or set target.path to a folder"
            ) from error
    file = package_file(path) if path.startswith("package:") else Path(path).expanduser().resolve()
    if file.suffix == ".gguf" and file.is_file():
        return _loaded(recipe, lambda: _from_gguf(file, out / "model", getattr(torch, recipe.target.dtype))), True
    if not (file / "config.json").is_file():
        raise ValueError(f"target.path: {path!r} is neither a folder with config.json nor a .gguf file; name one")
    return file, True


def _loaded(recipe: Recipe, call: Callable[[], Any]) -> Any:
    """What `call` loads of the target. Raises ValueError where transformers cannot read it."""
    try:
        return call()
    except Exception as error:  # transformers and its readers raise many kinds on files that are no model
        if isinstance(error, (ImportError, MemoryError)) or getattr(error, "errno", None):
            raise  # the machine's fault, not the files'
        place = f"target.path: {recipe.target.path!r}" if recipe.target.path else f"target {recipe.target.id}"
        said = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ValueError(
            f"{place} cannot be loaded by transformers ({said}); name the folder, or the .gguf file, of "
            f"{recipe.target.id}"
        ) from error


def _from_gguf(file: Path, folder: Path, dtype: torch.dtype) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
    )
    model.config.__dict__.pop("quantization_config", None)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def _config_json(folder: Path) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads((folder / "config.json").read_text(encoding="utf-8")))
