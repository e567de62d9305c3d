"""Each check is planted alone in a sound folder and must be the only fault found."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from export.checks import CHECKS, listing
from export.validate import validate
from tests.export.plants import LC, Plant, config, file, layer, method, spec, tensors, verifier, without
from tests.export.tiny import LAYERS, D, H, V, tiny_folder, tiny_target


def shift(t: dict[str, torch.Tensor], by: int) -> None:
    """Another map of the same size: each marked token moves by one."""
    ids = torch.arange(D) + t["d2t"]
    t["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill_(0, (ids + by) % V, True)


def swap(t: dict[str, torch.Tensor]) -> None:
    """Exchange two draft tokens, which leaves the set of tokens as it is."""
    ids = torch.arange(D) + t["d2t"]
    ids[[3, 7]] = ids[[7, 3]]
    t["d2t"] = ids - torch.arange(D)


def truncate(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def shards(folder: Path) -> None:
    """An index that names a shard which is not there."""
    index = {"weight_map": {"fc.weight": "model-00001-of-00002.safetensors", "d2t": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def absent(key: str, *parents: str) -> tuple[str, Plant, str]:
    return ("implicit-flag", without(*parents, key), f"{key} is not written")


PLANTS: list[tuple[str, Plant, str]] = [
    ("pickle", file("pytorch_model.bin"), "pytorch_model.bin is a pickle"),
    ("pickle", file("training_args.pt"), "training_args.pt is a pickle"),
    ("custom-code", config(lambda c: c.update(auto_map={"": "config.X"})), "auto_map is"),
    ("custom-code", file("config.py"), "config.py is code"),
    ("weights-file", truncate, "model.safetensors cannot be read"),
    ("weights-file", lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
    ("weights-file", file("model.safetensors", b"\xff" * 100), "model.safetensors cannot be read"),
    ("weights-file", shards, "model-00001-of-00002.safetensors is missing"),
    ("weights-file", file("model.safetensors.index.json"), "model.safetensors.index.json cannot be read"),
    ("stray-weights", lambda f: save_file({"a": torch.ones(2)}, f / "consolidated.safetensors"), "consolidated"),
    ("top-model-type", config(lambda c: c.update(model_type="llama")), "model_type is 'llama'"),
    ("algorithm", spec(algorithm="eagle"), "speculators_config.algorithm is 'eagle', speculators_model_type 'eagle3'"),
    ("proposal-methods", spec(proposal_methods=[]), "proposal_methods is []"),
    ("proposal-methods", spec(proposal_methods=[3]), "proposal_methods is [3]"),
    ("speculative-tokens", method(speculative_tokens=0), "speculative_tokens is 0"),
    ("speculative-tokens", method(speculative_tokens=None), "speculative_tokens is None"),
    ("speculative-tokens", method(speculative_tokens=True), "speculative_tokens is True"),
    ("default-proposal", spec(default_proposal_method="tree"), "is 'tree', listed are ['greedy']"),
    ("proposal-acceptance", method(verifier_accept_k=5), "accept_tolerance (5, 0.0)"),
    ("verifier-name", verifier(name_or_path=None), "name_or_path is None"),
    ("verifier-name", verifier(name_or_path="None"), "name_or_path is 'None'"),
    ("verifier-local-path", verifier(name_or_path="/models/target"), "name_or_path is '/models/target'"),
    ("verifier-local-path", verifier(name_or_path="../target"), "name_or_path is '../target'"),
    ("verifier-architectures", verifier(architectures=[]), "architectures is []"),
    ("verifier-architectures", verifier(architectures=["Qwen3ForCausalLM"]), "the target's ['LlamaForCausalLM']"),
    absent("architectures"),
    absent("speculators_version"),
    absent("norm_before_residual"),
    absent("norm_before_fc"),
    absent("norm_output"),
    absent("embed_requires_grad"),
    absent("target_hidden_size"),
    absent("tie_word_embeddings"),
    absent("layer_types", LC),
    absent("head_dim", LC),
    absent("rms_norm_eps", LC),
    absent("attention_bias", LC),
    absent("mlp_bias", LC),
    absent("hidden_act", LC),
    ("flag-type", config(lambda c: c.update(norm_output="yes")), "norm_output is 'yes'"),
    ("flag-type", config(lambda c: c.update(norm_before_residual=None)), "norm_before_residual is None"),
    ("dtype", config(lambda c: c.update(dtype="int8")), "dtype is 'int8'"),
    ("dtype", without("dtype"), "dtype is None"),
    ("tied-embeddings", config(lambda c: c.update(tie_word_embeddings=True)), "tie_word_embeddings is true"),
    ("tied-embeddings", layer(tie_word_embeddings=True), "tie_word_embeddings is true"),
    ("draft-vocab", config(lambda c: c.update(draft_vocab_size=V + 1)), f"draft_vocab_size is {V + 1}"),
    ("draft-vocab", config(lambda c: c.update(draft_vocab_size=None)), "draft_vocab_size is None"),
    ("layer-config", layer(intermediate_size=0), "transformer_layer_config has intermediate_size 0"),
    ("layer-config", layer(num_key_value_heads=3), "no multiple of num_key_value_heads"),
    ("layer-model-type", layer(model_type="mistral"), "model_type is 'mistral'"),
    ("layer-types", layer(layer_types=["full_attention"] * 2), "for 1 layers"),
    ("layer-types", layer(layer_types=["local"]), "layer_types is ['local']"),
    ("layer-types", layer(layer_types=["sliding_attention"]), "sliding_window None"),
    ("aux-ids", config(lambda c: c.update(eagle_aux_hidden_state_layer_ids=None)), "layer_ids is None"),
    ("aux-ids", config(lambda c: c.update(eagle_aux_hidden_state_layer_ids=[])), "layer_ids is []"),
    ("aux-ids", config(lambda c: c.update(eagle_aux_hidden_state_layer_ids=[-1, 2, 3])), "layer_ids is [-1, 2, 3]"),
    ("aux-order", config(lambda c: c.update(eagle_aux_hidden_state_layer_ids=[3, 2, 1])), "layer_ids is [3, 2, 1]"),
    ("aux-order", config(lambda c: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 2])), "layer_ids is [1, 2, 2]"),
    ("aux-count", layer(num_aux_hidden_states=4), "3 ids, transformer_layer_config.num_aux_hidden_states 4"),
    ("aux-range", config(lambda c: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, LAYERS + 1])), "holds 5"),
    ("missing-tensor", tensors(lambda t: t.pop("fc.weight")), "fc.weight [64, 192] is missing"),
    ("missing-tensor", tensors(lambda t: t.pop("t2d")), "t2d [512] is missing"),
    ("missing-tensor", tensors(lambda t: t.pop("lm_head.weight")), "lm_head.weight [128, 64] is missing"),
    ("missing-tensor", tensors(lambda t: t.pop("fc_norm.1.weight")), "fc_norm.1.weight [64] is missing"),
    (
        "extra-tensor",
        tensors(lambda t: t.update(verifier_norm=torch.ones(H).bfloat16())),
        "verifier_norm is not expected",
    ),
    ("tensor-shape", tensors(lambda t: t.update({"norm.weight": t["norm.weight"][:3].clone()})), "norm.weight is [3]"),
    ("tensor-shape", tensors(lambda t: t.update(t2d=t["t2d"][:-1].clone())), "t2d is [511]"),
    ("tensor-dtype", tensors(lambda t: t.update(d2t=t["d2t"].int())), "d2t is I32, config.json implies I64"),
    ("tensor-dtype", tensors(lambda t: t.update(t2d=t["t2d"].to(torch.uint8))), "t2d is U8"),
    ("tensor-dtype", tensors(lambda t: t.update({"fc.weight": t["fc.weight"].half()})), "fc.weight is F16"),
    ("nonfinite", tensors(lambda t: t["fc.weight"][0, :2].fill_(torch.nan)), "fc.weight holds 2 NaN or Inf of 12288"),
    ("nonfinite", tensors(lambda t: t["norm.weight"][:1].fill_(torch.inf)), "norm.weight holds 1 NaN or Inf of 64"),
    ("untrained", tensors(lambda t: t["layers.0.mlp.down_proj.weight"].zero_()), "down_proj.weight is all zero"),
    ("untrained", tensors(lambda t: t["norm.weight"].zero_()), "norm.weight is all zero"),
    ("untrained", tensors(lambda t: t["fc.weight"].fill_(0.5)), "fc.weight is 0.5 everywhere"),
    ("d2t-absolute", tensors(lambda t: t.update(d2t=t["d2t"] + torch.arange(D))), "d2t holds absolute ids"),
    ("d2t-range", tensors(lambda t: t["d2t"][-1:].add_(V)), "1 of 128 draft tokens lie outside 0..511"),
    ("d2t-order", tensors(swap), "draft tokens are not above the one before"),
    ("d2t-t2d", tensors(lambda t: shift(t, 1)), "draft tokens are not marked in t2d"),
    ("t2d-count", tensors(lambda t: t["t2d"].fill_(True)), "t2d marks 512 tokens, draft_vocab_size is 128"),
    ("target-positions", layer(max_position_embeddings=128), "is 128, the target's 256"),
    ("target-rope", layer(rope_parameters={"rope_theta": 5e5, "rope_type": "default"}), "500000.0"),
    ("target-rope", layer(partial_rotary_factor=0.5), "'partial_rotary_factor': 0.5"),
    ("target-rope", layer(rope_parameters={"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}), "'linear'"),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize(("check", "plant", "said"), PLANTS, ids=[f"{i}-{p[0]}" for i, p in enumerate(PLANTS)])
def test_planted_fault_is_the_only_one_found(tmp_path: Path, target: Path, check: str, plant: Plant, said: str):
    folder = tiny_folder(tmp_path)
    assert validate(folder, target=target) == []
    plant(folder)
    faults = validate(folder, target=target)
    assert {item.check for item in faults} == {check}, listing(faults)
    assert any(said in item.message and item.message.endswith(CHECKS[check]) for item in faults), listing(faults)


def test_every_check_has_a_test():
    here = Path(__file__).parent
    tests = "".join((here / f"test_{name}.py").read_text() for name in ("validate", "validate_folders", "speculators"))
    assert [name for name in CHECKS if f'"{name}"' not in tests] == []
