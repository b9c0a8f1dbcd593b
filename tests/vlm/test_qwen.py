"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL hosts, on tiny models made from configs: no network, no weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from torino import SAE, RawEmbedding, Reducer, Reduction, SAECard, VisualTokens, make
from torino.core.errors import BadParameter, BadTokens, MissingSignal, SAEMismatch

transformers = pytest.importorskip("transformers")

from torino.vlm import ReducingProcessor, adapter_for, families, reduced  # noqa: E402
from torino.vlm.adapters.base import Adapter, serve  # noqa: E402
from torino.vlm.adapters.qwen import Qwen  # noqa: E402

if not set(Qwen.families) <= set(families()):

    @serve(*Qwen.families)
    def _qwen() -> type[Adapter]:
        return Qwen


PAD, IMAGE, VIDEO, START, END, VOCAB = 0, 60, 61, 62, 63, 64
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
PATCH = 4
NEW = 5
# Rows of the test batch: the grids of their images in tokens (rows, columns), none for text alone.
ROWS = ([(3, 2)], [], [(2, 4), (1, 3)], [(5, 5)])


# ---------------------------------------------------------------------- tiny models and prompts


def tiny(family: str, **options: Any) -> Any:
    text: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": PAD,
    }
    vision: dict[str, Any] = {"depth": 3, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": 2}
    if family == "qwen2_vl":
        vision |= {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
        config, cls = transformers.Qwen2VLConfig, transformers.Qwen2VLForConditionalGeneration
    elif family == "qwen2_5_vl":
        vision |= {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24}
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}  # windows of 2x2 tokens
        config, cls = transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLForConditionalGeneration
    else:
        vision |= {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24}
        vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
        config, cls = transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration
    torch.manual_seed(7)
    made = config(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        **options,
    )
    model = cls(made).eval()
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(4)  # the customary start is so near zero that every answer is the same token
    return model


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small are slower in two threads than in one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny(request.param)


def prompt(rows: Sequence[Sequence[tuple[int, int]]], *, side: str = "left", seed: int = 3) -> dict[str, Tensor]:
    """What a processor would return; a row is the same whatever rows stand beside it."""
    lines: list[list[int]] = []
    pixels: list[Tensor] = []
    grids: list[tuple[int, int, int]] = []
    for images in rows:
        source = torch.Generator().manual_seed(seed + sum(9 * h + w for h, w in images))

        def words(count: int, source: torch.Generator = source) -> list[int]:
            return torch.randint(2, 50, (count,), generator=source).tolist()

        line = words(3)
        for height, width in images:
            line += [START, *[IMAGE] * (height * width), END, *words(2)]
            pixels.append(torch.randn(4 * height * width, 3 * 2 * PATCH * PATCH, generator=source))
            grids.append((1, 2 * height, 2 * width))
        lines.append(line + words(2))
    length = max(map(len, lines))
    filled = [[PAD] * (length - len(line)) for line in lines]
    ids = torch.tensor([f + line if side == "left" else line + f for f, line in zip(filled, lines, strict=True)])
    found = {"input_ids": ids, "attention_mask": (ids != PAD).long(), "mm_token_type_ids": (ids == IMAGE).long()}
    if pixels:
        found |= {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids)}
    return found


def answer(model: Any, inputs: Mapping[str, Any], **options: Any) -> Any:
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD} | options
    return model.generate(**inputs, **options, return_dict_in_generate=True, output_logits=True)


@contextmanager
def seen_positions(model: Any) -> Iterator[list[Tensor]]:
    """The position_ids that reach the language model, call by call."""
    found: list[Tensor] = []
    handle = model.model.language_model.register_forward_pre_hook(
        lambda module, arguments, given: found.append(given["position_ids"]), with_kwargs=True
    )
    try:
        yield found
    finally:
        handle.remove()


@dataclass(frozen=True, repr=False)
class Everything(Reducer):
    name: ClassVar[str] = "everything"

    def plan(self, tokens: VisualTokens) -> Reduction:
        return Reduction.identity(tokens.grid)


@dataclass(frozen=True, repr=False)
class Pick(Reducer):
    """Keep every other token, the last of them first if asked to."""

    name: ClassVar[str] = "pick"
    backwards: bool = False

    def plan(self, tokens: VisualTokens) -> Reduction:
        kept = torch.arange(0, len(tokens), 2)
        return Reduction.pick(kept.flip(0) if self.backwards else kept, tokens.grid, "pick")


@dataclass(frozen=True, repr=False)
class Average(Reducer):
    """The first half as one token anchored at patch 1, and the mean of all as one of no place."""

    name: ClassVar[str] = "average"

    def plan(self, tokens: VisualTokens) -> Reduction:
        half = max(len(tokens) // 2, 2)
        plan = Reduction.of(
            [{1: 0.6, **{i: 0.4 / (half - 1) for i in range(half) if i != 1}}, dict.fromkeys(range(len(tokens)), 0.1)],
            tokens.grid,
        )
        plan.anchor[1] = -1
        return plan


def random_sae(width: int = 32, **card: Any) -> SAE:
    return SAE(torch.randn(24, width, generator=torch.Generator().manual_seed(0)), card=SAECard(**card))


# ---------------------------------------------------------------------- nothing removed, nothing changed


@pytest.mark.parametrize("positions", ["compact", "original"])
def test_identity_is_bitwise_the_stock_model(model: Any, positions: Any) -> None:
    inputs = prompt(ROWS)
    stock = answer(model, inputs)
    logits = model(**inputs).logits
    deltas = model.model.rope_deltas.clone()
    with reduced(model, Everything(), positions=positions) as trace:
        mine = answer(model, inputs)
        again = model(**inputs).logits
        assert torch.equal(model.model.rope_deltas, deltas)
    assert torch.equal(mine.sequences, stock.sequences)
    assert all(torch.equal(a, b) for a, b in zip(mine.logits, stock.logits, strict=True))
    assert torch.equal(again, logits)
    assert trace.before == trace.after == 2 * (6 + 8 + 3 + 25)
    assert len(set(stock.sequences[:, -NEW:].flatten().tolist())) > 4, "the tiny model says one thing only"


def test_positions_of_the_identity_are_those_of_the_stock_model(model: Any) -> None:
    inputs = prompt(ROWS)
    with seen_positions(model) as stock:
        answer(model, inputs)
    with reduced(model, Everything()), seen_positions(model) as mine:
        answer(model, inputs)
    assert len(mine) == len(stock) == NEW
    assert all(torch.equal(a, b) for a, b in zip(mine, stock, strict=True))
    assert stock[0].shape[0] == 4


# ---------------------------------------------------------------------- tokens removed


REDUCERS = {
    "pick": Pick(),
    "backwards": Pick(backwards=True),
    "average": Average(),
    "torino-p": make("torino-p(k=2, delta=1)", sae=RawEmbedding()),
    "torino-m": make("torino-m(k=2, delta=1)", sae=RawEmbedding()),
    "budget": make("torino-m(k=2, delta=1, budget=3)", sae=RawEmbedding()),
}


@pytest.mark.parametrize("name", REDUCERS)
def test_ragged_batch_equals_one_by_one(model: Any, name: str) -> None:
    with reduced(model, REDUCERS[name]) as together:
        mine = answer(model, prompt(ROWS))
    length = prompt(ROWS)["input_ids"].shape[1]
    with reduced(model, REDUCERS[name]) as alone:
        for row, images in enumerate(ROWS):
            single = answer(model, prompt([images]))
            assert torch.equal(single.sequences[0, -NEW:], mine.sequences[row, length:])
            for a, b in zip(single.logits, mine.logits, strict=True):
                assert torch.allclose(a[0], b[row], atol=2e-4)
    assert together.before == alone.before == 42
    assert together.after == alone.after == sum(len(plan) for plan in together) < 42
    assert [len(plan) for plan in together] == [len(plan) for plan in alone]
    if name == "budget":
        assert together.looks[0].after == (3, 3, 3, 3)
    assert together.looks[0].bytes_saved > 0


@pytest.mark.parametrize("name", ["torino-p", "torino-m"])
def test_removing_tokens_changes_the_answer_but_not_the_prompt_given_back(model: Any, name: str) -> None:
    inputs = prompt(ROWS)
    stock = answer(model, inputs)
    with reduced(model, REDUCERS[name]):
        mine = answer(model, inputs)
    assert torch.equal(mine.sequences[:, :-NEW], inputs["input_ids"])
    assert not torch.allclose(mine.logits[0][0], stock.logits[0][0])
    # the text-only row has nothing to lose
    assert torch.equal(mine.sequences[1], stock.sequences[1])


def manual(model: Any, inputs: Mapping[str, Tensor], kept: Sequence[Tensor]) -> Tensor:
    """Logits of one prompt with some tokens of each image, through the language model alone."""
    inner = model.model
    seen = inner.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True)
    ids = inputs["input_ids"]
    full, _ = inner.get_rope_index(ids, inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"])
    embeds = inner.get_input_embeddings()(ids).masked_scatter(
        (ids == IMAGE)[..., None], torch.cat(list(seen.pooler_output))
    )
    keep, starts = torch.ones_like(ids[0], dtype=torch.bool), (ids[0] == START).nonzero()[:, 0] + 1
    for start, features, chosen in zip(starts, seen.pooler_output, kept, strict=True):
        gone = torch.ones(len(features), dtype=torch.bool)
        gone[chosen] = False
        keep[start : start + len(features)] = ~gone
    more: dict[str, Any] = {}
    if getattr(seen, "deepstack_features", None):
        deep = [torch.cat([f[c] for f, c in zip(layer, kept, strict=True)]) for layer in seen.deepstack_features]
        more = {"deepstack_visual_embeds": deep, "visual_pos_masks": (ids == IMAGE)[:, keep]}
    out = inner.language_model(inputs_embeds=embeds[:, keep], position_ids=full[:, :, keep], **more)
    return model.lm_head(out.last_hidden_state)


@torch.no_grad()
def test_two_images_as_made_by_hand(model: Any) -> None:
    inputs = prompt([[(4, 3), (2, 5)]])
    kept = [torch.arange(0, 12, 2), torch.arange(0, 10, 2)]
    with reduced(model, Pick()):
        mine = model(**inputs).logits
    wanted = manual(model, inputs, kept)
    assert mine.shape == wanted.shape
    assert torch.allclose(mine, wanted, atol=1e-5)


@torch.no_grad()
def test_every_layer_of_deepstack_is_reduced_by_the_same_plan() -> None:
    model = tiny("qwen3_vl")
    inputs = prompt([[(4, 3)], [(2, 5)]])
    stock = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True)
    shrunk, look = adapter_for(model).shrink(inputs, Average(), "compact")
    mine = shrunk["mm_encoder_outputs"]["image"]
    assert type(mine) is type(stock)
    assert len(mine.deepstack_features) == len(stock.deepstack_features) == 2
    for layer, old in zip(
        [mine.pooler_output, *mine.deepstack_features], [stock.pooler_output, *stock.deepstack_features], strict=True
    ):
        for values, before, plan in zip(layer, old, look.reductions, strict=True):
            dense = torch.zeros(len(plan), plan.patches)
            dense[plan.rows, plan.sources] = plan.weights
            assert torch.allclose(values, dense @ before, atol=1e-5)


# ---------------------------------------------------------------------- positions


def test_positions_by_hand(model: Any) -> None:
    # 3 words, <start>, 2x4 image, <end>, 2 words, <start>, 1x3 image, <end>, 2 + 2 words
    inputs = prompt([[(2, 4), (1, 3)], []])
    with reduced(model, Pick()), seen_positions(model) as found:
        answer(model, inputs)
        deltas = model.model.rope_deltas.clone()
    first = [[4, 4, 4], [4, 4, 6], [4, 5, 4], [4, 5, 6]]  # of columns 0 and 2 in both rows
    second = [[12, 12, 12], [12, 12, 14]]
    line = [*[[i] * 3 for i in range(4)], *first, *[[i] * 3 for i in range(8, 12)], *second]
    line += [[i] * 3 for i in range(15, 20)]
    assert found[0].shape == (4, 2, len(line))
    assert found[0][1:, 0].T.tolist() == line
    assert found[0][0, 0].tolist() == list(range(len(line)))
    pad = len(line) - 5
    assert found[0][:, 1].tolist() == [[0] * pad + list(range(5))] * 4
    for step, positions in enumerate(found[1:]):
        assert positions[1:, :, 0].tolist() == [[20 + step, 5 + step]] * 3
        assert positions[0, :, 0].tolist() == [len(line) + step, 5 + step]
    assert deltas.tolist() == [[20 - len(line)], [0]]


def test_a_merged_token_sits_at_its_anchor_and_one_of_no_place_comes_last(model: Any) -> None:
    with reduced(model, Average()), seen_positions(model) as found:
        answer(model, prompt([[(3, 4)]]))
    assert found[0][1:, 0, 4:6].T.tolist() == [[4, 4, 5], [4, 6, 7]]
    assert found[0][1:, 0, 6].tolist() == [8, 8, 8]  # <end> stays where it was


@torch.no_grad()
@pytest.mark.parametrize("row", [[(4, 3)], [(2, 2), (1, 5)]])
def test_decoding_step_by_step_goes_on_at_the_right_position(model: Any, row: list[tuple[int, int]]) -> None:
    # without a mask: given one, transformers 5.22 fails at the second step of its stock model too
    inputs = {name: value for name, value in prompt([row]).items() if name != "attention_mask"}
    words: list[Tensor] = []
    with reduced(model, Pick()):
        wanted = answer(model, inputs).sequences[:, -NEW:]
        with seen_positions(model) as found:
            step = model(**inputs, use_cache=True)
            for _ in range(NEW):
                words.append(step.logits[:, -1:].argmax(-1))
                step = model(input_ids=words[-1], past_key_values=step.past_key_values)
    assert torch.equal(torch.cat(words, 1), wanted)
    full, _ = model.model.get_rope_index(**{name: value for name, value in inputs.items() if name != "pixel_values"})
    for number, positions in enumerate(found[1:]):
        assert positions[-3:, 0, 0].tolist() == [int(full.max()) + 1 + number] * 3


def test_right_padding_gives_the_same_as_left(model: Any) -> None:
    left, right = prompt(ROWS), prompt(ROWS, side="right")
    with torch.no_grad(), reduced(model, Pick()):
        generated = answer(model, right).sequences[:, -NEW:]
        assert torch.equal(generated, answer(model, left).sequences[:, -NEW:])
        mine = model(**right).logits
        for row, images in enumerate(ROWS):
            alone = model(**prompt([images])).logits[0]
            assert torch.allclose(mine[row, : len(alone)], alone, atol=2e-4)


# ---------------------------------------------------------------------- ways of generating


@pytest.mark.parametrize("name", ["pick", "torino-m"])
def test_beams_equal_one_by_one(model: Any, name: str) -> None:
    options = {"num_beams": 3, "num_return_sequences": 2}
    with reduced(model, REDUCERS[name]):
        mine = answer(model, prompt(ROWS), **options).sequences[:, -NEW:]
        alone = [answer(model, prompt([images]), **options).sequences[:, -NEW:] for images in ROWS]
    assert torch.equal(mine, torch.cat(alone))


def test_beams_of_the_identity_equal_stock(model: Any) -> None:
    stock = answer(model, prompt(ROWS), num_beams=3, output_scores=True)
    with reduced(model, Everything()):
        mine = answer(model, prompt(ROWS), num_beams=3, output_scores=True)
    assert torch.equal(mine.sequences, stock.sequences)
    assert torch.equal(mine.sequences_scores, stock.sequences_scores)


@pytest.mark.parametrize("options", [{"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}])
def test_caches_agree(model: Any, options: dict[str, Any]) -> None:
    with reduced(model, Pick()):
        wanted = answer(model, prompt(ROWS)).sequences
        assert torch.equal(answer(model, prompt(ROWS), **options).sequences, wanted)


def test_eager_attention_gives_the_same_answer(model: Any) -> None:
    with reduced(model, Pick()):
        wanted = answer(model, prompt(ROWS)).sequences
        model.set_attn_implementation("eager")
        try:
            assert torch.equal(answer(model, prompt(ROWS)).sequences, wanted)
        finally:
            model.set_attn_implementation("sdpa")


def test_training_through_the_reduced_prompt(model: Any) -> None:
    inputs = prompt(ROWS)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    model.zero_grad()
    with reduced(model, REDUCERS["torino-m"]):
        model(**inputs, labels=labels).loss.backward()
    gradients = [weights.grad for weights in model.model.visual.blocks.parameters()]
    model.zero_grad()
    assert any(gradient is not None and bool(gradient.abs().sum() > 0) for gradient in gradients)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_half_precision(family: str, kind: torch.dtype) -> None:
    model = tiny(family).to(kind)
    inputs = prompt(ROWS[:2])
    stock = model(**inputs).logits
    with reduced(model, Everything()):
        assert torch.equal(model(**inputs).logits, stock)
    # the SAE stays in float32
    with reduced(model, make("torino-m(k=2, delta=1)", sae=random_sae(block=3))) as trace:
        assert bool(torch.isfinite(answer(model, inputs, max_new_tokens=2).logits[0]).all())
    assert trace.after < trace.before


def test_inputs_of_their_final_length_may_be_used_again(model: Any) -> None:
    with reduced(model, Pick()):
        wanted = answer(model, prompt(ROWS), num_beams=2).sequences[:, -NEW:]
    inputs = ReducingProcessor(lambda **_: prompt(ROWS), model, Pick())()
    assert not {"pixel_values", "image_grid_thw"} & set(inputs)
    for _ in range(2):
        assert torch.equal(answer(model, inputs, num_beams=2).sequences[:, -NEW:], wanted)


def test_a_second_turn_goes_on_from_the_cache(model: Any) -> None:
    full, question = prompt([[(4, 3)]]), torch.tensor([[7, 8, 9]])
    inputs = ReducingProcessor(lambda **_: full, model, Pick())()
    first = answer(model, inputs)
    again = torch.cat([first.sequences, question], 1)
    with seen_positions(model) as found:
        mine = answer(model, {"input_ids": again, "past_key_values": first.past_key_values})
    # the same two turns as one prompt
    more = torch.cat([first.sequences[:, -NEW:], question], 1)
    whole = full | {
        name: torch.cat([full[name], value], 1)
        for name, value in (
            ("input_ids", more),
            ("attention_mask", torch.ones_like(more)),
            ("mm_token_type_ids", torch.zeros_like(more)),
        )
    }
    with reduced(model, Pick()), seen_positions(model) as wanted:
        other = answer(model, whole)
    assert torch.equal(mine.sequences[:, -NEW:], other.sequences[:, -NEW:])
    new = found[0].shape[-1]
    assert torch.equal(found[0][-1:].expand(3, -1, -1), wanted[0][1:, :, -new:])


# ---------------------------------------------------------------------- no trace left


def test_afterwards_the_model_is_as_before(model: Any) -> None:
    inputs, other = prompt(ROWS), prompt([[(3, 3)], []])
    before, short = answer(model, inputs), answer(model, other)
    logits = model(**inputs).logits
    words = prompt([[], []])
    text = model(**words).logits
    with reduced(model, REDUCERS["torino-p"]):
        answer(model, other)
        model(**other)
    assert "generate" not in vars(model)
    # forward, generate and plain text first after a reduced call, each with another batch size than it had
    assert torch.equal(model(**inputs).logits, logits)
    assert torch.equal(model(**words).logits, text)
    for stock, given in ((before, inputs), (short, other)):
        again = answer(model, given)
        assert torch.equal(again.sequences, stock.sequences)
        assert all(torch.equal(a, b) for a, b in zip(again.logits, stock.logits, strict=True))


def test_after_an_error_the_model_is_as_before(model: Any) -> None:
    inputs = prompt(ROWS)
    before = answer(model, inputs)

    def stop(*_: Any) -> None:
        raise RuntimeError("stop")

    handle = model.lm_head.register_forward_hook(stop)
    with pytest.raises(RuntimeError, match="stop"), reduced(model, Pick()):
        answer(model, inputs)
    handle.remove()
    assert torch.equal(answer(model, inputs).sequences, before.sequences)


def test_close_gives_back_the_rope_deltas(model: Any) -> None:
    inner, host = model.model, adapter_for(model)
    assert isinstance(host, Qwen)
    mine = inner.rope_deltas = torch.tensor([[5]])
    with torch.no_grad():
        for rows in ([[(4, 4)]], [[(2, 2)], []]):
            host.shrink(prompt(rows), Pick(), "compact")
    assert inner.rope_deltas is not mine
    host.close()
    assert inner.rope_deltas is mine
    host.close()
    with torch.no_grad():
        host.shrink(prompt([[(4, 4)]]), Pick(), "compact")
    theirs = inner.rope_deltas = torch.tensor([[6]])
    host.close()
    assert inner.rope_deltas is theirs


def test_two_threads_do_not_mix(model: Any) -> None:
    inputs = [prompt([[(4, 4)], []]), prompt([[(2, 5), (3, 3)]])]
    reducers = [Pick(), REDUCERS["torino-m"]]
    wanted: list[Tensor] = []
    for given, reducer in zip(inputs, reducers, strict=True):
        with reduced(model, reducer):
            wanted.append(answer(model, given).sequences)
    found: list[list[Tensor]] = [[], []]

    def work(number: int) -> None:
        for _ in range(3):
            with reduced(model, reducers[number]):
                found[number].append(answer(model, inputs[number]).sequences)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        assert len(found[number]) == 3
        assert all(torch.equal(sequences, wanted[number]) for sequences in found[number])


def test_the_bare_model_without_its_head(model: Any) -> None:
    inputs = prompt(ROWS)
    with torch.no_grad():
        stock = model.model(**inputs).last_hidden_state
        with reduced(model.model, Everything()):
            assert torch.equal(model.model(**inputs).last_hidden_state, stock)


# ---------------------------------------------------------------------- what reducers see


def test_units_are_images_after_the_merger(model: Any) -> None:
    inputs = prompt(ROWS)
    with torch.no_grad():
        sight = adapter_for(model).look(inputs, frozenset())
        stock = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
    assert [image.grid for image in sight.tokens] == [(3, 2), (2, 4), (1, 3), (5, 5)]
    assert all(torch.equal(image.patches, features) for image, features in zip(sight.tokens, stock, strict=True))
    assert all(image.origin.block == 3 and image.cls is None and not image.signals for image in sight.tokens)


@torch.no_grad()
def test_keys_are_means_over_the_patches_of_a_token(model: Any) -> None:
    rows = [[(3, 2)], [(2, 4), (1, 3)]]
    tokens = adapter_for(model).look(prompt(rows), frozenset({"keys", "keys@-1", "keys@0", "queries@0"})).tokens
    tower = model.model.visual
    for image, (images, number) in zip(tokens, ((0, 0), (1, 0), (1, 1)), strict=True):
        assert image.keys is not None
        assert image.keys.shape == image.signals["keys@-1"].shape == image.signals["queries@0"].shape
        assert not torch.equal(image.keys, image.signals["keys@-1"])
        # patch by patch: what the first block projects does not depend on the order of patches yet
        given = prompt([rows[images]])
        counts = (given["image_grid_thw"].prod(-1)).tolist()
        start = sum(counts[:number])
        pixels = given["pixel_values"]
        states = tower.patch_embed(pixels)
        if hasattr(tower, "pos_embed"):
            continue  # Qwen3-VL adds positions first; the other two vouch for the order
        fused = tower.blocks[0].attn.qkv(tower.blocks[0].norm1(states))[start : start + counts[number]]
        queries, keys, _ = fused.view(-1, 4, 3, 16).mean(1).unbind(1)
        assert torch.allclose(image.signals["queries@0"], queries, atol=1e-5)
        assert torch.allclose(image.signals["keys@0"], keys, atol=1e-5)
    assert not tower.blocks[0].attn.qkv._forward_hooks


@pytest.mark.parametrize(
    ("signal", "sentence"),
    [
        ("cls_attention", r"comes from a CLS token, and the vision tower of Qwen\w+ has none"),
        ("cls", "comes from a CLS token"),
        ("keys@+1", "asks for block 3, and the tower has blocks 0 to 2"),
        ("keys@last", "names no block"),
        ("flavour", "No signal is called 'flavour'"),
    ],
)
def test_signals_that_are_not_there(model: Any, signal: str, sentence: str) -> None:
    class Wants(Everything):
        needs: ClassVar[frozenset[str]] = frozenset({signal})

    with reduced(model, Wants()) as trace, pytest.raises(MissingSignal, match=sentence):
        answer(model, prompt(ROWS))
    assert not trace.looks


# ---------------------------------------------------------------------- what is refused, what is passed on


@pytest.mark.parametrize("missing", ["mm_token_type_ids", "image_grid_thw"])
def test_what_the_processor_returns_must_be_passed_on(model: Any, missing: str) -> None:
    inputs = {name: value for name, value in prompt(ROWS).items() if name != missing}
    with reduced(model, Pick()), pytest.raises(BadParameter, match=f"without {missing}"):
        answer(model, inputs)


def test_other_refusals(model: Any) -> None:
    inputs = prompt([[(2, 2)]])
    cut = {name: inputs[name][:, :6] for name in ("input_ids", "attention_mask", "mm_token_type_ids")}
    with reduced(model, Pick()):
        with pytest.raises(BadParameter, match="both images and videos"):
            answer(model, inputs | {"pixel_values_videos": inputs["pixel_values"]})
        with pytest.raises(BadParameter, match="position_ids were given"):
            model(**inputs, position_ids=torch.arange(inputs["input_ids"].shape[1])[None])
        with pytest.raises(BadTokens, match="cut by the tokenizer"):
            answer(model, inputs | cut)


def test_an_sae_of_another_block_is_refused(model: Any) -> None:
    for sae, sentence in ((random_sae(block=1), "block 1; these are 32-wide tokens of"), (random_sae(16), "16-wide")):
        with reduced(model, make("torino-p", sae=sae)), pytest.raises(SAEMismatch, match=sentence):
            answer(model, prompt(ROWS))


def test_videos_alone_are_left_to_the_model(model: Any) -> None:
    given = prompt([[(2, 3)]])
    ids = torch.where(given["input_ids"] == IMAGE, VIDEO, given["input_ids"])
    inputs = {
        "input_ids": ids,
        "attention_mask": given["attention_mask"],
        "mm_token_type_ids": 2 * given["mm_token_type_ids"],
        "pixel_values_videos": given["pixel_values"],
        "video_grid_thw": given["image_grid_thw"],
    }
    stock = answer(model, inputs)
    with reduced(model, Pick()) as trace:
        assert torch.equal(answer(model, inputs).sequences, stock.sequences)
    assert not trace.looks
