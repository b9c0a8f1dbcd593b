"""VisualTokens: error messages, and token files in every accepted layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torino import TorinoError, VisualTokens
from torino.core.errors import BadFile, BadTokens, MissingSignal
from torino.core.io import write_arrays
from torino.core.tokens import Origin, load_tokens, ragged_patches, save_tokens


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape)).float().view(*shape)


# ---------------------------------------------------------------------- patches


@pytest.mark.parametrize(
    ("patches", "words"),
    [
        (torch.zeros(4), r"shape \(N, D\), got \(4,\)"),
        (torch.zeros(1, 4, 2), r"shape \(N, D\), got \(1, 4, 2\)"),
        (torch.zeros(()), r"shape \(N, D\)"),
        (torch.zeros(0, 2), "patches is empty"),
        (torch.zeros(4, 0), "patches is empty"),
        (torch.zeros(4, 2, dtype=torch.int64), "floating point, got torch.int64"),
        (torch.zeros(4, 2, dtype=torch.bool), "floating point, got torch.bool"),
        (torch.zeros(4, 2, dtype=torch.complex64), "floating point, got torch.complex64"),
        (np.zeros((4, 2), dtype=np.float32), "torch Tensor, got ndarray"),
        ([[0.0, 1.0]] * 4, "torch Tensor, got list"),
        (None, "torch Tensor, got NoneType"),
    ],
)
def test_patches_of_another_shape_or_type_are_refused(patches: Any, words: str) -> None:
    with pytest.raises(BadTokens, match=words):
        VisualTokens(patches, (2, 2))
    with pytest.raises(BadTokens, match=words):
        VisualTokens.of(patches)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_values_that_are_not_finite_are_refused_by_row(value: float, dtype: torch.dtype) -> None:
    patches = torch.zeros(9, 3, dtype=dtype)
    patches[7, 2] = patches[5, 0] = value
    with pytest.raises(BadTokens, match=r"NaN or infinite values, first in row 5.*half precision"):
        VisualTokens.of(patches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_every_float_type_is_taken_as_it_is(dtype: torch.dtype) -> None:
    patches = torch.zeros(4, 3, dtype=dtype)
    tokens = VisualTokens.of(patches)
    assert tokens.patches is patches
    assert (len(tokens), tokens.width, tokens.grid) == (4, 3, (2, 2))


# ---------------------------------------------------------------------- grids and signals


@pytest.mark.parametrize("grid", [(2, 2), (1, 5), (0, 0), (6, 0), (-2, -3), (-1, -6), (7, 1)])
def test_a_grid_of_another_size_is_refused(grid: tuple[int, int]) -> None:
    with pytest.raises(BadTokens, match=rf"grid {grid[0]}x{grid[1]} has .* but 6 were given.*cls="):
        VisualTokens(torch.zeros(6, 2), grid)


@pytest.mark.parametrize("grid", [(6,), (2, 3, 1), (), 6, "23", (2.0, 3.0)])
def test_a_grid_that_is_no_pair_of_whole_numbers_is_refused(grid: Any) -> None:
    with pytest.raises(BadTokens, match="grid"):
        VisualTokens(torch.zeros(6, 2), grid)


@pytest.mark.parametrize("count", [2, 3, 5, 577])
def test_no_square_is_guessed_where_there_is_none(count: int) -> None:
    with pytest.raises(BadTokens, match=rf"{count} patches do not form a square grid. Give grid=\(rows, columns\)"):
        VisualTokens.of(torch.zeros(count, 2))
    assert VisualTokens.of(torch.zeros(count, 2), grid=(1, count)).grid == (1, count)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("cls", (3,), r"cls must have shape \(2\), got \(3,\)"),
        ("cls", (1, 2), r"cls must have shape \(2\), got \(1, 2\)"),
        ("cls_attention", (4,), r"cls_attention must have shape \(any x 4\), got \(4,\)"),
        ("cls_attention", (4, 5), r"cls_attention must have shape \(any x 4\)"),
        ("keys", (5, 2), r"keys must have shape \(4 x any\), got \(5, 2\)"),
        ("keys", (4, 2, 1), r"keys must have shape \(4 x any\)"),
    ],
)
def test_signals_of_another_shape_are_refused(name: str, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(BadTokens, match=words):
        VisualTokens(torch.zeros(4, 2), (2, 2), **{name: torch.zeros(shape)})


@pytest.mark.parametrize("name", ["cls", "cls_attention", "keys"])
def test_signals_that_are_no_tensor_are_refused(name: str) -> None:
    with pytest.raises(BadTokens, match=name):
        VisualTokens(torch.zeros(4, 2), (2, 2), **{name: [0.0, 0.0]})


@pytest.mark.parametrize("name", ["cls", "cls_attention", "keys"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_signals_that_are_not_finite_are_refused(name: str, value: float) -> None:
    signal = torch.full({"cls": (2,), "cls_attention": (3, 4), "keys": (4, 5)}[name], value)
    with pytest.raises(BadTokens, match=f"{name}.*NaN or infinite"):
        VisualTokens(torch.zeros(4, 2), (2, 2), **{name: signal})


@pytest.mark.parametrize("name", ["cls", "cls_attention", "keys"])
def test_a_missing_signal_is_named_together_with_who_wanted_it(name: str) -> None:
    tokens = VisualTokens(torch.zeros(4, 2), (2, 2))
    with pytest.raises(MissingSignal) as caught:
        tokens.signal(name, "fastv(layer=2)")
    assert f"fastv(layer=2) needs the signal {name}" in str(caught.value)
    assert f"VisualTokens(..., {name}=...)" in str(caught.value)


def test_signals_that_are_there_come_back() -> None:
    signals = {"cls": torch.ones(2), "cls_attention": torch.ones(3, 4), "keys": torch.ones(4, 7)}
    tokens = VisualTokens(torch.zeros(4, 2), (2, 2), **signals)
    for name, value in signals.items():
        assert tokens.signal(name, "me") is value


def test_a_copy_with_changes_is_checked_again() -> None:
    tokens = VisualTokens(torch.zeros(4, 2), (2, 2), origin=Origin("clip", 3), cls=torch.ones(2))
    other = tokens.with_(grid=(1, 4))
    assert (other.grid, tokens.grid, other.origin) == ((1, 4), (2, 2), tokens.origin)
    assert other.cls is tokens.cls
    with pytest.raises(BadTokens, match="grid 1x3"):
        tokens.with_(grid=(1, 3))
    with pytest.raises(AttributeError):
        tokens.grid = (4, 1)  # type: ignore[misc]


def test_printed_in_words() -> None:
    tokens = VisualTokens(torch.zeros(6, 4), (2, 3), Origin("openai/clip", 22))
    assert repr(tokens) == "VisualTokens(6 patches of width 4 on a 2x3 grid, from openai/clip, block 22)"
    assert str(Origin()) == "an unnamed encoder, block unknown"
    assert str(Origin("clip", 0)) == "clip, block 0"


def test_every_refusal_is_a_value_error() -> None:
    for error in (BadTokens, BadFile, MissingSignal):
        assert issubclass(error, TorinoError)
        assert issubclass(error, ValueError)


# ---------------------------------------------------------------------- concatenation


def test_packing_lays_images_end_to_end() -> None:
    images = [VisualTokens.of(numbers(4, 2)), VisualTokens(numbers(3, 2) + 50, (1, 3))]
    packed = ragged_patches(images)
    assert packed.offsets.tolist() == [0, 4, 7]
    assert torch.equal(packed[0], images[0].patches)
    assert torch.equal(packed[1], images[1].patches)


def test_one_image_is_packed_without_a_copy() -> None:
    tokens = VisualTokens.of(numbers(4, 2))
    assert ragged_patches([tokens]).values.data_ptr() == tokens.patches.data_ptr()


def test_packing_nothing_or_two_widths_is_refused() -> None:
    with pytest.raises(BadTokens, match="list of images is empty"):
        ragged_patches([])
    with pytest.raises(BadTokens, match=r"same width, got widths \[2, 3\]"):
        ragged_patches([VisualTokens.of(numbers(4, 3)), VisualTokens.of(numbers(4, 2))])


# ---------------------------------------------------------------------- files

ENDINGS = (".npz", ".safetensors")


@pytest.mark.parametrize("ending", ENDINGS)
@given(
    grids=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=4),
    origin=st.sampled_from([Origin(), Origin("openai/clip", 22), Origin("größe"), Origin("", 0), Origin("a b/c", -1)]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.float64, torch.bfloat16]),
)
@settings(max_examples=15)
def test_what_is_saved_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    ending: str,
    grids: list[tuple[int, int]],
    origin: Origin,
    dtype: torch.dtype,
) -> None:
    images = [
        VisualTokens((numbers(rows * columns, 3) / 4 + i).to(dtype), (rows, columns), origin)
        for i, (rows, columns) in enumerate(grids)
    ]
    path = tmp_path_factory.mktemp("tokens") / f"tokens{ending}"
    assert save_tokens(images, path) == path
    back = load_tokens(path)
    assert [tokens.grid for tokens in back] == grids
    assert {tokens.origin for tokens in back} == {origin}
    for one, other in zip(back, images, strict=True):
        assert torch.equal(one.patches.float(), other.patches.float())


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_layout_is_read(tmp_path: Path, ending: str) -> None:
    def load(arrays: dict[str, torch.Tensor]) -> list[VisualTokens]:
        return load_tokens(write_arrays(tmp_path / f"t{ending}", arrays))

    one = load({"patches": numbers(9, 2)})
    assert [tokens.grid for tokens in one] == [(3, 3)]
    assert torch.equal(one[0].patches, numbers(9, 2))
    two = load({"patches": numbers(2, 4, 3)})
    assert [tokens.grid for tokens in two] == [(2, 2), (2, 2)]
    assert torch.equal(two[1].patches, numbers(2, 4, 3)[1])
    ragged = load({"patches": numbers(10, 2), "grids": torch.tensor([[2, 3], [1, 4]])})
    assert [tokens.grid for tokens in ragged] == [(2, 3), (1, 4)]
    assert torch.equal(ragged[1].patches, numbers(10, 2)[6:])
    stacked = load({"patches": numbers(2, 6, 3), "grids": torch.tensor([[2, 3], [3, 2]])})
    assert [tokens.grid for tokens in stacked] == [(2, 3), (3, 2)]
    for name, grid in (("grid", torch.tensor([1, 6])), ("grids", torch.tensor([[1, 6]]))):
        assert load({"patches": numbers(6, 2), name: grid})[0].grid == (1, 6)
    assert one[0].origin == Origin()


@pytest.mark.parametrize(
    ("arrays", "error", "words"),
    [
        ({"tokens": numbers(4, 2)}, BadFile, "no array called 'patches'; it has tokens.*Give it shape"),
        ({}, BadFile, "no array called 'patches'; it has none"),
        ({"patches": numbers(4)}, BadTokens, r"shape \(N, D\)"),
        ({"patches": numbers(1, 1, 4, 2)}, BadTokens, r"shape \(N, D\)"),
        ({"patches": numbers(5, 2)}, BadTokens, "do not form a square"),
        ({"patches": numbers(2, 5, 2)}, BadTokens, "do not form a square"),
        ({"patches": numbers(4, 2).long()}, BadTokens, "floating point"),
        ({"patches": numbers(4, 2) * math.nan}, BadTokens, "NaN"),
        ({"patches": numbers(4, 2), "grids": torch.tensor([[1, 3]])}, BadTokens, "grid 1x3 has 3"),
        ({"patches": numbers(9, 2), "grids": torch.tensor([[2, 2], [2, 2]])}, BadTokens, "have 8 patches, but .*9"),
        ({"patches": numbers(8, 2), "grids": torch.tensor([[3, 4], [-2, 2]])}, BadTokens, "grids"),
        ({"patches": numbers(8, 2), "grids": torch.tensor([[-2, -2], [2, 2]])}, BadTokens, "grid -2x-2"),
        ({"patches": numbers(8, 2), "grids": torch.tensor([[8, 1], [0, 3]])}, BadTokens, "grids"),
        ({"patches": numbers(2, 4, 2), "grids": torch.tensor([[2, 2]])}, BadTokens, "2 images but 1 grids"),
        ({"patches": numbers(4, 2), "grids": torch.ones(1, 2)}, BadTokens, "must be integers"),
        ({"patches": numbers(4, 2), "grids": torch.ones(1, 3).long()}, BadTokens, r"shape \(images, 2\)"),
        ({"patches": numbers(4, 2), "grids": torch.ones(1, 1, 2).long()}, BadTokens, r"shape \(images, 2\)"),
        ({"patches": numbers(4, 2), "grids": torch.zeros(0, 2).long()}, BadTokens, "0 grids"),
    ],
)
@pytest.mark.parametrize("ending", ENDINGS)
def test_files_of_another_layout_are_refused(
    tmp_path: Path, ending: str, arrays: dict[str, torch.Tensor], error: type[Exception], words: str
) -> None:
    path = write_arrays(tmp_path / f"t{ending}", arrays)
    with pytest.raises(error, match=words):
        load_tokens(path)


def test_the_origin_is_read_from_the_metadata(tmp_path: Path) -> None:
    for ending in ENDINGS:
        path = write_arrays(tmp_path / f"t{ending}", {"patches": numbers(4, 2)}, {"encoder": "clip", "block": "22"})
        assert load_tokens(path)[0].origin == Origin("clip", 22)


@pytest.mark.parametrize("block", ["", "last", "2.5", "--3", "²", "None"])
def test_a_block_that_is_no_number_is_unknown_or_refused(tmp_path: Path, block: str) -> None:
    path = write_arrays(tmp_path / "t.npz", {"patches": numbers(4, 2)}, {"encoder": "clip", "block": block})
    try:
        origin = load_tokens(path)[0].origin
    except TorinoError:
        return
    assert origin == Origin("clip", None)


def test_plain_numpy_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    np.savez(path, patches=np.arange(8.0, dtype=np.float32).reshape(4, 2), encoder="clip", block="7")
    tokens = load_tokens(path)[0]
    assert (tokens.origin, tokens.grid) == (Origin("clip", 7), (2, 2))
    np.savez(path, patches=np.arange(8.0).reshape(4, 2))
    assert load_tokens(path)[0].patches.dtype == torch.float64


def test_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="There is no file"):
        load_tokens(tmp_path / "missing.npz")
    (tmp_path / "t.npz").write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(BadFile, match="truncated"):
        load_tokens(tmp_path / "t.npz")
    (tmp_path / "t.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{")
    with pytest.raises(BadFile, match="truncated"):
        load_tokens(tmp_path / "t.safetensors")
    np.savez(tmp_path / "p.npz", patches=np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(BadFile, match="never loaded"):
        load_tokens(tmp_path / "p.npz")
    with pytest.raises(BadFile, match=r"Accepted: \.npz, \.safetensors"):
        save_tokens([VisualTokens.of(numbers(4, 2))], tmp_path / "t.pt")


def test_one_file_holds_one_origin_and_one_width(tmp_path: Path) -> None:
    clip = VisualTokens.of(numbers(4, 2), origin=Origin("clip", 3))
    with pytest.raises(BadTokens, match="same origin, got 2"):
        save_tokens([clip, VisualTokens.of(numbers(4, 2))], tmp_path / "t.npz")
    with pytest.raises(BadTokens, match="same width"):
        save_tokens([clip, VisualTokens.of(numbers(4, 3))], tmp_path / "t.npz")
    with pytest.raises(BadTokens, match="list of images is empty"):
        save_tokens([], tmp_path / "t.npz")
    assert not list(tmp_path.iterdir())
