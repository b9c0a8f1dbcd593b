"""Images from wherever they come: upright, in RGB, one frame, and of a size that a tower can take. Needs Pillow."""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from torino.core.errors import BadFile, BadParameter, TorinoError

try:
    from PIL import Image, ImageOps, UnidentifiedImageError
except ImportError as error:
    raise TorinoError(
        'Reading images needs Pillow, which is not installed. Install it with pip install "torino[vlm]".'
    ) from error

Padding = Literal["crop", "square"]
Picture = str | os.PathLike[str] | bytes | Image.Image
"""What :func:`open_image` takes: a path, the bytes of a file, or an opened image."""

LARGEST = 178_956_970  # pixels; Pillow calls anything above it a decompression bomb
LONGEST = 200  # times longer than wide; the short side is scaled up, so a line of pixels would fill the memory
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
WHITE = 255

_ADDRESS = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*://|data:)")


def open_image(source: Picture) -> Image.Image:
    """Open an image and bring it to RGB, upright as its EXIF says.

    Transparency is laid over white. 16-bit and floating-point greyscale is scaled to 8 bits. Of an animation or a
    file of several pages the first frame is taken, with a warning. Nothing is fetched from the web.

    Parameters
    ----------
    source : path, bytes or PIL image

    Returns
    -------
    PIL.Image.Image
        In mode RGB, of at least one pixel.

    Raises
    ------
    BadFile
        If it is missing, a folder, a web address, not an image, broken, or larger than a decompression bomb.

    Examples
    --------
    >>> open_image(Image.new("LA", (2, 1), (0, 0))).getpixel((0, 0))
    (255, 255, 255)
    """
    name = _name(source)
    if isinstance(source, Image.Image):
        return _read(source, name)
    with _open(source, name) as opened:
        return _read(opened, name)


def pad_square(image: Image.Image, colour: tuple[int, int, int] | None = None) -> Image.Image:
    """Centre an image on a square of one colour, as the authors of LLaVA-1.5 do.

    Parameters
    ----------
    image : PIL.Image.Image
        In mode RGB.
    colour : (int, int, int), optional
        By default the mean colour of CLIP's training images; :func:`mean_colour` reads it off a processor.

    Examples
    --------
    >>> pad_square(Image.new("RGB", (4, 2))).size, pad_square(Image.new("RGB", (4, 2))).getpixel((0, 0))
    ((4, 4), (122, 116, 104))
    """
    width, height = image.size
    if width == height:
        return image
    side = max(width, height)
    square = Image.new("RGB", (side, side), colour or mean_colour(None))
    square.paste(image, ((side - width) // 2, (side - height) // 2))
    return square


def prepare(image: Image.Image, padding: Padding = "crop", colour: tuple[int, int, int] | None = None) -> Image.Image:
    """Bring an image to the shape that its processor is to see.

    Parameters
    ----------
    image : PIL.Image.Image
    padding : {"crop", "square"}
        ``"crop"`` leaves the shape to the model's own processor, which for LLaVA-1.5 scales the short side and cuts
        what sticks out. ``"square"`` pads to a square first, so that nothing is cut: the paper's evaluation kit and
        the authors of LLaVA-1.5 do this, and it changes scores.
    colour : (int, int, int), optional
        Of the padding, see :func:`pad_square`.
    """
    if padding not in get_args(Padding):
        raise BadParameter(f"padding must be 'crop' or 'square', got {padding!r}.")
    width, height = image.size
    if padding == "square":
        if max(width, height) ** 2 > LARGEST:
            raise _too_large("The image", f"{width}x{height} pixels and would be padded to a square")
        return pad_square(image, colour)
    if max(width, height) > LONGEST * min(width, height):
        raise BadFile(
            f"The image is {width}x{height} pixels: one side is more than {LONGEST} times the other, and scaling the "
            "short one up would take too much memory. Crop it, or pad it to a square (padding='square')."
        )
    return image


def mean_colour(processor: Any) -> tuple[int, int, int]:
    """The mean colour that a processor (or its image processor) subtracts, in 0 to 255; CLIP's where it says none."""
    inner = getattr(processor, "image_processor", processor)
    mean: Sequence[float] = getattr(inner, "image_mean", None) or CLIP_MEAN
    red, green, blue = (int(value * 255) for value in mean)
    return red, green, blue


def as_seen(inputs: Mapping[str, Any], processor: Any, images: Sequence[Image.Image]) -> list[Image.Image]:
    """The images as the tower sees them, after scaling and cropping, for drawing: one for each picture or tile.

    Where the processor hands out patches instead of pictures (Qwen, SigLIP2), which then cover the whole image, the
    images are given back as they are.
    """
    pixels = inputs.get("pixel_values")
    inner = getattr(processor, "image_processor", processor)
    if pixels is None or getattr(pixels, "ndim", 0) not in (4, 5) or pixels.shape[-3] != 3:
        return list(images)
    values = pixels.detach().float().cpu().numpy().reshape(-1, *pixels.shape[-3:])
    mean = np.array(getattr(inner, "image_mean", None) or CLIP_MEAN).reshape(3, 1, 1)
    deviation = np.array(getattr(inner, "image_std", None) or (1.0, 1.0, 1.0)).reshape(3, 1, 1)
    if getattr(inner, "do_normalize", True) is False:
        mean, deviation = np.zeros_like(mean), np.ones_like(deviation)
    shown = ((values * deviation + mean) * 255).round().clip(0, 255).astype(np.uint8)
    return [Image.fromarray(np.ascontiguousarray(picture.transpose(1, 2, 0))) for picture in shown]


# ------------------------------------------------------------------ opening


def _read(opened: Image.Image, name: str) -> Image.Image:
    width, height = opened.size
    if width < 1 or height < 1:
        raise BadFile(f"{name} is empty: {width}x{height} pixels. Give an image of at least one pixel.")
    if width * height > LARGEST:
        raise _too_large(name, f"{width}x{height} pixels")
    try:
        opened.load()
        several = bool(getattr(opened, "is_animated", False))
        image = _rgb(_upright(opened))
    except Exception as error:  # decoders raise whatever they stumble over
        raise _broken(name, error) from error
    if several and opened.format != "MPO":  # an MPO is a photo with its previews
        warnings.warn(f"{name} holds several frames; only the first is looked at.", stacklevel=3)
    return image


def _open(source: str | os.PathLike[str] | bytes, name: str) -> Image.Image:
    file: Path | io.BytesIO
    if isinstance(source, bytes | bytearray | memoryview):
        file = io.BytesIO(source)
    elif isinstance(source, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]: callers may not check
        file = _existing(os.fspath(source), name)
    else:
        raise BadFile(f"An image is a path, bytes or a PIL image; got {type(source).__name__}.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # large, but below our own limit
            return Image.open(file)
    except Image.DecompressionBombError as error:
        raise _too_large(name, f"more than {LARGEST:,} pixels") from error
    except UnidentifiedImageError as error:
        raise BadFile(f"{name} is not an image in a known format. Give a JPEG, PNG, WebP, GIF, BMP or TIFF.") from error
    except Exception as error:
        raise _broken(name, error) from error


def _existing(text: str, name: str) -> Path:
    if _ADDRESS.match(text):
        raise BadFile(f"{name} is an address, and torino fetches no images. Download it and give the file.")
    path = Path(text).expanduser()
    try:
        if path.is_dir():
            raise BadFile(f"{name} is a folder. Give one image in it.")
        if not path.is_file():
            raise BadFile(f"There is no file {name}. Give the path of an image.")
    except OSError as error:  # a name too long for the disk, for one
        raise BadFile(f"Cannot read {name}: {error.strerror or error}. Give the path of an image.") from error
    return path


def _name(source: object) -> str:
    if isinstance(source, bytes | bytearray | memoryview):
        return "The image"
    text = str(getattr(source, "filename", "") or "The image") if isinstance(source, Image.Image) else str(source)
    return text if len(text) <= 120 else text[:100] + "…"


def _broken(name: str, error: Exception) -> BadFile:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return BadFile(f"{name} cannot be read as an image ({reason}). It may be cut off or damaged: fetch it anew.")


def _too_large(name: str, size: str) -> BadFile:
    return BadFile(f"{name} is {size}; torino takes up to {LARGEST:,} pixels. Scale it down first.")


# ------------------------------------------------------------------ colours


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # damaged EXIF beside pixels that are fine
        return image


def _rgb(image: Image.Image) -> Image.Image:
    """Any mode to RGB."""
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        image = Image.fromarray(_eight_bits(np.asarray(image, np.float64), image.mode))
    premultiplied = {"La": "LA", "RGBa": "RGBA"}
    if image.has_transparency_data or image.mode in premultiplied:
        coloured = image.convert(premultiplied.get(image.mode, "RGBA")).convert("RGBA")
        paper = Image.new("RGBA", coloured.size, (WHITE, WHITE, WHITE, WHITE))
        return Image.alpha_composite(paper, coloured).convert("RGB")
    return image.convert("RGB")


def _eight_bits(values: NDArray[np.float64], mode: str) -> NDArray[np.uint8]:
    """Grey values to 0..255. Pillow itself would cut everything above 255 to white.

    16-bit modes have a white of their own, 65535. 32-bit ones do not say theirs: it is the smallest of 1, 255 and
    65535 that none exceeds, or else the largest value.
    """
    values = np.nan_to_num(values, posinf=0.0, neginf=0.0)
    most = float(values.max(initial=0.0))
    if mode.startswith("I;16"):
        white = 65535.0
    else:
        whites = (255.0, 65535.0) if mode.startswith("I") else (1.0, 255.0, 65535.0)
        white = next((white for white in whites if most <= white), most)
    return (values.clip(0, white) * (255 / white)).round().astype(np.uint8)
