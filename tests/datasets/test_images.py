"""Images are opened as upright RGB: rotated, transparent, of any bit depth, animated, broken or huge."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from torino.core.errors import BadFile, BadParameter
from torino.datasets.images import as_seen, mean_color, open_image, pad_square, prepare


def encode_image(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    memory = io.BytesIO()
    image.save(memory, kind, **options)
    return memory.getvalue()


def get_color(image: Image.Image, at: tuple[int, int] = (0, 0)) -> tuple[int, int, int]:
    assert image.mode == "RGB"
    return image.getpixel(at)  # type: ignore[return-value]


def test_path_bytes_and_image_give_the_same_pixels(tmp_path: Path) -> None:
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8))
    photo.save(tmp_path / "photo.png")
    for source in (tmp_path / "photo.png", str(tmp_path / "photo.png"), encode_image(photo), photo):
        opened = open_image(source)
        assert opened.mode == "RGB"
        assert np.array_equal(np.asarray(opened), np.asarray(photo))


def test_exif_orientation_is_applied() -> None:
    photo = Image.new("RGB", (4, 2), (255, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6
    assert open_image(encode_image(photo, "JPEG", exif=exif)).size == (2, 4)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr", "HSV"])
def test_plain_modes_become_rgb(mode: str) -> None:
    white = Image.new("RGB", (3, 2), (255, 255, 255)).convert(mode)
    assert get_color(open_image(white)) == (255, 255, 255)


def test_cmyk_from_a_file() -> None:
    ink = Image.new("CMYK", (4, 4), (0, 0, 0, 255))
    assert max(get_color(open_image(encode_image(ink, "JPEG")))) < 8
    assert max(get_color(open_image(encode_image(ink, "TIFF")))) < 8


@pytest.mark.parametrize("mode", ["LA", "RGBA", "PA", "La", "RGBa"])
def test_transparency_is_blended_with_white(mode: str) -> None:
    clear = Image.new("RGBA", (2, 2), (0, 0, 0, 0))
    image = clear.convert("LA").convert(mode) if mode == "La" else clear.convert(mode)
    assert get_color(open_image(image)) == (255, 255, 255)


def test_palette_with_a_transparent_entry() -> None:
    image = Image.new("P", (2, 2), 0)
    image.putpalette([0, 0, 0, 255, 0, 0])
    assert get_color(open_image(encode_image(image, transparency=0))) == (255, 255, 255)
    assert get_color(open_image(encode_image(image))) == (0, 0, 0)


def test_sixteen_bit_grays_are_scaled() -> None:
    ramp = np.array([[0, 16448, 32896, 65535]], np.uint16)
    for source in (encode_image(Image.fromarray(ramp)), encode_image(Image.fromarray(ramp), "TIFF")):
        assert np.asarray(open_image(source))[0, :, 0].tolist() == [0, 64, 128, 255]
    integers = Image.fromarray(ramp.astype(np.int32))
    assert np.asarray(open_image(integers))[0, :, 0].tolist() == [0, 64, 128, 255]


@pytest.mark.parametrize("white", [1.0, 255.0, 65535.0, 1e6])
def test_floating_point_grays_are_scaled(white: float) -> None:
    gray = Image.fromarray(np.array([[0, white, np.nan]], np.float32))
    assert np.asarray(open_image(gray))[0, :, 0].tolist() == [0, 255, 0]
    assert get_color(open_image(Image.fromarray(np.zeros((1, 1), np.float32)))) == (0, 0, 0)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_first_frame_of_an_animation_is_used_with_a_warning(kind: str) -> None:
    red, blue = Image.new("RGB", (8, 8), (255, 0, 0)), Image.new("RGB", (8, 8), (0, 0, 255))
    data = encode_image(red, kind, save_all=True, append_images=[blue])
    with pytest.warns(UserWarning, match="first"):
        first = open_image(data)
    assert get_color(first)[0] > 200
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_image(encode_image(red, kind))


def test_photo_with_previews_is_not_an_animation() -> None:
    red = Image.new("RGB", (8, 8), (255, 0, 0))
    data = encode_image(red, "MPO", save_all=True, append_images=[red])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_image(data).size == (8, 8)


def test_single_pixel_is_an_image() -> None:
    assert open_image(encode_image(Image.new("RGB", (1, 1), (9, 8, 7)))).getpixel((0, 0)) == (9, 8, 7)
    assert pad_square(Image.new("RGB", (1, 1))).size == (1, 1)


def test_invalid_sources_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    (tmp_path / "words.jpg").write_text("text")
    (tmp_path / "empty.png").write_bytes(b"")
    cut = encode_image(photo)[: len(encode_image(photo)) // 2]
    broken = bytearray(encode_image(photo))
    broken[60:200] = b"\x00" * 140
    cases: list[tuple[object, str]] = [
        (tmp_path / "none.jpg", "There is no file"),
        (tmp_path, "folder"),
        ("https://example.org/cat.jpg", "does not download images"),
        ("data:image/png;base64,AAAA" + "A" * 500, "does not download images"),
        ("x" * 5000, "file|read"),
        (tmp_path / "words.jpg", "not an image"),
        (tmp_path / "empty.png", "not an image"),
        (cut, "cut off or damaged"),
        (bytes(broken), "cut off or damaged|not an image"),
        (b"", "not an image"),
        (Image.new("RGB", (0, 3)), "0x3 pixels"),
        (3, "int"),
    ]
    for source, expected in cases:
        with pytest.raises(BadFile, match=expected) as caught:
            open_image(source)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 400
    monkeypatch.setenv("TORINO_MAX_PIXELS", "1000")
    with pytest.raises(BadFile, match="64x64 pixels; torino accepts up to 1,000"):
        open_image(encode_image(photo))
    with pytest.raises(BadFile, match="padded to a square"):
        prepare(Image.new("RGB", (3, 50)), "square")


def test_decompression_bomb_is_refused_without_decoding(tmp_path: Path) -> None:
    path = tmp_path / "bomb.png"
    small = bytearray(encode_image(Image.new("1", (8, 8))))
    small[16:24] = (60000).to_bytes(4, "big") * 2
    small[29:33] = zlib.crc32(bytes(small[12:29])).to_bytes(4, "big")
    path.write_bytes(small)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(BadFile, match="Scale it down"):
            open_image(path)


def make_png(width: int, height: int, depth: int, color: int) -> bytes:
    """A black PNG, which is tiny; ``color`` 0 is gray, 6 is RGBA."""
    row = bytes(1 + width * (4 if color == 6 else 1) * depth // 8)
    compressor = zlib.compressobj(9)
    pixels = b"".join([*(compressor.compress(row) for _ in range(height)), compressor.flush()])
    chunks = {b"IHDR": struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0), b"IDAT": pixels, b"IEND": b""}
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks.items()
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def make_tiled_tiff(tile: int) -> bytes:
    """A TIFF of 16 x 16 pixels that declares larger tiles."""
    data = zlib.compress(bytes(16 * 16 * 3))
    tags = [
        (256, 16),
        (257, 16),
        (258, 8),
        (259, 8),
        (262, 2),
        (277, 3),
        (322, tile),
        (323, tile),
        (324, 8),
        (325, len(data)),
    ]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0" + struct.pack("<I", 8 + len(data)) + data + struct.pack("<H", len(tags)) + entries + bytes(4)


def peak_memory(path: Path) -> tuple[int, str]:
    """Open an image in another process; return its additional memory in bytes, and the result."""
    code = (
        "import resource, sys\n"
        "from torino.datasets.images import open_image\n"
        "used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "before = used()\n"
        "try: result = open_image(sys.argv[1]).size\n"
        "except ValueError as error: result = error\n"
        "print(used() - before, result)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    memory, _, result = done.stdout.strip().partition(" ")
    return int(memory), result


@pytest.mark.skipif(sys.platform != "linux", reason="other systems count ru_maxrss in other units")
@pytest.mark.parametrize(("depth", "color"), [(16, 0), (8, 6)])
def test_memory_of_crafted_images_is_bounded(tmp_path: Path, depth: int, color: int) -> None:
    (tmp_path / "large.png").write_bytes(make_png(13_000, 13_000, depth, color))
    memory, result = peak_memory(tmp_path / "large.png")
    assert "13000x13000 pixels; torino accepts up to 67,108,864" in result
    assert memory < 50e6
    (tmp_path / "small.png").write_bytes(make_png(4000, 4000, depth, color))
    memory, result = peak_memory(tmp_path / "small.png")
    assert result == "(4000, 4000)"
    assert memory < 16 * 4000**2


def test_large_tiles_are_refused() -> None:
    assert open_image(make_tiled_tiff(16)).size == (16, 16)
    with pytest.raises(BadFile, match="stored in tiles of 16000x16000 pixels; torino accepts up to 67,108,864"):
        open_image(make_tiled_tiff(16_000))


def test_limit_of_pixels_can_be_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # the limit of Pillow
    monkeypatch.setenv("TORINO_MAX_PIXELS", "3000")
    with pytest.raises(BadFile, match=r"64x64 pixels; torino accepts up to 3,000 pixels.* TORINO_MAX_PIXELS"):
        open_image(encode_image(Image.new("RGB", (64, 64))))
    monkeypatch.setenv("TORINO_MAX_PIXELS", "5000")
    assert open_image(encode_image(Image.new("RGB", (64, 64)))).size == (64, 64)


def test_bands_do_not_change_the_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    sources = [
        Image.fromarray(rng.integers(0, 256, (40, 30, 4), dtype=np.uint8)),
        Image.fromarray(rng.integers(0, 65536, (40, 30), dtype=np.uint16)),
        Image.fromarray(rng.random((40, 30), dtype=np.float32) * 300),
        Image.fromarray(rng.integers(0, 256, (40, 30, 4), dtype=np.uint8)).convert("PA"),
    ]
    whole = [np.asarray(open_image(source)) for source in sources]
    monkeypatch.setattr("torino.datasets.images.BAND_PIXELS", 7 * 30)
    assert all(np.array_equal(before, open_image(source)) for before, source in zip(whole, sources, strict=True))


def test_eps_does_not_start_ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker, program = tmp_path / "started", tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {marker}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)  # search again
    Image.new("RGB", (8, 8)).save(tmp_path / "photo.jpg", "EPS")
    with pytest.raises(BadFile, match=r"not an image in a known format\. Give a JPEG, PNG, WebP, GIF, BMP or TIFF"):
        open_image(tmp_path / "photo.jpg")
    assert not marker.exists()


@pytest.mark.parametrize("kind", ["PPM", "TGA", "PCX", "ICO", "SGI", "DDS"])
def test_other_formats_are_refused(kind: str) -> None:
    with pytest.raises(BadFile, match="not an image in a known format"):
        open_image(encode_image(Image.new("RGB", (16, 16)), kind))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_photo_formats_are_read(kind: str) -> None:
    assert open_image(encode_image(Image.new("RGB", (16, 16)), kind)).size == (16, 16)


def test_square_padding_equals_the_one_of_llava() -> None:
    from transformers import LlavaImageProcessorPil

    pad = LlavaImageProcessorPil(do_pad=True, size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    for size in ((9, 20), (20, 9), (13, 10), (7, 7)):
        pixels = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        photo = Image.fromarray(pixels)
        ours = pad(prepare(photo, "square", mean_color(pad)), do_pad=False, return_tensors="pt")["pixel_values"]
        theirs = pad(photo, return_tensors="pt")["pixel_values"]
        assert torch.equal(ours, theirs)
    assert mean_color(None) == mean_color(pad) == (122, 116, 104)


def test_prepare_pads_or_checks_the_shape() -> None:
    photo = Image.new("RGB", (30, 20))
    assert prepare(photo, "crop") is photo
    assert prepare(photo, "square").size == (30, 30)
    with pytest.raises(BadParameter, match="'crop' or 'square'"):
        prepare(photo, "stretch")  # type: ignore[arg-type]
    with pytest.raises(BadFile, match="more than 200 times"):
        prepare(Image.new("RGB", (1, 5000)))
    assert prepare(Image.new("RGB", (1, 5000)), "square").size == (5000, 5000)


def test_as_seen_inverts_the_processor() -> None:
    from transformers import CLIPImageProcessorPil

    processor = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    photo = Image.fromarray(np.random.default_rng(2).integers(0, 256, (28, 28, 3), dtype=np.uint8))
    (seen,) = as_seen(processor(photo, return_tensors="pt"), processor, [photo])
    assert np.array_equal(np.asarray(seen), np.asarray(photo))
    assert as_seen({"pixel_values": torch.zeros(4, 12)}, processor, [photo]) == [photo]
    assert as_seen({}, processor, [photo]) == [photo]


def test_the_size_is_read_from_the_header() -> None:
    from torino.datasets.images import image_size

    file = io.BytesIO()
    Image.new("RGB", (30, 20)).save(file, "PNG")
    cut = file.getvalue()[:60]  # the header alone
    assert image_size(file.getvalue()) == image_size(cut) == (30, 20)
    with pytest.raises(BadFile, match="not an image"):
        image_size(b"something else")
