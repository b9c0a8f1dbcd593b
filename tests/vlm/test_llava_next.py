"""LLaVA-NeXT and LLaVA-OneVision hosts, on tiny models made from configs: no network, no weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from torino import SAE, RawEmbedding, Reducer, Reduction, VisualTokens, make
from torino.core.errors import BadParameter, BadTokens, MissingSignal, TorinoError
from torino.core.reduction import ReductionBatch

transformers = pytest.importorskip("transformers")

from torino.vlm import ReducingProcessor, adapter_for, families, reduced  # noqa: E402
from torino.vlm.adapters.base import Adapter, serve  # noqa: E402
from torino.vlm.adapters.llava_next import LlavaNext  # noqa: E402
from torino.vlm.adapters.llava_onevision import LlavaOnevision  # noqa: E402

if "llava_next" not in families():

    @serve("llava_next")
    def _llava_next() -> type[Adapter]:
        return LlavaNext


if "llava_onevision" not in families():

    @serve("llava_onevision")
    def _llava_onevision() -> type[Adapter]:
        return LlavaOnevision


PAD, IMAGE, VIDEO, VOCAB = 0, 60, 61, 64
SIDE, PATCH, WIDTH = 32, 8, 32
TILE = (SIDE // PATCH) ** 2
PINPOINTS = [[a * SIDE, b * SIDE] for a, b in ((1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (3, 1))]
NEW = 3
BOTH = ("llava_next", "llava_onevision")
# Rows of the test batch: sizes (height, width) of their images, none for text alone. In OneVision, whose cap is two
# tiles here, the third is resized; and images that share a prompt have one tile each.
ROWS = ([(40, 90)], [], [(64, 60)], [(30, 50), (90, 30)], [(32, 32)])


# ---------------------------------------------------------------------- tiny models and prompts


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Threads only get in the way of models this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def tiny(family: str, tower: str = "", side: int = SIDE, patch: int = PATCH, **options: Any) -> Any:
    text = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 1024,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": PAD,
    }
    vision = {
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": side,
        "patch_size": patch,
    }
    is_next = family == "llava_next"
    tower = tower or ("clip" if is_next else "siglip")
    options = {"vision_feature_select_strategy": "default" if tower == "clip" else "full"} | options
    if not is_next:
        options = {"video_token_index": VIDEO, "vision_aspect_ratio": "anyres_max_2"} | options
    config = (transformers.LlavaNextConfig if is_next else transformers.LlavaOnevisionConfig)(
        text_config={"model_type": "llama" if is_next else "qwen2", **text},
        vision_config={
            "model_type": tower if "dino" in tower else f"{tower}_vision_model",
            "vision_use_head": False,
            **vision,
        },
        image_token_index=IMAGE,
        **{"image_grid_pinpoints": PINPOINTS} | options,
    )
    torch.manual_seed(3)
    name = "LlavaNextForConditionalGeneration" if is_next else "LlavaOnevisionForConditionalGeneration"
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def image_processor(family: str) -> Any:
    if family == "llava_next":
        from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil as Made
    else:
        from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
            LlavaOnevisionImageProcessorPil as Made,
        )
    size = {"height": SIDE, "width": SIDE}
    return Made(size=size, crop_size=size, image_grid_pinpoints=PINPOINTS)


def photo(size: tuple[int, int]) -> np.ndarray[Any, Any]:
    return np.random.default_rng(size[0] * 1000 + size[1]).integers(0, 256, (*size, 3), dtype=np.uint8)


def inputs_for(model: Any, rows: Sequence[Sequence[tuple[int, int]]], side: str = "left") -> dict[str, Any]:
    """Prompts with images, as long as the model's own features say."""
    family = model.config.model_type
    images = [[photo(size) for size in row] for row in rows if row]
    found: dict[str, Any] = {}
    lengths: list[int] = []
    if images:
        flat = images if family == "llava_onevision" else [image for row in images for image in row]
        found = dict(image_processor(family)(flat, return_tensors="pt"))
        with torch.no_grad():
            lengths = [len(part) for part in model.model.get_image_features(**found).pooler_output]
    length = iter(lengths)
    texts = []
    for number, row in enumerate(rows):
        text = [1, 5 + number]
        for _ in row:
            text += [IMAGE] * next(length) + [20 + number]
        texts.append(torch.tensor([*text, 9, 10 + number]))
    longest = max(map(len, texts))
    ids, mask = torch.full((len(texts), longest), PAD), torch.zeros(len(texts), longest, dtype=torch.long)
    for number, text in enumerate(texts):
        at = slice(longest - len(text), None) if side == "left" else slice(0, len(text))
        ids[number, at], mask[number, at] = text, 1
    return {"input_ids": ids, "attention_mask": mask, **found}


def answer(model: Any, inputs: dict[str, Any], **options: Any) -> Tensor:
    return model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **options)


# ---------------------------------------------------------------------- reducers


@dataclass(frozen=True)
class Every(Reducer):
    name: ClassVar[str] = "every"

    def plan(self, tokens: VisualTokens) -> Reduction:
        return Reduction.identity(tokens.grid, self.spec)


@dataclass(frozen=True)
class Loud(Reducer):
    """Keep the patches louder than the mean, so that what is kept depends on the tile."""

    name: ClassVar[str] = "loud"

    def plan(self, tokens: VisualTokens) -> Reduction:
        norm = tokens.patches.double().norm(dim=1)
        return Reduction.pick((norm >= norm.mean() - 1e-9).nonzero()[:, 0], tokens.grid, self.spec)


@dataclass(frozen=True)
class First(Reducer):
    """Keep the first patch of each unit."""

    name: ClassVar[str] = "first"

    def plan(self, tokens: VisualTokens) -> Reduction:
        return Reduction.pick(torch.zeros(1, dtype=torch.long), tokens.grid, self.spec)


@dataclass(frozen=True)
class Mean(Reducer):
    """One token for each unit, without a place."""

    name: ClassVar[str] = "mean"

    def plan(self, tokens: VisualTokens) -> Reduction:
        made = Reduction.of([dict.fromkeys(range(len(tokens)), 1 / len(tokens))], tokens.grid, self.spec)
        return Reduction(**{**vars(made), "anchor": torch.tensor([-1])})


@dataclass(frozen=True)
class Nothing(Reducer):
    name: ClassVar[str] = "nothing"

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


# ---------------------------------------------------------------------- nothing removed: the stock model


@pytest.mark.parametrize(("family", "attention"), [(BOTH[0], "sdpa"), (BOTH[1], "sdpa"), (BOTH[1], "eager")])
def test_identity_is_the_stock_model_to_the_bit(family: str, attention: str) -> None:
    model = tiny(family)
    model.set_attn_implementation(attention)
    try:
        inputs = inputs_for(model, ROWS)
        options = {"return_dict_in_generate": True, "output_logits": True}
        stock = answer(model, inputs, **options)
        with torch.no_grad():
            logits = model(**inputs).logits
        with reduced(model, Every()) as trace:
            ours = answer(model, inputs, **options)
            with torch.no_grad():
                again = model(**inputs).logits
    finally:
        model.set_attn_implementation("sdpa")
    assert torch.equal(stock.sequences, ours.sequences)
    assert all(torch.equal(one, other) for one, other in zip(stock.logits, ours.logits, strict=True))
    assert torch.equal(logits, again)
    assert trace.before == trace.after
    assert len(stock.sequences[:, -NEW:].unique()) > 3, "the tiny model says one thing only"


def test_what_keeps_everything_is_projected_as_the_stock_model_projects_it() -> None:
    """Here a product of fewer rows happens to round alike; elsewhere it need not."""
    model = tiny("llava_next")
    inputs = inputs_for(model, ROWS)
    shapes: list[Any] = []
    hook = model.model.multi_modal_projector.register_forward_pre_hook(lambda _, given: shapes.append(given[0].shape))
    with torch.no_grad(), reduced(model, Every()):
        type(model).forward(model, **inputs)
        model(**inputs)
    hook.remove()
    assert len(shapes) == 2
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("family", BOTH)
@pytest.mark.parametrize("size", [(32, 32), (90, 33), (33, 90), (64, 64), (20, 70), (200, 2), (1, 1)])
def test_identity_on_every_shape(family: str, size: tuple[int, int]) -> None:
    model = tiny(family)
    inputs = inputs_for(model, [[size]])
    with torch.no_grad():
        stock = model(**inputs).logits
        with reduced(model, Every()):
            assert torch.equal(model(**inputs).logits, stock)


def test_a_row_that_never_had_a_patch_keeps_its_newline() -> None:
    """A hair's breadth: unpadding leaves rows of no patches, and the model still ends each of them."""
    model = tiny("llava_next")
    inputs = inputs_for(model, [[(200, 2)]])
    assert (inputs["input_ids"] == IMAGE).sum() == TILE + SIDE // PATCH
    with reduced(model, First()) as trace:
        answer(model, inputs)
    assert [look.after for look in trace.looks] == [(1 + SIDE // PATCH,)]
    assert len(trace) == 1


# ---------------------------------------------------------------------- what is removed, and what is left


@pytest.mark.parametrize("family", BOTH)
def test_pruned_features_are_the_stock_ones_at_their_slots(family: str) -> None:
    model = tiny(family)
    inputs = inputs_for(model, ROWS)
    host = adapter_for(model)
    with torch.no_grad():
        stock = model.model.get_image_features(
            **{name: inputs[name] for name in ("pixel_values", "image_sizes", "batch_num_images") if name in inputs}
        ).pooler_output
        sight = host.look(inputs, frozenset())
        assert sight.full == tuple(map(len, stock))
        for reducer in (Loud(), First()):
            plans = reducer.plan_batch(sight.tokens)
            splices = host.splice(sight, plans)
            for splice, features in zip(splices, stock, strict=True):
                assert bool((splice.slots.diff() > 0).all())
                assert torch.allclose(splice.features, features[splice.slots], atol=1e-5)
            assert sum(len(splice.slots) for splice in splices) < sum(sight.full)


@pytest.mark.parametrize("newlines", ["rows", "all", "none"])
def test_newlines(newlines: Any) -> None:
    """Two tiles side by side on eight columns: a base view of 16, then rows of up to 8 patches and a newline."""
    model = tiny("llava_next")
    host = LlavaNext(model, newlines=newlines)
    inputs = inputs_for(model, [[(32, 64)]])
    with torch.no_grad():
        sight = host.look(inputs, frozenset())
        assert sight.full == (TILE + 4 * 9,)
        # the base view keeps patch 3; the left tile a patch of row 1, the right tile one of row 1 and one of row 3
        kept = [[3], [4], [6, 13]]
        plans = ReductionBatch.of([Reduction.pick(torch.tensor(at), (4, 4), "hand") for at in kept])
        (splice,) = host.splice(sight, plans)
    wanted = [3, TILE + 9 + 0, TILE + 9 + 4 + 2, TILE + 27 + 4 + 1]
    ends = {"rows": [TILE + 17, TILE + 35], "all": [TILE + 8, TILE + 17, TILE + 26, TILE + 35], "none": []}[newlines]
    assert splice.slots.tolist() == sorted(wanted + ends)
    for slot, feature in zip(splice.slots.tolist(), splice.features, strict=True):
        assert torch.equal(feature, model.model.image_newline) == (slot in ends)


def test_a_token_of_no_place_takes_the_last_one_of_its_tile() -> None:
    model = tiny("llava_next")
    host = adapter_for(model)
    with torch.no_grad():
        sight = host.look(inputs_for(model, [[(32, 64)]]), frozenset())
        (splice,) = host.splice(sight, Mean().plan_batch(sight.tokens))
    assert splice.slots.tolist() == [TILE - 1, TILE + 27 + 3, TILE + 27 + 7, TILE + 27 + 8]


def test_newlines_of_a_subclass_and_of_no_known_name() -> None:
    class AllNewlines(LlavaNext):
        newlines = "all"

    assert AllNewlines(tiny("llava_next")).newlines == "all"
    with pytest.raises(BadParameter, match="newlines must be one of 'rows', 'all', 'none', got 'some'"):
        LlavaNext(tiny("llava_next"), newlines="some")  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [(32, 40), (64, 40), (40, 90), (90, 20)])
def test_bars_are_cut_away_before_planning(size: tuple[int, int]) -> None:
    """A unit is what the model shows of a tile, and a merged token is made of nothing else."""
    from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape, unpad_image

    model = tiny("llava_next")
    inputs = inputs_for(model, [[size]])
    host = adapter_for(model)
    down, right = get_anyres_image_grid_shape(size, PINPOINTS, SIDE)
    tile = torch.arange(1, 1 + down * right).view(down, right)
    side = SIDE // PATCH
    patch = torch.arange(TILE).view(side, side).repeat(down, right)
    shown = unpad_image(torch.stack([tile.repeat_interleave(side, 0).repeat_interleave(side, 1), patch]), size)
    with torch.no_grad():
        pixels = inputs["pixel_values"][0]
        states = model.model.vision_tower(pixels, output_hidden_states=True).hidden_states[-2][:, 1:]
        sight = host.look(inputs, frozenset())
        (splice,) = host.splice(sight, Mean().plan_batch(sight.tokens))
        parts = [states[0], *[states[t, shown[1][shown[0] == t]] for t in shown[0].unique()]]
        assert [len(unit) for unit in sight.tokens] == [len(part) for part in parts]
        for unit, part in zip(sight.tokens, parts, strict=True):
            assert torch.allclose(unit.patches, part, atol=1e-5)
        means = model.model.multi_modal_projector(torch.stack([part.mean(0) for part in parts]))
    is_newline = (splice.features == model.model.image_newline).all(1)
    # the base view comes first; tiles follow by the place of their last patch, each row with its newline
    assert torch.allclose(splice.features[0], means[0], atol=1e-4)
    left = splice.features[~is_newline]
    assert len(left) == len(means)
    assert torch.cdist(left.double(), means.double()).min(1).values.max() < 1e-4
    assert int(is_newline.sum()) == down
    assert len(shown[0].flatten()) < down * right * TILE or size == (32, 40)


@pytest.mark.parametrize("family", BOTH)
@pytest.mark.parametrize("name", sorted(TORINO))
def test_torino_runs_and_the_trace_counts_the_prompt(family: str, name: str) -> None:
    model = tiny(family)
    inputs = inputs_for(model, ROWS)
    host = adapter_for(model)
    with torch.no_grad():
        shrunk, look = host.shrink(inputs, TORINO[name](), "compact")
    assert sum(look.after) == int((shrunk["input_ids"] == IMAGE).sum()) < sum(look.before)
    assert sum(look.before) == int((inputs["input_ids"] == IMAGE).sum())
    assert look.after == tuple(len(part) for part in shrunk["mm_encoder_outputs"]["image"].pooler_output)
    newlines = sum(look.after) - sum(len(plan) for plan in look.reductions)
    assert 0 < newlines <= sum(look.before)
    with reduced(model, TORINO[name]()) as trace:
        out = answer(model, inputs)
    assert trace.after == sum(look.after)
    assert out.shape == (len(ROWS), inputs["input_ids"].shape[1] + NEW)
    assert torch.equal(out[:, :-NEW], inputs["input_ids"])


@pytest.mark.parametrize("family", BOTH)
@pytest.mark.parametrize(
    ("positions", "reducer"),
    [("compact", Loud()), ("original", TORINO["torino-m"]()), ("original", Mean())],
    ids=["loud", "torino-m", "mean"],
)
def test_ragged_batch_is_its_rows_one_by_one(family: str, positions: Any, reducer: Reducer) -> None:
    model = tiny(family)
    inputs = inputs_for(model, ROWS)
    options = {"return_dict_in_generate": True, "output_logits": True}
    with reduced(model, reducer, positions=positions) as trace:
        together = answer(model, inputs, **options)
        for number, row in enumerate(ROWS):
            alone = inputs_for(model, [row])
            # the text of a row depends on its number
            alone["input_ids"] = inputs["input_ids"][number : number + 1, -alone["input_ids"].shape[1] :]
            single = answer(model, alone, **options)
            assert torch.equal(single.sequences[0, -NEW:], together.sequences[number, -NEW:])
            for one, other in zip(single.logits, together.logits, strict=True):
                assert torch.allclose(one[0], other[number], atol=1e-3)
    first, *rest = trace.looks
    assert first.after == tuple(count for look in rest for count in look.after)


@pytest.mark.parametrize("family", BOTH)
def test_beams_several_answers_and_no_cache(family: str) -> None:
    model = tiny(family)
    inputs = inputs_for(model, ROWS)
    with reduced(model, Loud()):
        beams = answer(model, inputs, num_beams=3, num_return_sequences=2)
        for number, row in enumerate(ROWS):
            alone = inputs_for(model, [row])
            alone["input_ids"] = inputs["input_ids"][number : number + 1, -alone["input_ids"].shape[1] :]
            single = answer(model, alone, num_beams=3, num_return_sequences=2)
            assert torch.equal(single[:, -NEW:], beams[2 * number : 2 * number + 2, -NEW:])
        assert torch.equal(answer(model, inputs), answer(model, inputs, use_cache=False))


@pytest.mark.parametrize("family", BOTH)
def test_forward_with_labels_pads_where_the_prompt_did(family: str) -> None:
    model = tiny(family)
    inputs = inputs_for(model, ROWS, side="right")
    labels = inputs["input_ids"].masked_fill(inputs["input_ids"] == IMAGE, -100)
    with reduced(model, Loud()) as trace:
        out = model(**inputs, labels=labels)
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert model.model.image_newline.grad.norm() > 0
    assert model.model.multi_modal_projector.linear_1.weight.grad.norm() > 0
    model.zero_grad()
    assert trace.after < trace.before


@pytest.mark.parametrize("family", BOTH)
def test_nothing_is_left_behind(family: str) -> None:
    model = tiny(family)
    inputs = inputs_for(model, ROWS)
    before = answer(model, inputs)
    with reduced(model, Loud()):
        answer(model, inputs)
    with reduced(model, Nothing()), pytest.raises(TorinoError):
        answer(model, inputs)
    assert "generate" not in vars(model)
    assert "forward" not in vars(model)
    assert torch.equal(answer(model, inputs), before)


@pytest.mark.parametrize("family", BOTH)
def test_tower_stops_and_flat_tiles_are_taken(family: str) -> None:
    """Pixels may come as images of tiles, filled up to the longest, or as all tiles end to end."""
    model = tiny(family)
    inputs = inputs_for(model, ROWS)
    counts = adapter_for(model).count_tiles(inputs["image_sizes"].tolist(), inputs)
    assert len(set(counts)) > 1
    tiles = torch.cat([tiles[:count] for tiles, count in zip(inputs["pixel_values"], counts, strict=True)])
    seen: list[int] = []
    block = model.model.vision_tower.encoder.layers[-1]
    hook = block.register_forward_hook(lambda *_: seen.append(1))
    with reduced(model, Loud()):
        one = answer(model, inputs)
        ran = len(seen)
        other = answer(model, {**inputs, "pixel_values": tiles})
    hook.remove()
    assert torch.equal(one, other)
    assert ran == (0 if family == "llava_next" else 1)  # OneVision reads the last block


@pytest.mark.parametrize("family", BOTH)
def test_half_precision(family: str) -> None:
    """The SAE stays in float32. Kernels of bfloat16 round by memory layout, so equal is not equal to the bit."""
    model = deepcopy(tiny(family)).to(torch.bfloat16)
    inputs = inputs_for(tiny(family), ROWS)
    inputs["pixel_values"] = inputs["pixel_values"].to(torch.bfloat16)
    with torch.no_grad():
        stock = model(**inputs).logits
        with reduced(model, Every()):
            assert torch.allclose(model(**inputs).logits, stock, atol=0.3)
        with reduced(model, TORINO["torino-m"]()) as trace:
            assert model(**inputs).logits.dtype == torch.bfloat16
    assert trace.after < trace.before


# ---------------------------------------------------------------------- OneVision: resizing


def test_an_image_over_the_cap_has_a_base_view_and_a_canvas() -> None:
    model = tiny("llava_onevision")
    inputs = inputs_for(model, [[(64, 60)], [(32, 60)]])
    host = adapter_for(model)
    with torch.no_grad():
        over, under = (scene.picture for scene in host.look(inputs, frozenset()).extra[0])
        sight = host.look(inputs, frozenset())
    assert (over.resized, under.resized) == (True, False)
    rows = int(over.newline.sum())
    assert [unit.grid for unit in sight.tokens[:2]] == [(4, 4), (rows, (len(over) - TILE - rows) // rows)]
    assert [unit.grid for unit in sight.tokens[2:]] == [(4, 4)] * 3
    assert {unit.width for unit in sight.tokens} == {WIDTH}
    assert len({unit.origin for unit in sight.tokens}) == 1


def test_canvas_merges_in_the_tower_and_keeps_what_it_keeps() -> None:
    """With a linear projector resizing commutes with it, so a merged token is the sum of stock ones plus bias."""
    model = tiny("llava_onevision", projector_hidden_act="linear")
    inputs = inputs_for(model, [[(64, 60)]])
    host = adapter_for(model)
    with torch.no_grad():
        stock = model.model.get_image_features(inputs["pixel_values"], inputs["image_sizes"]).pooler_output[0]
        sight = host.look(inputs, frozenset())
        base, canvas = sight.tokens
        plans = ReductionBatch.of(
            [
                Reduction.identity(base.grid),
                Reduction.of([{0: 1.0}, {1: 0.5, 2: 0.25, 7: 0.25}, {9: 1.0}, {3: 0.5}], canvas.grid),
            ]
        )
        plans[1].anchor[2] = 8  # it takes the place of a neighbour
        (splice,) = host.splice(sight, plans)
        bias = model.model.multi_modal_projector(torch.zeros(WIDTH))
    columns = canvas.grid[1]

    def place(patch: int) -> int:
        return TILE + patch + patch // columns  # a newline stands between rows

    ends = [TILE + columns, TILE + 2 * columns + 1]
    assert splice.slots.tolist() == sorted([*range(TILE), place(0), place(1), place(3), place(8), *ends])
    made = {
        place(1): 0.5 * stock[place(1)] + 0.25 * stock[place(2)] + 0.25 * stock[place(7)],
        place(3): 0.5 * stock[place(3)] + 0.5 * bias,
    }
    kept = {place(8): stock[place(9)]}
    for slot, feature in zip(splice.slots.tolist(), splice.features, strict=True):
        if slot in made:
            assert torch.allclose(feature, made[slot], atol=1e-4)
        else:
            assert torch.equal(feature, kept.get(slot, stock[slot]))


def test_cap_of_the_call_overrules_the_config() -> None:
    model = tiny("llava_onevision")
    inputs = inputs_for(model, [[(64, 60)]])
    host = adapter_for(model)
    with torch.no_grad():
        wide = host.look({**inputs, "vision_aspect_ratio": "anyres_max_9"}, frozenset())
    assert not wide.extra[0][0].picture.resized
    assert len(wide.tokens) == 5


@pytest.mark.parametrize("family", BOTH)
def test_signals_follow_the_patches(family: str) -> None:
    model = tiny(family, "clip")
    inputs = inputs_for(model, [[(64, 60)], [(40, 90)]])
    needs = frozenset({"cls_attention", "keys", "keys@0", "cls_attention@1"})
    with torch.no_grad():
        sight = adapter_for(model).look(inputs, needs)
    for unit in sight.tokens:
        assert unit.cls is not None
        assert unit.keys is not None
        assert unit.cls_attention is not None
        assert unit.cls_attention.shape == (2, len(unit))
        assert unit.signals["cls_attention@1"].shape == (2, len(unit))
        assert unit.keys.shape == unit.signals["keys@0"].shape == (len(unit), WIDTH)
    grids = {unit.grid for unit in sight.tokens}
    assert len(grids) > 1


# ---------------------------------------------------------------------- two phases


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = ["<pad>", "<s>", *[f"w{i}" for i in range(2, IMAGE)], "<image>", "<video>", "x", "<unk>"]
    made = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        unk_token="<unk>",
        padding_side="left",
        additional_special_tokens=["<image>", "<video>"],
    )


def processor(family: str, model: Any = None) -> Any:
    """The processor; of OneVision only what counts placeholders, because the whole of it wants torchvision."""
    if family == "llava_next":
        vision = (model or tiny(family)).config.vision_config
        return transformers.LlavaNextProcessor(
            image_processor(family),
            tokenizer(),
            patch_size=vision.patch_size,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )
    made = object.__new__(transformers.LlavaOnevisionProcessor)
    config = (model or tiny(family)).config
    made.image_processor, made.image_token = image_processor(family), "i"
    made.num_image_tokens = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
    made.vision_feature_select_strategy, made.vision_aspect_ratio = "full", config.vision_aspect_ratio
    return made


@pytest.mark.parametrize("family", BOTH)
def test_images_are_packed_as_the_processor_counts_at_full_size(family: str) -> None:
    """The geometry of the published models: every patch at most once, rows of one length, the right sum."""
    side = {"llava_next": 336, "llava_onevision": 384}[family]
    cap = {} if family == "llava_next" else {"vision_aspect_ratio": "anyres_max_9"}
    model = tiny(family, "", side, 14, image_grid_pinpoints=None, **cap)
    stock = processor(family, model)
    stock.image_processor.image_grid_pinpoints = model.config.image_grid_pinpoints
    host = adapter_for(model)
    patches = (side // 14) ** 2
    sizes = np.random.default_rng(2).integers(20, 2600, (12, 2)).tolist()
    given = {"image_sizes": sizes, "pixel_values": [[torch.zeros(3, side, side)]], "batch_num_images": [1] * len(sizes)}
    pictures = host.pictures(host.count_tiles(sizes, {}), patches, sizes, {})
    for number, picture in enumerate(pictures):
        text = stock.replace_image_token(given, number)
        assert len(picture) == len(text) // len(stock.image_token)
        rows = picture.row[picture.detail].bincount()
        assert len(rows) == int(picture.newline.sum())
        assert len(rows.unique()) == 1
        standing = picture.patch[picture.patch >= 0]
        assert len(standing.unique()) == len(standing)
        assert torch.equal(standing[:patches], torch.arange(patches))
    assert any(picture.resized for picture in pictures) == (family == "llava_onevision")
    assert not all(picture.resized for picture in pictures)


def test_processor_of_two_phases_gives_what_the_block_gives() -> None:
    """Also: the model's own count of placeholders is the one the processor expands to."""
    model = tiny("llava_next")
    stock = processor("llava_next")
    text = ["w5 <image> w6", "w7 <image> w8 <image> w9 w10"]
    images = [photo(size) for size in ((40, 90), (64, 60), (90, 30))]
    inputs = dict(stock(images=images, text=text, return_tensors="pt", padding=True))
    with reduced(model, Loud()) as trace:
        wanted = answer(model, inputs)
    ours = ReducingProcessor(stock, model, Loud())
    final = ours(images=images, text=text, padding=True)
    assert final.input_ids.shape[1] < inputs["input_ids"].shape[1]
    assert torch.equal(answer(model, {**final})[:, -NEW:], wanted[:, -NEW:])
    assert ours.trace.looks[0].after == trace.looks[0].after


# ---------------------------------------------------------------------- refused, in a sentence


@pytest.mark.parametrize("family", BOTH)
def test_several_layers_are_refused(family: str) -> None:
    model = tiny(family)
    inputs = inputs_for(model, [[(32, 32)]])
    with reduced(model, Every()), pytest.raises(TorinoError, match="several tower layers at once"):
        model(**inputs, vision_feature_layer=[-2, -1])


def test_videos_are_refused() -> None:
    model = tiny("llava_onevision")
    inputs = inputs_for(model, [[]])
    with reduced(model, Every()), pytest.raises(TorinoError, match="This prompt has a video"):
        answer(model, {**inputs, "pixel_values_videos": torch.zeros(1, 2, 3, SIDE, SIDE)})


def test_strategies_that_do_not_fit_the_tower_are_refused() -> None:
    inputs = inputs_for(tiny("llava_next"), [[(32, 32)]])
    with pytest.raises(TorinoError, match=r"feeds the CLS token to its language model"):
        adapter_for(tiny("llava_next", vision_feature_select_strategy="full")).look(inputs, frozenset())
    with pytest.raises(TorinoError, match="a patch in SiglipVisionModel"):
        adapter_for(tiny("llava_next", "siglip", vision_feature_select_strategy="default")).look(inputs, frozenset())
    with pytest.raises(TorinoError, match="this tower has 5 before its patches"):
        adapter_for(tiny("llava_next", "dinov2_with_registers", vision_feature_select_strategy="default")).look(
            inputs, frozenset()
        )


def test_a_cls_token_that_is_not_there_is_not_kept() -> None:
    model = tiny("llava_onevision")
    host = adapter_for(model)
    sight = host.look(inputs_for(model, [[(32, 32)]]), frozenset())
    plans = ReductionBatch.of([Reduction.pick(torch.tensor([0, TILE]), unit.grid, "hand") for unit in sight.tokens])
    with pytest.raises(MissingSignal, match="hand keeps the CLS token, and the tower SiglipVisionModel has none"):
        host.splice(sight, plans)


def test_a_cls_token_that_is_there_is_kept() -> None:
    model = tiny("llava_onevision", "clip")
    host = adapter_for(model)
    inputs = inputs_for(model, [[(64, 60)]])  # resized, so that stock features and made ones are mixed
    with torch.no_grad():
        sight = host.look(inputs, frozenset())
        plans = [Reduction.pick(torch.tensor([0, len(unit)]), unit.grid, "hand") for unit in sight.tokens]
        (splice,) = host.splice(sight, ReductionBatch.of(plans))
        cls = model.model.multi_modal_projector(sight.tokens[0].cls)
    assert splice.slots.tolist()[:3] == [0, TILE - 1, TILE]
    assert torch.allclose(splice.features[1], cls, atol=1e-5)


def test_siglip_has_no_cls_attention() -> None:
    model = tiny("llava_onevision")
    with pytest.raises(MissingSignal, match="attention of a CLS token"):
        adapter_for(model).look(inputs_for(model, [[(32, 32)]]), frozenset({"cls_attention"}))


@pytest.mark.parametrize("family", BOTH)
def test_pixels_and_sizes_that_do_not_fit_are_refused(family: str) -> None:
    model = tiny(family)
    inputs = inputs_for(model, [[(40, 90)], [(32, 32)]])
    host = adapter_for(model)
    for wrong, match in (
        ({"image_sizes": None}, "image_sizes is missing"),
        ({"pixel_values": inputs["pixel_values"][:1]}, "does not hold them"),
        ({"pixel_values": inputs["pixel_values"][:, :2]}, "does not hold them"),
        ({"pixel_values": inputs["pixel_values"][0, 0]}, "must be a tensor of shape"),
        ({"pixel_values": list(inputs["pixel_values"])}, "got list"),
    ):
        with pytest.raises(BadTokens, match=match):
            host.look({**inputs, **wrong}, frozenset())
    if family == "llava_onevision":
        with pytest.raises(BadTokens, match="batch_num_images counts 3 images, and image_sizes has 2"):
            host.look({**inputs, "batch_num_images": torch.tensor([1, 2])}, frozenset())


def test_a_reducer_that_leaves_nothing_is_refused() -> None:
    model = tiny("llava_next")
    with reduced(model, Nothing()), pytest.raises(TorinoError, match="left no token of image 0"):
        answer(model, inputs_for(model, [[(40, 90)]]))
