"""Load models, towers and processors by hub name, folder, or the name of an installed model package.

A package can provide a model under a short name through the entry point group ``torino.models``. The entry point is a
:class:`ModelPackage` or a function that returns one::

    [project.entry-points."torino.models"]
    mymodel = "my_package:model"

``torino ask --model mymodel`` then loads it. The optional package ``torino-lab`` provides ``lab`` this way.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, get_args

import torch

from torino.core.checks import describe_value, expand_path
from torino.core.device import resolve_device, resolve_dtype
from torino.core.errors import BadFile, MissingPackage, TorinoError, Unreachable
from torino.core.extras import install_command, optional_import
from torino.core.prompt_styles import PromptStyle
from torino.vlm.adapters.base import check_family

GROUP = "torino.models"


@dataclass(frozen=True)
class ModelPackage:
    """A model that an installed package provides under a short name.

    Attributes
    ----------
    folder : callable
        Returns the folder of the model, as ``save_pretrained`` writes it; it may prepare the folder on first use.
    sae : callable, optional
        Returns the folder of the SAE that belongs to the model, its default for methods that read concepts.
    tower : callable, optional
        Returns the folder of the model's vision tower alone.
    block : int, optional
        Zero-based block of the tower that the model and the SAE read.
    prompts : {"plain", "standard", "vlmevalkit", "llava"}, optional
        Prompt style that the model was trained with: how ``torino eval`` writes the questions of tasks that have no
        instruction of their own. ``plain`` sends each question as it is. Default: ``standard``.
    """

    folder: Callable[[], Path]
    sae: Callable[[], Path] | None = None
    tower: Callable[[], Path] | None = None
    block: int | None = None
    prompts: PromptStyle | None = None


def model_packages() -> dict[str, EntryPoint]:
    """Return the installed model packages by name."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def model_package(name: str | os.PathLike[str]) -> ModelPackage | None:
    """Return the installed model package of this name, if there is one.

    Raises
    ------
    TorinoError
        If its package fails to load, or the name is ``lab`` and ``torino-lab`` is not installed.
    """
    entry = model_packages().get(str(_check_name(name)))
    if entry is None:
        if str(name) == "lab":
            raise TorinoError(
                f"The model 'lab' comes with torino-lab, which is not installed: {install_command('torino[lab]')}, or "
                "pip install ./lab in a checkout of torino; or give another model: owner/repository, or ./lab for a "
                "folder."
            )
        return None
    owner = f"The model {str(name)!r} of the package {entry.dist.name if entry.dist else entry.module} failed to load"
    try:
        provided: Any = entry.load()
        package = provided() if callable(provided) else provided
    except MissingPackage:
        raise
    except Exception as error:  # a third-party package can fail in any way
        reason = " ".join(str(error).split())
        raise TorinoError(
            f"{owner}: {type(error).__name__}: {reason} (entry point {entry.value} in {GROUP}). Update the package or "
            "uninstall it."
        ) from error
    if not isinstance(package, ModelPackage):
        raise TorinoError(
            f"{owner}: {entry.value} gives a {type(package).__name__}, not a ModelPackage. Update the package or "
            "uninstall it."
        )
    if package.prompts is not None and package.prompts not in get_args(PromptStyle):
        raise TorinoError(
            f"{owner}: its prompts must be {', '.join(get_args(PromptStyle))}, got {package.prompts!r}. Update the "
            "package or uninstall it."
        )
    return package


def check_model(name_or_path: str | os.PathLike[str]) -> None:
    """Refuse a name that :func:`load_model` could not load, without loading anything."""
    if str(_check_name(name_or_path)) not in model_packages():
        model_package(name_or_path)  # refuses 'lab' if it is not installed
        local_name(split_revision(name_or_path)[0])


def split_revision(name_or_path: str | os.PathLike[str]) -> tuple[str | os.PathLike[str], str | None]:
    """Split ``owner/repository@revision`` into name and revision; an existing folder has no revision.

    Examples
    --------
    >>> split_revision("llava-hf/llava-1.5-7b-hf@b234b80"), split_revision("./llava")
    (('llava-hf/llava-1.5-7b-hf', 'b234b80'), ('./llava', None))
    """
    match = re.fullmatch(r"(\w[\w.-]*/\w[\w.-]*)@(\w[\w./-]*)", str(_check_name(name_or_path)))
    if match is None or expand_path(str(name_or_path), "The name of the model").exists():
        return name_or_path, None
    return match[1], match[2]


def load_model(
    name_or_path: str | os.PathLike[str], device: str | torch.device = "cpu", dtype: str | torch.dtype | None = None
) -> tuple[Any, Any]:
    """Load a vision-language model and its processor.

    Parameters
    ----------
    name_or_path : str or path
        Hub name, folder, or the name of an installed model package such as ``lab`` (write ``./lab`` for a folder of
        that name). ``owner/repository@revision`` loads a commit, branch or tag of the hub.
    device : str or torch.device
        ``"auto"`` selects a GPU if there is one.
    dtype : str or torch.dtype, optional
        float32 on the CPU by default, elsewhere the dtype of the checkpoint.

    Returns
    -------
    model, processor
        Stock transformers objects, in evaluation mode.

    Raises
    ------
    Unreachable, BadFile, TorinoError
        If it cannot be downloaded, if something is missing, or if its family is not supported.
    """
    library, target = transformers(), resolve_device(device)
    package = model_package(name_or_path)
    source, revision = split_revision(name_or_path) if package is None else (package.folder(), None)
    name = local_name(source)
    pinned = {} if revision is None else {"revision": revision}
    config = fetch(library.AutoConfig.from_pretrained, name, "config.json", **pinned)
    check_family(str(config.model_type))  # before gigabytes are downloaded
    processor = fetch(library.AutoProcessor.from_pretrained, name, "processor", **pinned)
    processor = pin_image_backend(processor, name, revision)
    if not hasattr(processor, "image_processor") or not hasattr(processor, "tokenizer"):
        raise BadFile(
            f"{name} has no processor for images and text: its files give a {type(processor).__name__}. "
            "Download processor_config.json or preprocessor_config.json and the tokenizer beside the weights."
        )
    if getattr(processor, "patch_size", 0) is None and hasattr(config, "vision_feature_select_strategy"):
        # Older processors leave counting their placeholders to the model.
        processor.patch_size = config.vision_config.patch_size
        processor.vision_feature_select_strategy = config.vision_feature_select_strategy
        processor.num_additional_image_tokens = int(config.vision_feature_select_strategy == "default")
    load = library.AutoModelForImageTextToText.from_pretrained
    options = {"dtype": resolve_dtype(dtype, target), "output_loading_info": True} | pinned
    model, info = fetch(load, name, "weights", **options)
    if info["missing_keys"]:
        raise BadFile(
            f"{name} has no weights for {len(info['missing_keys'])} tensors of the model, such as "
            f"{sorted(info['missing_keys'])[0]}. The checkpoint is incomplete: download it again."
        )
    return model.to(target).eval(), processor


def pin_image_backend(processor: Any, name: str, revision: str | None = None) -> Any:
    """Make a processor resize images with Pillow, as all results were measured, even if torchvision is installed.

    The two backends resize differently, which changes pixels and with them answers.
    """
    library, images = transformers(), getattr(processor, "image_processor", None)
    if images is None or type(images).__name__.endswith("Pil") or not library.utils.is_torchvision_available():
        return processor
    options = {} if revision is None else {"revision": revision}
    processor.image_processor = fetch(
        library.AutoImageProcessor.from_pretrained, name, "preprocessor_config.json", backend="pil", **options
    )
    return processor


# ---------------------------------------------------------------------- helpers for every loader


def transformers() -> Any:
    """Import transformers, or raise a plain error if it is missing."""
    with optional_import("Loading models needs", "torino[vlm]"):
        return import_module("transformers")


@contextmanager
def quiet_loading() -> Generator[Any]:
    """Yield transformers with its progress bars, advice and warnings, and those of the hub client, turned off."""
    library = transformers()
    import huggingface_hub

    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    huggingface_hub.logging.set_verbosity_error()
    huggingface_hub.utils.disable_progress_bars()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield library


def local_name(name_or_path: str | os.PathLike[str]) -> str:
    """Return a name for ``from_pretrained``: an existing folder, or something that may be a hub name."""
    text = str(_check_name(name_or_path))
    path = expand_path(text, "The name of the model")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise BadFile(f"{text} has no config.json. Give a folder written by save_pretrained, or a hub name.")
        return str(path)
    if path.exists() or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", text):
        raise BadFile(f"There is no folder {text!r}, and it is not a hub name (owner/repository) either.")
    return text


def _check_name(name: str | os.PathLike[str]) -> str | Path:
    """Refuse anything but text and paths."""
    if not isinstance(name, str | Path) or "\0" in str(name):
        raise BadFile(f"A model is loaded from a hub name or the path of a folder, got {describe_value(name)}.")
    return name


def encoder_name(text: str) -> str:
    """Return the name of an encoder for the origin of its tokens: its hub name, or the last part of a path."""
    cached = re.search(r"models--(.+?)--([^/\\]+)[/\\]snapshots", text)
    if cached:
        return f"{cached[1]}/{cached[2]}"
    return Path(text).absolute().name if text and Path(text).is_dir() else text


def fetch(load: Callable[..., Any], name: str, what: str, **options: Any) -> Any:
    """Call a ``from_pretrained`` and turn its errors into one sentence."""
    try:
        return load(name, **options)
    except Exception as error:  # transformers and the hub client pass on whatever the libraries below them raise
        raise _load_error(error, name, what) from error


def _load_error(error: Exception, name: str, what: str) -> TorinoError:
    from huggingface_hub import errors as hub

    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    if any(isinstance(link, hub.GatedRepoError) for link in chain):
        return Unreachable(f"{name} is gated: accept its terms at https://huggingface.co/{name}, then 'hf auth login'.")
    if any(isinstance(link, hub.RepositoryNotFoundError) for link in chain):
        return Unreachable(f"The hub has no model {name}, or it is private: check the name, or 'hf auth login'.")
    offline = (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled, ConnectionError)
    if any(isinstance(link, offline) for link in chain) and not Path(name).is_dir():
        return Unreachable(
            f"The hub could not be reached, or is disabled (HF_HUB_OFFLINE), and {name} is neither cached nor a "
            "local folder. Check the connection, or give the path of a downloaded folder."
        )
    text = " ".join((str(error).strip() or type(error).__name__).split())
    return BadFile(f"{name} could not be loaded: its {what} gave: {text if len(text) < 300 else text[:300] + '…'}")
