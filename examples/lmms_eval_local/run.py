"""Run torino's reducers in lmms-eval on a local task, with a tiny model that this script builds.

    python examples/lmms_eval_local/run.py FOLDER

Writes a LLaVA with random weights, an SAE, and eight images with a question each to FOLDER, then runs lmms-eval's own
command once for each reducer. The expected answers are those of the stock model in plain transformers, so exact match
is the share of answers that a reducer leaves unchanged. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

HERE = Path(__file__).resolve().parent
SIDE, WIDTH, IMAGES, LENGTH = 112, 32, 8, 2
QUESTION = "what is this ?"
WORDS = ["<pad>", "<s>", "</s>", "<unk>", "<image>", "USER:", "ASSISTANT:", "what", "is", "this", "?"]
WORDS += [f"word{number}" for number in range(53)]
TEMPLATE = (
    "{% for message in messages %}USER: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} {% endif %}{% endfor %}{% endfor %}"
    "ASSISTANT:"
)
REDUCERS = ["none", "torino-m(k=2;delta=2)", "torino-p(k=1;delta=1)", "visionzip(budget=32)", "random(budget=16)"]


def build_model(folder: Path) -> None:
    """Write a tiny LLaVA with its processor."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import (
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        PreTrainedTokenizerFast,
    )

    torch.manual_seed(0)
    size: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 48, "num_attention_heads": 4}
    vision = CLIPVisionConfig(**size, num_hidden_layers=3, image_size=SIDE, patch_size=14)
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    text = LlamaConfig(**size, **ends, num_hidden_layers=2, num_key_value_heads=2, vocab_size=len(WORDS))
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_index=4))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.25)  # large enough for answers to depend on the image
    model.generation_config.suppress_tokens = list(range(11))  # answers consist of word0, word1, …
    model.save_pretrained(folder)
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    named = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **named)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    pixels = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    LlavaProcessor(
        pixels,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)


def build_sae(folder: Path) -> None:
    """Write an SAE with random weights for the tower."""
    from torino import SAE

    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(2, 96, WIDTH, generator=generator)
    SAE(weights[0], W_dec=weights[1]).save(folder)


def make_image(seed: int) -> Image.Image:
    """Return an image of colored squares with some noise."""
    rng = np.random.default_rng(seed)
    areas = rng.integers(0, 200, (4, 4, 3)).repeat(28, 0).repeat(28, 1)
    return Image.fromarray((areas + rng.integers(0, 40, areas.shape)).astype(np.uint8))


def build_data(file: Path, model_folder: Path) -> None:
    """Write images, questions and the stock model's answers as parquet, in the layout of Hugging Face datasets."""
    from datasets import Dataset, Features, Value
    from datasets import Image as ImageFeature
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(model_folder).eval()
    processor = AutoProcessor.from_pretrained(model_folder)
    images = [make_image(seed) for seed in range(IMAGES)]
    answers: list[str] = []
    for image in images:
        inputs = processor(images=image, text=f"USER: <image> {QUESTION} ASSISTANT:", return_tensors="pt")
        out = model.generate(**inputs, max_new_tokens=LENGTH, do_sample=False)
        answers.append(processor.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    print(f"{len(set(answers))} different answers to {len(answers)} images")
    file.parent.mkdir(parents=True, exist_ok=True)
    features = Features({"image": ImageFeature(), "question": Value("string"), "answer": Value("string")})
    rows = {"image": images, "question": [QUESTION] * IMAGES, "answer": answers}
    Dataset.from_dict(rows, features=features).to_parquet(file)


def evaluate(folder: Path, reducer: str, *more: str) -> float:
    """Run lmms-eval's own command with one reducer, and return its exact match."""
    method = reducer.partition("(")[0]
    output = folder / "results" / reducer.replace("(", "-").replace(")", "").replace(";", "-").replace("=", "")
    arguments = f"pretrained={folder / 'model'},reducer={reducer}"
    if method.startswith("torino-"):
        arguments += f",sae={folder / 'sae'}"
    command = [sys.executable, "-m", "lmms_eval", "--model", "torino", "--model_args", arguments]
    command += ["--tasks", "local_squares", "--include_path", str(HERE), "--batch_size", "4", "--device", "cpu"]
    command += ["--output_path", str(output), *more]
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "TOKENIZERS_PARALLELISM": "false"}
    print("$ " + " ".join(command[2:]), flush=True)
    subprocess.run(command, cwd=folder, env={**os.environ, **quiet}, check=True)
    newest = max(output.rglob("*_results.json"), key=lambda file: file.stat().st_mtime)
    return float(json.loads(newest.read_text())["results"]["local_squares"]["exact_match,none"])


def main() -> None:
    """Build the missing files, run every reducer, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for the model, the data and the results")
    parser.add_argument("--reducers", nargs="+", default=REDUCERS, help="specs, with ; for commas")
    parser.add_argument(
        "--simple", action="store_true", help="use lmms-eval's simple models instead of its chat models"
    )
    args = parser.parse_args()
    folder: Path = args.folder.resolve()
    if not (folder / "data" / "test.parquet").is_file():
        build_model(folder / "model")
        build_sae(folder / "sae")
        build_data(folder / "data" / "test.parquet", folder / "model")
    more = ["--force_simple"] if args.simple else []
    scores = {reducer: evaluate(folder, reducer, *more) for reducer in args.reducers}
    print("\n| reducer | exact match with the stock model |\n| --- | ---: |")
    for reducer, score in scores.items():
        print(f"| `{reducer}` | {score:.3f} |")
    if scores.get("none", 1.0) != 1.0:
        sys.exit("With all tokens, lmms-eval must get the answers of the stock model, but it got others.")


if __name__ == "__main__":
    main()
