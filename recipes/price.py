"""The list prices that a report sets beside a measured cost."""

from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from recipes.schema import Cost

PRICES = Path(__file__).parent / "prices" / "usd.yaml"


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class Price:
    """A list price, USD per 1M tokens."""

    name: str
    input: float
    output: float
    date: Annotated[str, BeforeValidator(str)]
    """when it was last checked"""
    source: str


def read_prices(cost: Cost) -> list[Price]:
    """The list prices. Raises ValueError where the file is missing or is no list of prices."""
    file = Path(cost.prices) if cost.prices else PRICES
    try:
        return TypeAdapter(list[Price]).validate_python(yaml.safe_load(file.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError, ValidationError) as error:
        said = _first_fault(error) if isinstance(error, ValidationError) else str(error).splitlines()[0]
        raise ValueError(
            f"cost.prices: {cost.prices or PRICES.name}: {said}; a list of {{name, input, output, date, source}} is "
            "needed, see recipes/prices/usd.yaml"
        ) from error


def price_faults(cost: Cost) -> list[str]:
    """What is wrong with the prices; empty where they can be read."""
    try:
        read_prices(cost)
    except ValueError as error:
        return [str(error)]
    return []


def _first_fault(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
