"""Open images as upright RGB and bring them to a shape that a vision tower accepts. Needs Pillow."""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from torino.core.checks import check_choice, check_type
from torino.core.errors import BadFile, BadParameter
from torino.core.extras import optional_import
from torino.core.safety import PIXELS_VARIABLE, max_pixels

with optional_import("Reading images needs", "torino[vlm]"):
    from PIL import Image, ImageOps, UnidentifiedImageError

Padding = Literal["crop", "square"]
Picture = str | os.PathLike[str] | bytes | Image.Image
"""Input of :func:`open_image`: a path, the bytes of a file, or an opened image."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are read. Others are refused: for an EPS file, for example, Pillow would start Ghostscript."""
BAND_PIXELS = 2**22  # pixels that are converted at once, to save memory
MAX_ASPECT_RATIO = 200  # the short side is scaled up, so a thin strip would fill the memory
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
WHITE = 255
PREMULTIPLIED = {"La": "LA", "RGBa": "RGBA"}  # modes and what they are converted to first

TILE_WIDTH, TILE_LENGTH, ORIENTATION = 322, 323, 274  # TIFF and EXIF tags

_URL = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*://|data:)")


def open_image(source: Picture) -> Image.Image:
    """Open an image and convert it to RGB, rotated according to its EXIF data.

    Transparent pixels are blended with white. 16-bit and floating-point grayscale is scaled to 8 bits. Only the first
    frame of an animation or a multi-page file is used, with a warning. Nothing is downloaded.

    Files must be JPEG, PNG, WebP, GIF, BMP or TIFF, with at most 67 million pixels. The environment variable
    ``TORINO_MAX_PIXELS`` sets another limit; opening an image takes 8 to 16 bytes of memory per pixel.

    Parameters
    ----------
    source : path, bytes or PIL image
        An image that is already opened may have any format.

    Returns
    -------
    PIL.Image.Image
        In mode RGB, with at least one pixel.

    Raises
    ------
    BadFile
        If the source is missing, a folder, a URL, not an image of these formats, broken, or too large.

    Examples
    --------
    >>> open_image(Image.new("LA", (2, 1), (0, 0))).getpixel((0, 0))
    (255, 255, 255)
    """
    name = _display_name(source)
    if isinstance(source, Image.Image):
        return _decode(source, name)
    with _open(source, name) as opened:
        return _decode(opened, name)


def image_size(source: str | os.PathLike[str] | bytes) -> tuple[int, int]:
    """Return width and height of an image file from its header; the pixels are not decoded.

    Raises
    ------
    BadFile
        If the source is not an image of the accepted formats.
    """
    with _open(source, _display_name(source)) as opened:
        return opened.size


def pad_square(image: Image.Image, color: tuple[int, int, int] | None = None) -> Image.Image:
    """Center an image on a square of one color, as the authors of LLaVA-1.5 do.

    Parameters
    ----------
    image : PIL.Image.Image
        In mode RGB.
    color : (int, int, int), optional
        By default the mean color of CLIP's training images; :func:`mean_color` reads the color of a processor.

    Examples
    --------
    >>> pad_square(Image.new("RGB", (4, 2))).size, pad_square(Image.new("RGB", (4, 2))).getpixel((0, 0))
    ((4, 4), (122, 116, 104))
    """
    width, height = image.size
    if width == height:
        return image
    side = max(width, height)
    square = Image.new("RGB", (side, side), color or mean_color(None))
    square.paste(image, ((side - width) // 2, (side - height) // 2))
    return square


def prepare(image: Image.Image, padding: Padding = "crop", color: tuple[int, int, int] | None = None) -> Image.Image:
    """Pad an image for its processor, or check that the processor can handle its shape.

    Parameters
    ----------
    image : PIL.Image.Image
    padding : {"crop", "square"}
        ``"crop"`` leaves the shape to the model's processor. The one of LLaVA-1.5 scales the short side and crops the
        rest. ``"square"`` pads to a square first, so that nothing is cropped. The paper's evaluation kit and the
        authors of LLaVA-1.5 do this, and it changes scores.
    color : (int, int, int), optional
        Color of the padding, see :func:`pad_square`.
    """
    check_type("image", image, Image.Image, "a PIL image; open_image reads files")
    check_choice("padding", padding, Padding, "'crop' or 'square'")
    width, height = image.size
    if padding == "square":
        if max(width, height) ** 2 > 2 * max_pixels():  # accepts the largest photo if it is up to twice as wide as high
            raise _too_large_error("The image", f"{width}x{height} pixels and would be padded to a square", 2)
        return pad_square(image, color)
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise BadFile(
            f"The image is {width}x{height} pixels: one side is more than {MAX_ASPECT_RATIO} times the other, and "
            "scaling the short side up would take too much memory. Crop it, or pad it to a square (padding='square')."
        )
    return image


def mean_color(processor: Any) -> tuple[int, int, int]:
    """Return the mean color (0 to 255) that a processor or its image processor subtracts; CLIP's if it has none."""
    inner = getattr(processor, "image_processor", processor)
    mean: Sequence[float] = getattr(inner, "image_mean", None) or CLIP_MEAN
    red, green, blue = (int(value * 255) for value in mean)
    return red, green, blue


def as_seen(inputs: Mapping[str, Any], processor: Any, images: Sequence[Image.Image]) -> list[Image.Image]:
    """Return the images as the tower sees them, after scaling and cropping: one for each image or tile.

    Some processors return patches instead of pixels (Qwen, SigLIP2). Their patches cover the whole image, so the images
    are returned unchanged.
    """
    pixels = inputs.get("pixel_values", inputs.get("pixel_values_videos"))
    inner = getattr(processor, "image_processor", processor)
    if pixels is None or getattr(pixels, "ndim", 0) not in (4, 5) or pixels.shape[-3] != 3:
        return list(images)
    values = pixels.detach().float().cpu().numpy().reshape(-1, *pixels.shape[-3:])
    mean = np.array(getattr(inner, "image_mean", None) or CLIP_MEAN).reshape(3, 1, 1)
    std = np.array(getattr(inner, "image_std", None) or (1.0, 1.0, 1.0)).reshape(3, 1, 1)
    if getattr(inner, "do_normalize", True) is False:
        mean, std = np.zeros_like(mean), np.ones_like(std)
    restored = ((values * std + mean) * 255).round().clip(0, 255).astype(np.uint8)
    return [Image.fromarray(np.ascontiguousarray(picture.transpose(1, 2, 0))) for picture in restored]


# ------------------------------------------------------------------ opening


def _decode(opened: Image.Image, name: str) -> Image.Image:
    width, height = opened.size
    if width < 1 or height < 1:
        raise BadFile(f"{name} is empty: {width}x{height} pixels. Give an image of at least one pixel.")
    if width * height > max_pixels():
        raise _too_large_error(name, f"{width}x{height} pixels")
    _check_tiles(opened, name)
    try:
        opened.load()
        has_frames = bool(getattr(opened, "is_animated", False))
        image = _to_rgb(_apply_orientation(opened))
    except Exception as error:  # decoders raise many kinds of errors
        raise _broken_error(name, error) from error
    if has_frames and opened.format != "MPO":  # the other frames of an MPO are previews of the same photo
        warnings.warn(f"{name} contains several frames; only the first is used.", stacklevel=3)
    return image


def _open(source: str | os.PathLike[str] | bytes, name: str) -> Image.Image:
    file: Path | io.BytesIO
    if isinstance(source, bytes | bytearray | memoryview):
        file = io.BytesIO(source)
    elif isinstance(source, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]: callers may not check
        file = _check_path(os.fspath(source), name)
    else:
        raise BadFile(f"An image must be a path, bytes or a PIL image, got {type(source).__name__}.")
    try:
        if Image.MAX_IMAGE_PIXELS is not None and max_pixels() > Image.MAX_IMAGE_PIXELS:
            Image.MAX_IMAGE_PIXELS = max_pixels()  # otherwise Pillow refuses what TORINO_MAX_PIXELS allows
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # max_pixels is checked instead
            return Image.open(file, formats=FORMATS)
    except BadParameter:
        raise
    except Image.DecompressionBombError as error:
        raise _too_large_error(name, f"more than {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels") from error
    except UnidentifiedImageError as error:
        raise BadFile(f"{name} is not an image in a known format. Give a JPEG, PNG, WebP, GIF, BMP or TIFF.") from error
    except Exception as error:
        raise _broken_error(name, error) from error


def _check_path(text: str, name: str) -> Path:
    if _URL.match(text):
        raise BadFile(f"{name} is a URL, and torino does not download images. Download it and give the file.")
    try:
        path = Path(text).expanduser()
        if path.is_dir():
            raise BadFile(f"{name} is a folder. Give one image in it.")
        if not path.is_file():
            raise BadFile(f"There is no file {name}. Give the path of an image.")
    except (OSError, RuntimeError, ValueError) as error:  # a name that is too long, ~ of no user, or a NUL character
        if isinstance(error, BadFile):
            raise
        reason = getattr(error, "strerror", None) or error
        raise BadFile(f"Cannot read {name}: {reason}. Give the path of an image.") from error
    return path


def _display_name(source: object) -> str:
    if isinstance(source, bytes | bytearray | memoryview):
        return "The image"
    text = str(getattr(source, "filename", "") or "The image") if isinstance(source, Image.Image) else str(source)
    return text if len(text) <= 120 else text[:100] + "…"


def _broken_error(name: str, error: Exception) -> BadFile:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return BadFile(f"{name} cannot be read as an image ({reason}). It may be cut off or damaged: download it again.")


def _too_large_error(name: str, size: str, factor: int = 1) -> BadFile:
    return BadFile(
        f"{name} is {size}; torino accepts up to {factor * max_pixels():,} pixels. Scale it down first, or set the "
        f"environment variable {PIXELS_VARIABLE} to a larger number."
    )


def _check_tiles(opened: Image.Image, name: str) -> None:
    """Refuse a TIFF whose tiles are larger than an image may be: the decoder allocates a whole tile."""
    tags: Mapping[int, Any] = getattr(opened, "tag_v2", {})
    sides = [tags.get(tag, 0) for tag in (TILE_WIDTH, TILE_LENGTH)]
    if all(isinstance(side, int) for side in sides) and sides[0] * sides[1] > max_pixels():
        raise _too_large_error(name, f"stored in tiles of {sides[0]}x{sides[1]} pixels")


# ------------------------------------------------------------------ color modes


def _apply_orientation(image: Image.Image) -> Image.Image:
    try:
        if image.getexif().get(ORIENTATION, 1) == 1:  # exif_transpose would copy the image
            return image
        return ImageOps.exif_transpose(image)
    except Exception:  # the EXIF data is damaged, the pixels are not
        return image


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any mode to RGB; modes that need several steps are converted in bands, to save memory."""
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        white = _find_white(image)
        return _convert_bands(image, lambda band: Image.fromarray(_to_eight_bits(_gray_values(band), white)))
    if image.has_transparency_data or image.mode in PREMULTIPLIED:
        return _convert_bands(image, _blend_with_white)
    return image.convert("RGB")


def _bands(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Yield horizontal bands of an image, with the row of their first line."""
    width, height = image.size
    rows = max(1, BAND_PIXELS // width)
    for top in range(0, height, rows):
        yield top, image.crop((0, top, width, min(top + rows, height)))


def _convert_bands(image: Image.Image, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
    result = Image.new("RGB", image.size)
    for top, band in _bands(image):
        result.paste(convert(band).convert("RGB"), (0, top))
    return result


def _blend_with_white(image: Image.Image) -> Image.Image:
    rgba = image.convert(PREMULTIPLIED.get(image.mode, "RGBA")).convert("RGBA")
    background = Image.new("RGBA", rgba.size, (WHITE, WHITE, WHITE, WHITE))
    return Image.alpha_composite(background, rgba)


def _gray_values(image: Image.Image) -> NDArray[np.float64]:
    return np.nan_to_num(np.asarray(image, np.float64), posinf=0.0, neginf=0.0)


def _find_white(image: Image.Image) -> float:
    """Return the gray value of white: 65535 in 16-bit modes.

    32-bit modes do not define it: the smallest of 1, 255 and 65535 that no value exceeds is used, or else the largest
    value.
    """
    if image.mode.startswith("I;16"):
        return 65535.0
    largest = max(float(_gray_values(band).max(initial=0.0)) for _, band in _bands(image))
    candidates = (255.0, 65535.0) if image.mode.startswith("I") else (1.0, 255.0, 65535.0)
    return next((candidate for candidate in candidates if largest <= candidate), largest)


def _to_eight_bits(values: NDArray[np.float64], white: float) -> NDArray[np.uint8]:
    """Scale gray values to 0..255. Pillow would clip everything above 255 to white."""
    return (values.clip(0, white) * (255 / white)).round().astype(np.uint8)
