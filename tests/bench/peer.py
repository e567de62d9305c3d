# pyright: basic
"""Speculators 0.9's own EAGLE-3 model, loss, optimiser and train_epoch on the benchmark's documents.

Only the loading of the target's weights and the reading of files are replaced: random matrices, and batches that its
own CollateFn made, pinned. Its profile log is off (log_freq), as that synchronises.
"""

import argparse
import importlib.machinery
import statistics
import sys
import tempfile
import time
import types
from typing import Any

import torch

from tests.bench.shapes import Shape, documents, full_flops, vocabulary
from train.pack import pack


def peer(shape: Shape, ttt: int, optimizer: str) -> dict[str, Any]:
    """One cell of the peer's."""
    from tests.bench.train import STEPS, TOKENS, WARM, await_turn, result

    stand_in()
    model, arguments = build(shape, ttt, TOKENS)
    batches = [collate(documents(shape, TOKENS, seed, extra=1), shape.hidden, TOKENS) for seed in range(3)]
    marks: list[torch.cuda.Event] = []
    started, first = time.perf_counter(), 0.0

    def mark() -> None:
        nonlocal first
        marks.append(torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True)))
        if len(marks) == 1:
            torch.cuda.synchronize()
            first = time.perf_counter() - started
        if len(marks) == WARM:
            await_turn()

    loader = Batches([batches[n % 3] for n in range(WARM + STEPS)])
    trainer = make_trainer(model, arguments, loader, optimizer)
    trainer.train_epoch(0, step_callback=mark)
    torch.cuda.synchronize()
    flops = statistics.mean(full_flops(shape, pack(documents(shape, TOKENS, seed)), ttt) for seed in range(3))
    return result(marks, flops, flops, first, 0.0)


class Absent:
    """An importer of last resort: packages that the peer imports and this benchmark does not use."""

    names = ("openai", "httpx2", "loguru", "datasets")

    def find_spec(self, name: str, *_: Any) -> Any:
        if name.split(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: type(name, (), {}) if not name.startswith("__") else _no(name)
        return module

    def exec_module(self, module: Any) -> None:
        pass


def _no(name: str) -> Any:
    raise AttributeError(name)


def stand_in(fused: bool = True) -> None:
    """Mend what stops its trainer here: packages that are missing; with its fused losses, one autotuner's list for two
    kernels; without a GPU, what refuses a CPU.
    """
    sys.meta_path.append(Absent())
    if not fused:
        import speculators.train.distributed as distributed
        import torch.nn.attention.flex_attention as flex

        flex._validate_device = lambda *_: None
        distributed._local_rank = "cpu"
        torch.accelerator.synchronize = lambda *_: None
        torch.cuda.synchronize = lambda *_: None
        return
    import speculators.losses.fused as losses
    import triton

    configs = losses.loss_backward_kernel.configs
    losses.loss_backward_kernel.configs = [
        triton.Config(dict(c.kwargs), num_warps=c.num_warps, num_stages=c.num_stages) for c in configs
    ]


def build(shape: Shape, ttt: int, tokens: int) -> tuple[Any, argparse.Namespace]:
    """Its model with its own defaults and random target weights, on the GPU, and its flattened settings."""
    import speculators.utils.loading as loading
    from transformers import LlamaConfig

    def random_layers(names: list[str], *_: Any, **__: Any) -> dict[str, torch.Tensor]:
        made = {n: torch.randn(shape.vocab, shape.hidden, device="cuda", dtype=torch.bfloat16) * 0.02 for n in names}
        norm = torch.ones(shape.hidden, device="cuda", dtype=torch.bfloat16)
        return {n: norm if n == "model.norm.weight" else t for n, t in made.items()}

    loading.load_model_layers = random_layers
    folder = tempfile.mkdtemp()
    LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.inner,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.groups,
        head_dim=shape.size, max_position_embeddings=32768, rope_parameters=shape.rope, bos_token_id=None,
        eos_token_id=None, architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return build_for(folder, ttt, tokens, vocabulary(shape))


def build_for(
    folder: str, ttt: int, tokens: int, vocab: tuple[torch.Tensor, torch.Tensor], device: str = "cuda"
) -> tuple[Any, argparse.Namespace]:
    """Its model for the target in `folder` and a (d2t, t2d) vocabulary, with its own defaults, on `device`."""
    from speculators.model import SpeculatorModel
    from speculators.train.cli import create_transformer_layer_config
    from speculators.train.config import TrainConfig

    config = TrainConfig(
        speculator_type="eagle3", verifier={"verifier_name_or_path": folder},
        loss={"ttt_steps": ttt, "loss_implementation": "fused" if device == "cuda" else "eager"},
        data={"total_seq_len": tokens},
    )  # fmt: skip
    arguments = argparse.Namespace(**config.flatten())
    layer = create_transformer_layer_config(
        folder, arguments.num_layers, arguments.draft_arch, arguments.draft_hidden_act, arguments.sliding_window,
        arguments.full_attention_indices,
    )  # fmt: skip
    d2t_D, t2d_V = (x.to(device) for x in vocab)
    arguments.draft_vocab_size = len(d2t_D)
    with torch.device(device):
        model = SpeculatorModel.registry["eagle3"].from_training_args(
            verifier_config=layer, t2d=t2d_V, d2t=d2t_D, **vars(arguments)
        )
    return model.to(device), arguments


def collate(rows: list[Any], hidden: int, tokens: int) -> dict[str, Any]:
    """One batch, made by its own collator from our features."""
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import CollateFn

    make = CollateFn(tokens, hidden, num_target_layers=3, dtype=torch.bfloat16, preprocess=shift_batch)
    batch = make([
        {
            "hidden_states": row.aux_SAH, "verifier_last_hidden_states": row.final_SH, "input_ids": row.input_ids_S,
            "loss_mask": row.loss_mask_S, "lengths": torch.tensor([len(row.input_ids_S)]),
            "position_ids": torch.arange(len(row.input_ids_S)),
        }
        for row in rows
    ])  # fmt: skip
    pinned = torch.cuda.is_available()
    return {name: v.pin_memory() if pinned and isinstance(v, torch.Tensor) else v for name, v in batch.items()}


class Batches:
    """What its trainer takes for a data loader."""

    batch_sampler = None

    def __init__(self, batches: list[dict[str, Any]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return (dict(one) for one in self.batches)


def make_trainer(model: Any, arguments: argparse.Namespace, batches: Any, optimizer: str, steps: int = 1000) -> Any:
    """Its Trainer, with its default optimiser settings; `batches` is what it takes for a data loader."""
    from speculators.train.trainer import Trainer, TrainerConfig

    train_kwargs, val_kwargs = type(model).get_trainer_kwargs(**vars(arguments))
    config = TrainerConfig(
        num_epochs=1, save_path=tempfile.mkdtemp(), lr=arguments.lr, resume_from_checkpoint=False,
        train_call_kwargs=train_kwargs, val_call_kwargs=val_kwargs, optimizer=optimizer,
        weight_decay=arguments.weight_decay, muon_lr=arguments.muon_lr, muon_momentum=arguments.muon_momentum,
        muon_weight_decay=arguments.muon_weight_decay, muon_ns_steps=arguments.muon_ns_steps,
        muon_adjust_lr_fn=arguments.muon_adjust_lr_fn, scheduler_type=arguments.scheduler_type,
        scheduler_total_steps=steps, hidden_states_dtype=torch.bfloat16, log_freq=10**9,
        gradient_checkpointing=arguments.gradient_checkpointing, max_steps=None,
    )  # fmt: skip
    return Trainer(model, config, batches, None)
