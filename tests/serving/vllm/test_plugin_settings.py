"""Settings of the vLLM plug-in, from the command line and from the environment; without vLLM."""

from __future__ import annotations

import json

import pytest

from torino.core.errors import BadParameter, TorinoError
from torino.serving.settings import ReductionSettings
from torino.serving.vllm.settings import PluginSettings, read_settings

GIVEN = {"method": "random", "budget": 8, "placement": "engine"}


def test_settings_survive_json() -> None:
    settings = PluginSettings.from_dict(GIVEN)
    assert settings == PluginSettings(ReductionSettings("random", budget=8), "engine")
    assert PluginSettings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "must be an object"),
        ("random", "must be an object"),
        ({**GIVEN, "placement": "front"}, "placement must be one of 'processor', 'engine'"),
        ({**GIVEN, "device": 0}, "device must be a device"),
        ({**GIVEN, "device": "cuda:0"}, "has no effect with placement='engine'"),
        ({**GIVEN, "budgets": 3}, "budgets"),
        ({"method": "torino-m", "placement": "processor"}, "needs an SAE"),
    ],
)
def test_wrong_settings_are_refused(given: object, message: str) -> None:
    with pytest.raises(TorinoError, match=message):
        PluginSettings.from_dict(given)


def test_settings_come_from_the_command_line_or_the_environment() -> None:
    variable = {"TORINO_VLLM": json.dumps(GIVEN)}
    expected = PluginSettings.from_dict(GIVEN)
    assert read_settings(None, {}) is None
    assert read_settings(None, {"TORINO_VLLM": " "}) is None
    assert read_settings(GIVEN, {}) == expected
    assert read_settings(None, variable) == expected
    assert read_settings(GIVEN, variable) == expected
    with pytest.raises(BadParameter, match="different settings"):
        read_settings({**GIVEN, "budget": 9}, variable)
    with pytest.raises(BadParameter, match="TORINO_VLLM must be JSON"):
        read_settings(None, {"TORINO_VLLM": "{method: random}"})


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORINO_VLLM", json.dumps(GIVEN))
    assert read_settings(None) == PluginSettings.from_dict(GIVEN)
