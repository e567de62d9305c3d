"""A folder -> its faults. Strict, for anybody's head, because both loaders are lenient.

The checks are named in :mod:`export.checks`. What speculators' own classes make of the folder is :mod:`export.reload`,
what the served head does is :mod:`export.parity`.
"""

import json
from pathlib import Path
from typing import Any, cast

from export import target_faults, weight_faults
from export.checks import Fault, fault
from export.config_faults import CHECKED, config_faults, describes_tensors, is_local_path, verifier
from export.layout import expected_tensors

_INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_NORM_PLUS_ONE = ("gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_5", "qwen3_5_text", "recurrent_gemma")


def validate(folder: Path, *, target: Path | None = None, local_target: bool = False) -> list[Fault]:
    """All faults of a Speculators folder; empty where it is sound.

    `target` is the served target's folder, for the checks beside it; `local_target` allows a verifier path that exists
    on this machine only. Weights are read whole.
    """
    config, faults = _config(folder)
    if config is None:
        return faults
    own = config_faults(config, local_target=local_target)
    paths, file_faults = _weight_paths(folder)
    files, unreadable = weight_faults.tensor_files(paths)
    faults += [*own, *file_faults, *unreadable]
    listed: list[Fault] = []
    whole = not file_faults and not unreadable
    if whole and describes_tensors(own):
        listed = list(weight_faults.list_faults(files, expected_tensors(config)))
    faults += [*listed, *weight_faults.value_faults(files)]
    comparable = whole and not listed and describes_tensors(own)
    if comparable and "d2t" in files:
        maps = list(weight_faults.map_faults(files, config))
        faults += maps
        comparable = not any(item.check in ("d2t-absolute", "d2t-range") for item in maps)
    return faults + (_beside(config, files, target, comparable) if target is not None else [])


def notes(folder: Path, *, target: Path | None = None) -> list[str]:
    """What is allowed but worth knowing, one line each. The folder must be one that `validate` can read."""
    config, _ = _config(folder)
    if config is None:
        return []
    layer, said = cast(dict[str, Any], config["transformer_layer_config"]), list[str]()
    if "embed_tokens.weight" not in weight_faults.tensor_files(_weight_paths(folder)[0])[0]:
        said.append(
            "embeddings are not shipped: vLLM shares the target's, but speculators 0.9.0 on transformers 5 may go on "
            "training with uninitialised ones; export.include_embeddings ships them"
        )
    if "sliding_attention" in str(layer.get("layer_types")):
        window = layer.get("sliding_window")
        said.append(f"attention slides over {window} tokens: better than full attention far above that, worse below")
    name = verifier(config).get("name_or_path")
    if isinstance(name, str) and is_local_path(name):
        said.append("the verifier is a path on this machine: the folder serves here, and is not portable")
    if config.get("draft_vocab_size") == layer.get("vocab_size"):
        said.append("the draft vocabulary is the whole vocabulary (speculators does that silently without counts)")
    if target is not None:
        said += _target_notes(layer, target_faults.target_config(target))
    return said


def _target_notes(layer: dict[str, Any], target: Any) -> list[str]:
    said: list[str] = []
    own, given = getattr(target, "head_dim", None), layer.get("head_dim")
    if own and given and given != own:
        said.append(f"head_dim {given} is not the target's {own}: allowed, but rope then turns other frequencies")
    if target.model_type in _NORM_PLUS_ONE:
        said.append(
            f"{target.model_type}'s final norm multiplies by 1 + w: speculators up to 0.9.0 trained eagle3 and peagle "
            "heads on logits without the 1 [g]; the folder cannot show it"
        )
    return said


def _beside(config: dict[str, Any], files: weight_faults.Files, target: Path, comparable: bool) -> list[Fault]:
    if config.get("speculators_model_type") not in CHECKED:
        return []
    try:
        own = target_faults.target_config(target)
        faults = [*target_faults.size_faults(config, own), *target_faults.architecture_faults(config, own)]
        if comparable and not any(item.check in ("target-hidden", "target-vocab") for item in faults):
            faults += target_faults.row_faults(files, config, target)
    except ValueError as error:
        return [fault("target-config", str(error))]
    return faults


def _config(folder: Path) -> tuple[dict[str, Any] | None, list[Fault]]:
    """config.json where it is Speculators format, and the faults of the folder as a place."""
    if not folder.is_dir():
        return None, [fault("folder", f"{folder} is no folder")]
    names = sorted(p.name for p in folder.rglob("*") if p.is_file())
    faults = [fault("pickle", f"{name} is a pickle") for name in names if name.endswith(PICKLES)]
    faults += [fault("custom-code", f"{name} is code") for name in names if name.endswith(".py")]
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError:
        return None, [*faults, fault("folder", f"{folder} holds no config.json")]
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        return None, [*faults, fault("config-json", f"config.json is no JSON ({error})")]
    if not isinstance(config, dict):
        return None, [*faults, fault("config-json", f"config.json holds {type(config).__name__}")]
    config = cast(dict[str, Any], config)
    if "auto_map" in config:
        faults.append(fault("custom-code", f"auto_map is {config['auto_map']!r}"))
    lacking = [
        key for key in ("speculators_config", "transformer_layer_config") if not isinstance(config.get(key), dict)
    ]
    lacking += [] if "speculators_model_type" in config else ["speculators_model_type"]
    if lacking:
        kind = config.get("architectures") or config.get("model_type")
        return None, [*faults, fault("not-speculators", f"config.json ({kind}) lacks {', '.join(lacking)}")]
    return config, faults


def _weight_paths(folder: Path) -> tuple[list[Path], list[Fault]]:
    """The safetensors files that loaders read, and what is wrong with their set."""
    present = {p.name for p in folder.glob("*.safetensors")}
    wanted = {"model.safetensors"}
    if (folder / _INDEX).exists():
        try:
            wanted = set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            return [], [fault("weights-file", f"{_INDEX} cannot be read")]
    faults = [fault("weights-file", f"{name} is missing") for name in sorted(wanted - present)]
    faults += [fault("stray-weights", f"{name} lies beside the weights") for name in sorted(present - wanted)]
    return [folder / name for name in sorted(wanted & present)], faults
