"""The ledger and its asking side, against a loopback server that speaks the engine's protocol."""

import json
from pathlib import Path
from typing import Any

import pytest

from data import answers, target
from data.answers import Ledger, read_turns, wanted
from data.prompts import Prompt
from recipes.artifact import Stage, build
from recipes.faults import EnvironmentFault
from recipes.load import build as checked
from recipes.schema import Recipe
from tests.openai_server import Fake, openai_server
from tests.tiny import make_target, recipe_data, write_prompts

TARGET = Stage(name="target", verb="prepare", make=target.make, inputs=(), keys=("target",))


def prompt(number: int, split: str = "train", turns: int = 1) -> Prompt:
    messages = tuple({"role": "user", "content": f"question {number} part {t}"} for t in range(turns))
    return Prompt(id=f"{number:016x}", domain="chat", split=split, messages=messages, source="x")


@pytest.fixture()
def run(tmp_path: Path) -> Path:
    recipe = make_recipe(tmp_path)
    (tmp_path / "run").mkdir()
    build(TARGET, recipe, tmp_path / "run")
    return tmp_path / "run"


def make_recipe(folder: Path, **changes: Any) -> Recipe:
    path = folder / "target"
    plain = recipe_data(path if path.exists() else make_target(path), write_prompts(folder / "p.jsonl"))
    plain["answers"].update(changes)
    return checked(plain)


def ask(run: Path, fake: Fake, prompts: list[Prompt], **changes: Any) -> dict[str, Any]:
    """Answer `prompts` into run/answers."""
    recipe = make_recipe(run.parent, url=fake.url, held_out=100, **changes)
    (run / "prompts").mkdir(exist_ok=True)
    (run / "prompts" / "manifest.json").write_text('{"plan": {}, "files": {}}')
    lines = [json.dumps({"id": p.id, "domain": p.domain, "split": p.split, "messages": list(p.messages),
                         "source": p.source}) for p in prompts]  # fmt: skip
    (run / "prompts" / "prompts.jsonl").write_text("".join(f"{line}\n" for line in lines))
    out = run / "answers.partial"
    out.mkdir(exist_ok=True)
    return answers.make(recipe, run, out)


def test_each_prompt_is_asked_once_and_kept_with_the_engines_ids(run: Path) -> None:
    with openai_server() as fake:
        counts = ask(run, fake, [prompt(i) for i in range(9)])
    turns = read_turns(run / "answers.partial")
    assert len(turns) == len(fake.asked) == counts["turns"] == 9
    assert all(len(t.output_ids) == 24 and t.prompt_ids for t in turns)
    assert counts["answer_tokens"] == 9 * 24


def test_turns_are_answered_one_after_another_on_the_targets_own_answers(run: Path) -> None:
    with openai_server() as fake:
        ask(run, fake, [prompt(i, turns=3) for i in range(12)])
    turns = read_turns(run / "answers.partial")
    by_prompt: dict[str, list[answers.Turn]] = {}
    for t in turns:
        by_prompt.setdefault(t.prompt_id, []).append(t)
    assert any(len(ts) == 3 for ts in by_prompt.values())
    for ts in by_prompt.values():
        # A cut answer ends the conversation: nobody would have gone on from it.
        assert all(t.finish == "stop" for t in ts[:-1])
    later = [json.loads(a) for a in fake.asked if len(json.loads(a)) > 1]
    assert later and all(m["role"] == "assistant" for a in later for m in a[1::2])


def test_passing_failures_are_retried_and_refused_requests_dropped_by_reason(run: Path) -> None:
    with openai_server(failures=[503, 429, 500]) as fake:
        ask(run, fake, [prompt(1)])
        assert len(fake.asked) == 1
        fake.failures = [400]
        counts = ask(run, fake, [prompt(1), prompt(2)])
    assert counts["dropped"] == {"refused_by_engine": 1}


def test_a_prompt_that_is_too_long_is_dropped_by_reason(run: Path) -> None:
    with openai_server() as fake:
        counts = ask(run, fake, [prompt(1), prompt(2)], max_prompt_tokens=5)
    assert counts["dropped"] == {"prompt_too_long": 2} and counts["answer_tokens"] == 0


def test_a_server_that_keeps_failing_or_refuses_ends_the_run_in_one_line(run: Path) -> None:
    with openai_server(failures=[500] * 9) as fake, pytest.raises(EnvironmentFault, match="failed 2 times: HTTP 500"):
        ask(run, fake, [prompt(1)], retries=1)
    with openai_server(failures=[401] * 9) as fake, pytest.raises(EnvironmentFault, match="refuses: HTTP 401"):
        ask(run, fake, [prompt(1)])
    with openai_server(without_ids=True) as fake, pytest.raises(EnvironmentFault, match="returned no token ids"):
        ask(run, fake, [prompt(1)])
    fake.url = "http://127.0.0.1:9"
    with pytest.raises(EnvironmentFault, match=r"answers.url: .* does not answer"):
        ask(run, fake, [prompt(1)])


def test_finished_rows_stay_and_only_the_rest_is_asked(run: Path) -> None:
    with openai_server() as fake:
        ask(run, fake, [prompt(i) for i in range(4)])
        ledger = run / "answers.partial" / "ledger.jsonl"
        before = ledger.read_bytes()
        ledger.write_bytes(before + b'{"key": "torn')
        ask(run, fake, [prompt(i) for i in range(7)])
        assert ledger.read_bytes().startswith(before)
        assert len(fake.asked) == 7


def test_an_earlier_ledger_is_adopted_where_it_answers_the_same_questions(run: Path) -> None:
    with openai_server() as fake:
        ask(run, fake, [prompt(i) for i in range(4)])
        (run / "answers.partial").rename(run / "answers")
        ask(run, fake, [prompt(i) for i in range(6)])
        assert len(fake.asked) == 6
        ask_again = len(fake.asked)
        (run / "answers.partial" / "ledger.jsonl").unlink()
        ask(run, fake, [prompt(0)], max_tokens=12)  # other sampling: another question
        assert len(fake.asked) == ask_again + 1


def test_held_out_prompts_are_answered_up_to_their_number_by_domain() -> None:
    some = [prompt(i, "held_out") for i in range(5)] + [prompt(9)]
    assert [p.id for p in wanted(some, 2)] == [some[0].id, some[1].id, some[5].id]


def test_a_torn_last_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    first = Ledger(path, "salt")
    first.add(prompt(1), 0, [1], [2], "stop")
    first.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"key": "abc", "prom')
    again = Ledger(path, "salt")
    again.close()
    assert path.read_bytes() == whole and again.row(prompt(1), 0) is not None
