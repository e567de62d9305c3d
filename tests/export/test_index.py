from dataclasses import replace
from pathlib import Path

import pytest

from export.index import FILE, Index, parse, to_bytes, with_current, with_head
from tests.export.publishing import LATER, entry, small


def some(tmp_path: Path) -> Index:
    files = small(tmp_path)
    return with_head(with_head(None, entry(files)), entry(files, tag="target-v2", date=LATER))


def test_it_reads_back_as_it_was(tmp_path: Path):
    index = some(tmp_path)
    assert parse(to_bytes(index), "here") == index and to_bytes(parse(to_bytes(index), "here")) == to_bytes(index)
    assert parse(to_bytes(with_current(index, "target-v1")), "here").current == "target-v1"


def test_no_entry_is_lost_or_changed(tmp_path: Path):
    index = some(tmp_path)
    assert with_head(index, index.heads[0]) == replace(index, current="target-v1")
    with pytest.raises(ValueError, match=r"target-v1 is another head there"):
        with_head(index, replace(index.heads[0], date=LATER))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"schema": 1', '"schema": 2'), ('"schema": 1', '"schema": true'), ('"current"', '"now"'),
        ('"weights": "', '"weights": "../'), ('"tag": "target-v2"', '"tag": "target-v1"'),
        ('"tag": "target-v2"', '"tag": "\\u001b[31m"'), ('"value": 1.77', '"value": NaN'),
        ('"value": 1.77', '"value": "1.77"'), ('"heads": [', '"heads": [3,'), ("{", "[" * 100_000),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused(tmp_path: Path, old: str, new: str):
    text = to_bytes(some(tmp_path)).decode()
    assert old in text
    with pytest.raises(ValueError, match=r"here: heads\.json cannot be read \(.*restore heads\.json from an earlier"):
        parse(text.replace(old, new, 1).encode(), "here")


def test_it_holds_no_path_and_no_text(tmp_path: Path):
    text = to_bytes(some(tmp_path)).decode()
    assert str(tmp_path) not in text and "/somewhere/private" not in text and "sesame" not in text
    assert FILE == "heads.json"
