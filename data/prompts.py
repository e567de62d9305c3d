"""The stage `prompts`: sources -> prompts.jsonl, split by content, free of duplicates, every dropped row counted.

Which prompts there are, on which side of the split and in which order depends on their content and the recipe alone,
so two runs write the same bytes. Held-out prompts measure; nothing that is nearly one of them is trained on.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from datasketch import MinHash, MinHashLSH  # pyright: ignore[reportMissingTypeStubs]
from tqdm import tqdm

from data.sources import fingerprint, read
from recipes.artifact import hash_json, write_bytes
from recipes.schema import Answers, Domain, Recipe

Split = Literal["held_out", "train"]
FILE = "prompts.jsonl"
SHINGLE_WORDS = 3
NEAR = 0.6
"""Jaccard similarity of two prompts' word shingles from which on they are near-duplicates: one word changed in 14"""
BANDS, BAND_ROWS = 42, 3
"""of the MinHash index: a pair at NEAR is a candidate with probability 1 - (1 - NEAR**3)**42 = 0.99996"""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What is put to the target: messages up to the last user turn, or to its answer where answers are prewritten."""

    id: str
    """first 16 hex digits of the SHA-256 of the messages' canonical JSON"""
    domain: str
    split: Split
    messages: tuple[dict[str, str], ...]
    source: str
    """path of the recipe's source"""


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    prompt: Prompt
    text: str
    """the user turns as they were before `wrap`, normalised"""


@dataclass(kw_only=True)
class _Pool:
    """A domain's candidates and what became of its rows."""

    rows_in: int = 0
    dropped: Counter[str] = field(default_factory=Counter[str])
    repaired: Counter[str] = field(default_factory=Counter[str])
    candidates: list[_Candidate] = field(default_factory=list[_Candidate])


@dataclass(frozen=True, kw_only=True)
class _Index:
    """The held-out side of all domains, for the search of near-duplicates."""

    lsh: Any
    shingles: list[frozenset[str]]


def make(recipe: Recipe, run: Path, out: Path) -> dict[str, Any]:
    """Write `prompts.jsonl` into `out`, sorted by domain (in the recipe's order), split and id.

    Returns by domain {rows_in, train, held_out, dropped: {reason: rows}, repaired: {what: rows}, licences, sources:
    {path: fingerprint}}, where rows_in = train + held_out + the sum of dropped; `repaired` rows are not dropped ones.
    The held-out side is every benchmark, whole, and of traffic the share `held_out_share` by hash of the opening turn.
    All of it, measured or not, is kept out of training, so that a larger `held_out` can be measured later.

    Raises ValueError where a source cannot be read or a domain is left without prompts; EnvironmentFault as `read`.
    """
    pools = {name: _pool(name, domain, recipe.answers) for name, domain in recipe.domains.items()}
    kept = _pick_held_out(recipe, pools)
    index = _index([c for pool in pools.values() for c in pool.candidates if c.prompt.split == "held_out"])
    taken: set[str] = set()
    for name, domain in recipe.domains.items():
        side = [c for c in pools[name].candidates if c.prompt.split == "train"]
        kept[name] += _pick(_shuffled(side, recipe.seed), domain.train, taken, pools[name].dropped, index)
    accounting = {name: _account(name, recipe.domains[name], pools[name], kept[name]) for name in recipe.domains}
    lines = [
        json.dumps(asdict(c.prompt), ensure_ascii=False)
        for name in recipe.domains
        for c in sorted(kept[name], key=lambda c: (c.prompt.split, c.prompt.id))
    ]
    write_bytes(out / FILE, "".join(f"{line}\n" for line in lines).encode())
    return accounting


def read_prompts(folder: Path) -> list[Prompt]:
    """The prompts of a finished stage directory, in file order.

    Raises ValueError where the file is missing or a line of it is damaged.
    """
    file, prompts = folder / FILE, list[Prompt]()
    if not file.is_file():
        raise ValueError(f"{file}: missing; run the stage that makes the prompts first")
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            value: Any = json.loads(line)
            prompts.append(
                Prompt(
                    id=value["id"],
                    domain=value["domain"],
                    split=value["split"],
                    messages=tuple(value["messages"]),
                    source=value["source"],
                )
            )
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{file}: line {number} is damaged; run the stage that makes the prompts again") from error
    return prompts


def _pool(name: str, domain: Domain, answers: Answers) -> _Pool:
    """All rows of the domain's sources; of those with the same user text, the one with the smallest id stays."""
    pool, best = _Pool(), dict[bytes, _Candidate]()
    for source in domain.sources:
        for row in tqdm(read(source), desc=f"{name}: {source.path}", unit=" rows", disable=None, leave=False):
            pool.rows_in += 1
            found = row.dropped or _candidate(row.messages, name, domain, answers, source.path)
            if isinstance(found, str):
                pool.dropped[found] += 1
                continue
            pool.repaired.update(row.repaired)
            key = hashlib.sha256(found.text.encode()).digest()
            other = best.get(key)
            if other:
                pool.dropped["duplicate"] += 1
            if other is None or found.prompt.id < other.prompt.id:
                best[key] = found
    pool.candidates = list(best.values())
    return pool


def _candidate(
    messages: tuple[dict[str, str], ...], name: str, domain: Domain, answers: Answers, source: str
) -> _Candidate | str:
    """The prompt that a conversation makes, or the reason why it makes none."""
    system = [m for m in messages[:1] if m["role"] == "system"]
    turns = list(messages[len(system) :])[: 2 * answers.max_turns]
    users = [m["content"] for m in turns if m["role"] == "user"]
    if answers.mode == "prewritten" and domain.role == "traffic":
        turns = turns[: len(turns) // 2 * 2]
        users = users[: len(turns) // 2]
        if not turns:
            return "no_answer"
    else:
        turns = [m for m in turns if m["role"] == "user"]
    fault = _limit_fault(users, domain)
    if fault:
        return fault
    wrapped = (*system, *(_wrap(m, domain.wrap) for m in turns))
    held_out = domain.role == "benchmark" or _share(_normal(users[0])) < domain.held_out_share
    prompt = Prompt(
        id=hash_json(wrapped)[:16],
        domain=name,
        split="held_out" if held_out else "train",
        messages=wrapped,
        source=source,
    )
    return _Candidate(prompt=prompt, text=_normal("\n".join(users)))


def _limit_fault(users: list[str], domain: Domain) -> str | None:
    text = "".join(users)
    if any(len(user.strip()) < domain.min_chars for user in users):
        return "too_short"
    if any(len(user) > domain.max_chars for user in users):
        return "too_long"
    if len(text) - len(text.encode("ascii", "ignore")) > domain.max_non_ascii * len(text):
        return "other_language"
    return None


def _wrap(message: dict[str, str], wrap: str) -> dict[str, str]:
    if message["role"] != "user":
        return message
    return {"role": "user", "content": wrap.replace("{prompt}", message["content"])}


def _normal(text: str) -> str:
    return " ".join(text.casefold().split())


def _share(opening: str) -> float:
    """Where the opening falls in the hash space, 0 to 1. Of the opening alone: longer or wrapped, it stays put."""
    return int.from_bytes(hashlib.sha256(opening.encode()).digest()[:8]) / 2**64


def _shuffled(candidates: list[_Candidate], seed: int) -> list[_Candidate]:
    return sorted(candidates, key=lambda c: hashlib.sha256(f"{seed}:{c.prompt.id}".encode()).digest())


def _pick_held_out(recipe: Recipe, pools: Mapping[str, _Pool]) -> dict[str, list[_Candidate]]:
    """Held-out prompts by domain. Benchmarks choose first, because their prompts are given."""
    kept: dict[str, list[_Candidate]] = {}
    taken: set[str] = set()
    for name, domain in sorted(recipe.domains.items(), key=lambda item: item[1].role != "benchmark"):
        side = [c for c in pools[name].candidates if c.prompt.split == "held_out"]
        kept[name] = _pick(_shuffled(side, recipe.seed), domain.held_out, taken, pools[name].dropped, None)
    return kept


def _pick(
    ordered: list[_Candidate], size: int, taken: set[str], dropped: Counter[str], index: _Index | None
) -> list[_Candidate]:
    """The first `size` candidates that no domain has taken and that are near to nothing in the index."""
    kept: list[_Candidate] = []
    for candidate in ordered:
        if len(kept) == size:
            dropped["not_needed"] += 1
        elif candidate.prompt.id in taken:
            dropped["duplicate"] += 1
        elif index is not None and _is_near(index, candidate.text):
            dropped["near_duplicate_of_held_out"] += 1
        else:
            kept.append(candidate)
            taken.add(candidate.prompt.id)
    return kept


_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")  # Chinese, Japanese: by character


def _shingles(text: str) -> frozenset[str]:
    """Runs of SHINGLE_WORDS words of a normalised text; a shorter text, or one without words, is one shingle."""
    words = _WORD.findall(text) or [text]
    return frozenset(" ".join(words[i : i + SHINGLE_WORDS]) for i in range(max(1, len(words) - SHINGLE_WORDS + 1)))


def _index(candidates: list[_Candidate]) -> _Index:
    lsh: Any = MinHashLSH(num_perm=BANDS * BAND_ROWS, params=(BANDS, BAND_ROWS))
    shingles: list[frozenset[str]] = []
    for number, text in enumerate(sorted({c.text for c in candidates})):
        shingles.append(_shingles(text))
        lsh.insert(number, _minhash(shingles[-1]))
    return _Index(lsh=lsh, shingles=shingles)


def _minhash(shingles: frozenset[str]) -> Any:
    sketch: Any = MinHash(num_perm=BANDS * BAND_ROWS, seed=1)
    sketch.update_batch([shingle.encode() for shingle in shingles])
    return sketch


def _is_near(index: _Index, text: str) -> bool:
    mine = _shingles(text)
    numbers: list[int] = index.lsh.query(_minhash(mine))
    return any(len(mine & other) >= NEAR * len(mine | other) for other in (index.shingles[n] for n in numbers))


def _account(name: str, domain: Domain, pool: _Pool, kept: list[_Candidate]) -> dict[str, Any]:
    sizes = Counter(c.prompt.split for c in kept)
    assert pool.rows_in == len(kept) + pool.dropped.total(), (name, pool.rows_in, len(kept), pool.dropped)
    asked: dict[Split, int] = {"held_out": domain.held_out, "train": domain.train}
    for split, size in asked.items():
        if size and not sizes[split]:
            raise ValueError(_nothing_left(name, split, pool))
    return {
        "rows_in": pool.rows_in,
        "train": sizes["train"],
        "held_out": sizes["held_out"],
        "dropped": dict(sorted(pool.dropped.items())),
        "repaired": dict(sorted(pool.repaired.items())),
        "licences": sorted({source.licence for source in domain.sources}),
        "sources": {source.path: fingerprint(source) for source in domain.sources},
    }


def _nothing_left(name: str, split: Split, pool: _Pool) -> str:
    why = ", ".join(f"{reason} {rows}" for reason, rows in pool.dropped.most_common(5)) or "none dropped"
    advice = "raise held_out_share, " if split == "held_out" else "lower held_out_share, "
    return (
        f"domains.{name}: no {split} prompts left of {pool.rows_in} rows ({why}); {advice}"
        "loosen the domain's limits (min_chars, max_chars, max_non_ascii) or add sources"
    )
