from dataclasses import replace

import numpy as np
import pytest

import draftsmith
from eval.needs import needs
from eval.power import half_width, power_at, requests_to_show, spread
from export.requests import write_requests
from tests.eval.samples import recipe, traffic

CHAT = {"chat": {"min_acceptance": 1.4, "min_acceptance_unrepeated": 1.3, "min_speedup": 1.2}, "code": {}}


def written(run, rows):
    (run / "record").mkdir(parents=True)
    write_requests(run / "record", rows)
    return run


def test_each_bound_has_its_chance_and_its_number(tmp_path):
    of, rows = recipe(rules=CHAT), traffic()
    said = needs(of, written(tmp_path, rows))
    mine = [r for r in rows if (r.arm, r.domain, r.phase) == ("head", "chat", "acceptance")]
    length, planned = 1 + sum(r.accepted for r in mine) / sum(r.drafts for r in mine), min(of.gate.prompts, 40)
    assert f"min_acceptance 1.4: {length:.3f} before, from {len(mine)} answers; {planned} planned give" in said
    assert f"+-{half_width(spread(mine), planned, 0.95):.3f}" in said
    assert f"chance {power_at(spread(mine), length - 1.4, planned, 0.95):.0%}" in said
    assert f"90% needs {requests_to_show(spread(mine), length - 1.4, 0.95, 0.9)}" in said
    few = [r for r in mine if not r.repeated_4gram]
    assert f"min_acceptance_unrepeated 1.3: {1 + sum(r.accepted for r in few) / sum(r.drafts for r in few):.3f}" in said
    assert "no bound on its acceptance length; the interval would be +-" in said.split("code:")[1]
    assert said.splitlines()[-1].startswith("speed: 12 prompts of chat, 3 rounds an arm, at 1")


def test_a_bound_out_of_reach_and_too_few_prompts_are_said(tmp_path):
    hard = recipe(rules={"chat": {"min_acceptance": 3.9}, "code": {}})
    hard = replace(hard, domains={name: replace(d, held_out=20) for name, d in hard.domains.items()})
    said = needs(hard, written(tmp_path, traffic()))
    assert "a head like that does not pass, however many are asked" in said
    assert (
        "chat: 20 prompts an arm; gate.min_requests is 30, so it would be refused" in said and "speed: no rule" in said
    )


def test_without_a_record_the_plan_is_told(tmp_path):
    said = needs(recipe(rules=CHAT), tmp_path)
    assert "no record to learn from; `draftsmith measure` with gate.prompts=30" in said
    assert "min_acceptance 1.4: unknown, the record holds 0 such answers" in said


def test_a_record_that_cannot_be_read(tmp_path):
    (tmp_path / "record").mkdir()
    (tmp_path / "record" / "requests.parquet").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"requests\.parquet: .*measure again"):
        needs(recipe(), tmp_path)


def test_a_measured_head_passes_as_often_as_was_told(tmp_path):
    """The chance that is printed is that of the gate's own interval, on rows drawn like the pilot's."""
    pilot = [r for r in traffic() if (r.arm, r.domain, r.phase) == ("head", "chat", "acceptance")]
    length = 1 + sum(r.accepted for r in pilot) / sum(r.drafts for r in pilot)
    least = length - 0.06
    told = power_at(spread(pilot), length - least, 40, 0.95)
    generator, passed = np.random.default_rng(1), 0
    for _ in range(400):
        drawn = [pilot[i] for i in generator.integers(0, len(pilot), 40)]
        passed += 1 + sum(r.accepted for r in drawn) / sum(r.drafts for r in drawn) - half_width(
            spread(drawn), 40, 0.95) >= least  # fmt: skip
    assert passed / 400 == pytest.approx(told, abs=0.08) and 0.2 < told < 0.98


def test_from_the_command_line(tmp_path, capsys):
    assert draftsmith.main(["gate", "smollm2-chat", "--dry-run", "--runs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("smollm2-chat: what the gate would need") and "sharegpt: 120 prompts an arm" in out
    assert list(tmp_path.iterdir()) == []
