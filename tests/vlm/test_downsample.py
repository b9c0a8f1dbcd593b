"""The image itself is shrunk: grids, pixels of every kind, and the same tokens as the stock tower gives for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from tests.support import tiny, tiny_qwen
from tests.vlm.test_families import MODELS
from torino import make
from torino.core.errors import MissingSignal, TorinoError, UnmetBudget
from torino.reducers import KeepShare
from torino.reducers.downsample import cover_grid, shrink_grid
from torino.testing import sample_tokens
from torino.vlm import VLM, adapter_for, reduced
from torino.vlm.downsample import resize_packed
from torino.vlm.session import Inputs

POSSIBLE = ("llava", "paligemma", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def shrink(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    return interpolate(pixels, size=size, mode="bicubic", antialias=True)


def test_grids_fit_the_budget_and_keep_the_shape() -> None:
    for rows in range(1, 26):
        for columns in range(1, 26):
            for budget in range(1, rows * columns + 1, 7):
                height, width = shrink_grid((rows, columns), budget)
                assert 1 <= height <= rows
                assert 1 <= width <= columns
                assert height * width <= budget
                # no larger grid between the shapes would fit: one more row and column is too much
                assert (height + 1) * (width + 1) > budget or height == rows or width == columns
    assert shrink_grid((24, 24), 128) == (11, 11)
    with pytest.raises(UnmetBudget, match="cannot give 5 tokens"):
        shrink_grid((2, 2), 5)


def test_cells_cover_every_patch_once() -> None:
    for grid, small in (((4, 4), (2, 3)), ((7, 5), (3, 5)), ((24, 24), (13, 14)), ((3, 3), (1, 1))):
        plan = cover_grid(grid, small, "test")
        assert int(plan.sizes.sum()) == plan.patches
        assert int(plan.sizes.min()) >= 1
        for patch, token in enumerate(plan.assigned.tolist()):
            row, column = patch // grid[1], patch % grid[1]
            assert token == int((row + 0.5) * small[0] / grid[0]) * small[1] + int((column + 0.5) * small[1] / grid[1])
        assert torch.equal(plan.assigned[plan.anchor], torch.arange(len(plan)))
        assert bool((plan.anchor.diff() > 0).all())


@pytest.mark.parametrize("tower", ["clip", "siglip", "dinov2", "registers"])
@torch.no_grad()
def test_tokens_are_those_of_the_smaller_image(tower: str) -> None:
    model, registers = tiny.llava(tower), tiny.REGISTERS if tower == "registers" else 0
    adapter, pixels = adapter_for(model), tiny.pixels(2)
    encoded, plans = adapter.encode_in_tower({"pixel_values": pixels}, make("downsample(budget=7)"))  # type: ignore[arg-type]
    embeds = adapter.embed(encoded, plans)
    vision = model.model.vision_tower
    options = {} if tower in ("dinov2", "registers") else {"interpolate_pos_encoding": True}
    output = vision(shrink(pixels, (28, 42)), output_hidden_states=True, **options)
    states = output.hidden_states[model.config.vision_feature_layer]
    expected = model.model.multi_modal_projector(states[:, int(tower != "siglip") :])
    assert expected.shape[1] == 6 + registers
    for item, features in zip(embeds, expected, strict=True):
        assert torch.allclose(item.features, features, atol=1e-5)
        assert item.sizes.tolist() == [0] * registers + plans[0].sizes.tolist()  # type: ignore[union-attr]


def patchify(image: Tensor, merge: int, patch: int, frames: int) -> Tensor:
    """Cut an image into the patches of Qwen's processor, one value at a time; all frames are the same."""
    channels, height, width = image.shape
    rows: list[Tensor] = []
    for top in range(0, height, merge * patch):
        for left in range(0, width, merge * patch):
            for y in range(top, top + merge * patch, patch):
                for x in range(left, left + merge * patch, patch):
                    piece = image[:, y : y + patch, x : x + patch]
                    rows.append(piece[:, None].expand(channels, frames, patch, patch).flatten())
    return torch.stack(rows)


def test_packed_pixels_are_resized_as_an_image() -> None:
    image = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0))
    packed = patchify(image, 2, 4, 2)
    small = resize_packed(packed, (1, 6, 10), (4, 6), 2, 4, 2)
    assert torch.allclose(small, patchify(shrink(image[None], (16, 24))[0], 2, 4, 2), atol=1e-5)
    assert torch.equal(resize_packed(packed, (1, 6, 10), (6, 10), 2, 4, 2), packed)


@pytest.mark.parametrize("family", POSSIBLE)
def test_all_patches_equal_the_stock_model_and_the_session_equals_reduced(family: str) -> None:
    model, batches = MODELS[family]()
    generation: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    generation["suppress_tokens"] = [int(model.config.image_token_id)]
    for inputs in batches:
        length = inputs["input_ids"].shape[1]
        stock = model.generate(**inputs, **generation)
        with reduced(model, KeepShare(make("downsample(budget=1)"), 1.0)):
            assert torch.equal(model.generate(**inputs, **generation), stock)
        for positions, attention in (("compact", "plain"), ("original", "proportional"), ("median", "restore")):
            host: dict[str, Any] = {"positions": positions, "attention": attention}
            reducer = KeepShare(make("downsample(budget=1)"), 0.5)
            vlm, given = VLM(model, _Decoder(), **host), Inputs(dict(inputs), ("",) * len(inputs["input_ids"]))
            output = vlm.generate(given, [vlm.reduce(vlm.encode(given, [reducer]), reducer)], **generation)
            with reduced(model, reducer, **host) as trace:
                assert torch.equal(model.generate(**inputs, **generation)[:, length:], output.ids)
            assert all(len(plan) <= max(1, round(plan.patches / 2)) for plan in trace)
            assert trace.after == sum(len(plan) for plan in trace) < trace.before


class _Decoder:
    chat_template = None

    @staticmethod
    def batch_decode(rows: Tensor, skip_special_tokens: bool = True) -> list[str]:
        return [str(row.tolist()) for row in rows]


@pytest.mark.parametrize("family", [family for family in MODELS if family not in POSSIBLE])
def test_other_families_are_refused(family: str) -> None:
    model, (inputs, _) = MODELS[family]()
    with (
        pytest.raises(TorinoError, match="shrinks the image before the vision tower, and"),
        reduced(model, make("downsample(budget=2)")),
    ):
        model.generate(**inputs, max_new_tokens=1)


def test_tokens_alone_are_refused() -> None:
    with pytest.raises(MissingSignal, match="shrinks the image itself"):
        make("downsample(budget=2)").plan(sample_tokens(16)[0])


def test_qwen_keeps_positions_of_the_full_image() -> None:
    model = tiny_qwen.make_model("qwen2_vl").eval()
    inputs = tiny_qwen.make_inputs([[(4, 4)]])
    short, call = adapter_for(model).reduce_inputs(inputs, make("downsample(budget=4)"), "original")
    is_image = short["input_ids"][0] == int(model.config.image_token_id)
    assert call.reductions[0].anchor.tolist() == [0, 2, 8, 10]
    place = short["position_ids"][2:, 0][:, is_image]
    assert (place - place[:, :1]).tolist() == [[0, 0, 2, 2], [0, 2, 0, 2]]
