import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from data.target import embedding
from export.layout import expected_tensors
from export.reload import reload_faults, speculators_logits
from export.speculators import config_json, make, write_folder
from export.validate import validate
from tests.export.tiny import (
    ROPE,
    D,
    H,
    V,
    edit_config,
    edit_tensors,
    settings,
    tiny_folder,
    tiny_head,
    tiny_recipe,
    tiny_run,
    tiny_target,
)
from train.head import open_head
from train.places import places

VARIANTS: dict[str, dict[str, Any]] = {
    "fc_norm": {},
    "input_norm": {"norm_before_fc": True, "fc_norm": False},
    "bare": {"fc_norm": False, "norm_output": False, "norm_before_residual": False},
    "qwen3": {"layer_type": "qwen3"},
    "deep and sliding": {"num_layers": 2, "window": 32},
    "four aux": {"aux_layers": [0, 1, 2, 4]},
    "whole vocabulary": {"draft_vocab_size": V},
}


def test_config_is_the_format_with_every_flag_explicit():
    config = config_json(
        settings(window=32, num_layers=2), verifier="org/target", architecture="LlamaForCausalLM", speculative_tokens=4
    )
    assert config == {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "dtype": "bfloat16",
        "draft_vocab_size": D,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "embed_requires_grad": False,
        "fc_norm": True,
        "norm_before_fc": False,
        "norm_before_residual": True,
        "norm_output": True,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 4,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {
            "model_type": "llama",
            "vocab_size": V,
            "hidden_size": H,
            "intermediate_size": 2 * H,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 256,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "initializer_range": 0.02,
            "pretraining_tp": 1,
            "rope_parameters": ROPE,
            "use_sliding_window": True,
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "sliding_attention"],
            "tie_word_embeddings": False,
            "use_cache": True,
            "num_aux_hidden_states": 3,
        },
    }


def test_aux_layers_must_ascend():
    with pytest.raises(ValueError, match=r"aux_layers: \[2, 1, 3\] must be strictly ascending"):
        config_json(settings(aux_layers=[2, 1, 3]), verifier="x", architecture="x", speculative_tokens=3)


def test_same_head_same_bytes(tmp_path: Path):
    one, two = tiny_folder(tmp_path / "one"), tiny_folder(tmp_path / "two")
    for name in ("config.json", "model.safetensors"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    assert sorted(p.name for p in one.iterdir()) == ["config.json", "model.safetensors"]


def test_weights_are_the_state_rounded_to_bf16(tmp_path: Path):
    folder = tiny_folder(tmp_path)
    state, written = load_file(tmp_path / "head" / "head.safetensors"), load_file(folder / "model.safetensors")
    assert set(written) == set(state)
    for name, tensor in written.items():
        assert torch.equal(tensor, state[name] if name in ("d2t", "t2d") else state[name].to(torch.bfloat16)), name
    with cast(Any, safe_open)(folder / "model.safetensors", "pt") as stored:
        assert stored.metadata() == {"format": "pt"}


@pytest.mark.parametrize("name", VARIANTS)
def test_tensor_list_is_that_of_speculators_own_class(name: str):
    from speculators import SpeculatorModelConfig
    from speculators.models.eagle3 import Eagle3DraftModel

    config = config_json(settings(**VARIANTS[name]), verifier="x", architecture="x", speculative_tokens=3)
    own = Eagle3DraftModel(cast(Any, SpeculatorModelConfig).from_dict(json.loads(json.dumps(config))))
    shapes = {k: tuple(v.shape) for k, v in own.state_dict().items() if not k.startswith("verifier_")}
    assert {k: v.shape for k, v in expected_tensors(config).items()} == shapes


def test_peagle_tensor_list_is_that_of_speculators_own_class():
    from speculators import SpeculatorModelConfig
    from speculators.models.peagle import PEagleDraftModel

    head = settings(layer_type="qwen3", num_layers=2, fc_norm=False, norm_output=False)
    config = config_json(head, verifier="x", architecture="x", speculative_tokens=8)
    config |= {"speculators_model_type": "peagle", "mask_token_id": V - 1, "embed_requires_grad": True}
    config["speculators_config"]["algorithm"] = "peagle"
    own = PEagleDraftModel(cast(Any, SpeculatorModelConfig).from_dict(json.loads(json.dumps(config))))
    shapes = {k: tuple(v.shape) for k, v in own.state_dict().items() if not k.startswith("verifier_")}
    assert {k: v.shape for k, v in expected_tensors(config).items()} == shapes
    assert expected_tensors(config)["embed_tokens.weight"].required


@pytest.mark.parametrize("name", VARIANTS)
def test_folder_is_sound_and_reloads_bit_for_bit(tmp_path: Path, name: str):
    target = tiny_target(tmp_path / "target")
    folder = tiny_folder(tmp_path, **VARIANTS[name])
    assert validate(folder, target=target) == []
    assert reload_faults(folder, target) == []


def test_reload_sees_what_the_lenient_loader_hides(tmp_path: Path):
    target, folder = tiny_target(tmp_path / "target"), tiny_folder(tmp_path)
    edit_tensors(folder, lambda t: t.update({"extra.weight": t.pop("layers.0.self_attn.q_proj.weight")}))
    faults = {f.check: f.message for f in reload_faults(folder, target)}
    assert "extra.weight is in the file, not in the loaded model" in faults["reload-dropped"]
    assert "reload-warning" in faults
    edit_tensors(folder, lambda t: t.update({"fc.weight": t["fc.weight"].double() + 1e-9}))
    assert any(f.check == "reload-differs" and "fc.weight is not" in f.message for f in reload_faults(folder, target))
    edit_tensors(folder, lambda t: t.update({"fc.weight": t["fc.weight"][:, :-1].clone()}))
    assert any(f.check == "reload" for f in reload_faults(folder, target))


def test_speculators_logits_depend_on_each_flag(tmp_path: Path):
    """The reference for our own forward must itself notice the flags."""
    target = tiny_target(tmp_path / "target")
    folder = tiny_folder(tmp_path, norm_output=False)
    draw = torch.Generator().manual_seed(0)
    states, tokens = torch.randn(9, 3, H, generator=draw), torch.arange(9)
    logits = speculators_logits(folder, target, states, tokens)
    assert logits.shape == (9, D) and logits.dtype == torch.float32
    assert torch.equal(logits, speculators_logits(folder, target, states, tokens))
    assert torch.allclose(logits[:5], speculators_logits(folder, target, states[:5], tokens[:5]), atol=1e-5)
    edit_config(folder, lambda c: c.update(norm_before_residual=False))
    assert not torch.allclose(logits, speculators_logits(folder, target, states, tokens), atol=1e-2)


@pytest.mark.parametrize("name", [n for n in VARIANTS if n != "whole vocabulary"])
def test_our_own_forward_gives_speculators_logits(tmp_path: Path, name: str):
    target, folder = tiny_target(tmp_path / "target"), tiny_folder(tmp_path, **VARIANTS[name])
    head, _, _ = open_head(tmp_path / "head")
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
        draw = torch.Generator().manual_seed(0)
        states = torch.randn(40, head.config.num_aux, H, generator=draw)
        tokens = torch.randint(V, (40,), generator=draw)
        embeds = embedding(target).float()[tokens]
        (own,) = head.logits(states.flatten(1), [embeds], places([(0, 40)], torch.arange(40)))
    theirs = speculators_logits(folder, target, states, tokens)
    torch.testing.assert_close(own, theirs, atol=2e-5, rtol=1e-4)


def test_embeddings_that_are_not_shipped_are_the_targets(tmp_path: Path):
    """speculators itself may leave uninitialised memory there, so its own loading is no reference for them."""
    target = tiny_target(tmp_path / "target")
    states, tokens = torch.randn(5, 3, H, generator=torch.Generator().manual_seed(0)), torch.arange(5)
    slim, whole = tiny_folder(tmp_path / "slim"), tiny_folder(tmp_path / "whole", embeddings=embedding(target))
    for fill in range(5):
        litter = [torch.full((V, H), float(fill)) for _ in range(20)]
        del litter
        logits = (speculators_logits(folder, target, states, tokens) for folder in (slim, whole))
        assert torch.equal(*logits)


def test_vllm_reads_every_flag(tmp_path: Path):
    from vllm.transformers_utils.config import get_config, maybe_override_with_speculators

    folder = tiny_folder(tmp_path, aux_layers=[0, 1, 2, 4], window=32)
    own = json.loads((folder / "config.json").read_text())
    read = cast(Any, get_config(str(folder), trust_remote_code=False))
    assert type(read).__name__ == "SpeculatorsConfig"
    assert read.architectures == ["Eagle3LlamaForCausalLM"]
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "draft_vocab_size"):
        assert getattr(read, flag) == own[flag], flag
    assert read.eagle_aux_hidden_state_layer_ids == [0, 1, 2, 4]
    for key, value in own["transformer_layer_config"].items():
        if key not in ("model_type", "tie_word_embeddings"):
            assert getattr(read, key) == value, key
    model, tokenizer, speculative = maybe_override_with_speculators(str(folder), None, False)
    assert (model, tokenizer) == ("org/target", "org/target")
    assert speculative == {"method": "eagle3", "num_speculative_tokens": 3, "model": str(folder)}


def test_embeddings_are_shipped_on_request(tmp_path: Path):
    target = tiny_target(tmp_path / "target")
    folder = tiny_folder(tmp_path, embeddings=embedding(target))
    assert torch.equal(load_file(folder / "model.safetensors")["embed_tokens.weight"], embedding(target))
    assert validate(folder, target=target) == []
    assert reload_faults(folder, target) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("fc.weight"), "fc.weight: missing"),
        (lambda t: t.update(other=torch.zeros(1)), "other: not part of the format"),
        (lambda t: t.update({"norm.weight": torch.ones(3)}), r"norm.weight: shape \[3\], head.json implies \[64\]"),
        (lambda t: t["fc.weight"].fill_(torch.nan), "fc.weight: holds NaN or Inf"),
    ],
)
def test_a_head_that_does_not_fit_its_settings_is_refused(tmp_path: Path, change: Any, said: str):
    head = tiny_head(tmp_path / "head")
    state = load_file(head / "head.safetensors")
    change(state)
    save_file(state, head / "head.safetensors")
    with pytest.raises(ValueError, match=said):
        write_folder(head, tmp_path / "out", verifier="x", architecture="x", speculative_tokens=3)
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_stage_names_the_published_target(tmp_path: Path):
    run = tiny_run(tmp_path)
    accounting = make(tiny_recipe(export={"speculative_tokens": 2}), run, run / "checkpoint")
    config = json.loads((run / "checkpoint" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 2
    assert accounting["bytes"] == (run / "checkpoint" / "model.safetensors").stat().st_size
    assert accounting["parameters"] == sum(
        t.numel() for n, t in load_file(run / "head" / "head.safetensors").items() if n not in ("d2t", "t2d")
    )


def test_stage_names_a_local_targets_folder(tmp_path: Path):
    run = tiny_run(tmp_path, local=True)
    make(tiny_recipe(export={"include_embeddings": True}), run, run / "checkpoint")
    config = json.loads((run / "checkpoint" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(run / "target" / "model")
    assert "embed_tokens.weight" in load_file(run / "checkpoint" / "model.safetensors")


def test_stage_refuses_a_head_of_another_target(tmp_path: Path):
    run = tiny_run(tmp_path, rope={"rope_theta": 5e5, "rope_type": "default"})
    with pytest.raises(ValueError, match=r"target-rope: rope_parameters is .*500000"):
        make(tiny_recipe(), run, run / "checkpoint")
