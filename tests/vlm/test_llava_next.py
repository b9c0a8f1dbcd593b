"""The LLaVA-NeXT and LLaVA-OneVision adapters on tiny models."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import transformers

from tests.support.tiny_tiles import (
    BOTH,
    IMAGE,
    NEW,
    PATCH,
    PINPOINTS,
    ROWS,
    SIDE,
    TILE,
    WIDTH,
    generate,
    image_processor,
    make_inputs,
    make_model,
    photo,
)
from torino import SAE, RawEmbedding, Reducer, Reduction, VisualTokens, make
from torino.core.errors import BadParameter, BadTokens, TorinoError
from torino.core.reduction import ReductionBatch
from torino.vlm import ReducingProcessor, adapter_for, reduced
from torino.vlm.adapters.llava_next import LlavaNext

# ---------------------------------------------------------------------- reducers


@dataclass(frozen=True)
class KeepAll(Reducer):
    """Keep every patch."""

    name: ClassVar[str] = "keep-all"

    def plan(self, tokens: VisualTokens) -> Reduction:
        return Reduction.identity(tokens.grid, self.spec)


@dataclass(frozen=True)
class KeepLarge(Reducer):
    """Keep the patches whose norm is above the mean, which depend on the tile."""

    name: ClassVar[str] = "keep-large"

    def plan(self, tokens: VisualTokens) -> Reduction:
        norm = tokens.patches.double().norm(dim=1)
        return Reduction.pick((norm >= norm.mean() - 1e-9).nonzero()[:, 0], tokens.grid, self.spec)


@dataclass(frozen=True)
class KeepFirst(Reducer):
    """Keep the first patch of each unit."""

    name: ClassVar[str] = "keep-first"

    def plan(self, tokens: VisualTokens) -> Reduction:
        return Reduction.pick(torch.zeros(1, dtype=torch.long), tokens.grid, self.spec)


@dataclass(frozen=True)
class Mean(Reducer):
    """Return one token for each unit, without an anchor."""

    name: ClassVar[str] = "mean"

    def plan(self, tokens: VisualTokens) -> Reduction:
        plan = Reduction.of([dict.fromkeys(range(len(tokens)), 1 / len(tokens))], tokens.grid, self.spec)
        return Reduction(**{**vars(plan), "anchor": torch.tensor([-1])})


@dataclass(frozen=True)
class KeepNone(Reducer):
    """Keep no token."""

    name: ClassVar[str] = "keep-none"

    def plan(self, tokens: VisualTokens) -> Reduction:
        return Reduction.pick(torch.zeros(0, dtype=torch.long), tokens.grid, self.spec)


def random_sae() -> SAE:
    return SAE(torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(5)))


TORINO: dict[str, Callable[[], Reducer]] = {
    "torino-p": lambda: make("torino-p(k=1, delta=1)", sae=random_sae()),
    "torino-m": lambda: make("torino-m(k=1, delta=1)", sae=random_sae()),
    "torino-m raw": lambda: make("torino-m(k=1, delta=1)", sae=RawEmbedding()),
    "torino-m budget": lambda: make("torino-m(k=1, delta=1, budget=3)", sae=RawEmbedding()),
}


# ---------------------------------------------------------------------- identity


@pytest.mark.parametrize(("family", "attention"), [(BOTH[0], "sdpa"), (BOTH[1], "sdpa"), (BOTH[1], "eager")])
def test_identity_is_bitwise_the_stock_model(family: str, attention: str) -> None:
    model = make_model(family)
    model.set_attn_implementation(attention)
    try:
        inputs = make_inputs(model, ROWS)
        options = {"return_dict_in_generate": True, "output_logits": True}
        stock = generate(model, inputs, **options)
        with torch.no_grad():
            logits = model(**inputs).logits
        with reduced(model, KeepAll()) as trace:
            output = generate(model, inputs, **options)
            with torch.no_grad():
                again = model(**inputs).logits
    finally:
        model.set_attn_implementation("sdpa")
    assert torch.equal(stock.sequences, output.sequences)
    assert all(torch.equal(a, b) for a, b in zip(stock.logits, output.logits, strict=True))
    assert torch.equal(logits, again)
    assert trace.before == trace.after
    assert len(stock.sequences[:, -NEW:].unique()) > 3, "all answers of the tiny model are the same"


def test_identity_projects_as_the_stock_model_does() -> None:
    """A matrix product with fewer rows may round differently, although it does not here."""
    model = make_model("llava_next")
    inputs = make_inputs(model, ROWS)
    shapes: list[Any] = []
    hook = model.model.multi_modal_projector.register_forward_pre_hook(
        lambda _, arguments: shapes.append(arguments[0].shape)
    )
    with torch.no_grad(), reduced(model, KeepAll()):
        type(model).forward(model, **inputs)
        model(**inputs)
    hook.remove()
    assert len(shapes) == 2
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("family", BOTH)
@pytest.mark.parametrize("size", [(32, 32), (90, 33), (33, 90), (64, 64), (20, 70), (200, 2), (1, 1)])
def test_identity_for_every_shape(family: str, size: tuple[int, int]) -> None:
    model = make_model(family)
    inputs = make_inputs(model, [[size]])
    with torch.no_grad():
        stock = model(**inputs).logits
        with reduced(model, KeepAll()):
            assert torch.equal(model(**inputs).logits, stock)


def test_row_without_patches_keeps_its_newline() -> None:
    """Unpadding a very thin image leaves rows without patches, and the model still ends each with a newline."""
    model = make_model("llava_next")
    inputs = make_inputs(model, [[(200, 2)]])
    assert (inputs["input_ids"] == IMAGE).sum() == TILE + SIDE // PATCH
    with reduced(model, KeepFirst()) as trace:
        generate(model, inputs)
    assert [call.after for call in trace.calls] == [(1 + SIDE // PATCH,)]
    assert len(trace) == 1


# ---------------------------------------------------------------------- reduced features


@pytest.mark.parametrize("family", BOTH)
def test_pruned_features_equal_the_stock_features_at_their_slots(family: str) -> None:
    model = make_model(family)
    inputs = make_inputs(model, ROWS)
    adapter = adapter_for(model)
    with torch.no_grad():
        stock = model.model.get_image_features(
            **{name: inputs[name] for name in ("pixel_values", "image_sizes", "batch_num_images") if name in inputs}
        ).pooler_output
        encoded = adapter.encode(inputs, frozenset())
        assert encoded.full == tuple(map(len, stock))
        for reducer in (KeepLarge(), KeepFirst()):
            plans = reducer.plan_batch(encoded.tokens)
            embeds = adapter.embed(encoded, plans)
            for item, features in zip(embeds, stock, strict=True):
                assert bool((item.slots.diff() > 0).all())
                assert torch.allclose(item.features, features[item.slots], atol=1e-5)
            assert sum(len(item.slots) for item in embeds) < sum(encoded.full)


@pytest.mark.parametrize("newlines", ["rows", "all", "none"])
def test_newlines(newlines: Any) -> None:
    """Two tiles side by side: a base view of 16 patches, then rows of up to 8 patches and a newline."""
    model = make_model("llava_next")
    adapter = LlavaNext(model, newlines=newlines)
    inputs = make_inputs(model, [[(32, 64)]])
    with torch.no_grad():
        encoded = adapter.encode(inputs, frozenset())
        assert encoded.full == (TILE + 4 * 9,)
        # The base view keeps patch 3, the left tile one of row 1, the right tile one of row 1 and one of row 3.
        kept = [[3], [4], [6, 13]]
        plans = ReductionBatch.of([Reduction.pick(torch.tensor(patches), (4, 4), "hand") for patches in kept])
        (item,) = adapter.embed(encoded, plans)
    expected = [3, TILE + 9 + 0, TILE + 9 + 4 + 2, TILE + 27 + 4 + 1]
    newline_slots = {"rows": [TILE + 17, TILE + 35], "all": [TILE + 8, TILE + 17, TILE + 26, TILE + 35], "none": []}[
        newlines
    ]
    assert item.slots.tolist() == sorted(expected + newline_slots)
    for slot, feature in zip(item.slots.tolist(), item.features, strict=True):
        assert torch.equal(feature, model.model.image_newline) == (slot in newline_slots)


def test_token_without_an_anchor_takes_the_last_slot_of_its_tile() -> None:
    model = make_model("llava_next")
    adapter = adapter_for(model)
    with torch.no_grad():
        encoded = adapter.encode(make_inputs(model, [[(32, 64)]]), frozenset())
        (item,) = adapter.embed(encoded, Mean().plan_batch(encoded.tokens))
    assert item.slots.tolist() == [TILE - 1, TILE + 27 + 3, TILE + 27 + 7, TILE + 27 + 8]


def test_newlines_of_a_subclass_and_wrong_newlines() -> None:
    class AllNewlines(LlavaNext):
        newlines = "all"

    assert AllNewlines(make_model("llava_next")).newlines == "all"
    with pytest.raises(BadParameter, match="newlines must be one of 'rows', 'all', 'none', got 'some'"):
        LlavaNext(make_model("llava_next"), newlines="some")  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [(32, 40), (64, 40), (40, 90), (90, 20)])
def test_bars_are_removed_before_planning(size: tuple[int, int]) -> None:
    """A unit is the visible part of a tile, and a merged token is made of visible patches only."""
    from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape, unpad_image

    model = make_model("llava_next")
    inputs = make_inputs(model, [[size]])
    adapter = adapter_for(model)
    rows, columns = get_anyres_image_grid_shape(size, PINPOINTS, SIDE)
    tile = torch.arange(1, 1 + rows * columns).view(rows, columns)
    side = SIDE // PATCH
    patch = torch.arange(TILE).view(side, side).repeat(rows, columns)
    shown = unpad_image(torch.stack([tile.repeat_interleave(side, 0).repeat_interleave(side, 1), patch]), size)
    with torch.no_grad():
        pixels = inputs["pixel_values"][0]
        states = model.model.vision_tower(pixels, output_hidden_states=True).hidden_states[-2][:, 1:]
        encoded = adapter.encode(inputs, frozenset())
        (item,) = adapter.embed(encoded, Mean().plan_batch(encoded.tokens))
        expected = [states[0], *[states[t, shown[1][shown[0] == t]] for t in shown[0].unique()]]
        assert [len(unit) for unit in encoded.tokens] == [len(part) for part in expected]
        for unit, part in zip(encoded.tokens, expected, strict=True):
            assert torch.allclose(unit.patches, part, atol=1e-5)
        means = model.model.multi_modal_projector(torch.stack([part.mean(0) for part in expected]))
    is_newline = (item.features == model.model.image_newline).all(1)
    # The base view is first; tiles follow in the order of their last patches, each row with its newline.
    assert torch.allclose(item.features[0], means[0], atol=1e-4)
    tokens = item.features[~is_newline]
    assert len(tokens) == len(means)
    assert torch.cdist(tokens.double(), means.double()).min(1).values.max() < 1e-4
    assert int(is_newline.sum()) == rows
    assert len(shown[0].flatten()) < rows * columns * TILE or size == (32, 40)


@pytest.mark.parametrize("family", BOTH)
@pytest.mark.parametrize("name", sorted(TORINO))
def test_trace_counts_the_tokens_of_the_prompt(family: str, name: str) -> None:
    model = make_model(family)
    inputs = make_inputs(model, ROWS)
    adapter = adapter_for(model)
    with torch.no_grad():
        reduced_inputs, call = adapter.reduce_inputs(inputs, TORINO[name](), "compact")
    assert sum(call.after) == int((reduced_inputs["input_ids"] == IMAGE).sum()) < sum(call.before)
    assert sum(call.before) == int((inputs["input_ids"] == IMAGE).sum())
    assert call.after == tuple(len(part) for part in reduced_inputs["mm_encoder_outputs"]["image"].pooler_output)
    newlines = sum(call.after) - sum(len(plan) for plan in call.reductions)
    assert 0 < newlines <= sum(call.before)
    with reduced(model, TORINO[name]()) as trace:
        out = generate(model, inputs)
    assert trace.after == sum(call.after)
    assert out.shape == (len(ROWS), inputs["input_ids"].shape[1] + NEW)
    assert torch.equal(out[:, :-NEW], inputs["input_ids"])


@pytest.mark.parametrize("family", BOTH)
@pytest.mark.parametrize(
    ("positions", "reducer"),
    [("compact", KeepLarge()), ("original", TORINO["torino-m"]()), ("original", Mean())],
    ids=["keep-large", "torino-m", "mean"],
)
def test_ragged_batch_equals_its_rows(family: str, positions: Any, reducer: Reducer) -> None:
    model = make_model(family)
    inputs = make_inputs(model, ROWS)
    options = {"return_dict_in_generate": True, "output_logits": True}
    with reduced(model, reducer, positions=positions) as trace:
        together = generate(model, inputs, **options)
        for number, row in enumerate(ROWS):
            alone = make_inputs(model, [row])
            # The text of a row depends on its number.
            alone["input_ids"] = inputs["input_ids"][number : number + 1, -alone["input_ids"].shape[1] :]
            single = generate(model, alone, **options)
            assert torch.equal(single.sequences[0, -NEW:], together.sequences[number, -NEW:])
            for a, b in zip(single.logits, together.logits, strict=True):
                assert torch.allclose(a[0], b[number], atol=1e-3)
    first, *rest = trace.calls
    assert first.after == tuple(count for call in rest for count in call.after)


@pytest.mark.parametrize("family", BOTH)
def test_beam_search_and_no_cache(family: str) -> None:
    model = make_model(family)
    inputs = make_inputs(model, ROWS)
    with reduced(model, KeepLarge()):
        beams = generate(model, inputs, num_beams=3, num_return_sequences=2)
        for number, row in enumerate(ROWS):
            alone = make_inputs(model, [row])
            alone["input_ids"] = inputs["input_ids"][number : number + 1, -alone["input_ids"].shape[1] :]
            single = generate(model, alone, num_beams=3, num_return_sequences=2)
            assert torch.equal(single[:, -NEW:], beams[2 * number : 2 * number + 2, -NEW:])
        assert torch.equal(generate(model, inputs), generate(model, inputs, use_cache=False))


@pytest.mark.parametrize("family", BOTH)
def test_forward_with_labels_pads_where_the_prompt_did(family: str) -> None:
    model = make_model(family)
    inputs = make_inputs(model, ROWS, side="right")
    labels = inputs["input_ids"].masked_fill(inputs["input_ids"] == IMAGE, -100)
    with reduced(model, KeepLarge()) as trace:
        out = model(**inputs, labels=labels)
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert model.model.image_newline.grad.norm() > 0
    assert model.model.multi_modal_projector.linear_1.weight.grad.norm() > 0
    model.zero_grad()
    assert trace.after < trace.before


@pytest.mark.parametrize("family", BOTH)
def test_model_is_unchanged_afterwards(family: str) -> None:
    model = make_model(family)
    inputs = make_inputs(model, ROWS)
    before = generate(model, inputs)
    with reduced(model, KeepLarge()):
        generate(model, inputs)
    with reduced(model, KeepNone()), pytest.raises(TorinoError):
        generate(model, inputs)
    assert "generate" not in vars(model)
    assert "forward" not in vars(model)
    assert torch.equal(generate(model, inputs), before)


@pytest.mark.parametrize("family", BOTH)
def test_tower_stops_and_accepts_flat_tiles(family: str) -> None:
    """Pixels may be padded to the largest number of tiles, or be all tiles concatenated."""
    model = make_model(family)
    inputs = make_inputs(model, ROWS)
    counts = adapter_for(model).count_tiles(inputs["image_sizes"].tolist(), inputs)
    assert len(set(counts)) > 1
    tiles = torch.cat([tiles[:count] for tiles, count in zip(inputs["pixel_values"], counts, strict=True)])
    calls: list[int] = []
    block = model.model.vision_tower.encoder.layers[-1]
    hook = block.register_forward_hook(lambda *_: calls.append(1))
    with reduced(model, KeepLarge()):
        padded = generate(model, inputs)
        count = len(calls)
        flat = generate(model, {**inputs, "pixel_values": tiles})
    hook.remove()
    assert torch.equal(padded, flat)
    assert count == (0 if family == "llava_next" else 1)  # OneVision reads the last block


@pytest.mark.parametrize("family", BOTH)
def test_half_precision(family: str) -> None:
    """The SAE stays in float32. Rounding in bfloat16 depends on the memory layout, so results are not bitwise equal."""
    model = deepcopy(make_model(family)).to(torch.bfloat16)
    inputs = make_inputs(make_model(family), ROWS)
    inputs["pixel_values"] = inputs["pixel_values"].to(torch.bfloat16)
    with torch.no_grad():
        stock = model(**inputs).logits
        with reduced(model, KeepAll()):
            assert torch.allclose(model(**inputs).logits, stock, atol=0.3)
        with reduced(model, TORINO["torino-m"]()) as trace:
            assert model(**inputs).logits.dtype == torch.bfloat16
    assert trace.after < trace.before


@pytest.mark.parametrize("family", BOTH)
def test_signals_follow_the_patches(family: str) -> None:
    model = make_model(family, "clip")
    inputs = make_inputs(model, [[(64, 60)], [(40, 90)]])
    needs = frozenset({"cls_attention", "keys", "keys@0", "cls_attention@1"})
    with torch.no_grad():
        encoded = adapter_for(model).encode(inputs, needs)
    for unit in encoded.tokens:
        assert unit.cls is not None
        assert unit.keys is not None
        assert unit.cls_attention is not None
        assert unit.cls_attention.shape == (2, len(unit))
        assert unit.signals["cls_attention@1"].shape == (2, len(unit))
        assert unit.keys.shape == unit.signals["keys@0"].shape == (len(unit), WIDTH)
    grids = {unit.grid for unit in encoded.tokens}
    assert len(grids) > 1


# ---------------------------------------------------------------------- the processor


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = ["<pad>", "<s>", *[f"w{i}" for i in range(2, IMAGE)], "<image>", "<video>", "x", "<unk>"]
    tokenizer_object = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer_object.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_object,
        pad_token="<pad>",
        bos_token="<s>",
        unk_token="<unk>",
        padding_side="left",
        additional_special_tokens=["<image>", "<video>"],
    )


def make_processor(family: str, model: Any = None) -> Any:
    """Return the processor; for OneVision only its placeholder count, because the rest needs torchvision."""
    if family == "llava_next":
        vision = (model or make_model(family)).config.vision_config
        return transformers.LlavaNextProcessor(
            image_processor(family),
            make_tokenizer(),
            patch_size=vision.patch_size,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )
    stock = object.__new__(transformers.LlavaOnevisionProcessor)
    config = (model or make_model(family)).config
    stock.image_processor, stock.image_token = image_processor(family), "i"
    stock.num_image_tokens = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
    stock.vision_feature_select_strategy, stock.vision_aspect_ratio = "full", config.vision_aspect_ratio
    return stock


@pytest.mark.parametrize("family", BOTH)
def test_packing_matches_the_processor_at_full_size(family: str) -> None:
    """With the geometry of the published models: each patch at most once, rows of equal length, the right total."""
    side = {"llava_next": 336, "llava_onevision": 384}[family]
    limit = {} if family == "llava_next" else {"vision_aspect_ratio": "anyres_max_9"}
    model = make_model(family, "", side, 14, image_grid_pinpoints=None, **limit)
    stock = make_processor(family, model)
    stock.image_processor.image_grid_pinpoints = model.config.image_grid_pinpoints
    adapter = adapter_for(model)
    patches = (side // 14) ** 2
    sizes = np.random.default_rng(2).integers(20, 2600, (12, 2)).tolist()
    inputs = {
        "image_sizes": sizes,
        "pixel_values": [[torch.zeros(3, side, side)]],
        "batch_num_images": [1] * len(sizes),
    }
    packings = adapter.find_packing(adapter.count_tiles(sizes, {}), patches, sizes, {})
    for number, packing in enumerate(packings):
        text = stock.replace_image_token(inputs, number)
        assert len(packing) == len(text) // len(stock.image_token)
        rows = packing.row[packing.detail].bincount()
        assert len(rows) == int(packing.newline.sum())
        assert len(rows.unique()) == 1
        patch = packing.patch[packing.patch >= 0]
        assert len(patch.unique()) == len(patch)
        assert torch.equal(patch[:patches], torch.arange(patches))
    assert any(packing.resized for packing in packings) == (family == "llava_onevision")
    assert not all(packing.resized for packing in packings)


def test_processor_equals_context_manager() -> None:
    """The model's own count of placeholders equals that of the processor."""
    model = make_model("llava_next")
    stock = make_processor("llava_next")
    text = ["w5 <image> w6", "w7 <image> w8 <image> w9 w10"]
    images = [photo(size) for size in ((40, 90), (64, 60), (90, 30))]
    inputs = dict(stock(images=images, text=text, return_tensors="pt", padding=True))
    with reduced(model, KeepLarge()) as trace:
        expected = generate(model, inputs)
    processor = ReducingProcessor(stock, model, KeepLarge())
    final = processor(images=images, text=text, padding=True)
    assert final.input_ids.shape[1] < inputs["input_ids"].shape[1]
    assert torch.equal(generate(model, {**final})[:, -NEW:], expected[:, -NEW:])
    assert processor.trace.calls[0].after == trace.calls[0].after


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize("family", BOTH)
def test_several_layers_are_refused(family: str) -> None:
    model = make_model(family)
    inputs = make_inputs(model, [[(32, 32)]])
    with reduced(model, KeepAll()), pytest.raises(TorinoError, match="several tower layers at once"):
        model(**inputs, vision_feature_layer=[-2, -1])


def test_strategies_that_do_not_match_the_tower_are_refused() -> None:
    inputs = make_inputs(make_model("llava_next"), [[(32, 32)]])
    with pytest.raises(TorinoError, match=r"feeds the CLS token to its language model"):
        adapter_for(make_model("llava_next", vision_feature_select_strategy="full")).encode(inputs, frozenset())
    with pytest.raises(TorinoError, match="a patch in SiglipVisionModel"):
        adapter_for(make_model("llava_next", "siglip", vision_feature_select_strategy="default")).encode(
            inputs, frozenset()
        )
    with pytest.raises(TorinoError, match="this tower has 5 before its patches"):
        adapter_for(make_model("llava_next", "dinov2_with_registers", vision_feature_select_strategy="default")).encode(
            inputs, frozenset()
        )


@pytest.mark.parametrize("family", BOTH)
def test_inconsistent_pixels_and_sizes_are_refused(family: str) -> None:
    model = make_model(family)
    inputs = make_inputs(model, [[(40, 90)], [(32, 32)]])
    adapter = adapter_for(model)
    for change, message in (
        ({"image_sizes": None}, "image_sizes is missing"),
        ({"pixel_values": inputs["pixel_values"][:1]}, "which does not match"),
        ({"pixel_values": inputs["pixel_values"][:, :2]}, "which does not match"),
        ({"pixel_values": inputs["pixel_values"][0, 0]}, "must be a tensor of shape"),
        ({"pixel_values": list(inputs["pixel_values"])}, "got list"),
    ):
        with pytest.raises(BadTokens, match=message):
            adapter.encode({**inputs, **change}, frozenset())
    if family == "llava_onevision":
        with pytest.raises(BadTokens, match="batch_num_images counts 3 images, and image_sizes has 2"):
            adapter.encode({**inputs, "batch_num_images": torch.tensor([1, 2])}, frozenset())


def test_reducer_that_keeps_nothing_is_refused() -> None:
    model = make_model("llava_next")
    with reduced(model, KeepNone()), pytest.raises(TorinoError, match="kept no token of image 0"):
        generate(model, make_inputs(model, [[(40, 90)]]))
