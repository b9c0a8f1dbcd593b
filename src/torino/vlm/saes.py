"""Load SAEs by the names that commands, servers and stores accept. Needs neither Pillow nor transformers."""

from __future__ import annotations

from torino.core.concepts import ConceptEncoder, RawEmbedding
from torino.core.errors import BadParameter
from torino.datasets.bundled import example_sae
from torino.sae import SAE
from torino.vlm.loading import ModelPackage, model_package, model_packages

NO_SAE = "none"
LAB = "lab"


def find_package(name: str | None) -> ModelPackage | None:
    """Return the installed model package of this name, if there is one."""
    return None if name is None or (name not in model_packages() and name != LAB) else model_package(name)


def load_encoder(name: str, *, decoder: bool = False) -> ConceptEncoder:
    """Load an SAE: folder, file, hub repository, model package (``lab``), ``example``, or ``none`` for no SAE."""
    if not name.strip():
        raise BadParameter("The name of the SAE is empty. Give a folder, a file or a hub repository.")
    if name == NO_SAE:
        return RawEmbedding()
    package = find_package(name)
    if package is None:
        return example_sae() if name == "example" else SAE.load(name, decoder=decoder)
    if package.sae is None:
        raise BadParameter(f"The model package {name!r} has no SAE. Give a folder, a file or a hub repository.")
    return SAE.load(package.sae(), decoder=decoder)
