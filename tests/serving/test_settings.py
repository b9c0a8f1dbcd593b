"""Settings of servers and stores."""

from __future__ import annotations

import pytest

from torino.core.errors import BadParameter, TorinoError
from torino.serving.settings import ReductionSettings, check_servable, default_sae


def test_settings_survive_json() -> None:
    settings = ReductionSettings("torino-x", sae="example", keep=0.25, positions="original")
    assert ReductionSettings.from_dict(settings.to_dict()) == settings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "must be an object"),
        ({"methd": "torino-m"}, "methd"),
        ({"method": "random", "budget": "64"}, "budget"),
        ({"method": "random", "budget": 0}, "budget"),
        ({"method": "random", "budget": 64, "keep": 0.5}, "exclude each other"),
        ({"method": "torino-m"}, "needs an SAE"),
        ({"method": "random", "sae": "example", "budget": 4}, "no effect"),
        ({"method": "none", "budget": 4}, "no effect"),
        ({"method": "random", "keep": 1.5}, "keep must be"),
        ({"method": "nothing", "budget": 4}, "nothing"),
        ({"method": "random", "budget": 4, "positions": "middle"}, "positions"),
    ],
)
def test_wrong_settings_are_refused(given: object, message: str) -> None:
    with pytest.raises(TorinoError, match=message):
        ReductionSettings.from_dict(given)


def test_build_gives_the_reducer() -> None:
    assert ReductionSettings("none").build() is None
    assert ReductionSettings("torino-m", sae="example", budget=9).build().spec.startswith("torino-m(")
    assert "25% of the patches" in ReductionSettings("random", keep=0.25).build().spec


def test_hash_depends_on_everything_that_changes_tokens() -> None:
    base = ReductionSettings("torino-m", sae="example", budget=9)
    others = [
        ReductionSettings("torino-m", sae="none", budget=9),
        ReductionSettings("torino-m", sae="example", budget=8),
        ReductionSettings("torino-p", sae="example", budget=9),
        ReductionSettings("torino-m", sae="example", budget=9, attention="proportional"),
    ]
    assert base.hash("model") == ReductionSettings("torino-m", sae="example", budget=9).hash("model")
    assert len({base.hash("model"), base.hash("other"), *(other.hash("model") for other in others)}) == 6


def test_reducers_that_depend_on_other_requests_are_refused() -> None:
    with pytest.raises(BadParameter, match="by the question"):
        check_servable(ReductionSettings("cdpruner", budget=8).build())
    with pytest.raises(BadParameter, match="by the question, and the images are reduced before the question is known"):
        check_servable(ReductionSettings("torino-q", sae="example", budget=8).build())
    check_servable(ReductionSettings("torino-q(query=0)", sae="example", budget=8).build())
    check_servable(ReductionSettings("random", budget=8).build())
    check_servable(None)


def test_default_sae() -> None:
    assert default_sae("torino-m", "lab") == "lab"
    assert default_sae("random", "lab") is None
    assert default_sae("torino-m", "owner/model") is None
