import json
import re
from dataclasses import replace

import pytest

from export.figures import Figure, Latency, Measured, Speed, Steps
from export.record import (
    Refusal,
    Verdict,
    read_record,
    read_verdict,
    recipe_hash,
    to_json,
    write_record,
    write_verdict,
)
from export.requests import read_requests, write_requests
from tests.eval.samples import conditions, recipe, record, request, traffic


def verdict() -> Verdict:
    figure = Figure(value=1.7, low=1.6, high=1.8, n=60)
    times = Latency(ttft_p50=0.1, ttft_p99=0.2, gap_p50=0.03, gap_p99=0.05, per_token_p50=0.02, per_token_p99=0.04)
    chat = Measured(
        role="traffic", requests=60, acceptance=figure, acceptance_unrepeated=None, repeated_share=0.4,
        per_position=[0.4, 0.2, 0.1], tokens_per_step=Steps(head=figure, ngram=None), simulated=1.7, simulated_gap=0.0,
        parity=None, latency={"head": times},
    )  # fmt: skip
    speed = Speed(domain="chat", concurrency=1, speedup=figure, rounds=[{"none": 30.0, "head": 50.0, "ratio": 5 / 3}],
                  served={"8": {"head": 150.0}}, latency={"none": times})  # fmt: skip
    refusal = Refusal(rule="min_acceptance", domain="chat", figure=1.7, low=1.6, high=1.8, threshold=1.9, why="too low")
    return Verdict(
        passed=False,
        refusals=[refusal],
        made_from={"record": "e" * 64},
        domains={"chat": chat},
        speed=speed,
        conditions=conditions(),
        findings=["noisy"],
    )


def test_record_comes_back_equal(tmp_path):
    (tmp_path / "record").mkdir()
    made = record(traffic(), recipe())
    write_record(tmp_path / "record", made)
    assert read_record(tmp_path) == made


def test_verdict_comes_back_equal(tmp_path):
    (tmp_path / "verdict").mkdir()
    write_verdict(tmp_path / "verdict", verdict())
    assert read_verdict(tmp_path) == verdict()


def test_verdict_json_has_the_agreed_keys():
    plain = json.loads(json.dumps(to_json(verdict()), allow_nan=False))
    assert {"schema", "passed", "refusals", "made_from", "domains", "speed", "conditions", "findings"} == set(plain)
    assert plain["domains"]["chat"]["tokens_per_step"] == {
        "head": {"value": 1.7, "low": 1.6, "high": 1.8, "n": 60}, "ngram": None,
        "incumbent": None, "none": 1.0,
    }  # fmt: skip


def test_requests_come_back_equal_and_write_the_same_bytes(tmp_path):
    rows = [*traffic()[:30], request(99, error="HTTP 500", counted=False, windows=(), output_ids=())]
    write_requests(tmp_path, rows)
    first = (tmp_path / "requests.parquet").read_bytes()
    assert read_requests(tmp_path) == rows
    write_requests(tmp_path, rows)
    assert (tmp_path / "requests.parquet").read_bytes() == first


def test_no_request_is_a_table_too(tmp_path):
    write_requests(tmp_path, [])
    assert read_requests(tmp_path) == []


def test_recipe_hash_ignores_where_it_is_published_only():
    one = recipe()
    assert recipe_hash(one) == recipe_hash(replace(one, publish=replace(one.publish, repo_id="a/b", private=False)))
    assert recipe_hash(one) != recipe_hash(recipe(prompts=41))


def test_record_holds_no_token_ids():
    assert not re.search(r"prompt_ids|output_ids|messages", json.dumps(to_json(record(traffic(), recipe()))))


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "missing"), ("{", "Expecting"), ('{"passed": true}', "refusals: Field required"),
     ("[]", "run that stage again")],
)  # fmt: skip
def test_unreadable_verdict(tmp_path, content, said):
    (tmp_path / "verdict").mkdir()
    if content is not None:
        (tmp_path / "verdict" / "verdict.json").write_text(content)
    with pytest.raises(ValueError, match=said) as caught:
        read_verdict(tmp_path)
    assert "\n" not in str(caught.value)


def test_unknown_key_in_record(tmp_path):
    (tmp_path / "record").mkdir()
    plain = to_json(record(traffic(), recipe()))
    (tmp_path / "record" / "record.json").write_text(json.dumps({**plain, "prompts": ["secret"]}))
    with pytest.raises(ValueError, match="prompts: Unexpected keyword argument"):
        read_record(tmp_path)


def test_unreadable_requests(tmp_path):
    with pytest.raises(ValueError, match=r"requests.parquet: missing; measure again"):
        read_requests(tmp_path)
    (tmp_path / "requests.parquet").write_bytes(b"PAR1 no table PAR1")
    with pytest.raises(ValueError, match="measure again"):
        read_requests(tmp_path)
