from pathlib import Path

import pytest

from recipes import outside
from recipes.load import build
from recipes.price import price_faults, read_prices
from recipes.schema import Cost
from tests.recipes.small import small


def test_the_shipped_prices_have_dates_and_sources():
    prices = read_prices(Cost())
    assert len(prices) >= 4 and all(p.date.startswith("2026-") and p.source and p.output > p.input for p in prices)
    assert price_faults(Cost()) == []


def test_own_prices(tmp_path: Path):
    file = tmp_path / "own.yaml"
    file.write_text("- {name: ours, input: 1, output: 2.5, date: 2026-11-30, source: contract}\n")
    (price,) = read_prices(Cost(prices=str(file)))
    assert (price.output, price.date) == (2.5, "2026-11-30")
    recipe = build(small(cost__prices=str(file)))
    before = outside.prices(recipe)
    file.write_text("- {name: ours, input: 1, output: 3, date: 2026-12-01, source: contract}\n")
    assert before != outside.prices(recipe) and set(before) == {str(file)}, "an edited list makes the report anew"
    assert outside.prices(build(small())) == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- {name: x, input: 1, output: 2, source: y}", "0.date: Field required"),
        ("- {name: x, input: much, output: 2, date: d, source: y}", "0.input: Input should be a valid number"),
        ("just words", "Input should be a valid list"),
        ("{", "while parsing a flow"),
    ],
)
def test_prices_that_cannot_be_read(tmp_path: Path, text: str, said: str):
    file = tmp_path / "own.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"cost\.prices: .*a list of \{name, input, output, date, source\}") as error:
        read_prices(Cost(prices=str(file)))
    assert said in str(error.value) and price_faults(Cost(prices=str(file))) == [str(error.value)]


def test_a_missing_file(tmp_path: Path):
    (fault,) = price_faults(Cost(prices=str(tmp_path / "none.yaml")))
    assert "No such file" in fault and "see recipes/prices/usd.yaml" in fault
