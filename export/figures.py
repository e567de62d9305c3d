"""What is measured, as figures: the parts that a verdict shows, the card prints and the report draws."""

import statistics
from typing import Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Parity:
    """Our replay of a domain's served token ids beside what was served."""

    windows: int
    """replayed"""
    equal: int
    """windows with the same accepted count"""
    served_length: float
    replayed_length: float
    unexplained: int = 0
    """differing windows whose top two logits lie more than one quantum apart at the first difference"""
    detail: dict[str, Any] = Field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Figure:
    """A value with its interval, from n requests."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Latency:
    """Seconds. gap: between chunks; per_token: decode time / tokens (a speculating engine answers in bursts)."""

    ttft_p50: float
    ttft_p99: float
    gap_p50: float
    gap_p99: float
    per_token_p50: float
    per_token_p99: float
    per_token: list[float] = Field(default_factory=list[float])
    """quantiles at 0, 5, ... 100%: the distribution that is drawn"""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Steps:
    """Tokens a target step, by arm: the one figure that compares the head with n-gram and with another head."""

    head: Figure | None
    ngram: Figure | None
    incumbent: Figure | None = None
    none: float = 1.0


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Measured:
    """What was measured on a domain."""

    role: str
    requests: int
    acceptance: Figure | None
    """None where no window was verified"""
    acceptance_unrepeated: Figure | None
    """over answers without a repeated 4-gram"""
    repeated_share: float | None
    per_position: list[float]
    """cumulative: accepted at least this many / windows"""
    tokens_per_step: Steps
    simulated: float | None
    simulated_gap: float | None
    """simulated / served - 1"""
    parity: Parity | None
    latency: dict[str, Latency]
    temperatures: dict[str, Figure | None] = Field(default_factory=dict[str, Figure | None])
    """acceptance at the recipe's further temperatures"""
    looks: list[int] = Field(default_factory=list[int])
    """requests asked by each planned look (Record.looks)"""
    contexts: dict[str, Figure] = Field(default_factory=dict[str, Figure])
    """tokens of context where a window began, beside the longest training row -> acceptance length there"""
    over_incumbent: dict[str, Figure | None] = Field(default_factory=dict[str, Figure | None])
    """temperature -> acceptance length less the incumbent's, same prompts; empty without an incumbent"""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Loaded:
    """The speed arms with several requests in flight."""

    speedup: Figure | None
    """an answer's output tokens / its seconds, head / none, median of the rounds"""
    p99: Figure | None
    """p99 of an answer's seconds, head / none"""
    beside: dict[str, Figure] = Field(default_factory=dict[str, Figure])
    """further arm -> the same, head / that arm"""
    throughput: dict[str, float]
    """arm -> output tokens/s of all requests together, median of the rounds"""
    latency: dict[str, Latency]


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Same:
    """Greedy answers with and without the head, to the same prompt, in the same round, alone in the engine."""

    answers: int
    equal: int
    first_difference: float | None
    """tokens before the answers part, median of those that do"""
    none_equal: int
    """answers of the arm without speculation that equal its own of the first round: the engine's own noise"""
    none_answers: int


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Speed:
    """Output tokens/s against no speculation."""

    domain: str
    concurrency: int
    speedup: Figure | None
    """median of the rounds' ratios"""
    rounds: list[dict[str, float]]
    """arm -> output tokens/s; ratio -> head / none"""
    served: dict[str, dict[str, float]]
    """concurrency of the acceptance runs -> arm -> output tokens/s"""
    latency: dict[str, Latency]
    p99: Figure | None = None
    """p99 of an answer's seconds, head / none"""
    loads: dict[str, Loaded] = Field(default_factory=dict[str, Loaded])
    """by requests in flight"""
    beside: dict[str, Figure] = Field(default_factory=dict[str, Figure])
    """further arm -> speed-up over it instead of over no speculation"""
    same: Same | None = None
    """None where the arms were not timed at T=0"""

    @property
    def at(self) -> dict[str, Loaded]:
        """Requests in flight -> figures there, one in flight first; its throughput is the median of the rounds."""
        arms = {arm for shown in self.rounds for arm in shown if arm != "ratio"}
        rates = {arm: [shown[arm] for shown in self.rounds if shown.get(arm)] for arm in arms}
        alone = Loaded(
            speedup=self.speedup,
            p99=self.p99,
            beside=self.beside,
            throughput={arm: statistics.median(found) for arm, found in rates.items() if found},
            latency=self.latency,
        )
        return {"1": alone, **self.loads}
