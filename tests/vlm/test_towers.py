"""Towers opened from checkpoints that are built here: tokens from images alone, in raster order, up to the tap."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from torino import SAE, BadFile, BadParameter, BadTokens, MissingSignal, Origin, TorinoError, Unreachable, make
from torino.vlm.towers import Tower, load_tower

DEPTH, SIDE = 3, 56
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": 14,
}
ROPE = {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 1e4}
TEXT: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _clip(whole: bool = False) -> tuple[nn.Module, Any]:
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPVisionConfig, CLIPVisionModel

    processor = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    if whole:
        return CLIPModel(CLIPConfig(vision_config=VISION, text_config=TEXT)), processor
    return CLIPVisionModel(CLIPVisionConfig(**VISION)), processor


def _siglip() -> tuple[nn.Module, Any]:
    from transformers import SiglipConfig, SiglipImageProcessorPil, SiglipModel

    processor = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    return SiglipModel(SiglipConfig(vision_config=VISION, text_config=TEXT)), processor


def _siglip2() -> tuple[nn.Module, Any]:
    from transformers import Siglip2ImageProcessorPil, Siglip2VisionConfig, Siglip2VisionModel

    config = Siglip2VisionConfig(**{**VISION, "num_patches": 16})
    return Siglip2VisionModel(config), Siglip2ImageProcessorPil(patch_size=14, max_num_patches=16)


def _dinov2(registers: bool = False) -> tuple[nn.Module, Any]:
    from transformers import (
        BitImageProcessorPil,
        Dinov2Config,
        Dinov2Model,
        Dinov2WithRegistersConfig,
        Dinov2WithRegistersModel,
    )

    processor = BitImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    if registers:
        return Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**VISION, num_register_tokens=3)), processor
    return Dinov2Model(Dinov2Config(**VISION)), processor


def _qwen2() -> tuple[nn.Module, Any]:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = {"embed_dim": 32, "hidden_size": 24, "depth": DEPTH, "num_heads": 4, "mlp_ratio": 2}
    config = Qwen2VLConfig(vision_config=vision, text_config={**TEXT, "rope_parameters": ROPE})
    return Qwen2VLForConditionalGeneration(config), _qwen_processor()


def _qwen25() -> tuple[nn.Module, Any]:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {"hidden_size": 32, "out_hidden_size": 24, "depth": DEPTH, "num_heads": 4, "intermediate_size": 48}
    vision |= {"window_size": 56, "fullatt_block_indexes": [1]}
    config = Qwen2_5_VLConfig(vision_config=vision, text_config={**TEXT, "rope_parameters": ROPE})
    return Qwen2_5_VLForConditionalGeneration(config), _qwen_processor()


def _qwen3() -> tuple[nn.Module, Any]:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    vision = {"hidden_size": 32, "out_hidden_size": 24, "depth": DEPTH, "num_heads": 4, "intermediate_size": 48}
    vision |= {"patch_size": 14, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    config = Qwen3VLConfig(vision_config=vision, text_config={**TEXT, "head_dim": 12, "rope_parameters": ROPE})
    return Qwen3VLForConditionalGeneration(config), _qwen_processor()


def _qwen_processor() -> Any:
    from transformers import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64})


def _llava() -> tuple[nn.Module, Any]:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(vision_config=CLIPVisionConfig(**VISION), text_config=LlamaConfig(**TEXT))
    return LlavaForConditionalGeneration(config), _clip()[1]


KINDS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "clip": _clip,
    "whole-clip": lambda: _clip(whole=True),
    "siglip": _siglip,
    "siglip2": _siglip2,
    "dinov2": _dinov2,
    "dinov2-registers": lambda: _dinov2(registers=True),
    "qwen2": _qwen2,
    "qwen2.5": _qwen25,
    "qwen3": _qwen3,
    "llava": _llava,
}
QWEN = ("qwen2", "qwen2.5", "qwen3")


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zoo")
    for name, build in KINDS.items():
        torch.manual_seed(0)
        model, processor = build()
        for parameter in model.parameters():  # fresh weights are so small that attention would be uniform
            nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(folder / name)  # type: ignore[operator]
        processor.save_pretrained(folder / name)
    return folder


def photo(width: int = SIDE, height: int = SIDE, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def near(ours: Tensor | None, theirs: Tensor) -> None:
    assert ours is not None
    assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-4), float((ours - theirs).abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_in_raster_order(zoo: Path, kind: str) -> None:
    """What enters the first block knows its own pixels alone: change one patch of the photo, and one token changes."""
    tower = load_tower(zoo / kind, block=-1)
    wide, high = (112, 56) if kind in QWEN else (84, 28) if kind == "siglip2" else (SIDE, SIDE)
    before = photo(wide, high)
    row, column = 1, wide // 14 - 2
    after = before.copy()
    after.paste(Image.new("RGB", (14, 14), (255, 0, 255)), (column * 14, row * 14))
    one, two = tower.look([before, after])
    assert one.grid == (high // 14, wide // 14)
    changed = (one.patches - two.patches).abs().amax(1) > 1e-4
    assert changed.nonzero().flatten().tolist() == [row * (wide // 14) + column]


@pytest.mark.parametrize("kind", ["clip", "whole-clip", "siglip", "dinov2", "dinov2-registers", "llava"])
def test_tokens_are_the_hidden_state_of_the_default_block(zoo: Path, kind: str) -> None:
    from transformers import AutoModel

    tower = load_tower(zoo / kind)
    assert (tower.block, tower.blocks, tower.width) == (DEPTH - 2, DEPTH, 32)
    (tokens,) = tower.look(photo())
    model = AutoModel.from_pretrained(zoo / kind).eval()
    stock = {"whole-clip": "vision_model", "siglip": "vision_model", "llava": "vision_tower"}.get(kind)
    pixels = tower.processor(photo(), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        whole = (getattr(model, stock) if stock else model)(pixels, output_hidden_states=True)
    states = whole.hidden_states[-2][0]
    prefix = {"siglip": 0, "dinov2-registers": 4}.get(kind, 1)
    assert torch.equal(tokens.patches, states[prefix:])
    assert tokens.grid == (4, 4)
    assert (tokens.cls is None) == (kind == "siglip")
    if tokens.cls is not None:
        assert torch.equal(tokens.cls, states[0])
    assert tokens.origin == Origin("" if kind == "llava" else kind, DEPTH - 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_what_each_image_is_alone(zoo: Path, kind: str) -> None:
    tower = load_tower(zoo / kind)
    photos = [photo(), photo(112, 56, 1), photo(56, 84, 2), photo(seed=3)]
    together = tower.look(photos, frozenset({"keys"}))
    assert len(together) == 4
    for image, tokens in zip(photos, together, strict=True):
        (alone,) = tower.look([image], frozenset({"keys"}), batch=1)
        assert tokens.grid == alone.grid
        near(tokens.patches, alone.patches)
        assert tokens.keys is not None
        near(tokens.keys, alone.keys)  # type: ignore[arg-type]
        assert tokens.keys.shape == (len(tokens), 32)
    if kind in QWEN:
        assert [tokens.grid for tokens in together] == [(4, 4), (4, 8), (6, 4), (4, 4)]
    assert len(tower.look(photos, batch=3)) == 4
    assert tower.look([]) == []


@pytest.mark.parametrize("kind", QWEN)
def test_qwen_merges_these_very_tokens(zoo: Path, kind: str) -> None:
    """Our raster order, put into merge windows again, gives the merger what the model gives it."""
    photos = [photo(168, 112), photo(84, 140, 1)]
    last = load_tower(zoo / kind, block=DEPTH - 1)
    merged = load_tower(zoo / kind, block=DEPTH)
    assert merged.width == 24
    assert merged.origin == Origin(kind, DEPTH)
    for tokens, whole in zip(last.look(photos), merged.look(photos), strict=True):
        rows, columns = tokens.grid
        assert whole.grid == (rows // 2, columns // 2)
        windows = tokens.patches.view(rows // 2, 2, columns // 2, 2, 32).transpose(1, 2).reshape(-1, 32)
        with torch.no_grad():
            near(whole.patches, last.model.merger(windows))  # type: ignore[operator]
    with pytest.raises(TorinoError, match="merger"):
        merged.look(photos, frozenset({"keys"}))


@pytest.mark.parametrize("kind", ["qwen2", "qwen2.5", "qwen3"])
def test_qwen_keys_are_in_raster_order_too(zoo: Path, kind: str) -> None:
    tower = load_tower(zoo / kind, block=-1)
    (tokens,) = tower.look(photo(112, 56), frozenset({"keys@0", "queries@0"}))
    attention = tower.model.blocks[0].get_submodule("attn")  # type: ignore[index, union-attr]
    norm = tower.model.blocks[0].norm1  # type: ignore[index, union-attr]
    with torch.no_grad():
        query, key, _ = attention.qkv(norm(tokens.patches)).chunk(3, -1)
    near(tokens.signals["keys@0"], key)
    near(tokens.signals["queries@0"], query)


@pytest.mark.parametrize("kind", ["clip", "dinov2", "dinov2-registers"])
def test_cls_attention_and_keys_without_eager_attention(zoo: Path, kind: str) -> None:
    from transformers import AutoModel

    tower = load_tower(zoo / kind)
    (tokens,) = tower.look(photo(), frozenset({"cls", "cls_attention", "keys", "cls_attention@+1", "queries"}))
    eager = AutoModel.from_pretrained(zoo / kind, attn_implementation="eager").eval()
    with torch.no_grad():
        found = eager(tower.processor(photo(), return_tensors="pt")["pixel_values"], output_attentions=True).attentions
    prefix = 4 if "registers" in kind else 1
    near(tokens.cls_attention, found[tower.block][0, :, 0, prefix:])
    near(tokens.signals["cls_attention@+1"], found[tower.block + 1][0, :, 0, prefix:])
    assert tokens.cls_attention is not None
    assert tokens.cls_attention.std() > 1e-4
    assert tokens.signals["queries"].shape == (16, 32)


@pytest.mark.parametrize("kind", ["siglip", "siglip2", "qwen2"])
@pytest.mark.parametrize("signal", ["cls", "cls_attention"])
def test_a_tower_without_cls_says_so(zoo: Path, kind: str, signal: str) -> None:
    with pytest.raises(MissingSignal, match=f"tower {kind} has none"):
        load_tower(zoo / kind).look(photo(), frozenset({signal}))


def test_siglip2_leaves_its_padding_out(zoo: Path) -> None:
    tower = load_tower(zoo / "siglip2", block=DEPTH - 1)
    (tokens,) = tower.look(photo(70, 42), frozenset({"keys"}))
    assert tokens.grid == (3, 5)
    inputs = tower.processor(photo(70, 42), return_tensors="pt")
    with torch.no_grad():
        states = tower.model(**inputs, output_hidden_states=True).hidden_states[-1]
    assert torch.equal(tokens.patches, states[0, :15])


@pytest.mark.parametrize("kind", ["clip", "qwen2.5"])
def test_what_is_behind_the_tap_never_runs(zoo: Path, kind: str) -> None:
    tower = load_tower(zoo / kind, block=0)
    layers = tower.model.blocks if kind in QWEN else tower.model.encoder.layers  # type: ignore[union-attr]
    ran: list[int] = []
    for number, layer in enumerate(layers):  # type: ignore[arg-type]
        layer.register_forward_hook(lambda *_, number=number: ran.append(number))
    tower.look(photo())
    assert ran == [0]


def test_a_loaded_model_is_taken_as_it_is(zoo: Path) -> None:
    from transformers import AutoImageProcessor, CLIPModel, LlavaForConditionalGeneration

    processor = AutoImageProcessor.from_pretrained(zoo / "llava")
    llava = LlavaForConditionalGeneration.from_pretrained(zoo / "llava").eval()
    tower = Tower(llava, processor)
    assert tower.model is llava.model.vision_tower
    opened = load_tower(zoo / "llava")
    assert (tower.block, tower.origin) == (opened.block, opened.origin)
    assert torch.equal(tower.look(photo())[0].patches, opened.look(photo())[0].patches)
    clip = Tower(CLIPModel.from_pretrained(zoo / "whole-clip").eval(), processor, 0)
    assert clip.origin == Origin("whole-clip", 0)
    assert "CLIPVisionModel of 3 blocks, 32 wide" in repr(clip)
    assert Tower(clip.model, processor, 0, encoder="mine").origin.encoder == "mine"


def test_older_layouts_of_checkpoints_and_configs(zoo: Path, tmp_path: Path) -> None:
    expected = load_tower(zoo / "llava").look(photo())[0]
    old = _changed(
        zoo / "llava", tmp_path / "old", lambda key: key.replace("vision_tower.", "vision_tower.vision_model.")
    )
    assert torch.equal(load_tower(old).look(photo())[0].patches, expected.patches)
    new = _changed(zoo / "llava", tmp_path / "new", lambda key: f"model.{key}")
    assert torch.equal(load_tower(new).look(photo())[0].patches, expected.patches)
    deep = _changed(zoo / "llava", tmp_path / "deep", config={"vision_feature_layer": -1})
    assert load_tower(deep).block == DEPTH - 1
    many = _changed(zoo / "llava", tmp_path / "many", config={"vision_feature_layer": [-2, -1]})
    with pytest.raises(TorinoError, match="several tower layers"):
        load_tower(many)
    assert load_tower(many, block=0).block == 0
    cached = tmp_path / "models--owner--some-clip" / "snapshots" / "0123"
    _changed(zoo / "clip", cached)
    assert load_tower(cached).origin.encoder == "owner/some-clip"
    text = json.loads((zoo / "qwen2" / "config.json").read_text())
    text["vision_config"]["model_type"] = "qwen2_vl"  # as on the hub
    family = _changed(zoo / "qwen2", tmp_path / "family", config={"vision_config": text["vision_config"]})
    assert len(load_tower(family).look(photo())[0]) == 16


def _changed(
    source: Path,
    target: Path,
    rename: Callable[[str], str | None] = lambda key: key,
    config: dict[str, Any] | None = None,
) -> Path:
    target.mkdir(parents=True)
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    weights = {rename(key): value for key, value in load_file(source / "model.safetensors").items()}
    save_file({key: value for key, value in weights.items() if key}, target / "model.safetensors", {"format": "pt"})
    settings = json.loads((source / "config.json").read_text()) | (config or {})
    (target / "config.json").write_text(json.dumps(settings))
    return target


def test_dtypes_and_devices(zoo: Path) -> None:
    half = load_tower(zoo / "clip", dtype="bfloat16", device="auto" if not torch.cuda.is_available() else "cpu")
    assert half.look(photo())[0].patches.dtype == torch.bfloat16
    assert load_tower(zoo / "clip", dtype=torch.float16).model.dtype == torch.float16
    assert load_tower(zoo / "clip", dtype="auto").model.dtype == torch.float32
    for wrong in ("int8", "float99", torch.int64):
        with pytest.raises(BadParameter, match="dtype must be"):
            load_tower(zoo / "clip", dtype=wrong)
    with pytest.raises(BadParameter, match="device must be"):
        load_tower(zoo / "clip", device="abacus")
    if not torch.cuda.is_available():
        with pytest.raises(BadParameter, match="no cuda device"):
            load_tower(zoo / "clip", device="cuda:1")


def test_mistakes_get_a_sentence(zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    text = tmp_path / "text"
    text.mkdir()
    (text / "config.json").write_text(json.dumps({"model_type": "llama"}))
    bare = _changed(zoo / "clip", tmp_path / "bare")
    (bare / "preprocessor_config.json").unlink()
    lacking = _changed(zoo / "clip", tmp_path / "lacking", lambda key: None if "layers.0" in key else key)
    headless = _changed(zoo / "clip", tmp_path / "headless", lambda key: None if "post_layernorm" in key else key)
    weightless = _changed(zoo / "clip", tmp_path / "weightless")
    (weightless / "model.safetensors").unlink()
    cut = _changed(zoo / "clip", tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:1000])
    garbled = _changed(zoo / "clip", tmp_path / "garbled")
    (garbled / "config.json").write_text("{")
    unknown = _changed(zoo / "clip", tmp_path / "unknown", config={"model_type": "zebra"})
    cases: list[tuple[str | Path, type[TorinoError], str]] = [
        ("owner/of-nothing-at-all", Unreachable, "hub could not be reached.*owner/of-nothing-at-all"),
        ("./nowhere", BadFile, "There is no folder './nowhere'"),
        (tmp_path / "file", BadFile, "There is no folder"),
        (tmp_path / "empty", BadFile, "no config.json"),
        (text, TorinoError, r"text \(llama\) has no vision tower.*Known: CLIP"),
        (bare, BadFile, "preprocessor_config.json"),
        (lacking, BadFile, "no weights for .* parts of its vision tower, such as encoder.layers.0"),
        (weightless, BadFile, "could not be opened"),
        (cut, BadFile, "could not be opened"),
        (garbled, BadFile, "config.json"),
        (unknown, BadFile, "zebra"),
    ]
    for source, error, expected in cases:
        with pytest.raises(error, match=expected) as caught:
            load_tower(source)
        assert len(str(caught.value)) < 700
    assert load_tower(headless).blocks == DEPTH
    for block in (-2, DEPTH, 1.5, True):
        with pytest.raises(BadParameter, match="block must be"):
            load_tower(zoo / "clip", block=block)  # type: ignore[arg-type]
    tower = load_tower(zoo / "clip")
    with pytest.raises(BadParameter, match="batch"):
        tower.look(photo(), batch=0)
    with pytest.raises(BadFile, match="200 times"):
        tower.look(Image.new("RGB", (1, 1000)))
    with pytest.raises(BadFile, match="no file"):
        tower.look([tmp_path / "none.png"])
    assert tower.look(Image.new("L", (1, 1)))[0].grid == (4, 4)
    tower.processor.crop_size = {"height": 28, "width": 28}
    with pytest.raises(TorinoError, match="CLIPVisionModel refused"):
        tower.look(photo())


def test_square_padding_shows_what_cropping_cuts(zoo: Path) -> None:
    tower = load_tower(zoo / "clip", block=-1)
    wide = photo(112, 56)
    (crop,), (square,) = tower.look(wide), tower.look(wide, padding="square")
    assert not torch.allclose(crop.patches, square.patches)


def test_from_images_to_a_reduction(zoo: Path) -> None:
    tower = load_tower(zoo / "whole-clip")
    torch.manual_seed(0)
    sae = SAE(torch.randn(64, 32), kind="topk", k=4).described(encoder="someone/whole-clip", block=1)
    plans = make("torino-m", sae=sae, k=1, delta=1).plan_batch(tower.look([photo(), photo(seed=1)]))
    assert all(1 <= len(plan) <= 16 for plan in plans)
    with pytest.raises(TorinoError, match="block 0"):
        make("torino-m", sae=sae).plan_batch(load_tower(zoo / "whole-clip", block=0).look(photo()))
    broken = load_tower(zoo / "clip")
    with torch.no_grad():
        next(broken.model.parameters()).fill_(torch.nan)
    with pytest.raises(BadTokens, match="NaN"):
        broken.look(photo())
