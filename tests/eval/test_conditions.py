import sys
from dataclasses import replace
from pathlib import Path

import pytest

from data.engine import Server
from eval.conditions import describe, machine, portable, speculative_settings
from tests.eval.samples import recipe


def test_portable_commands():
    names = {"/home/me/runs/x/checkpoint": "checkpoint", sys.executable: "{python}"}
    config = '{"model": "/home/me/runs/x/checkpoint"}'
    command = [sys.executable, "--model", "/data/models/llama", "--chat-template=/home/me/t.jinja", "--port", "4711"]
    assert portable([*command, "--speculative-config", config], names) == [
        "{python}", "--model", ".../llama", "--chat-template=.../t.jinja", "--port", "PORT", "--speculative-config",
        '{"model": "checkpoint"}',
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        ([], {}),
        (["--model", "x"], {}),
        (["--speculative-config", '{"method": "ngram"}'], {"method": "ngram"}),
        (["-sc", '{"method": "ngram"}'], {"method": "ngram"}),
        (['--speculative-config={"a": 1}', "--speculative-config.a=2"], {"a": "2"}),
        (["--speculative_config.rejection_sample_method", "block"], {"rejection_sample_method": "block"}),
        (["--speculative-config", "{torn"], {"{torn": "unreadable"}),
        (["--speculative-config"], {"": "unreadable"}),
        (["--speculative-config", "[1, 2]"], {"[1, 2]": "unreadable"}),
    ],
)
def test_speculative_settings(command, settings):
    assert speculative_settings(command) == settings


def test_describe():
    of = recipe()
    of = replace(of, engine=replace(of.engine, env={"HF_TOKEN": "hf_secret", "LD_PRELOAD": "/home/me/lib/x.so"}))
    config = '{"model": "/runs/x/c", "method": "eagle3", "draft_sample_method": "probabilistic"}'
    server = Server(url="u", model="target", pid=0, command=("vllm", "--speculative-config", config), version="0.32.0",
                    log=Path("x"))  # fmt: skip
    said = describe(of, {"/runs/x/c": "checkpoint"}, {"head": server})
    assert said.env == {"HF_TOKEN": "***", "LD_PRELOAD": ".../x.so"}
    assert (said.engine, said.engine_version, said.speculative_tokens) == ("vllm", "0.32.0", 3)
    assert (said.rejection_sample_method, said.draft_sample_method) == ("standard", "probabilistic")
    assert said.command["head"][2] == config.replace("/runs/x/c", "checkpoint")
    assert said.date.endswith("Z")


def test_machine():
    here = machine()
    assert here.cpu and here.cores >= 1 and here.memory_gib > 0
