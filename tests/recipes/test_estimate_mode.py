"""Which capture.mode `plan` names."""

from dataclasses import replace
from pathlib import Path

from recipes.estimate_mode import fitting_mode, free_bytes
from recipes.estimate_rates import cpu_rates, gpu_rates
from recipes.load import load

CPU = cpu_rates(4.7e11, cores=2)


def test_disk_where_it_has_room_and_several_epochs_use_it() -> None:
    mode, why = fitting_mode(load("smollm2-chat"), 1e12, CPU)
    assert mode == "disk" and "4,613 bytes a token" in why and "931 GiB are free" in why


def test_stream_where_the_disk_is_too_small_or_one_pass_is_made() -> None:
    recipe = load("smollm2-chat")
    mode, why = fitting_mode(recipe, 1e8, CPU)
    assert mode == "stream" and "of which disk has 95.4 MiB free" in why
    big = load("llama-3.3-70b-chat")
    once = replace(big, train=replace(big.train, epochs=0.2))
    assert fitting_mode(once, 1e15, gpu_rates(once, 8))[0] == "stream"


def test_free_bytes_of_a_run_that_is_not_there_yet(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "runs" / "new") > 0
