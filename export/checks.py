"""Every check of a Speculators folder by name: what is allowed, and what to do. The finding itself comes before it.

The letters in brackets are the traps that published heads and both loaders were seen to fall into (T: TorchSpec #38):
a wrong number of aux states, b unsorted ids, c implicit flags, d norms that vLLM drops, e lenient loading, f missing
t2d, i sliding window, j stale vocabulary map, k rope, l local path.
"""

from dataclasses import dataclass

CHECKS = {
    # files
    "folder": "needs a folder with config.json and model.safetensors",
    "config-json": "needs one JSON object",
    "not-speculators": "needs speculators_model_type, speculators_config and transformer_layer_config; export the head "
    "in Speculators format (`speculators convert` for other trainers' heads)",
    "pickle": "unpickling runs code; ship safetensors only and delete it",
    "custom-code": "neither loader needs it, and the Hub marks such a repo as custom code; delete it",
    "weights-file": "loaders need a whole model.safetensors (or all shards of its index); export again",
    "stray-weights": "vLLM loads every .safetensors file beside model.safetensors; delete it",
    # config.json by itself
    "top-model-type": "vLLM recognises the format only where the top level has no model_type; delete the key",
    "algorithm": "eagle3 and peagle are checked here, and both keys must say the same",
    "proposal-methods": "needs a list of greedy methods; no other type exists",
    "speculative-tokens": "needs an integer of at least 1: vLLM drafts that many tokens",
    "default-proposal": "must be the proposal_type of a listed method",
    "proposal-acceptance": "vLLM ignores relaxed acceptance; write verifier_accept_k 1 and accept_tolerance 0.0",
    "verifier-name": "`vllm serve FOLDER` starts the model that it names; write the target's published id",
    "verifier-local-path": "nobody else has that path [l]; write the published id, or mark the target as local only",
    "verifier-architectures": "must list the target's class as its config.json does",
    "implicit-flag": "write the value that was trained with [c]",
    "flag-type": "needs true or false",
    "dtype": "allowed: bfloat16, float16, float32",
    "tied-embeddings": "lm_head has draft_vocab_size rows and is never tied; write false at both levels",
    "draft-vocab": "needs 1 up to the target's vocabulary",
    "layer-config": "needs the draft decoder's own sizes",
    "layer-model-type": "vLLM serves eagle3 and peagle heads of type llama and qwen3 only",
    "layer-types": "needs full_attention or sliding_attention a layer, and a window in tokens where one slides [i]",
    "aux-ids": "needs the layers trained with; where absent or empty vLLM silently takes 2, N//2, N-3",
    "aux-order": "vLLM sorts and dedupes the ids [b]; sort them, and the blocks of fc.weight's columns with them",
    "aux-count": "vLLM's llama drafter reads num_aux_hidden_states only and takes 3 where absent [a]; write the "
    "number of ids there",
    "norm-conflict": "speculators refuses the pair; set the one that was not trained to false",
    "peagle-norms": "vLLM does not hand it to peagle heads [d] and would serve another model; train without it",
    "peagle-mask": "a peagle head needs a mask_token_id inside the vocabulary that is no draft token",
    # tensors
    "missing-tensor": "both loaders go on with uninitialised values [e, f]; export again",
    "extra-tensor": "it belongs to no flag in config.json [e]; export again or correct the flag",
    "tensor-shape": "must follow from config.json; export again",
    "tensor-dtype": "floats must be of config.json's dtype, d2t I64, t2d BOOL; export again",
    "nonfinite": "the head cannot have been trained to that; go back to an earlier checkpoint",
    "untrained": "a trained tensor is not constant; the export took uninitialised memory or the wrong state",
    "d2t-absolute": "d2t holds offsets: target id = i + d2t[i]; subtract 0..D-1",
    "d2t-range": "i + d2t[i] must be a token id of the target",
    "d2t-order": "i + d2t[i] must be strictly ascending: lm_head's rows are in the order of t2d",
    "d2t-t2d": "d2t and t2d must name the same tokens; use the maps that the head was trained with",
    "t2d-count": "t2d must mark exactly draft_vocab_size tokens",
    # against the target
    "target-config": "needs a folder that transformers can read; name the one that is served",
    "target-hidden": "must be the target's hidden size: speculators knows no other fc, vLLM no other embedding",
    "target-vocab": "must be the target's vocab_size: vLLM scatters the draft's logits into it",
    "target-positions": "must be at least the target's, else the rotary table ends before the context does; raise it",
    "target-rope": "must be the target's rope settings, which the head was trained with [k]; write those",
    "aux-range": "the target has no such layer; ids are 0 (embeddings) to its number of layers",
    "embeddings-differ": "they are frozen copies [T]; leave them out, or copy the target's",
    "lm-head-rows": "rows are the target's, but of other tokens than d2t says [j]: a stale or permuted map; export "
    "with the map that the head was trained with",
    # through speculators' own classes
    "reload": "speculators' own loader must accept the folder",
    "reload-warning": "speculators' own loader must have nothing to complain of",
    "reload-dropped": "speculators' own loader ignores it; export again",
    "reload-differs": "speculators' own loader must end up with the file's very bits; export again",
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing wrong with a folder: the check's name, and what was found, what is allowed, what to do."""

    check: str
    message: str


def fault(check: str, found: str) -> Fault:
    """The Fault of a named check for what was found."""
    return Fault(check=check, message=f"{found}; {CHECKS[check]}")


def listing(faults: list[Fault]) -> str:
    """The faults, one a line, indented."""
    return "\n".join(f"  {item.check}: {item.message}" for item in faults)
