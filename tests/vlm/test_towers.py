"""Towers loaded from tiny checkpoints: their tokens and signals, compared with the stock models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.support.tower_zoo import DEPTH, KINDS, QWEN, SIDE, photo
from torino import SAE, TorinoError, make
from torino.core.errors import BadFile, BadParameter, BadTokens, MissingSignal, Unreachable
from torino.core.tokens import Origin
from torino.vlm.towers import Tower, load_tower


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zoo")
    for name, build in KINDS.items():
        torch.manual_seed(0)
        model, processor = build()
        for parameter in model.parameters():  # initial weights are so small that attention would be uniform
            nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(folder / name)  # type: ignore[operator]
        processor.save_pretrained(folder / name)
    return folder


def assert_close(actual: Tensor | None, expected: Tensor) -> None:
    assert actual is not None
    assert torch.allclose(actual, expected, atol=1e-5, rtol=1e-4), float((actual - expected).abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_in_raster_order(zoo: Path, kind: str) -> None:
    """The input of the first block depends only on its own pixels: changing one patch changes one token."""
    tower = load_tower(zoo / kind, block=-1)
    wide, high = (112, 56) if kind in QWEN else (84, 28) if kind == "siglip2" else (SIDE, SIDE)
    before = photo(wide, high)
    row, column = 1, wide // 14 - 2
    after = before.copy()
    after.paste(Image.new("RGB", (14, 14), (255, 0, 255)), (column * 14, row * 14))
    first, second = tower.encode([before, after])
    assert first.grid == (high // 14, wide // 14)
    changed = (first.patches - second.patches).abs().amax(1) > 1e-4
    assert changed.nonzero().flatten().tolist() == [row * (wide // 14) + column]


@pytest.mark.parametrize("kind", ["clip", "whole-clip", "siglip", "dinov2", "dinov2-registers", "llava"])
def test_tokens_are_the_hidden_state_of_the_default_block(zoo: Path, kind: str) -> None:
    from transformers import AutoModel

    tower = load_tower(zoo / kind)
    assert (tower.block, tower.blocks, tower.width) == (DEPTH - 2, DEPTH, 32)
    (tokens,) = tower.encode(photo())
    model = AutoModel.from_pretrained(zoo / kind).eval()
    stock = {"whole-clip": "vision_model", "siglip": "vision_model", "llava": "vision_tower"}.get(kind)
    pixels = tower.processor(photo(), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        output = (getattr(model, stock) if stock else model)(pixels, output_hidden_states=True)
    states = output.hidden_states[-2][0]
    prefix = {"siglip": 0, "dinov2-registers": 4}.get(kind, 1)
    assert torch.equal(tokens.patches, states[prefix:])
    assert tokens.grid == (4, 4)
    assert (tokens.cls is None) == (kind == "siglip")
    if tokens.cls is not None:
        assert torch.equal(tokens.cls, states[0])
    assert tokens.origin == Origin("" if kind == "llava" else kind, DEPTH - 2)


@pytest.mark.parametrize("kind", KINDS)
def test_batch_equals_single_images(zoo: Path, kind: str) -> None:
    tower = load_tower(zoo / kind)
    photos = [photo(), photo(112, 56, 1), photo(56, 84, 2), photo(seed=3)]
    together = tower.encode(photos, frozenset({"keys"}))
    assert len(together) == 4
    for image, tokens in zip(photos, together, strict=True):
        (alone,) = tower.encode([image], frozenset({"keys"}), batch=1)
        assert tokens.grid == alone.grid
        assert_close(tokens.patches, alone.patches)
        assert tokens.keys is not None
        assert_close(tokens.keys, alone.keys)  # type: ignore[arg-type]
        assert tokens.keys.shape == (len(tokens), 32)
    if kind in QWEN:
        assert [tokens.grid for tokens in together] == [(4, 4), (4, 8), (6, 4), (4, 4)]
    assert len(tower.encode(photos, batch=3)) == 4
    assert tower.encode([]) == []


@pytest.mark.parametrize("kind", QWEN)
def test_qwen_merger_reads_these_tokens(zoo: Path, kind: str) -> None:
    """Tokens in raster order, rearranged into merge windows, give the output of the merger."""
    photos = [photo(168, 112), photo(84, 140, 1)]
    last = load_tower(zoo / kind, block=DEPTH - 1)
    merged = load_tower(zoo / kind, block=DEPTH)
    assert merged.width == 24
    assert merged.origin == Origin(kind, DEPTH)
    for tokens, output in zip(last.encode(photos), merged.encode(photos), strict=True):
        rows, columns = tokens.grid
        assert output.grid == (rows // 2, columns // 2)
        windows = tokens.patches.view(rows // 2, 2, columns // 2, 2, 32).transpose(1, 2).reshape(-1, 32)
        with torch.no_grad():
            assert_close(output.patches, last.model.merger(windows))  # type: ignore[operator]
    with pytest.raises(TorinoError, match="merger"):
        merged.encode(photos, frozenset({"keys"}))


@pytest.mark.parametrize("kind", ["qwen2", "qwen2.5", "qwen3"])
def test_qwen_keys_are_in_raster_order_too(zoo: Path, kind: str) -> None:
    tower = load_tower(zoo / kind, block=-1)
    (tokens,) = tower.encode(photo(112, 56), frozenset({"keys@0", "queries@0"}))
    attention = tower.model.blocks[0].get_submodule("attn")  # type: ignore[index, union-attr]
    norm = tower.model.blocks[0].norm1  # type: ignore[index, union-attr]
    with torch.no_grad():
        query, key, _ = attention.qkv(norm(tokens.patches)).chunk(3, -1)
    assert_close(tokens.signals["keys@0"], key)
    assert_close(tokens.signals["queries@0"], query)


@pytest.mark.parametrize("kind", ["clip", "dinov2", "dinov2-registers"])
def test_cls_attention_and_keys_without_eager_attention(zoo: Path, kind: str) -> None:
    from transformers import AutoModel

    tower = load_tower(zoo / kind)
    (tokens,) = tower.encode(photo(), frozenset({"cls", "cls_attention", "keys", "cls_attention@+1", "queries"}))
    eager = AutoModel.from_pretrained(zoo / kind, attn_implementation="eager").eval()
    with torch.no_grad():
        attentions = eager(
            tower.processor(photo(), return_tensors="pt")["pixel_values"], output_attentions=True
        ).attentions
    prefix = 4 if "registers" in kind else 1
    assert_close(tokens.cls_attention, attentions[tower.block][0, :, 0, prefix:])
    assert_close(tokens.signals["cls_attention@+1"], attentions[tower.block + 1][0, :, 0, prefix:])
    assert tokens.cls_attention is not None
    assert tokens.cls_attention.std() > 1e-4
    assert tokens.signals["queries"].shape == (16, 32)


@pytest.mark.parametrize("kind", ["siglip", "siglip2", "qwen2"])
@pytest.mark.parametrize("signal", ["cls", "cls_attention"])
def test_missing_cls_token_is_refused(zoo: Path, kind: str, signal: str) -> None:
    with pytest.raises(MissingSignal, match=f"tower {kind} has none"):
        load_tower(zoo / kind).encode(photo(), frozenset({signal}))


def test_siglip2_padding_is_dropped(zoo: Path) -> None:
    tower = load_tower(zoo / "siglip2", block=DEPTH - 1)
    (tokens,) = tower.encode(photo(70, 42), frozenset({"keys"}))
    assert tokens.grid == (3, 5)
    inputs = tower.processor(photo(70, 42), return_tensors="pt")
    with torch.no_grad():
        states = tower.model(**inputs, output_hidden_states=True).hidden_states[-1]
    assert torch.equal(tokens.patches, states[0, :15])


@pytest.mark.parametrize("kind", ["clip", "qwen2.5"])
def test_later_blocks_never_run(zoo: Path, kind: str) -> None:
    tower = load_tower(zoo / kind, block=0)
    layers = tower.model.blocks if kind in QWEN else tower.model.encoder.layers  # type: ignore[union-attr]
    ran: list[int] = []
    for number, layer in enumerate(layers):  # type: ignore[arg-type]
        layer.register_forward_hook(lambda *_, number=number: ran.append(number))
    tower.encode(photo())
    assert ran == [0]


def test_loaded_model(zoo: Path) -> None:
    from transformers import AutoImageProcessor, CLIPModel, LlavaForConditionalGeneration

    processor = AutoImageProcessor.from_pretrained(zoo / "llava")
    llava = LlavaForConditionalGeneration.from_pretrained(zoo / "llava").eval()
    tower = Tower(llava, processor)
    assert tower.model is llava.model.vision_tower
    loaded = load_tower(zoo / "llava")
    assert (tower.block, tower.origin) == (loaded.block, loaded.origin)
    assert torch.equal(tower.encode(photo())[0].patches, loaded.encode(photo())[0].patches)
    clip = Tower(CLIPModel.from_pretrained(zoo / "whole-clip").eval(), processor, 0)
    assert clip.origin == Origin("whole-clip", 0)
    assert "CLIPVisionModel of 3 blocks, 32 wide" in repr(clip)
    assert Tower(clip.model, processor, 0, encoder="other/name").origin.encoder == "other/name"


def test_older_layouts_of_checkpoints_and_configs(zoo: Path, tmp_path: Path) -> None:
    expected = load_tower(zoo / "llava").encode(photo())[0]
    old = _copy_changed(
        zoo / "llava", tmp_path / "old", lambda key: key.replace("vision_tower.", "vision_tower.vision_model.")
    )
    assert torch.equal(load_tower(old).encode(photo())[0].patches, expected.patches)
    new = _copy_changed(zoo / "llava", tmp_path / "new", lambda key: f"model.{key}")
    assert torch.equal(load_tower(new).encode(photo())[0].patches, expected.patches)
    deep = _copy_changed(zoo / "llava", tmp_path / "deep", config={"vision_feature_layer": -1})
    assert load_tower(deep).block == DEPTH - 1
    many = _copy_changed(zoo / "llava", tmp_path / "many", config={"vision_feature_layer": [-2, -1]})
    with pytest.raises(TorinoError, match="several tower layers"):
        load_tower(many)
    assert load_tower(many, block=0).block == 0
    cached = tmp_path / "models--owner--some-clip" / "snapshots" / "0123"
    _copy_changed(zoo / "clip", cached)
    assert load_tower(cached).origin.encoder == "owner/some-clip"
    text = json.loads((zoo / "qwen2" / "config.json").read_text())
    text["vision_config"]["model_type"] = "qwen2_vl"  # as on the hub
    family = _copy_changed(zoo / "qwen2", tmp_path / "family", config={"vision_config": text["vision_config"]})
    assert len(load_tower(family).encode(photo())[0]) == 16


def _copy_changed(
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
    assert half.encode(photo())[0].patches.dtype == torch.bfloat16
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


def test_wrong_arguments_are_refused(zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    text = tmp_path / "text"
    text.mkdir()
    (text / "config.json").write_text(json.dumps({"model_type": "llama"}))
    bare = _copy_changed(zoo / "clip", tmp_path / "bare")
    (bare / "preprocessor_config.json").unlink()
    incomplete = _copy_changed(zoo / "clip", tmp_path / "incomplete", lambda key: None if "layers.0" in key else key)
    headless = _copy_changed(zoo / "clip", tmp_path / "headless", lambda key: None if "post_layernorm" in key else key)
    weightless = _copy_changed(zoo / "clip", tmp_path / "weightless")
    (weightless / "model.safetensors").unlink()
    cut = _copy_changed(zoo / "clip", tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:1000])
    garbled = _copy_changed(zoo / "clip", tmp_path / "garbled")
    (garbled / "config.json").write_text("{")
    unknown = _copy_changed(zoo / "clip", tmp_path / "unknown", config={"model_type": "zebra"})
    cases: list[tuple[str | Path, type[TorinoError], str]] = [
        ("owner/of-nothing-at-all", Unreachable, "hub could not be reached.*owner/of-nothing-at-all"),
        ("./nowhere", BadFile, "There is no folder './nowhere'"),
        (tmp_path / "file", BadFile, "There is no folder"),
        (tmp_path / "empty", BadFile, "no config.json"),
        (text, TorinoError, r"text \(llama\) has no supported vision tower. Supported: CLIP"),
        (bare, BadFile, "preprocessor_config.json"),
        (incomplete, BadFile, "no weights for .* tensors of its vision tower, such as encoder.layers.0"),
        (weightless, BadFile, "could not be loaded"),
        (cut, BadFile, "could not be loaded"),
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
        tower.encode(photo(), batch=0)
    with pytest.raises(BadFile, match="200 times"):
        tower.encode(Image.new("RGB", (1, 1000)))
    with pytest.raises(BadFile, match="no file"):
        tower.encode([tmp_path / "none.png"])
    assert tower.encode(Image.new("L", (1, 1)))[0].grid == (4, 4)
    tower.processor.crop_size = {"height": 28, "width": 28}
    with pytest.raises(TorinoError, match="CLIPVisionModel refused"):
        tower.encode(photo())


def test_square_padding_keeps_what_cropping_removes(zoo: Path) -> None:
    tower = load_tower(zoo / "clip", block=-1)
    wide = photo(112, 56)
    (crop,), (square,) = tower.encode(wide), tower.encode(wide, padding="square")
    assert not torch.allclose(crop.patches, square.patches)


def test_from_images_to_a_reduction(zoo: Path) -> None:
    tower = load_tower(zoo / "whole-clip")
    torch.manual_seed(0)
    sae = SAE(torch.randn(64, 32), kind="topk", k=4).update_card(encoder="someone/whole-clip", block=1)
    plans = make("torino-m", sae=sae, k=1, delta=1).plan_batch(tower.encode([photo(), photo(seed=1)]))
    assert all(1 <= len(plan) <= 16 for plan in plans)
    with pytest.raises(TorinoError, match="block 0"):
        make("torino-m", sae=sae).plan_batch(load_tower(zoo / "whole-clip", block=0).encode(photo()))
    broken = load_tower(zoo / "clip")
    with torch.no_grad():
        next(broken.model.parameters()).fill_(torch.nan)
    with pytest.raises(BadTokens, match="NaN"):
        broken.encode(photo())


def test_a_wrong_grid_of_packed_patches_is_refused(zoo: Path) -> None:
    tower = load_tower(zoo / QWEN[0])
    (inputs,) = tower.process([photo(168, 112)])
    with pytest.raises(BadParameter, match=r"image_grid_thw describes .* patches, and pixel_values has shape"):
        tower.visual_tokens({**inputs, "image_grid_thw": inputs["image_grid_thw"] * 2})
