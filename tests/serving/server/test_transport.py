"""What a front sends to its engine is checked there."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load, save

from tests.support.tiny_vlm import QUESTION, photo
from torino.core.errors import BadTokens
from torino.reducers import Reducer
from torino.serving.server.jobs import FinishedAnswer, TextPiece
from torino.serving.server.schema import Sampling
from torino.serving.server.transport import pack_event, pack_request, unpack_event, unpack_request
from torino.vlm import VLM
from torino.vlm.batching import process_image, reduce_pixels

TURNS = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
SAMPLING = Sampling(5, 0.5, 0.9, ("a", "b"), 3, True)
CPU = torch.device("cpu")


@pytest.fixture
def body(vlm: VLM, reducer: Reducer) -> bytes:
    return pack_request(TURNS, reduce_pixels(vlm, [process_image(vlm, photo())], reducer), SAMPLING)


def test_a_request_arrives_as_it_was(vlm: VLM, reducer: Reducer, body: bytes) -> None:
    (part,) = reduce_pixels(vlm, [process_image(vlm, photo())], reducer)
    turns, (image,), sampling = unpack_request(body, 32, CPU)
    assert turns == TURNS
    assert sampling == SAMPLING
    assert torch.equal(image.embeds[0].features, part.embeds[0].features)
    assert torch.equal(image.embeds[0].slots, part.embeds[0].slots)
    assert image.encoded.full == part.encoded.full
    assert (image.positions, image.proportional) == (part.positions, part.proportional)
    sizes = [torch.cat([plan.sizes for plan in item.plans]) for item in (part, image)]
    assert torch.equal(*sizes)
    assert int(sizes[0].max()) > 1


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("0.features", lambda value: value[:, :8].contiguous()),
        ("0.features", lambda value: value[:0]),
        ("0.features", lambda value: value * torch.nan),
        ("0.features", lambda value: value[0]),
        ("0.features", lambda value: value.long()),
        ("0.slots", lambda value: value - 100),
        ("0.slots", lambda value: value + 100),
        ("0.slots", lambda value: value[1:]),
        ("0.slots", lambda value: value.float()),
        ("0.sizes", lambda value: value * 0),
        ("0.sizes", lambda value: value + (1 << 40)),
        ("0.sizes", lambda value: torch.cat([value, value, value])),
        ("0.full", lambda value: value * 0),
        ("request", lambda value: value[:-5].contiguous()),
        ("request", lambda value: torch.frombuffer(bytearray(b"[]"), dtype=torch.uint8)),
        ("request", lambda value: torch.frombuffer(bytearray(b"{}"), dtype=torch.uint8)),
    ],
)
def test_wrong_tensors_are_refused(body: bytes, name: str, change: object) -> None:
    tensors = load(body)
    unpack_request(save(tensors), 32, CPU)
    tensors[name] = change(tensors[name])  # type: ignore[operator]
    with pytest.raises(BadTokens):
        unpack_request(save(tensors), 32, CPU)


def test_other_bytes_are_refused() -> None:
    for body in (b"", b"x" * 100, b"\x80\x04\x95", save({"a": torch.zeros(2)})):
        with pytest.raises(BadTokens, match="cannot read"):
            unpack_request(body, 32, CPU)


def test_events_arrive_as_they_were() -> None:
    for event in (TextPiece('a "b"\n'), FinishedAnswer("x", "stop", 4, 5, 6)):
        assert unpack_event(pack_event(event).decode()) == event
    assert unpack_event('{"error": {"status": 400}}') == {"status": 400}
