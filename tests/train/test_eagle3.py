"""The head against two references: speculators' own model class, and serving done step by step."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from transformers import LlamaConfig, Qwen3Config

from train.eagle3 import Eagle3, HeadConfig, initialise
from train.places import places

CONFIG = HeadConfig(
    algorithm="eagle3", layer_type="llama", num_layers=1, hidden_size=64, intermediate_size=96, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5, rope={"rope_type": "default", "rope_theta": 10000.0},
    max_position_embeddings=512, vocab_size=320, draft_vocab_size=128, window=0, norm_before_residual=True,
    norm_before_fc=False, fc_norm=True, norm_output=True, aux_layers=(1, 3, 5),
)  # fmt: skip
VARIANTS: list[dict[str, Any]] = [
    {},
    {"layer_type": "qwen3"},
    {"fc_norm": False, "norm_before_fc": True, "norm_output": False},
    {"norm_before_residual": False},
    {"num_layers": 2},
    {"window": 7},
    {"aux_layers": (1, 2, 3, 5)},
]


def random_head(config: HeadConfig, seed: int = 0) -> Eagle3:
    torch.manual_seed(seed)
    head = Eagle3(config)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(0, 0.1)
    return head.eval()


def reference(head: Eagle3) -> Eagle3DraftModel:
    """speculators' own class with our weights; its strict load proves that the names are the format's."""
    c = head.config
    shape = {
        "vocab_size": c.vocab_size, "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers, "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads, "head_dim": c.head_dim, "rms_norm_eps": c.rms_norm_eps,
        "rope_parameters": dict(c.rope), "max_position_embeddings": c.max_position_embeddings,
        "layer_types": ["sliding_attention" if c.window else "full_attention"] * c.num_layers,
        "sliding_window": c.window or None,
    }  # fmt: skip
    layer = LlamaConfig(**shape) if c.layer_type == "llama" else Qwen3Config(**shape, use_sliding_window=bool(c.window))
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=c.draft_vocab_size,
        norm_before_residual=c.norm_before_residual,
        norm_before_fc=c.norm_before_fc, fc_norm=c.fc_norm, norm_output=c.norm_output,
        eagle_aux_hidden_state_layer_ids=list(c.aux_layers),
    )  # fmt: skip
    model = Eagle3DraftModel(config)
    missing, unexpected = model.load_state_dict(copy.deepcopy(head.state_dict()), strict=False)
    assert not unexpected
    assert set(missing) <= {"embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight", "d2t", "t2d"}
    return model.float().eval()


def reference_logits(
    model: Eagle3DraftModel, aux: torch.Tensor, ids: torch.Tensor, docs: list[tuple[int, int]], steps: int
) -> list[torch.Tensor]:
    """Its logits of each TTT step, caught at its lm_head. It is given x_{t+1} shifted already, as its collator does."""
    model.embed_tokens.weight.data = torch.randn(320, 64, generator=torch.Generator().manual_seed(5))
    caught: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _m, _i, out: caught.append(out[0].detach()))
    doc_ids = torch.cat([torch.full((b - a,), n) for n, (a, b) in enumerate(docs)])
    shifted = torch.cat([ids[1:], ids[:1]])
    position = torch.cat([torch.arange(b - a) for a, b in docs])
    with torch.no_grad():
        model(hidden_states=aux[None], input_ids=shifted[None], document_ids=doc_ids[None], position_ids=position[None],
              ttt_steps=steps)  # fmt: skip
    hook.remove()
    return caught


@pytest.mark.parametrize("changes", VARIANTS, ids=lambda c: ",".join(c) or "default")
def test_logits_equal_speculators(changes: dict[str, Any]) -> None:
    config = replace(CONFIG, **changes)
    head, docs, steps = random_head(config), [(0, 11), (11, 30)], 3
    torch.manual_seed(1)
    aux, ids = torch.randn(30, config.num_aux * 64), torch.randint(0, 320, (30,))
    model = reference(head)
    expected = reference_logits(model, aux, ids, docs, steps)
    kept = torch.tensor([2, 3, 4, 7, 11, 14, 15, 20, 25])  # with k <= 2, none reads past its document
    table = model.embed_tokens.weight.data
    embeds = [table[torch.cat([ids[1:], ids[:1]])], *(table[ids[kept + 1 + k]] for k in range(1, steps))]
    with torch.no_grad():
        ours = head.logits(aux, embeds, places(docs, kept))
    # Its later steps keep step 0's window; ours slides with the query, as served (next test).
    for step in range(1 if config.window else steps):
        torch.testing.assert_close(ours[step], expected[step][kept], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("changes", [{}, {"num_layers": 2}, {"window": 5}], ids=["default", "two layers", "window"])
def test_training_time_test_is_what_serving_does(changes: dict[str, Any]) -> None:
    """From one anchor: draft as an engine would, with a growing cache, and get the same logits."""
    config = replace(CONFIG, **changes)
    head = random_head(config)
    torch.manual_seed(2)
    aux, ids, table = torch.randn(20, 3 * 64), torch.randint(0, 320, (20,)), torch.randn(320, 64)
    anchor, steps = 9, 4
    kept = torch.tensor([anchor])
    embeds = [table[torch.cat([ids[1:], ids[:1]])], *(table[ids[kept + 1 + k]] for k in range(1, steps))]
    with torch.no_grad():
        ours = torch.stack(head.logits(aux, embeds, places([(0, 20)], kept)))[:, 0]
        served = served_logits(head, aux, ids, table, anchor, steps)
    torch.testing.assert_close(ours, served, atol=2e-5, rtol=2e-5)


def served_logits(
    head: Eagle3, aux: torch.Tensor, ids: torch.Tensor, table: torch.Tensor, anchor: int, steps: int
) -> Any:
    """No cache at all: rerun the whole sequence [fused states up to the anchor, own states after], growing by one."""
    hidden = head.fuse(aux[: anchor + 1])
    logits = []
    for step in range(steps):
        length = anchor + 1 + step
        out = hidden
        rope = head._rope(hidden, torch.arange(length))
        for layer in head.layers:
            x, residual = layer.inputs(table[ids[1 : length + 1]], out)
            q = layer.self_attn.queries(x, rope).transpose(0, 1)
            k, v = (part.transpose(0, 1) for part in layer.self_attn.keys_values(x, rope))
            distance = torch.arange(length)[:, None] - torch.arange(length)
            seen = (distance >= 0) & ((distance < head.config.window) if head.config.window else True)
            attended = torch.nn.functional.scaled_dot_product_attention(
                q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0), attn_mask=seen
            )
            out = layer.outputs(attended.transpose(0, 1).flatten(1), residual)
        normed = head.norm(out)
        logits.append(head.lm_head(normed)[-1])
        hidden = torch.cat([hidden, (normed if head.config.norm_output else out)[-1:]])
    return torch.stack(logits)


def test_documents_do_not_see_each_other() -> None:
    head = random_head(CONFIG)
    aux, table = torch.randn(24, 3 * 64), torch.randn(320, 64)
    ids, kept = torch.randint(0, 320, (24,)), torch.tensor([13, 18])

    def run(states: torch.Tensor) -> torch.Tensor:
        embeds = [table[torch.cat([ids[1:], ids[:1]])], table[ids[kept + 2]]]
        with torch.no_grad():
            return torch.stack(head.logits(states, embeds, places([(0, 12), (12, 24)], kept)))

    changed = aux.clone()
    changed[:12] += 1.0
    torch.testing.assert_close(run(aux), run(changed))
    changed[12] += 1.0
    assert not torch.allclose(run(aux), run(changed))


def test_a_new_head_passes_the_last_aux_state() -> None:
    head = Eagle3(replace(CONFIG, fc_norm=False))
    norm, rows = torch.rand(64) + 0.5, torch.randn(128, 64)
    initialise(head, norm, rows, 0.5, seed=3)
    aux = torch.zeros(4, 3 * 64)
    aux[:, 128:] = torch.randn(4, 64)
    assert torch.nn.functional.cosine_similarity(head.fuse(aux), aux[:, 128:]).min() > 0.9
    torch.testing.assert_close(head.norm.weight, norm * 0.5)
    torch.testing.assert_close(head.lm_head.weight, rows)
    again = Eagle3(replace(CONFIG, fc_norm=False))
    initialise(again, norm, rows, 0.5, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), again.parameters(), strict=True))
