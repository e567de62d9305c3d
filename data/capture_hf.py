"""Capture through transformers: any decoder, CPU or GPU.

Shapes: B rows, S positions, H hidden size, A aux layers, V target vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from data.store import Features
from data.tokens import Row


@dataclass(frozen=True, kw_only=True)
class Session:
    """A loaded target and the layers to keep (vLLM's ids: `hidden_states[i]`, the residual stream after i layers)."""

    model: Any
    layers: tuple[int, ...]
    device: torch.device


def open_target(path: Path, layers: tuple[int, ...], dtype: torch.dtype) -> Session:
    """Load the target for capture, on the GPU where there is one."""
    # By number: which GPU is the current one is a thread's own, and a stream captures in another thread.
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
    model = model.to(device).eval()
    return Session(model=model, layers=layers, device=device)


@torch.inference_mode()
def forward(session: Session, rows: list[Row]) -> list[Features]:
    """Features of each row, on the CPU, without padding.

    Rows are padded on the right: under a causal mask what stands behind a row cannot reach it.
    """
    width = max(len(r.input_ids) for r in rows)
    ids_BS = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids_BS[i, : len(row.input_ids)] = torch.tensor(row.input_ids)
    decoder = session.model.get_decoder()
    got = decoder(input_ids=ids_BS.to(session.device), output_hidden_states=True, use_cache=False)
    aux_BSAH = torch.cat([got.hidden_states[i] for i in session.layers], dim=-1).cpu()
    final_BSH = got.last_hidden_state.cpu()
    return [
        Features(
            aux_SAH=aux_BSAH[i, : len(row.input_ids)],
            final_SH=final_BSH[i, : len(row.input_ids)],
            input_ids_S=torch.tensor(row.input_ids),
            loss_mask_S=torch.tensor(row.loss_mask).bool(),
        )
        for i, row in enumerate(rows)
    ]


@torch.inference_mode()
def logits(session: Session, row: Row) -> torch.Tensor:
    """The target's own logits [S, V] of one row, with whatever its class does after lm_head."""
    ids_1S = torch.tensor([row.input_ids], device=session.device)
    return session.model(input_ids=ids_1S, use_cache=False).logits[0].cpu()
