"""What a recipe may say of the gate: what is measured in vLLM, and what must be reached to publish."""

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from recipes.schema_input import STRICT, Count, Flag, Integer, Load, Number, Positive, Share


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Rule:
    """What a domain must reach; each bound is compared with the interval's worse end, but for the median's."""

    min_acceptance: Number = 0.0
    """tokens a target step, pooled"""
    min_acceptance_unrepeated: Number = 0.0
    """the same over answers without a repeated 4-gram"""
    min_speedup: Number = 0.0
    """output tokens/s against no speculation at concurrency 1, median of the rounds"""
    min_median_speedup: Number = 0.0
    """the same, but compared with the median itself: two dozen prompts leave a wide interval"""
    min_speedup_at: dict[Load, Number] = Field(default_factory=dict)
    """requests in flight, one of gate.loads -> the same there"""
    max_p99: Number = 0.0
    """p99 of an answer's seconds against no speculation, at every timed load; the interval's upper end is compared"""

    max_below_incumbent: Annotated[float, Field(strict=True, ge=0)] | None = None
    """acceptance length that it may fall behind gate.incumbent's on the same prompts, tokens a target step; 0 = not at
    all; null = only reported"""

    @property
    def on_speed(self) -> bool:
        """True where it asks for something that only the speed arms show."""
        return bool(self.min_speedup or self.min_median_speedup or self.min_speedup_at or self.max_p99)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Gate:
    """What is measured in vLLM, and what must be reached to publish."""

    rules: dict[str, Rule]
    """by domain; every domain that is measured needs one, an empty rule only reports"""
    prompts: Positive = 60
    """a domain"""
    looks: Annotated[int, Field(strict=True, ge=1, le=20)] = 1
    """at a domain's acceptance while it is measured: above 1, what is clear ends early, at no higher rate of errors"""
    max_tokens: Positive = 200
    temperatures: tuple[Annotated[float, Field(strict=True, ge=0)], ...] = (0.0,)
    concurrency: Positive = 8
    """requests in flight while acceptance is measured"""
    speed_domain: str = ""
    """whose prompts the speed arms answer; empty = the first domain that has a speed rule"""
    speed_prompts: Positive = 12
    speed_max_tokens: Positive = 100
    speed_rounds: Annotated[int, Field(strict=True, ge=3)] = 3
    loads: tuple[Annotated[int, Field(strict=True, ge=2)], ...] = ()
    """requests in flight at which the speed arms are timed too, beside one, e.g. [8, 32]"""
    incumbent: str = ""
    """the head now published, measured beside this one: a folder, or ORG/NAME@REVISION on the Hub; empty = none"""
    ngram: Flag = True
    """measure n-gram speculation beside the head"""
    ngram_prompts: Count = 0
    """a domain that n-gram answers; 0 = as many as the head"""
    speed_ngram: Flag = True
    """time it too"""
    confidence: Annotated[float, Field(strict=True, gt=0.5, lt=1)] = 0.95
    min_requests: Positive = 30
    """fewer measured requests in a domain fail the gate"""
    bootstrap: Annotated[int, Field(strict=True, ge=1000)] = 10000
    seed: Integer = 0
    parity_windows: Share = 0.985
    """share of served windows that our own replay must reproduce"""
    parity_length: Share = 0.01
    """relative difference of the replayed and the served acceptance length, at most"""
    parity_unexplained: Share = 0.001
    """share of windows that may differ by more than rounding explains"""
