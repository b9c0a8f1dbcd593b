"""What the commands share: the SAE, the reducer and the share of tokens that a person named on the command line."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from torino.errors import BadParameter

if TYPE_CHECKING:  # torch is only fetched by commands that need it
    from torino.concepts import ConceptEncoder
    from torino.reducers import Reducer


def open_sae(name: str, levels: int | None = None, device: Any = "cpu") -> ConceptEncoder:
    """Open the SAE called ``name``: a folder, file or hub repository, ``"example"``, or ``"raw"`` for none."""
    from torino.concepts import RawEmbedding
    from torino.example import example_sae
    from torino.sae import SAE

    if name == "raw":
        if levels is not None:
            raise BadParameter("--levels chooses Matryoshka levels of an SAE, and --sae raw is none. Leave one out.")
        return RawEmbedding()
    loaded = example_sae() if name == "example" else SAE.load(name, decoder=False)
    return (loaded if levels is None else loaded.first(levels)).to(device)


def build_reducer(
    method: str, sae: str | None, levels: int | None, given: dict[str, Any], device: Any = "cpu"
) -> Reducer:
    """Build the reducer that the options describe; options left out are the method's own."""
    from torino.reducers import get, make

    parameters = {name: value for name, value in given.items() if value is not None}
    kind = get(method.partition("(")[0].strip())
    reads_concepts = is_dataclass(kind) and "sae" in {field.name for field in fields(kind)}
    if reads_concepts and sae is None:
        raise BadParameter(
            f"{method} groups patches by concepts, so say which SAE reads them: --sae FOLDER, --sae owner/repository, "
            "or --sae raw for none."
        )
    if sae is not None and not reads_concepts:
        raise BadParameter(f"{method} reads no concepts, so --sae has no meaning for it. Leave it out.")
    if sae is not None:
        parameters["sae"] = open_sae(sae, levels, device)
    return make(method, **parameters)


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
