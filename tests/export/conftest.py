import time

import huggingface_hub
import pytest

from tests.hub_server import Hub


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that anybody waited, without waiting."""
    kept: list[float] = []
    monkeypatch.setattr(time, "sleep", kept.append)
    return kept


@pytest.fixture
def logged_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A login in the environment, and a client that speaks plain LFS and stays on loopback."""
    monkeypatch.setenv("HF_TOKEN", Hub.TOKEN)
    for name, value in (("HF_HUB_DISABLE_XET", True), ("HF_HUB_OFFLINE", False), ("HF_HUB_DISABLE_TELEMETRY", True)):
        monkeypatch.setattr(huggingface_hub.constants, name, value)
