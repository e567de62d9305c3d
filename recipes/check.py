"""Rules that span the fields of a recipe. Each fault names the key, the value, what is allowed and what to do."""

from recipes.schema import Recipe, Target


def default_aux_layers(num_hidden_layers: int) -> tuple[int, ...]:
    """2, N//2, N-3: vLLM's own default (ids = residual stream after i layers)."""
    return (2, num_hidden_layers // 2, num_hidden_layers - 3)


def aux_layers(recipe: Recipe) -> tuple[int, ...]:
    """The aux layer ids that this recipe captures, trains with and exports."""
    return recipe.capture.aux_layers or default_aux_layers(recipe.target.facts.num_hidden_layers)


def is_local(target: Target) -> bool:
    """True where the target is served from files that others cannot fetch by its id."""
    return target.local_only


def cross_faults(recipe: Recipe) -> list[str]:
    """One line for each rule that the recipe breaks; empty when it is sound."""
    return [*_domain_faults(recipe), *_head_faults(recipe), *_train_faults(recipe), *_gate_faults(recipe)]


def _domain_faults(recipe: Recipe) -> list[str]:
    faults: list[str] = []
    for name, domain in recipe.domains.items():
        key = f"domains.{name}"
        if not name.isidentifier():
            faults.append(f"{key}: a domain's name is letters, digits and _")
        if not domain.sources:
            faults.append(f"{key}.sources: empty; name at least one source")
        if domain.role == "benchmark" and domain.train:
            faults.append(f"{key}.train: {domain.train}, but a benchmark is never trained on; set 0 or role: traffic")
        if domain.min_chars > domain.max_chars:
            faults.append(f"{key}.min_chars: {domain.min_chars} is above max_chars {domain.max_chars}")
        if "{prompt}" not in domain.wrap:
            faults.append(f"{key}.wrap: {domain.wrap!r} lacks {{prompt}}, so every prompt would be the same")
    if not any(d.train for d in recipe.domains.values()):
        faults.append("domains: no domain has train > 0, so there is nothing to train on")
    room = recipe.answers.max_prompt_tokens + recipe.answers.max_tokens
    if room > recipe.target.max_model_len:
        faults.append(
            f"answers.max_prompt_tokens + answers.max_tokens: {room} is above target.max_model_len "
            f"{recipe.target.max_model_len}; lower one or raise the other"
        )
    if recipe.target.max_model_len > recipe.target.facts.max_position_embeddings:
        faults.append(
            f"target.max_model_len: {recipe.target.max_model_len} is above the target's own "
            f"{recipe.target.facts.max_position_embeddings} positions"
        )
    return faults


def _head_faults(recipe: Recipe) -> list[str]:
    faults: list[str] = []
    facts, head, layers = recipe.target.facts, recipe.head, aux_layers(recipe)
    if list(layers) != sorted(set(layers)) or not all(1 <= i < facts.num_hidden_layers for i in layers):
        faults.append(
            f"capture.aux_layers: {list(layers)} must be strictly ascending and within "
            f"1..{facts.num_hidden_layers - 1} (vLLM sorts them, and would permute fc's columns)"
        )
    if 0 < head.window <= recipe.train.ttt_steps:
        faults.append(
            f"head.window: {head.window} is within train.ttt_steps {recipe.train.ttt_steps}, so late steps would see "
            "no context; set 0 (full) or more"
        )
    if head.norm_before_fc and head.fc_norm:
        faults.append("head.norm_before_fc, head.fc_norm: both true; choose one (fc_norm norms each state apart)")
    if head.draft_vocab_size > facts.vocab_size:
        faults.append(
            f"head.draft_vocab_size: {head.draft_vocab_size} is above the target's vocabulary {facts.vocab_size}"
        )
    return faults


def _train_faults(recipe: Recipe) -> list[str]:
    train, faults = recipe.train, list[str]()
    if bool(train.tokens) == bool(train.epochs):
        faults.append(f"train.tokens, train.epochs: {train.tokens}, {train.epochs}; set exactly one of them above 0")
    if train.ttt_steps < recipe.export.speculative_tokens:
        faults.append(
            f"train.ttt_steps: {train.ttt_steps} is below export.speculative_tokens "
            f"{recipe.export.speculative_tokens}; the last draft tokens would be untrained"
        )
    if train.sharding == "fsdp2" and train.processes == 1:
        faults.append(
            "train.sharding, train.processes: fsdp2, 1, but one process has nobody to share with; set train.processes "
            "above 1, or train.sharding: ddp"
        )
    if train.sharding == "fsdp2" and train.optimizer == "muon":
        faults.append(
            "train.sharding, train.optimizer: fsdp2, muon, whose every iteration would gather each matrix; set "
            "train.optimizer: adamw, or train.sharding: ddp"
        )
    capture = recipe.capture
    if capture.backend == "hf" and capture.engines * capture.tensor_parallel > 1:
        faults.append(
            f"capture.engines, capture.tensor_parallel: {capture.engines}, {capture.tensor_parallel}, but transformers "
            "captures in this process alone; set both to 1, or capture.backend: sglang"
        )
    return faults


def _gate_faults(recipe: Recipe) -> list[str]:
    gate, faults = recipe.gate, list[str]()
    measured = [name for name, domain in recipe.domains.items() if domain.held_out]
    if recipe.engine.windows == "chunks" and gate.ngram and not gate.speed_ngram:
        faults.append(
            "engine.windows, gate.ngram, gate.speed_ngram: chunks, true, false; n-gram drafts in some steps only, "
            "which chunks do not show, so it can only be timed; set gate.speed_ngram: true, or gate.ngram: false"
        )
    for name in gate.rules:
        if name not in recipe.domains:
            faults.append(f"gate.rules.{name}: no such domain; domains are {', '.join(recipe.domains)}")
    for name in measured:
        if name not in gate.rules:
            faults.append(f"gate.rules.{name}: missing; {name} is held out, so give it a rule ({{}} only reports)")
    if not any(r.min_acceptance > 1 for r in gate.rules.values()):
        faults.append("gate.rules: no domain has min_acceptance above 1, so the gate could not say no")
    compared = [name for name, rule in gate.rules.items() if rule.max_below_incumbent is not None]
    if compared and not gate.incumbent:
        faults.append(
            f"gate.rules.{compared[0]}.max_below_incumbent: set, but gate.incumbent names no head; name one, or take "
            "the rule out"
        )
    if gate.incumbent and not compared:
        faults.append(
            f"gate.incumbent: {gate.incumbent}, but no rule compares with it, so a worse head would pass; set "
            "gate.rules.NAME.max_below_incumbent, e.g. 0.05"
        )
    if gate.speed_domain and gate.speed_domain not in recipe.domains:
        faults.append(f"gate.speed_domain: {gate.speed_domain!r} is no domain; allowed: {', '.join(recipe.domains)}")
    for name, rule in gate.rules.items():
        strange = [load for load in rule.min_speedup_at if int(load) not in gate.loads]
        if strange:
            faults.append(
                f"gate.rules.{name}.min_speedup_at: {', '.join(strange)}, but gate.loads is {list(gate.loads)}; add it "
                "there, or take the rule out (min_speedup is the rule at one request in flight)"
            )
    if gate.looks > 1 and gate.prompts < max(2 * gate.looks, gate.min_requests):
        faults.append(
            f"gate.looks: {gate.looks} at gate.prompts {gate.prompts}, none before gate.min_requests "
            f"{gate.min_requests}; ask more prompts, or look once"
        )
    if gate.loads and max(gate.loads) > gate.speed_prompts:
        faults.append(
            f"gate.loads: {max(gate.loads)} in flight is never reached with gate.speed_prompts {gate.speed_prompts}; "
            "time more prompts, or drop that load"
        )
    if len(set(gate.loads)) < len(gate.loads):
        faults.append(f"gate.loads: {list(gate.loads)} names a load twice; name each once")
    if gate.min_requests > gate.prompts:
        faults.append(f"gate.min_requests: {gate.min_requests} is above gate.prompts {gate.prompts}")
    return faults
