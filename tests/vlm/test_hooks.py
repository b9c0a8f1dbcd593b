"""Captured states and signals, compared with those of the complete tower with eager attention."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import tiny
from torino import TorinoError
from torino.core.errors import MissingSignal
from torino.core.timing import recording
from torino.vlm.hooks import CapturedFeatures, capture, signal_block, tower_layout

TOWERS = ("clip", "siglip", "dinov2", "registers")
PREFIX = {"clip": 1, "siglip": 0, "dinov2": 1, "registers": 1 + tiny.REGISTERS}


def make_tower(name: str = "clip", attention: str = "sdpa") -> Any:
    return tiny.llava(name, attention=attention).model.vision_tower


def run_capture(tower: nn.Module, block: int, *needs: str, pixels: Tensor | None = None) -> CapturedFeatures:
    pixels = tiny.pixels(2) if pixels is None else pixels
    return capture(tower, tower_layout(tower), block, frozenset(needs), lambda: tower(pixels))


def count_hooks(tower: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in tower.modules())


@pytest.fixture(autouse=True)
def _no_gradient() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", TOWERS)
def test_states_equal_those_of_the_complete_tower(name: str) -> None:
    tower = make_tower(name)
    states = tower(tiny.pixels(2), output_hidden_states=True).hidden_states
    for block in range(-1, tiny.BLOCKS):
        assert torch.equal(run_capture(tower, block).states, states[block + 1])


@pytest.mark.parametrize("name", TOWERS)
def test_signals_equal_those_of_eager_attention(name: str) -> None:
    """The tower uses sdpa, which never computes the attention map; the expected values come from an eager tower."""
    tower, eager = make_tower(name), make_tower(name, "eager")
    outputs: dict[str, Tensor] = {}
    parts = tower_layout(eager)
    for number, block in enumerate(parts.blocks):
        for part, find in (("keys", parts.key), ("queries", parts.query)):
            find(block).register_forward_hook(
                lambda _, a, output, key=f"{part}{number}": outputs.__setitem__(key, output)
            )
    maps = eager(tiny.pixels(2), output_attentions=True).attentions
    first = PREFIX[name]
    needs = ["keys", "queries", "keys@+1", "queries@-1", "queries@+1", "keys@0"]
    attention = {} if name == "siglip" else {"cls_attention": 1, "cls_attention@0": 0, "cls_attention@+2": 3}
    captured = run_capture(tower, 1, *needs, *attention)
    assert set(captured.signals) == {*needs, *attention}
    for signal, block in attention.items():
        assert torch.allclose(captured.signals[signal], maps[block][:, :, 0, first:], atol=1e-5)
        assert captured.signals[signal].shape == (2, 4, tiny.PATCHES)
    for signal, block in (("keys", 1), ("queries", 1), ("keys@+1", 2), ("queries@-1", 0), ("keys@0", 0)):
        expected = outputs[f"{signal.partition('@')[0]}{block}"][:, first:]
        assert torch.allclose(captured.signals[signal], expected, atol=1e-5), signal
    assert torch.equal(captured.signal("keys", 1), captured.signals["keys"][1])
    assert captured.signal("queries@7", 1) is None


def test_keys_equal_the_output_of_the_projection() -> None:
    tower = make_tower()
    outputs: list[Tensor] = []
    tower.encoder.layers[2].self_attn.k_proj.register_forward_hook(lambda _, a, output: outputs.append(output))
    assert torch.equal(run_capture(tower, 2, "keys").signals["keys"], outputs[0][:, 1:])


@pytest.mark.parametrize(
    ("block", "needs", "entered", "ended"),
    [
        (2, (), [0, 1, 2], [0, 1, 2]),
        (0, (), [0], [0]),
        (-1, (), [0], []),
        (3, (), [0, 1, 2, 3], [0, 1, 2, 3]),
        (1, ("cls_attention", "keys"), [0, 1], [0, 1]),
        (2, ("keys@0",), [0, 1, 2], [0, 1, 2]),
        (1, ("keys@+1",), [0, 1, 2], [0, 1]),  # the next block runs up to its keys
    ],
)
def test_tower_stops_once_everything_is_captured(
    block: int, needs: tuple[str, ...], entered: list[int], ended: list[int]
) -> None:
    tower = make_tower()
    started: list[int] = []
    finished: list[int] = []
    after: list[str] = []
    for number, layer in enumerate(tower.encoder.layers):
        # registered first, so that they run before the hooks of capture
        layer.register_forward_pre_hook(lambda _, a, number=number: started.append(number))
        layer.register_forward_hook(lambda _, a, o, number=number: finished.append(number))
    tower.post_layernorm.register_forward_hook(lambda _, a, o: after.append("end"))
    run_capture(tower, block, *needs)
    assert (started, finished, after) == (entered, ended, [])


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        ((), {}),
        (("cls",), {}),
        (("keys",), {"1.k_proj": 1}),
        (("queries@0",), {"0.q_proj": 1}),
        (("cls_attention",), {"1.k_proj": 1, "1.q_proj": 1}),
        (("cls_attention@2", "keys@2", "keys"), {"1.k_proj": 1, "2.k_proj": 1, "2.q_proj": 1}),
    ],
)
def test_only_needed_signals_are_captured(needs: tuple[str, ...], expected: dict[str, int]) -> None:
    tower = make_tower()
    hooks: Counter[str] = Counter()

    def run() -> None:
        for number, block in enumerate(tower.encoder.layers):
            for part in ("q_proj", "k_proj", "v_proj"):
                hooks[f"{number}.{part}"] += len(getattr(block.self_attn, part)._forward_hooks)
        tower(tiny.pixels(1))

    captured = capture(tower, tower_layout(tower), 1, frozenset(needs), run)
    assert +hooks == expected
    assert set(captured.signals) == {name for name in needs if name != "cls"}
    assert count_hooks(tower) == 0


def test_hooks_are_removed_after_an_error() -> None:
    tower = make_tower()

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    handle = tower.encoder.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        run_capture(tower, 2, "cls_attention")
    handle.remove()
    assert count_hooks(tower) == 0
    with pytest.raises(ValueError, match="image size"):  # an error of the tower itself
        run_capture(tower, 2, "keys", pixels=torch.zeros(1, 3, 20, 20))
    assert count_hooks(tower) == 0
    assert torch.equal(run_capture(tower, 2).states, tower(tiny.pixels(2), output_hidden_states=True).hidden_states[3])


def test_tower_without_captured_outputs_is_refused() -> None:
    tower = make_tower()
    with pytest.raises(
        TorinoError, match=r"finished without computing query@1, states. Hooks see nothing inside a compiled tower"
    ):
        capture(tower, tower_layout(tower), 2, frozenset({"queries@1"}), lambda: None)
    assert count_hooks(tower) == 0


@pytest.mark.parametrize(
    ("need", "message"),
    [
        ("flavor", "'flavor' is not a signal of a tower. Use cls, cls_attention"),
        ("cls@2", "'cls@2' is not a signal"),
        ("keys@9", "keys@9 refers to block 9, and the tower has blocks 0 to 3"),
        ("keys@+2", "keys@\\+2 refers to block 4"),
        ("keys@-3", "refers to block -1"),
        ("keys@next", "'keys@next' does not name a block. Write keys@8"),
        ("keys@", "does not name a block"),
        ("queries@+-1", "does not name a block"),
    ],
)
def test_unknown_signals_are_refused(need: str, message: str) -> None:
    with pytest.raises(MissingSignal, match=message):
        run_capture(make_tower(), 2, need)


@pytest.mark.parametrize("need", ["cls", "cls_attention", "cls_attention@0"])
def test_tower_without_a_cls_token_is_refused_before_it_runs(need: str) -> None:
    tower = make_tower("siglip")

    def run() -> None:
        raise AssertionError("the tower ran")

    with pytest.raises(MissingSignal, match=r"CLS token, and the tower of this model has none\. Choose a reducer"):
        capture(tower, tower_layout(tower), 2, frozenset({need}), run)


def test_other_towers_are_refused() -> None:
    from transformers import ViTConfig, ViTModel

    with pytest.raises(TorinoError, match=r"ViTModel \(vit\) is not supported. Supported: CLIP, SigLIP"):
        tower_layout(
            ViTModel(ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8))
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_signals_are_float32_in_half_precision(dtype: torch.dtype) -> None:
    tower = make_tower().to(dtype)
    captured = run_capture(tower, 1, "cls_attention", "keys", pixels=tiny.pixels(1).to(dtype))
    assert captured.states.dtype == dtype
    assert captured.signals["keys"].dtype == captured.signals["cls_attention"].dtype == torch.float32
    rows = captured.signals["cls_attention"].sum(-1)
    assert bool((rows < 1).all())  # the rest is the attention of the CLS token to itself


def test_signals_ignore_autocast() -> None:
    tower = make_tower()
    plain = run_capture(tower, 1, "cls_attention").signals["cls_attention"]
    with torch.autocast("cpu", torch.bfloat16):
        cast = run_capture(tower, 1, "cls_attention").signals["cls_attention"]
    assert cast.dtype == torch.float32
    assert torch.allclose(cast, plain, atol=0.05)


def test_gradients_flow_through_states_and_not_through_signals() -> None:
    tower = make_tower()
    with torch.enable_grad():
        captured = run_capture(tower, 1, "cls_attention", "keys")
    assert captured.states.requires_grad
    assert not any(values.requires_grad for values in captured.signals.values())


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant: bool) -> None:
    weight: list[Tensor] = []
    for checkpointing in (False, True):
        tower = make_tower().train()
        if checkpointing:
            tower.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with torch.enable_grad():
            pixels = tiny.pixels(1).requires_grad_()
            states = run_capture(tower, 2, "keys", pixels=pixels).states
            states.square().sum().backward()
        weight.append(tower.encoder.layers[1].mlp.fc1.weight.grad)
    assert torch.allclose(*weight, rtol=1e-4)


def test_threads_share_a_tower() -> None:
    """Both threads register their hooks before either tower runs, so the hooks of both are called."""
    tower = make_tower()
    pixels = [tiny.pixels(1, seed=seed) for seed in range(2)]
    states = [tower(image, output_hidden_states=True).hidden_states for image in pixels]
    before = count_hooks(tower)
    gate = threading.Barrier(2)
    results: dict[int, Tensor] = {}
    stopped: dict[int, bool] = {}

    def work(number: int, block: int) -> None:
        def run() -> None:
            gate.wait()
            try:
                with torch.no_grad():
                    tower(pixels[number])
            except BaseException:
                stopped[number] = True
                raise

        results[number] = capture(tower, tower_layout(tower), block, frozenset({"keys"}), run).states

    for _ in range(5):
        threads = [threading.Thread(target=work, args=args) for args in ((0, 1), (1, 2))]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert torch.allclose(results.pop(0), states[0][2], atol=1e-6)
        assert torch.allclose(results.pop(1), states[1][3], atol=1e-6)
        assert stopped == {0: True, 1: True}
        assert count_hooks(tower) == before


def test_time_of_signals_is_recorded() -> None:
    tower = make_tower()
    with recording() as seconds:
        run_capture(tower, 1)
        assert "signals" not in seconds
        run_capture(tower, 1, "cls_attention")
    assert seconds["signals"] > 0


def test_other_signals_of_the_attention_map() -> None:
    """Attention maps, received attention, one head of full width, and mean keys, computed by definition."""
    model = make_tower()
    parts, pixels = tower_layout(model), tiny.pixels(2)
    needs = {"attention@1", "received_attention@1", "cls_attention_joint@1", "head_keys@1", "keys@1", "queries@1"}
    captured = capture(model, parts, 1, frozenset(needs), lambda: model(pixels)).signals
    outputs: dict[str, torch.Tensor] = {}
    attention = parts.blocks[1].self_attn
    hooks = [
        attention.q_proj.register_forward_hook(lambda _, __, output: outputs.update(q=output)),
        attention.k_proj.register_forward_hook(lambda _, __, output: outputs.update(k=output)),
    ]
    model(pixels)
    for hook in hooks:
        hook.remove()
    images, tokens, width = outputs["q"].shape
    size = width // parts.heads
    for i in range(images):
        q, k = outputs["q"][i], outputs["k"][i]
        maps = torch.stack(
            [
                (q[:, h * size : (h + 1) * size] @ k[:, h * size : (h + 1) * size].T / size**0.5).softmax(-1)
                for h in range(parts.heads)
            ]
        )
        assert torch.allclose(captured["attention@1"][i], maps[:, 1:, 1:], atol=1e-6)
        assert torch.allclose(captured["received_attention@1"][i], maps.mean(0).mean(0)[1:], atol=1e-6)
        joint = (q[0] @ k.T / width**0.5).softmax(-1)[1:]
        assert torch.allclose(captured["cls_attention_joint@1"][i], joint, atol=1e-6)
        mean = sum(k[1:, h * size : (h + 1) * size] for h in range(parts.heads)) / parts.heads
        assert torch.allclose(captured["head_keys@1"][i], mean, atol=1e-6)
        assert captured["attention@1"][i].shape == (parts.heads, tokens - 1, tokens - 1)


@pytest.mark.parametrize(("blocks", "block"), [(24, 8), (12, 4), (27, 9), (2, 0), (1, 0)])
def test_blocks_can_be_scaled_to_the_depth(blocks: int, block: int) -> None:
    assert signal_block("received_attention@9/24", 0, blocks) == block


@pytest.mark.parametrize("name", ["keys@0/24", "keys@25/24", "keys@9/", "keys@/9", "keys@9/0"])
def test_wrong_share_of_the_depth(name: str) -> None:
    with pytest.raises(MissingSignal, match="does not name a block"):
        signal_block(name, 0, 12)
