"""A stand-in for the part of SGLang that data/sglang_worker.py drives.

The CPU tests run the worker as the process it is with it: settings, slots, replies, deaths. States are rows of a random
table (`states`), or, with FAKE_REAL set, a transformers forward's. It says nothing about SGLang itself; what that does
is measured on a GPU (LOG.md).
"""

from pathlib import Path

import torch


def states(ids: list[int], layer: int) -> torch.Tensor:
    """[S, 64]: what the stand-in computes after `layer` layers; layer 100 is the final state."""
    table = torch.randn(320, 64, generator=torch.Generator().manual_seed(0))
    return (table[torch.tensor(ids)] * layer).bfloat16()


SOURCES = {
    "sglang/srt/configs/model_config.py": """
class ModelConfig:
    @staticmethod
    def from_server_args(args): return args
""",
    "sglang/srt/server_args.py": """
class ServerArgs:
    def __init__(self, **given): self.__dict__.update({"device": "cpu", "page_size": 1, **given})
def set_global_server_args_for_scheduler(args): pass
""",
    "sglang/srt/model_executor/model_runner.py": """
import os
import torch
from tests.fake_sglang import states
class Pool:
    def clear(self): pass
class Model:
    def __init__(self, path, dtype):
        if os.environ.get("FAKE_REAL"):
            from transformers import AutoModelForCausalLM
            self.inner = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        self.logits_processor = torch.nn.Identity()
    def set_eagle3_layers_to_capture(self, layers): self.layers = layers
class ModelRunner:
    def __init__(self, model_config, server_args, **_):
        if os.environ.get("FAKE_FAILS"): raise RuntimeError("no such attention backend")
        self.server_args, self.model_config = server_args, model_config
        self.model = Model(server_args.model_path, getattr(torch, server_args.dtype))
        self.req_to_token_pool = self.token_to_kv_pool_allocator = Pool()
        self.asked = 0
    def alloc_memory_pool(self): pass
    def init_attention_backends(self): pass
    def init_cuda_graphs(self): pass
    def forward(self, batch):
        self.asked += 1
        if self.asked > int(os.environ.get("FAKE_DIES_AFTER", 10**9)): os._exit(9)
        cut = slice(int(os.environ.get("FAKE_CACHED", 0)) if self.asked > 1 else 0, None)
        if os.environ.get("FAKE_REAL"):
            rows = [self.model.inner.get_decoder()(torch.tensor([r]), output_hidden_states=True) for r in batch.rows]
            aux = [torch.cat([o.hidden_states[i + 1][0] for o in rows])[cut] for i in self.model.layers]
            final = torch.cat([o.last_hidden_state[0] for o in rows])[cut]
        else:
            aux = [torch.cat([states(r, i + 1) for r in batch.rows])[cut] for i in self.model.layers]
            final = torch.cat([states(r, 100) for r in batch.rows])[cut]
        self.model.logits_processor._forward_pre_hooks.copy().popitem()[1](None, (None, final, None, batch, aux))
""",
    "sglang/srt/managers/schedule_batch.py": """
import torch
class Req:
    def __init__(self, rid, origin_input_text, origin_input_ids, sampling_params):
        self.origin_input_ids = origin_input_ids
    def set_extend_input_len(self, n): assert n == len(self.full_untruncated_fill_ids) == self.fill_len
class ScheduleBatch:
    device = "cpu"
    @classmethod
    def init_new(cls, reqs, **_):
        made = cls()
        made.rows = [list(r.origin_input_ids) for r in reqs]
        return made
    def prepare_for_extend(self): self.prefill_input_ids_cpu = torch.tensor(sum(self.rows, []))
""",
    "sglang/srt/mem_cache/cache_init_params.py": """
class CacheInitParams:
    def __init__(self, disable, **_): assert disable
""",
    "sglang/srt/mem_cache/radix_cache.py": """
class RadixCache:
    def __init__(self, params): pass
""",
    "sglang/srt/model_executor/forward_batch_info.py": """
class ForwardBatch:
    @staticmethod
    def init_new(batch, runner): return batch
""",
    "sglang/srt/sampling/sampling_params.py": """
class SamplingParams:
    def __init__(self, **_): pass
""",
    "sglang/srt/speculative/spec_info.py": """
class SpeculativeAlgorithm:
    NONE = None
""",
}


def write_fake_sglang(folder: Path) -> Path:
    """A folder for PYTHONPATH in which `import sglang` finds the stand-in."""
    for name, source in SOURCES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return folder
