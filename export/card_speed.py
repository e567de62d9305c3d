"""The model card on speed, and on where the head does not help."""

from export.card_cells import ARMS, figure, number, table
from export.record import Verdict


def speed(verdict: Verdict) -> str:
    """Tokens/s, loads and latency."""
    timed = verdict.speed
    if timed is None:
        return "Speed against no speculation was not measured.\n"
    shown_arms = [*timed.rounds, *timed.served.values(), *(at.throughput for at in timed.loads.values())]
    every = [arm for arm in ARMS if any(arm in shown for shown in shown_arms)]
    arms = [arm for arm in every if any(arm in shown for shown in timed.rounds)]
    rows = [[str(i + 1), *[number(shown.get(arm), 1) for arm in arms], number(shown.get("ratio"))]
            for i, shown in enumerate(timed.rounds)]  # fmt: skip
    text = (
        f"Output tokens/s on {timed.domain} at concurrency {timed.concurrency}, arms alternated: "
        f"**{figure(timed.speedup)}** times no speculation, median of the rounds.\n\n"
    )
    latencies = [[ARMS.get(arm, arm), *[f"{1000 * seconds:.1f}" for seconds in (
        latency.ttft_p50, latency.ttft_p99, latency.gap_p50, latency.gap_p99, latency.per_token_p50,
        latency.per_token_p99)]] for arm, latency in timed.latency.items()]  # fmt: skip
    names = ["arm, ms", "first token p50", "p99", "gap p50", "p99", "per token p50", "p99"]
    loads = [
        [f"{load} in flight", figure(at.speedup), figure(at.p99), *[number(at.throughput.get(arm), 1) for arm in every]]
        for load, at in timed.loads.items()
    ]
    loaded = [
        "load",
        "speed-up of an answer",
        "p99 of its seconds, ratio",
        *[f"{ARMS[arm]}, tokens/s" for arm in every],
    ]
    same = timed.same
    equal = f"\nGreedy answers equal to those without the head: {same.equal} of {same.answers}.\n" if same else ""
    served = [
        [concurrency, *[number(by_arm.get(arm), 1) for arm in every]] for concurrency, by_arm in timed.served.items()
    ]
    return (
        text
        + table(["round", *[ARMS[arm] for arm in arms], "ratio"], rows)
        + (f"\n{table(names, latencies)}" if latencies else "")
        + (f"\n{table(loaded, loads)}" if loads else "")
        + equal
        + (f"\n{table(['concurrency, tokens/s', *[ARMS[arm] for arm in every]], served)}" if served else "")
    )


def worse(verdict: Verdict) -> str:
    """Where the head loses, from the measured arms alone."""
    said: list[str] = []
    timed = verdict.speed
    if timed and timed.speedup and timed.speedup.low < 1:
        said.append(f"{timed.domain} at concurrency {timed.concurrency}: the speed-up's interval reaches below 1.")
    for load, at in timed.loads.items() if timed else []:
        if at.speedup and at.speedup.low < 1:
            said.append(f"Concurrency {load}: the speed-up's interval reaches below 1.")
        if at.p99 and at.p99.high > 1:
            said.append(f"Concurrency {load}: p99 of an answer's seconds is {figure(at.p99)} of that without.")
    for concurrency, arms in timed.served.items() if timed else []:
        if "head" in arms and "none" in arms and arms["head"] < arms["none"]:
            said.append(f"Concurrency {concurrency}: {arms['head']:.1f} tokens/s against {arms['none']:.1f} without.")
    latency = timed.latency if timed else {}
    if "head" in latency and "none" in latency:
        for field, label in (("ttft_p50", "first token, median"), ("gap_p99", "gap between chunks, p99")):
            own, none = (getattr(latency[arm], field) for arm in ("head", "none"))
            if own > none:
                said.append(f"{label}: {1000 * own:.1f} ms against {1000 * none:.1f} ms without.")
    for name, measured in verdict.domains.items():
        head, ngram = measured.tokens_per_step.head, measured.tokens_per_step.ngram
        if head and ngram and ngram.value > head.value:
            said.append(f"{name}: n-gram speculation, which needs no head, makes more tokens a step.")
    listed = "".join(f"- {line}\n" for line in said) or "Nowhere among what was measured; other loads were not.\n"
    return f"## Where it does not help\n\n{listed}"
