"""InternVL on a tiny model built from a config, and the contract that it shares with the other hosts of cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from torino import BadTokens, MissingSignal, RawEmbedding, Reduction, TorinoError, VisualTokens, make
from torino.reducers import Reducer
from torino.vlm import ReducingProcessor, adapter_for, reduced
from torino.vlm.adapters.base import families, serve
from torino.vlm.adapters.internvl import InternVL

if "internvl" not in families():
    serve("internvl")(lambda: InternVL)

IMAGE = 60
CELLS = 16
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
TOWER = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 32,
    "patch_size": 4,
}
# A prompt is a row of tokens; -3 stands for picture number 3. One picture, two of them, none, two without text between.
PROMPTS = ([5, 6, -1, 7, 8, 9], [5, -2, 6, -3, 7], [5, 6, 7], [11, -4, -5, 12])


@dataclass(frozen=True)
class Every(Reducer):
    """Keeps everything."""

    def plan(self, tokens: VisualTokens) -> Reduction:
        return Reduction.identity(tokens.grid)


@dataclass(frozen=True)
class Some(Reducer):
    """Keeps cells whose first value is large: how many depends on the picture, never none and never all."""

    def plan(self, tokens: VisualTokens) -> Reduction:
        values = tokens.patches[:, 0].float()
        kept = (values > values.mean()).nonzero()[:, 0]
        return Reduction.pick(kept, tokens.grid, "some")


@dataclass(frozen=True)
class Pairs(Reducer):
    """Merges each cell with its right neighbour, unevenly."""

    def plan(self, tokens: VisualTokens) -> Reduction:
        rows = [{i: 0.75, i + 1: 0.25} for i in range(0, len(tokens), 2)]
        return Reduction.of(rows, tokens.grid, "pairs")


@dataclass(frozen=True)
class Wanting(Every):
    """Needs the CLS token."""

    needs: ClassVar[frozenset[str]] = frozenset({"cls"})


@dataclass(frozen=True)
class Watching(Every):
    """Needs the CLS token's attention."""

    needs: ClassVar[frozenset[str]] = frozenset({"cls_attention"})


@dataclass(frozen=True)
class Family:
    """A tiny model, and how its processor would lay out a batch of prompts."""

    name: str
    build: Callable[[], Any]
    size: int = 32
    pixels: Callable[[list[list[Tensor]]], dict[str, Tensor]] = field(
        default=lambda rows: {"pixel_values": torch.stack([picture for row in rows for picture in row])}
    )
    types: Callable[[Tensor], dict[str, Tensor]] = field(default=lambda ids: {})
    first: int = 0
    """Position that the language model gives the first token in ``forward``."""
    static: bool = True
    """Whether the stock model can use a static cache."""

    def inputs(self, prompts: Sequence[Sequence[int]], side: str = "left") -> dict[str, Any]:
        rows = [[token for item in prompt for token in ([IMAGE] * CELLS if item < 0 else [item])] for prompt in prompts]
        length = max(map(len, rows))
        pads = [[0] * (length - len(row)) for row in rows]
        ids = [pad + row if side == "left" else row + pad for pad, row in zip(pads, rows, strict=True)]
        input_ids = torch.tensor(ids)
        pictures = [[self.picture(-item) for item in prompt if item < 0] for prompt in prompts]
        pixels = self.pixels(pictures) if any(pictures) else {}
        return {"input_ids": input_ids, "attention_mask": (input_ids != 0).long(), **pixels, **self.types(input_ids)}

    def picture(self, number: int) -> Tensor:
        return torch.randn(3, self.size, self.size, generator=torch.Generator().manual_seed(number))


def scrambled(model: nn.Module) -> Any:
    """Give a model weights that make it talkative: those it is born with answer one token to everything."""
    source = torch.Generator().manual_seed(7)
    gemma = "Gemma" in type(model).__name__  # whose norms add 1 to their weights
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            is_norm = weight.ndim == 1 and name.endswith("weight")
            scale = 0.3 if weight.ndim == 1 else 1.5 * weight.shape[-1] ** -0.5
            base = 1.0 if is_norm and (not gemma or "vision" in name) else 0.0
            weight.copy_(base + scale * torch.randn(weight.shape, generator=source))
    return model.eval()


def generate(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    given: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    # untrained models may say the placeholder, which without a cache is then taken for a place of an image
    given |= {"output_logits": True, "suppress_tokens": [IMAGE], **options}
    return model.generate(**inputs, **given)


def same(one: Any, other: Any) -> bool:
    steps = zip(one.logits, other.logits, strict=True)
    return torch.equal(one.sequences, other.sequences) and all(torch.equal(a, b) for a, b in steps)


class Contract:
    """What every host of cells must do; a subclass gives the fixture ``family``."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def one_thread(cls) -> Iterator[None]:
        """Threads that wait for each other take ten times as long as models of this size do."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, family: Family) -> Any:
        torch.manual_seed(0)
        return scrambled(family.build())

    @pytest.mark.parametrize(
        "options", [{}, {"use_cache": False}, {"num_beams": 3, "num_return_sequences": 2}], ids=str
    )
    def test_identity_generates_what_the_stock_model_does(
        self, family: Family, model: Any, options: dict[str, Any]
    ) -> None:
        inputs = family.inputs(PROMPTS)
        stock = generate(model, inputs, **options)
        with reduced(model, Every()) as trace:
            ours = generate(model, inputs, **options)
        assert same(stock, ours)
        assert len(stock.sequences.unique()) > 8, "the model says too little for this to show anything"
        assert (trace.before, trace.after, len(trace)) == (5 * CELLS, 5 * CELLS, 5)
        assert same(stock, generate(model, inputs, **options)), "something was left behind"

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_identity_gives_the_logits_and_loss_of_the_stock_model(self, family: Family, model: Any, side: str) -> None:
        inputs = family.inputs(PROMPTS, side)
        inputs["labels"] = inputs["input_ids"].masked_fill(inputs["input_ids"] % IMAGE == 0, -100)
        stock = model(**inputs)
        with reduced(model, Every()):
            ours = model(**inputs)
        assert torch.equal(stock.logits, ours.logits)
        assert torch.equal(stock.loss, ours.loss)
        with reduced(model, Some()):
            fewer = model(**inputs)
        assert fewer.logits.shape[1] < stock.logits.shape[1]
        assert bool(torch.isfinite(fewer.loss))

    def test_identity_keeps_original_positions(self, family: Family, model: Any) -> None:
        inputs = family.inputs(PROMPTS)
        alone = family.inputs(PROMPTS[:1])
        with reduced(model, Every(), positions="original"):
            ours, logits = generate(model, inputs), model(**alone).logits
        assert same(generate(model, inputs), ours)
        assert torch.equal(model(**alone).logits, logits)

    def test_identity_in_half_precision(self, family: Family, model: Any) -> None:
        half = deepcopy(model).to(torch.bfloat16)
        inputs = family.inputs(PROMPTS)
        stock = half(**inputs).logits
        with reduced(half, Every()):
            assert torch.equal(half(**inputs).logits, stock)
        with reduced(half, make("torino-m", sae=RawEmbedding())):
            assert half(**inputs).logits.dtype == torch.bfloat16

    @pytest.mark.parametrize("positions", ["compact", "original"])
    @pytest.mark.parametrize("reducer", [Some(), Pairs()], ids=["prune", "merge"])
    def test_a_ragged_batch_answers_as_its_rows_do_alone(
        self, family: Family, model: Any, reducer: Reducer, positions: Any
    ) -> None:
        with reduced(model, reducer, positions=positions) as trace:
            batch = generate(model, family.inputs(PROMPTS))
            alone = [generate(model, family.inputs([prompt])) for prompt in PROMPTS]
        if isinstance(reducer, Some):
            assert len(set(map(len, trace.looks[0].reductions))) > 1, "the batch is not ragged"
        for row, one in enumerate(alone):
            assert torch.equal(batch.sequences[row, -4:], one.sequences[0, -4:])
            for a, b in zip(batch.logits, one.logits, strict=True):
                torch.testing.assert_close(a[row], b[0], atol=2e-4, rtol=1e-4)

    def test_beams_of_a_ragged_batch(self, family: Family, model: Any) -> None:
        options = {"num_beams": 3, "num_return_sequences": 2}
        with reduced(model, Some()):
            batch = generate(model, family.inputs(PROMPTS), **options).sequences
            for row, prompt in enumerate(PROMPTS):
                alone = generate(model, family.inputs([prompt]), **options).sequences
                assert torch.equal(batch[2 * row : 2 * row + 2, -4:], alone[:, -4:])

    @pytest.mark.parametrize("options", [{"use_cache": False}, {"cache_implementation": "static"}], ids=str)
    def test_other_caches_answer_alike(self, family: Family, model: Any, options: dict[str, Any]) -> None:
        if "cache_implementation" in options and not family.static:
            pytest.skip("the stock model fails with this cache in transformers 5.22.2")
        inputs = family.inputs(PROMPTS)
        with reduced(model, Some()):
            usual, other = generate(model, inputs), generate(model, inputs, **options)
        assert torch.equal(usual.sequences, other.sequences)
        for a, b in zip(usual.logits, other.logits, strict=True):
            torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-4)

    @pytest.mark.parametrize("prompt", [PROMPTS[0], PROMPTS[1], PROMPTS[3]], ids=str)
    def test_pruning_is_what_one_would_do_by_hand(self, family: Family, model: Any, prompt: list[int]) -> None:
        inputs = family.inputs([prompt])
        with reduced(model, Some()) as trace:
            ours = model(**inputs).logits
        features = [row for picture in stock_features(model, inputs) for row in picture.split(CELLS)]
        kept = [plan.anchor for plan in trace]
        torch.testing.assert_close(ours, by_hand(family, model, inputs, features, kept), atol=2e-4, rtol=1e-4)

    @pytest.mark.parametrize("name", ["torino-p", "torino-m"])
    def test_torino_runs_and_counts_what_it_leaves(self, family: Family, model: Any, name: str) -> None:
        reducer = make(name, sae=RawEmbedding(), k=2, delta=1)
        inputs = family.inputs(PROMPTS)
        shrunk, look = adapter_for(model).shrink(inputs, reducer, "compact", side="left")
        with reduced(model, reducer) as trace:
            answer = generate(model, inputs).sequences
        assert torch.equal(answer[:, :-4], inputs["input_ids"])
        assert int((shrunk["input_ids"] == IMAGE).sum()) == sum(look.after) == trace.after
        assert trace.before == 5 * CELLS
        assert 5 <= trace.after < trace.before
        assert len(trace) == 5
        assert "pixel_values" not in shrunk

    def test_the_processor_gives_what_the_wrapped_model_uses(self, family: Family, model: Any) -> None:
        inputs = family.inputs(PROMPTS)
        with reduced(model, Some()):
            wrapped = generate(model, inputs)
        ready = ReducingProcessor(lambda **_: inputs, model, Some())()
        plain = generate(model, dict(ready.items()) | {"mm_encoder_outputs": ready["mm_encoder_outputs"]})
        assert torch.equal(wrapped.sequences[:, -4:], plain.sequences[:, -4:])
        assert plain.sequences.shape[1] < wrapped.sequences.shape[1]
        beams = [
            generate(model, {name: ready[name] for name in ready}, num_beams=2).sequences  # twice: beams change inputs
            for _ in range(2)
        ]
        assert torch.equal(*beams)

    def test_original_positions_are_those_of_the_full_prompt(self, family: Family, model: Any) -> None:
        inputs = family.inputs(PROMPTS[:1])
        host = adapter_for(model)
        shrunk, look = host.shrink(inputs, Some(), "original")
        anchors = look.reductions[0].anchor
        expected = torch.cat([torch.arange(2), 2 + anchors, torch.arange(2 + CELLS, 5 + CELLS)])
        assert shrunk["position_ids"].tolist() == [(expected + family.first).tolist()]
        # generate counts from 0 and lets the model add what it likes
        assert host.shrink(inputs, Some(), "original", side="left")[0]["position_ids"].tolist() == [expected.tolist()]
        with reduced(model, Some(), positions="original"):
            torch.testing.assert_close(model(**inputs).logits[:, -1], generate(model, inputs).logits[0])

    def test_text_alone_is_left_alone(self, family: Family, model: Any) -> None:
        inputs = family.inputs([[5, 6, 7], [8, 9]])
        with reduced(model, Some()) as trace:
            ours = generate(model, inputs)
        assert same(generate(model, inputs), ours)
        assert not trace.looks

    def test_a_failure_inside_leaves_nothing_behind(self, family: Family, model: Any) -> None:
        inputs = family.inputs(PROMPTS[:1])
        stock = model(**inputs).logits
        cut = {**inputs, "input_ids": inputs["input_ids"][:, :-8], "attention_mask": inputs["attention_mask"][:, :-8]}
        with pytest.raises(BadTokens, match="placeholders"), reduced(model, Every()):
            model(**{name: cut[name] for name in cut if not name.endswith("type_ids")})
        assert "forward" not in model.__dict__
        assert torch.equal(model(**inputs).logits, stock)

    def test_a_cls_token_is_not_to_be_had(self, family: Family, model: Any) -> None:
        with pytest.raises(MissingSignal, match=r"the CLS token, and.*torino-m"), reduced(model, Wanting()):
            model(**family.inputs(PROMPTS[:1]))


def stock_features(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """Features of the stock model, each of them one or more pictures end to end."""
    names = ("pixel_values", "pixel_attention_mask")
    return list(model.get_image_features(**{n: inputs[n] for n in names if n in inputs}).pooler_output)


def by_hand(
    family: Family, model: Any, inputs: dict[str, Any], features: list[Tensor], kept: Sequence[Tensor]
) -> Tensor:
    """Logits of one prompt whose picture tokens are picked by hand and put among the embedded text."""
    ids = inputs["input_ids"][0]
    text = model.get_input_embeddings()(ids.masked_fill(ids == IMAGE, 0))
    places = (ids == IMAGE).nonzero()[:, 0].split(CELLS)
    rows, at = text.clone(), [(ids != IMAGE).nonzero()[:, 0]]
    for place, feature, chosen in zip(places, features, kept, strict=True):
        rows[place] = feature
        at.append(place[chosen])
    order = torch.cat(at).sort().values
    return model(inputs_embeds=rows[order][None], **family.types(ids[order][None])).logits


def build(**tower: Any) -> Any:
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    return InternVLForConditionalGeneration(
        InternVLConfig(
            vision_config={**TOWER, "num_hidden_layers": 3, **tower},
            text_config={"model_type": "qwen2", **TEXT},
            image_token_id=IMAGE,
            image_seq_length=CELLS,
        )
    )


class TestInternVL(Contract):
    @pytest.fixture(
        scope="class",
        params=[{}, {"use_mean_pooling": False, "use_qk_norm": True, "norm_type": "rms_norm"}],
        ids=["plain", "norms"],
    )
    @classmethod
    def family(cls, request: pytest.FixtureRequest) -> Family:
        return Family("internvl", lambda: build(**request.param))

    def test_merging_happens_before_the_projector(self, family: Family, model: Any) -> None:
        inputs = family.inputs(PROMPTS[:1])
        cells: list[Tensor] = []
        hook = model.model.multi_modal_projector.register_forward_pre_hook(lambda _, given: cells.append(given[0][0]))
        model.get_image_features(inputs["pixel_values"])
        hook.remove()
        halves = 0.75 * cells[0][0::2] + 0.25 * cells[0][1::2]
        with reduced(model, Pairs()):
            ours = model(**inputs).logits
        merged = [model.model.multi_modal_projector(halves).repeat_interleave(2, 0)]
        expected = by_hand(family, model, inputs, merged, [torch.arange(0, CELLS, 2)])
        torch.testing.assert_close(ours, expected, atol=2e-4, rtol=1e-4)

    def test_another_layer_of_the_tower(self, family: Family, model: Any) -> None:
        inputs = family.inputs(PROMPTS)
        for layer, block in ((-2, 1), (1, 0), (3, 2), (0, -1)):
            # transformers 5.23 takes 0 for a flag that is not set
            stock = generate(model, inputs, vision_feature_layer=layer or -4)
            with reduced(model, Every()):
                assert same(stock, generate(model, inputs, vision_feature_layer=layer))
            sight = adapter_for(model).look({**inputs, "vision_feature_layer": layer}, frozenset())
            assert sight.tokens[0].origin.block == block

    def test_the_tower_is_stopped_where_it_is_tapped(self, family: Family, model: Any) -> None:
        ran: list[int] = []
        hooks = [
            block.register_forward_hook(lambda *_, number=number: ran.append(number))
            for number, block in enumerate(model.model.vision_tower.encoder.layer)
        ]
        adapter_for(model).look({**family.inputs(PROMPTS), "vision_feature_layer": -3}, frozenset())
        for hook in hooks:
            hook.remove()
        assert ran == [0]

    def test_attention_of_the_cls_token_adds_up_in_cells(self, family: Family, model: Any) -> None:
        inputs = family.inputs(PROMPTS[:2])
        needs = frozenset({"cls_attention", "keys", "keys@-1"})
        tokens = adapter_for(model).look(inputs, needs).tokens
        tower = deepcopy(model.model.vision_tower)
        tower.set_attn_implementation("eager")
        keys: list[Tensor] = []
        tower.encoder.layer[2].attention.k_norm.register_forward_hook(lambda _, __, output: keys.append(output))
        attention = tower(inputs["pixel_values"], output_attentions=True).attentions[-1]
        shares = attention[:, :, 0, 1:].reshape(3, 2, 4, 2, 4, 2).sum((3, 5)).reshape(3, 2, CELLS)
        means = keys[0][:, 1:].reshape(3, 4, 2, 4, 2, 16).mean((2, 4)).reshape(3, CELLS, 16)
        for number, picture in enumerate(tokens):
            assert picture.grid == (4, 4)
            assert picture.width == 64
            assert picture.cls_attention is not None
            assert picture.keys is not None
            torch.testing.assert_close(picture.cls_attention, shares[number], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(picture.keys, means[number], atol=1e-5, rtol=1e-4)
            assert picture.signals["keys@-1"].shape == (CELLS, 16)
        with reduced(model, Watching()):
            generate(model, inputs)

    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            ({"vision_feature_layer": [1, 2]}, "several tower layers"),
            ({"vision_feature_select_strategy": "full"}, "CLS token among the patches"),
        ],
        ids=["layers", "strategy"],
    )
    def test_what_cannot_be_folded_is_refused(
        self, family: Family, model: Any, options: dict[str, Any], sentence: str
    ) -> None:
        with pytest.raises(TorinoError, match=sentence), reduced(model, Every()):
            model(**family.inputs(PROMPTS), **options)
