"""A tiny chat model with a real tokenizer and chat template: random weights, but every format is the real one."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = [
    "Write a poem about the sea and the wind.",
    "Explain how a bicycle works to a child.", "def add(a, b): return a + b",
    "What is the capital of France? Paris is the capital of France.", "Tell me three facts about owls and foxes.",
]  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}  # fmt: skip


def make_target(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a 6-layer Llama (bf16, random, norms not all one) with tokenizer and template; returns the folder."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{**SHAPE, **changes}, bos_token_id=1, eos_token_id=2, pad_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif parameter.dim() == 2:
                parameter.normal_(0, 0.08)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 320 tokens with ChatML's special tokens."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPE["vocab_size"], special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    raw.train_from_iterator(TEXT * 4, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    made.chat_template = TEMPLATE
    return made


def recipe_data(target: Path, prompts: Path, **changes: Any) -> dict[str, Any]:
    """A recipe over the tiny target and a JSONL of prompts, as plain data; `changes` replaces top-level keys."""
    facts = {
        "model_type": "llama", "architecture": "LlamaForCausalLM", **SHAPE, "norm": "rms",
        "rope": {"rope_type": "default", "rope_theta": 10000.0}, "total_params_b": 0.001, "active_params_b": 0.001,
    }  # fmt: skip
    plain: dict[str, Any] = {
        "name": "tiny",
        "target": {
            "id": "test/tiny", "revision": "1", "path": str(target), "max_model_len": 256, "local_only": True,
            "facts": facts,
        },
        "domains": {
            "chat": {
                "sources": [{"path": str(prompts), "form": "prompt", "field": "prompt"}],
                "train": 24, "held_out": 6, "held_out_share": 0.2, "min_chars": 3,
            }
        },
        "answers": {"max_tokens": 24, "max_prompt_tokens": 128, "concurrency": 4, "held_out": 4},
        "capture": {"shard_tokens": 400, "batch_tokens": 200, "check_rows": 2, "aux_layers": [1, 3, 5]},
        "head": {"draft_vocab_size": 128},
        "train": {"epochs": 2.0, "pack_tokens": 160, "checkpoint_steps": 3, "warmup_steps": 2},
        "gate": {"prompts": 4, "min_requests": 2, "rules": {"chat": {"min_acceptance": 1.2}}},
        "tracking": {"wandb": "disabled"},
    }  # fmt: skip
    return {**plain, **changes}


def write_prompts(path: Path, count: int = 60) -> Path:
    """A JSONL of `count` different prompts."""
    lines = [f'{{"prompt": "Tell me fact number {i} about {TEXT[i % 5][:20]}"}}\n' for i in range(count)]
    path.write_text("".join(lines))
    return path
