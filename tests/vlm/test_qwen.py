"""The Qwen2-VL, Qwen2.5-VL and Qwen3-VL adapter on tiny models."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tests.support.tiny import Identity
from tests.support.tiny_qwen import FAMILIES, IMAGE, NEW, PAD, ROWS, START, make_inputs, make_model
from torino import SAE, RawEmbedding, Reducer, Reduction, VisualTokens, make
from torino.core.errors import BadParameter, BadTokens, MissingSignal, SAEMismatch
from torino.sae import SAECard
from torino.vlm import ReducingProcessor, adapter_for, reduced
from torino.vlm.adapters.qwen import Qwen


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return make_model(request.param)


def generate(model: Any, inputs: Mapping[str, Any], **options: Any) -> Any:
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD} | options
    return model.generate(**inputs, **options, return_dict_in_generate=True, output_logits=True)


@contextmanager
def record_positions(model: Any) -> Iterator[list[Tensor]]:
    """Record the position_ids of each call of the language model."""
    recorded: list[Tensor] = []
    handle = model.model.language_model.register_forward_pre_hook(
        lambda module, arguments, named: recorded.append(named["position_ids"]), with_kwargs=True
    )
    try:
        yield recorded
    finally:
        handle.remove()


@dataclass(frozen=True, repr=False)
class KeepAlternate(Reducer):
    """Keep every other token, optionally in reverse order."""

    name: ClassVar[str] = "keep-alternate"
    backwards: bool = False

    def plan(self, tokens: VisualTokens) -> Reduction:
        kept = torch.arange(0, len(tokens), 2)
        return Reduction.pick(kept.flip(0) if self.backwards else kept, tokens.grid, "pick")


@dataclass(frozen=True, repr=False)
class Average(Reducer):
    """Merge the first half into one token anchored at patch 1, and all patches into one without an anchor."""

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


# ---------------------------------------------------------------------- identity


@pytest.mark.parametrize("positions", ["compact", "original"])
def test_identity_is_bitwise_the_stock_model(model: Any, positions: Any) -> None:
    inputs = make_inputs(ROWS)
    stock = generate(model, inputs)
    logits = model(**inputs).logits
    deltas = model.model.rope_deltas.clone()
    with reduced(model, Identity(), positions=positions) as trace:
        output = generate(model, inputs)
        again = model(**inputs).logits
        assert torch.equal(model.model.rope_deltas, deltas)
    assert torch.equal(output.sequences, stock.sequences)
    assert all(torch.equal(a, b) for a, b in zip(output.logits, stock.logits, strict=True))
    assert torch.equal(again, logits)
    assert trace.before == trace.after == 2 * (6 + 8 + 3 + 25)
    assert len(set(stock.sequences[:, -NEW:].flatten().tolist())) > 4, "all answers of the tiny model are the same"


def test_identity_positions_equal_those_of_the_stock_model(model: Any) -> None:
    inputs = make_inputs(ROWS)
    with record_positions(model) as stock:
        generate(model, inputs)
    with reduced(model, Identity()), record_positions(model) as output:
        generate(model, inputs)
    assert len(output) == len(stock) == NEW
    assert all(torch.equal(a, b) for a, b in zip(output, stock, strict=True))
    assert stock[0].shape[0] == 4


# ---------------------------------------------------------------------- tokens removed


REDUCERS = {
    "alternate": KeepAlternate(),
    "backwards": KeepAlternate(backwards=True),
    "average": Average(),
    "torino-p": make("torino-p(k=2, delta=1)", sae=RawEmbedding()),
    "torino-m": make("torino-m(k=2, delta=1)", sae=RawEmbedding()),
    "budget": make("torino-m(k=2, delta=1, budget=3)", sae=RawEmbedding()),
}


@pytest.mark.parametrize("name", REDUCERS)
def test_ragged_batch_equals_its_rows(model: Any, name: str) -> None:
    with reduced(model, REDUCERS[name]) as together:
        output = generate(model, make_inputs(ROWS))
    length = make_inputs(ROWS)["input_ids"].shape[1]
    with reduced(model, REDUCERS[name]) as alone:
        for row, images in enumerate(ROWS):
            single = generate(model, make_inputs([images]))
            assert torch.equal(single.sequences[0, -NEW:], output.sequences[row, length:])
            for a, b in zip(single.logits, output.logits, strict=True):
                assert torch.allclose(a[0], b[row], atol=2e-4)
    assert together.before == alone.before == 42
    assert together.after == alone.after == sum(len(plan) for plan in together) < 42
    assert [len(plan) for plan in together] == [len(plan) for plan in alone]
    if name == "budget":
        assert together.calls[0].after == (3, 3, 3, 3)
    assert together.calls[0].bytes_saved > 0


@pytest.mark.parametrize("name", ["torino-p", "torino-m"])
def test_reduction_changes_the_answer_but_not_the_returned_prompt(model: Any, name: str) -> None:
    inputs = make_inputs(ROWS)
    stock = generate(model, inputs)
    with reduced(model, REDUCERS[name]):
        output = generate(model, inputs)
    assert torch.equal(output.sequences[:, :-NEW], inputs["input_ids"])
    assert not torch.allclose(output.logits[0][0], stock.logits[0][0])
    # the text-only row is unchanged
    assert torch.equal(output.sequences[1], stock.sequences[1])


def logits_by_hand(model: Any, inputs: Mapping[str, Tensor], kept: Sequence[Tensor]) -> Tensor:
    """Return the logits of one prompt with some tokens of each image, computed with the language model alone."""
    inner = model.model
    encoded = inner.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True)
    ids = inputs["input_ids"]
    full, _ = inner.get_rope_index(ids, inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"])
    embeds = inner.get_input_embeddings()(ids).masked_scatter(
        (ids == IMAGE)[..., None], torch.cat(list(encoded.pooler_output))
    )
    keep, starts = torch.ones_like(ids[0], dtype=torch.bool), (ids[0] == START).nonzero()[:, 0] + 1
    for start, features, chosen in zip(starts, encoded.pooler_output, kept, strict=True):
        is_kept = torch.zeros(len(features), dtype=torch.bool)
        is_kept[chosen] = True
        keep[start : start + len(features)] = is_kept
    extra: dict[str, Any] = {}
    if getattr(encoded, "deepstack_features", None):
        deep = [torch.cat([f[c] for f, c in zip(layer, kept, strict=True)]) for layer in encoded.deepstack_features]
        extra = {"deepstack_visual_embeds": deep, "visual_pos_masks": (ids == IMAGE)[:, keep]}
    out = inner.language_model(inputs_embeds=embeds[:, keep], position_ids=full[:, :, keep], **extra)
    return model.lm_head(out.last_hidden_state)


@torch.no_grad()
def test_two_images_equal_logits_by_hand(model: Any) -> None:
    inputs = make_inputs([[(4, 3), (2, 5)]])
    kept = [torch.arange(0, 12, 2), torch.arange(0, 10, 2)]
    with reduced(model, KeepAlternate()):
        output = model(**inputs).logits
    expected = logits_by_hand(model, inputs, kept)
    assert output.shape == expected.shape
    assert torch.allclose(output, expected, atol=1e-5)


@torch.no_grad()
def test_deepstack_layers_are_reduced_by_the_same_plan() -> None:
    model = make_model("qwen3_vl")
    inputs = make_inputs([[(4, 3)], [(2, 5)]])
    stock = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True)
    reduced_inputs, call = adapter_for(model).reduce_inputs(inputs, Average(), "compact")
    output = reduced_inputs["mm_encoder_outputs"]["image"]
    assert type(output) is type(stock)
    assert len(output.deepstack_features) == len(stock.deepstack_features) == 2
    for layer, old in zip(
        [output.pooler_output, *output.deepstack_features],
        [stock.pooler_output, *stock.deepstack_features],
        strict=True,
    ):
        for values, before, plan in zip(layer, old, call.reductions, strict=True):
            dense = torch.zeros(len(plan), plan.patches)
            dense[plan.rows, plan.sources] = plan.weights
            assert torch.allclose(values, dense @ before, atol=1e-5)


# ---------------------------------------------------------------------- positions


def test_positions_by_hand(model: Any) -> None:
    # 3 words, <start>, 2x4 image, <end>, 2 words, <start>, 1x3 image, <end>, 2 + 2 words
    inputs = make_inputs([[(2, 4), (1, 3)], []])
    with reduced(model, KeepAlternate()), record_positions(model) as recorded:
        generate(model, inputs)
        deltas = model.model.rope_deltas.clone()
    first = [[4, 4, 4], [4, 4, 6], [4, 5, 4], [4, 5, 6]]  # columns 0 and 2 of both rows
    second = [[12, 12, 12], [12, 12, 14]]
    line = [*[[i] * 3 for i in range(4)], *first, *[[i] * 3 for i in range(8, 12)], *second]
    line += [[i] * 3 for i in range(15, 20)]
    assert recorded[0].shape == (4, 2, len(line))
    assert recorded[0][1:, 0].T.tolist() == line
    assert recorded[0][0, 0].tolist() == list(range(len(line)))
    pad = len(line) - 5
    assert recorded[0][:, 1].tolist() == [[0] * pad + list(range(5))] * 4
    for step, positions in enumerate(recorded[1:]):
        assert positions[1:, :, 0].tolist() == [[20 + step, 5 + step]] * 3
        assert positions[0, :, 0].tolist() == [len(line) + step, 5 + step]
    assert deltas.tolist() == [[20 - len(line)], [0]]


def test_positions_of_merged_tokens(model: Any) -> None:
    with reduced(model, Average()), record_positions(model) as recorded:
        generate(model, make_inputs([[(3, 4)]]))
    assert recorded[0][1:, 0, 4:6].T.tolist() == [[4, 4, 5], [4, 6, 7]]
    assert recorded[0][1:, 0, 6].tolist() == [8, 8, 8]  # <end> keeps its position


@torch.no_grad()
@pytest.mark.parametrize("row", [[(4, 3)], [(2, 2), (1, 5)]])
def test_decoding_loop_continues_at_the_right_position(model: Any, row: list[tuple[int, int]]) -> None:
    # Without a mask, because the stock model of transformers 5.22 fails at the second step with one.
    inputs = {name: value for name, value in make_inputs([row]).items() if name != "attention_mask"}
    tokens: list[Tensor] = []
    with reduced(model, KeepAlternate()):
        expected = generate(model, inputs).sequences[:, -NEW:]
        with record_positions(model) as recorded:
            step = model(**inputs, use_cache=True)
            for _ in range(NEW):
                tokens.append(step.logits[:, -1:].argmax(-1))
                step = model(input_ids=tokens[-1], past_key_values=step.past_key_values)
    assert torch.equal(torch.cat(tokens, 1), expected)
    full, _ = model.model.get_rope_index(**{name: value for name, value in inputs.items() if name != "pixel_values"})
    for number, positions in enumerate(recorded[1:]):
        assert positions[-3:, 0, 0].tolist() == [int(full.max()) + 1 + number] * 3


def test_right_padding_equals_left_padding(model: Any) -> None:
    left, right = make_inputs(ROWS), make_inputs(ROWS, side="right")
    with torch.no_grad(), reduced(model, KeepAlternate()):
        generated = generate(model, right).sequences[:, -NEW:]
        assert torch.equal(generated, generate(model, left).sequences[:, -NEW:])
        output = model(**right).logits
        for row, images in enumerate(ROWS):
            alone = model(**make_inputs([images])).logits[0]
            assert torch.allclose(output[row, : len(alone)], alone, atol=2e-4)


# ---------------------------------------------------------------------- generation


@pytest.mark.parametrize("name", ["alternate", "torino-m"])
def test_beam_search_on_a_ragged_batch_equals_its_rows(model: Any, name: str) -> None:
    options = {"num_beams": 3, "num_return_sequences": 2}
    with reduced(model, REDUCERS[name]):
        output = generate(model, make_inputs(ROWS), **options).sequences[:, -NEW:]
        alone = [generate(model, make_inputs([images]), **options).sequences[:, -NEW:] for images in ROWS]
    assert torch.equal(output, torch.cat(alone))


def test_beam_search_with_identity_equals_the_stock_model(model: Any) -> None:
    stock = generate(model, make_inputs(ROWS), num_beams=3, output_scores=True)
    with reduced(model, Identity()):
        output = generate(model, make_inputs(ROWS), num_beams=3, output_scores=True)
    assert torch.equal(output.sequences, stock.sequences)
    assert torch.equal(output.sequences_scores, stock.sequences_scores)


@pytest.mark.parametrize("options", [{"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}])
def test_caches_agree(model: Any, options: dict[str, Any]) -> None:
    with reduced(model, KeepAlternate()):
        expected = generate(model, make_inputs(ROWS)).sequences
        assert torch.equal(generate(model, make_inputs(ROWS), **options).sequences, expected)


def test_eager_attention_gives_the_same_answer(model: Any) -> None:
    with reduced(model, KeepAlternate()):
        expected = generate(model, make_inputs(ROWS)).sequences
        model.set_attn_implementation("eager")
        try:
            assert torch.equal(generate(model, make_inputs(ROWS)).sequences, expected)
        finally:
            model.set_attn_implementation("sdpa")


def test_gradients_reach_the_tower(model: Any) -> None:
    inputs = make_inputs(ROWS)
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
    model = make_model(family).to(kind)
    inputs = make_inputs(ROWS[:2])
    stock = model(**inputs).logits
    with reduced(model, Identity()):
        assert torch.equal(model(**inputs).logits, stock)
    # The SAE stays in float32.
    with reduced(model, make("torino-m(k=2, delta=1)", sae=random_sae(block=3))) as trace:
        assert bool(torch.isfinite(generate(model, inputs, max_new_tokens=2).logits[0]).all())
    assert trace.after < trace.before


def test_inputs_of_the_processor_can_be_reused(model: Any) -> None:
    with reduced(model, KeepAlternate()):
        expected = generate(model, make_inputs(ROWS), num_beams=2).sequences[:, -NEW:]
    inputs = ReducingProcessor(lambda **_: make_inputs(ROWS), model, KeepAlternate())()
    assert not {"pixel_values", "image_grid_thw"} & set(inputs)
    for _ in range(2):
        assert torch.equal(generate(model, inputs, num_beams=2).sequences[:, -NEW:], expected)


def test_second_turn_continues_from_the_cache(model: Any) -> None:
    full, question = make_inputs([[(4, 3)]]), torch.tensor([[7, 8, 9]])
    inputs = ReducingProcessor(lambda **_: full, model, KeepAlternate())()
    first = generate(model, inputs)
    again = torch.cat([first.sequences, question], 1)
    with record_positions(model) as recorded:
        output = generate(model, {"input_ids": again, "past_key_values": first.past_key_values})
    # The same two turns as one prompt.
    new_ids = torch.cat([first.sequences[:, -NEW:], question], 1)
    both_turns = full | {
        name: torch.cat([full[name], value], 1)
        for name, value in (
            ("input_ids", new_ids),
            ("attention_mask", torch.ones_like(new_ids)),
            ("mm_token_type_ids", torch.zeros_like(new_ids)),
        )
    }
    with reduced(model, KeepAlternate()), record_positions(model) as expected:
        other = generate(model, both_turns)
    assert torch.equal(output.sequences[:, -NEW:], other.sequences[:, -NEW:])
    new = recorded[0].shape[-1]
    assert torch.equal(recorded[0][-1:].expand(3, -1, -1), expected[0][1:, :, -new:])


# ---------------------------------------------------------------------- the model is unchanged afterwards


def test_model_is_unchanged_after_the_block(model: Any) -> None:
    inputs, other = make_inputs(ROWS), make_inputs([[(3, 3)], []])
    before, short = generate(model, inputs), generate(model, other)
    logits = model(**inputs).logits
    words = make_inputs([[], []])
    text = model(**words).logits
    with reduced(model, REDUCERS["torino-p"]):
        generate(model, other)
        model(**other)
    assert "generate" not in vars(model)
    # After a reduced call: forward, text and generate, with other batch sizes.
    assert torch.equal(model(**inputs).logits, logits)
    assert torch.equal(model(**words).logits, text)
    for stock, given in ((before, inputs), (short, other)):
        again = generate(model, given)
        assert torch.equal(again.sequences, stock.sequences)
        assert all(torch.equal(a, b) for a, b in zip(again.logits, stock.logits, strict=True))


def test_model_is_unchanged_after_an_error(model: Any) -> None:
    inputs = make_inputs(ROWS)
    before = generate(model, inputs)

    def stop(*_: Any) -> None:
        raise RuntimeError("stop")

    handle = model.lm_head.register_forward_hook(stop)
    with pytest.raises(RuntimeError, match="stop"), reduced(model, KeepAlternate()):
        generate(model, inputs)
    handle.remove()
    assert torch.equal(generate(model, inputs).sequences, before.sequences)


def test_close_restores_the_rope_deltas(model: Any) -> None:
    inner, adapter = model.model, adapter_for(model)
    assert isinstance(adapter, Qwen)
    own = inner.rope_deltas = torch.tensor([[5]])
    with torch.no_grad():
        for rows in ([[(4, 4)]], [[(2, 2)], []]):
            adapter.reduce_inputs(make_inputs(rows), KeepAlternate(), "compact")
    assert inner.rope_deltas is not own
    adapter.close()
    assert inner.rope_deltas is own
    adapter.close()
    with torch.no_grad():
        adapter.reduce_inputs(make_inputs([[(4, 4)]]), KeepAlternate(), "compact")
    new = inner.rope_deltas = torch.tensor([[6]])
    adapter.close()
    assert inner.rope_deltas is new


def test_threads_are_independent(model: Any) -> None:
    inputs = [make_inputs([[(4, 4)], []]), make_inputs([[(2, 5), (3, 3)]])]
    reducers = [KeepAlternate(), REDUCERS["torino-m"]]
    expected: list[Tensor] = []
    for thread_inputs, reducer in zip(inputs, reducers, strict=True):
        with reduced(model, reducer):
            expected.append(generate(model, thread_inputs).sequences)
    outputs: list[list[Tensor]] = [[], []]

    def work(number: int) -> None:
        for _ in range(3):
            with reduced(model, reducers[number]):
                outputs[number].append(generate(model, inputs[number]).sequences)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        assert len(outputs[number]) == 3
        assert all(torch.equal(sequences, expected[number]) for sequences in outputs[number])


def test_model_without_head(model: Any) -> None:
    inputs = make_inputs(ROWS)
    with torch.no_grad():
        stock = model.model(**inputs).last_hidden_state
        with reduced(model.model, Identity()):
            assert torch.equal(model.model(**inputs).last_hidden_state, stock)


# ---------------------------------------------------------------------- tokens and signals


def test_units_are_images_after_the_merger(model: Any) -> None:
    inputs = make_inputs(ROWS)
    with torch.no_grad():
        encoded = adapter_for(model).encode(inputs, frozenset())
        stock = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
    assert [image.grid for image in encoded.tokens] == [(3, 2), (2, 4), (1, 3), (5, 5)]
    assert all(torch.equal(image.patches, features) for image, features in zip(encoded.tokens, stock, strict=True))
    assert all(image.origin.block == 3 and image.cls is None and not image.signals for image in encoded.tokens)


@torch.no_grad()
def test_keys_are_means_over_the_patches_of_a_token(model: Any) -> None:
    rows = [[(3, 2)], [(2, 4), (1, 3)]]
    tokens = adapter_for(model).encode(make_inputs(rows), frozenset({"keys", "keys@-1", "keys@0", "queries@0"})).tokens
    tower = model.model.visual
    for image, (images, number) in zip(tokens, ((0, 0), (1, 0), (1, 1)), strict=True):
        assert image.keys is not None
        assert image.keys.shape == image.signals["keys@-1"].shape == image.signals["queries@0"].shape
        assert not torch.equal(image.keys, image.signals["keys@-1"])
        # The projection of the first block does not depend on the order of patches.
        single = make_inputs([rows[images]])
        counts = (single["image_grid_thw"].prod(-1)).tolist()
        start = sum(counts[:number])
        pixels = single["pixel_values"]
        states = tower.patch_embed(pixels)
        if hasattr(tower, "pos_embed"):
            continue  # Qwen3-VL adds positions first; the other two families test the order
        fused = tower.blocks[0].attn.qkv(tower.blocks[0].norm1(states))[start : start + counts[number]]
        queries, keys, _ = fused.view(-1, 4, 3, 16).mean(1).unbind(1)
        assert torch.allclose(image.signals["queries@0"], queries, atol=1e-5)
        assert torch.allclose(image.signals["keys@0"], keys, atol=1e-5)
    assert not tower.blocks[0].attn.qkv._forward_hooks


@pytest.mark.parametrize(
    ("signal", "message"),
    [
        ("cls_attention", r"comes from a CLS token, and the vision tower of Qwen\w+ has none"),
        ("cls", "comes from a CLS token"),
        ("keys@+1", "refers to block 3, and the tower has blocks 0 to 2"),
        ("keys@last", "does not name a block"),
        ("flavor", "'flavor' is not a signal of this tower"),
    ],
)
def test_unknown_signals_are_refused(model: Any, signal: str, message: str) -> None:
    class NeedsSignal(Identity):
        needs: ClassVar[frozenset[str]] = frozenset({signal})

    with reduced(model, NeedsSignal()) as trace, pytest.raises(MissingSignal, match=message):
        generate(model, make_inputs(ROWS))
    assert not trace.calls


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize("missing", ["mm_token_type_ids", "image_grid_thw"])
def test_missing_inputs_are_refused(model: Any, missing: str) -> None:
    inputs = {name: value for name, value in make_inputs(ROWS).items() if name != missing}
    with reduced(model, KeepAlternate()), pytest.raises(BadParameter, match=f"without {missing}"):
        generate(model, inputs)


def test_other_refusals(model: Any) -> None:
    inputs = make_inputs([[(2, 2)]])
    truncated = {name: inputs[name][:, :6] for name in ("input_ids", "attention_mask", "mm_token_type_ids")}
    with reduced(model, KeepAlternate()):
        with pytest.raises(BadParameter, match="both images and videos"):
            generate(model, inputs | {"pixel_values_videos": inputs["pixel_values"]})
        with pytest.raises(BadParameter, match="position_ids were given"):
            model(**inputs, position_ids=torch.arange(inputs["input_ids"].shape[1])[None])
        with pytest.raises(BadTokens, match="tokenizer may have truncated"):
            generate(model, inputs | truncated)


def test_sae_of_another_block_is_refused(model: Any) -> None:
    for sae, message in (
        (random_sae(block=1), "block 1, but the tokens have width 32 and come from"),
        (random_sae(16), "width 16 "),
    ):
        with reduced(model, make("torino-p", sae=sae)), pytest.raises(SAEMismatch, match=message):
            generate(model, make_inputs(ROWS))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda grids: grids[0], r"must be integers of shape \(images, 3\)"),
        (lambda grids: grids.float(), r"must be integers of shape \(images, 3\)"),
        (lambda grids: grids.tolist(), "image_grid_thw must be a torch Tensor, got list"),
        (lambda grids: grids * 2, "image_grid_thw describes .* patches, and pixel_values has shape"),
        (lambda grids: grids - 1, "times must be at least 1, and height and width positive multiples of 2"),
    ],
    ids=["vector", "float", "list", "larger", "odd"],
)
def test_a_wrong_grid_is_one_sentence(model: Any, change: Any, words: str) -> None:
    inputs = dict(make_inputs(ROWS[:1]))
    inputs["image_grid_thw"] = change(inputs["image_grid_thw"])
    with reduced(model, make("random", budget=2)), pytest.raises(BadParameter, match=words):
        model(**inputs)
