"""What the commands share: the SAE, the reducer, the picture and the shares that a person named on the command line."""

from __future__ import annotations

import re
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torino.core.errors import BadFile, BadParameter

if TYPE_CHECKING:  # torch is only fetched by commands that need it
    from torino.core.concepts import ConceptEncoder
    from torino.reducers import Reducer

PICTURES = (".png", ".jpg", ".jpeg", ".webp")
POSITIONS = ("own", "compact", "original")  # those of torino.vlm.adapters.base, without torch
LAB = "lab"
"""The name of the model, tower and SAE that come with torino."""


def open_sae(name: str, levels: int | None = None, device: Any = "cpu") -> ConceptEncoder:
    """Open the SAE called ``name``: a folder, file or hub repository, ``lab``, ``example``, or ``raw`` for none."""
    from torino.core.concepts import RawEmbedding
    from torino.datasets.bundled import example_sae
    from torino.sae.model import SAE

    if name == "raw":
        if levels is not None:
            raise BadParameter("--levels chooses Matryoshka levels of an SAE, and --sae raw is none. Leave one out.")
        return RawEmbedding()
    if name == LAB:
        from torino_lab.shipped import lab_sae

        loaded = lab_sae(decoder=False)
    else:
        loaded = example_sae() if name == "example" else SAE.load(name, decoder=False)
    return (loaded if levels is None else loaded.first(levels)).to(device)


def reads_concepts(method: str) -> bool:
    """Whether a method, by name or spec, groups patches by what an SAE reads in them."""
    from torino.reducers import get

    kind = get(method.partition("(")[0].strip())
    return is_dataclass(kind) and "sae" in {field.name for field in fields(kind)}


def build_reducer(
    method: str, sae: str | None, levels: int | None, given: dict[str, Any], device: Any = "cpu"
) -> Reducer:
    """Build the reducer that the options describe; options left out are the method's own."""
    from torino.reducers import make

    parameters = {name: value for name, value in given.items() if value is not None}
    reads = reads_concepts(method)
    if reads and sae is None:
        raise BadParameter(
            f"{method} groups patches by concepts, so say which SAE reads them: --sae FOLDER, --sae owner/repository, "
            "or --sae raw for none."
        )
    if sae is not None and not reads:
        raise BadParameter(f"{method} reads no concepts, so --sae has no meaning for it. Leave it out.")
    if sae is not None:
        parameters["sae"] = open_sae(sae, levels, device)
    return make(method, **parameters)


def one_picture(path: str | Path) -> Any:
    """Open the image a question is about; what leaves open which picture that is, or shows nothing, is refused.

    A bundled photo may be called by its name: astronaut, coffee, chelsea or rocket.
    """
    from torino.datasets.bundled import PHOTOS, example_folder
    from torino.datasets.images import open_image

    if str(path) in PHOTOS and not Path(path).exists():
        path = example_folder() / "photos" / f"{path}.jpg"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*several frames")
        try:
            picture = open_image(path)
        except UserWarning as error:
            raise BadFile(
                f"{path} holds several frames, and a question is about one picture. "
                "Save the frame you mean as a PNG or JPEG file, and ask about that."
            ) from error
    if max(picture.size) < 2:
        raise BadFile(f"{path} is a single pixel, in which there is nothing to see. Give a larger picture.")
    return picture


def picture_file(option: str, path: Path) -> Path:
    """A file that a picture can be written to, or a sentence."""
    if path.suffix.lower() not in PICTURES:
        raise BadParameter(f"{option} must end in .png, .jpg or .webp, got {path.name!r}.")
    if path.is_dir():
        raise BadParameter(f"{option} {path} is a folder. Give the path of a file.")
    return path


@contextmanager
def hushed() -> Generator[Any]:
    """Give transformers, with the progress bars, advice and warnings of it and the hub client kept off the screen."""
    from torino.vlm.towers import transformers

    library = transformers()
    import huggingface_hub

    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    huggingface_hub.logging.set_verbosity_error()
    huggingface_hub.utils.disable_progress_bars()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield library


def share_of(keep: str) -> float:
    """Read a share such as ``25%`` or ``0.25``."""
    try:
        share = float(keep.rstrip("%")) / (100 if keep.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise BadParameter(f"--keep must be a share such as 25% or 0.25, got {keep!r}.")
    return share


def split_words(text: str) -> list[str]:
    """Words between commas; commas inside brackets do not divide.

    Examples
    --------
    >>> split_words("random, torino-m(k=2, delta=1),tome")
    ['random', 'torino-m(k=2, delta=1)', 'tome']
    """
    words = [word.strip() for word in re.split(r",(?![^()]*\))", text)]
    return [word for word in words if word]


def split_pairs(text: str) -> list[tuple[int, int]]:
    """Pairs k,delta between spaces; ``no`` is none.

    Examples
    --------
    >>> split_pairs("3,3 2,1"), split_pairs("no")
    ([(3, 3), (2, 1)], [])
    """
    pairs: list[tuple[int, int]] = []
    for word in [] if text.strip() == "no" else text.split():
        found = re.fullmatch(r"(\d+),(\d+)", word)
        if found is None or not 1 <= int(found[2]) <= int(found[1]):
            raise BadParameter(f"Write pairs as k,delta with delta from 1 to k, such as '3,3 2,2', got {word!r}.")
        pairs.append((int(found[1]), int(found[2])))
    return pairs


def share_of_work(text: str) -> tuple[int, int]:
    """Read ``i/n``, counted from 1, as (i - 1, n).

    Examples
    --------
    >>> share_of_work("2/4")
    (1, 4)
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise BadParameter(f"--shard is i/n with i from 1 to n, such as 1/4, got {text!r}.")
    return int(found[1]) - 1, int(found[2])
