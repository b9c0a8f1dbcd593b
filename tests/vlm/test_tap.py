"""Tapping towers: states and signals against those of the whole tower, run with eager attention."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

from torino import MissingSignal, TorinoError
from torino.core.timing import recording
from torino.vlm.hooks import CapturedFeatures, tap, tower_layout

TOWERS = ("clip", "siglip", "dinov2", "registers")
PREFIX = {"clip": 1, "siglip": 0, "dinov2": 1, "registers": 1 + tiny.REGISTERS}


def tower_of(name: str = "clip", attention: str = "sdpa") -> Any:
    return tiny.llava(name, attention=attention).model.vision_tower


def tapped(tower: nn.Module, block: int, *needs: str, pixels: Tensor | None = None) -> CapturedFeatures:
    pixels = tiny.pictures(2) if pixels is None else pixels
    return tap(tower, tower_layout(tower), block, frozenset(needs), lambda: tower(pixels))


def hooks_on(tower: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in tower.modules())


@pytest.fixture(autouse=True)
def _no_gradient() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", TOWERS)
def test_states_are_those_of_the_whole_tower(name: str) -> None:
    tower = tower_of(name)
    whole = tower(tiny.pictures(2), output_hidden_states=True).hidden_states
    for block in range(-1, tiny.BLOCKS):
        assert torch.equal(tapped(tower, block).states, whole[block + 1])


@pytest.mark.parametrize("name", TOWERS)
def test_signals_are_those_of_eager_attention(name: str) -> None:
    """The tap runs with sdpa, which never forms the map; the answer comes from a tower that does."""
    tower, eager = tower_of(name), tower_of(name, "eager")
    caught: dict[str, Tensor] = {}
    parts = tower_layout(eager)
    for number, block in enumerate(parts.blocks):
        for part, find in (("keys", parts.key), ("queries", parts.query)):
            find(block).register_forward_hook(
                lambda _, a, output, key=f"{part}{number}": caught.__setitem__(key, output)
            )
    maps = eager(tiny.pictures(2), output_attentions=True).attentions
    first = PREFIX[name]
    needs = ["keys", "queries", "keys@+1", "queries@-1", "queries@+1", "keys@0"]
    attention = {} if name == "siglip" else {"cls_attention": 1, "cls_attention@0": 0, "cls_attention@+2": 3}
    seen = tapped(tower, 1, *needs, *attention)
    assert set(seen.signals) == {*needs, *attention}
    for signal, block in attention.items():
        assert torch.allclose(seen.signals[signal], maps[block][:, :, 0, first:], atol=1e-5)
        assert seen.signals[signal].shape == (2, 4, tiny.PATCHES)
    for signal, block in (("keys", 1), ("queries", 1), ("keys@+1", 2), ("queries@-1", 0), ("keys@0", 0)):
        wanted = caught[f"{signal.partition('@')[0]}{block}"][:, first:]
        assert torch.allclose(seen.signals[signal], wanted, atol=1e-5), signal
    assert torch.equal(seen.of("keys", 1), seen.signals["keys"][1])
    assert seen.of("queries@7", 1) is None


def test_keys_are_exactly_what_the_projection_gave() -> None:
    tower = tower_of()
    kept: list[Tensor] = []
    tower.encoder.layers[2].self_attn.k_proj.register_forward_hook(lambda _, a, output: kept.append(output))
    assert torch.equal(tapped(tower, 2, "keys").signals["keys"], kept[0][:, 1:])


@pytest.mark.parametrize(
    ("block", "needs", "entered", "ended"),
    [
        (2, (), [0, 1, 2], [0, 1, 2]),
        (0, (), [0], [0]),
        (-1, (), [0], []),
        (3, (), [0, 1, 2, 3], [0, 1, 2, 3]),
        (1, ("cls_attention", "keys"), [0, 1], [0, 1]),
        (2, ("keys@0",), [0, 1, 2], [0, 1, 2]),
        (1, ("keys@+1",), [0, 1, 2], [0, 1]),  # into the next block, as far as its keys
    ],
)
def test_the_tower_stops_as_soon_as_all_is_there(
    block: int, needs: tuple[str, ...], entered: list[int], ended: list[int]
) -> None:
    tower = tower_of()
    begun: list[int] = []
    done: list[int] = []
    rest: list[str] = []
    for number, one in enumerate(tower.encoder.layers):
        # position_mode first, so that they run before the tap's own
        one.register_forward_pre_hook(lambda _, a, number=number: begun.append(number))
        one.register_forward_hook(lambda _, a, o, number=number: done.append(number))
    tower.post_layernorm.register_forward_hook(lambda _, a, o: rest.append("end"))
    tapped(tower, block, *needs)
    assert (begun, done, rest) == (entered, ended, [])


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
def test_only_what_is_needed_is_captured(needs: tuple[str, ...], expected: dict[str, int]) -> None:
    tower = tower_of()
    position_mode: Counter[str] = Counter()

    def run() -> None:
        for number, block in enumerate(tower.encoder.layers):
            for part in ("q_proj", "k_proj", "v_proj"):
                position_mode[f"{number}.{part}"] += len(getattr(block.self_attn, part)._forward_hooks)
        tower(tiny.pictures(1))

    seen = tap(tower, tower_layout(tower), 1, frozenset(needs), run)
    assert +position_mode == expected
    assert set(seen.signals) == {name for name in needs if name != "cls"}
    assert hooks_on(tower) == 0


def test_hooks_are_gone_after_an_error() -> None:
    tower = tower_of()

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    handle = tower.encoder.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        tapped(tower, 2, "cls_attention")
    handle.remove()
    assert hooks_on(tower) == 0
    with pytest.raises(ValueError, match="image size"):  # the tower's own complaint comes through
        tapped(tower, 2, "keys", pixels=torch.zeros(1, 3, 20, 20))
    assert hooks_on(tower) == 0
    assert torch.equal(tapped(tower, 2).states, tower(tiny.pictures(2), output_hidden_states=True).hidden_states[3])


def test_a_tower_that_shows_nothing() -> None:
    tower = tower_of()
    with pytest.raises(TorinoError, match=r"ended without passing query@1, states. A tower that was compiled"):
        tap(tower, tower_layout(tower), 2, frozenset({"queries@1"}), lambda: None)
    assert hooks_on(tower) == 0


@pytest.mark.parametrize(
    ("need", "words"),
    [
        ("flavour", "No signal is called 'flavour'. Known: cls, cls_attention"),
        ("cls@2", "No signal is called 'cls@2'"),
        ("keys@9", "keys@9 asks for block 9, and the tower has blocks 0 to 3"),
        ("keys@+2", "keys@\\+2 asks for block 4"),
        ("keys@-3", "asks for block -1"),
        ("keys@next", "'keys@next' names no block. Write keys@8"),
        ("keys@", "names no block"),
        ("queries@+-1", "names no block"),
    ],
)
def test_signals_that_there_are_not(need: str, words: str) -> None:
    with pytest.raises(MissingSignal, match=words):
        tapped(tower_of(), 2, need)


@pytest.mark.parametrize("need", ["cls", "cls_attention", "cls_attention@0"])
def test_a_tower_without_a_cls_token_says_so_before_it_runs(need: str) -> None:
    tower = tower_of("siglip")

    def run() -> None:
        raise AssertionError("the tower ran")

    with pytest.raises(MissingSignal, match=r"CLS token, and the tower of this model has none\. Choose a reducer"):
        tap(tower, tower_layout(tower), 2, frozenset({need}), run)


def test_a_tower_of_another_kind() -> None:
    from transformers import ViTConfig, ViTModel

    with pytest.raises(TorinoError, match=r"ViTModel \(vit\) is not known here. Known: CLIP, SigLIP"):
        tower_layout(
            ViTModel(ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8))
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_signals_are_float32_in_half_precision(dtype: torch.dtype) -> None:
    tower = tower_of().to(dtype)
    seen = tapped(tower, 1, "cls_attention", "keys", pixels=tiny.pictures(1).to(dtype))
    assert seen.states.dtype == dtype
    assert seen.signals["keys"].dtype == seen.signals["cls_attention"].dtype == torch.float32
    rows = seen.signals["cls_attention"].sum(-1)
    assert bool((rows < 1).all())  # the rest went to the CLS token itself


def test_autocast_does_not_reach_the_signals() -> None:
    tower = tower_of()
    plain = tapped(tower, 1, "cls_attention").signals["cls_attention"]
    with torch.autocast("cpu", torch.bfloat16):
        cast = tapped(tower, 1, "cls_attention").signals["cls_attention"]
    assert cast.dtype == torch.float32
    assert torch.allclose(cast, plain, atol=0.05)


def test_gradients_flow_through_states_and_not_through_signals() -> None:
    tower = tower_of()
    with torch.enable_grad():
        seen = tapped(tower, 1, "cls_attention", "keys")
    assert seen.states.requires_grad
    assert not any(values.requires_grad for values in seen.signals.values())


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant: bool) -> None:
    weight: list[Tensor] = []
    for checkpointing in (False, True):
        tower = tower_of().train()
        if checkpointing:
            tower.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with torch.enable_grad():
            pixels = tiny.pictures(1).requires_grad_()
            states = tapped(tower, 2, "keys", pixels=pixels).states
            states.square().sum().backward()
        weight.append(tower.encoder.layers[1].mlp.fc1.weight.grad)
    assert torch.allclose(*weight, rtol=1e-4)


def test_threads_share_a_tower() -> None:
    """Both place their hooks before either runs, so each sees the other's."""
    tower = tower_of()
    pixels = [tiny.pictures(1, seed=seed) for seed in range(2)]
    whole = [tower(one, output_hidden_states=True).hidden_states for one in pixels]
    before = hooks_on(tower)
    gate = threading.Barrier(2)
    found: dict[int, Tensor] = {}
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

        found[number] = tap(tower, tower_layout(tower), block, frozenset({"keys"}), run).states

    for _ in range(5):
        threads = [threading.Thread(target=work, args=args) for args in ((0, 1), (1, 2))]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert torch.allclose(found.pop(0), whole[0][2], atol=1e-6)
        assert torch.allclose(found.pop(1), whole[1][3], atol=1e-6)
        assert stopped == {0: True, 1: True}
        assert hooks_on(tower) == before


def test_time_for_signals_is_part_of_the_tower() -> None:
    tower = tower_of()
    with recording() as seconds:
        tapped(tower, 1)
        assert "signals" not in seconds
        tapped(tower, 1, "cls_attention")
    assert seconds["signals"] > 0


def test_other_signals_of_the_attention_map() -> None:
    """Whole maps, what a patch receives, one head of full width, keys averaged over heads: by their definitions."""
    model = tower_of()
    parts, pixels = tower_layout(model), tiny.pictures(2)
    needs = {"attention@1", "received_attention@1", "cls_attention_joint@1", "head_keys@1", "keys@1", "queries@1"}
    seen = tap(model, parts, 1, frozenset(needs), lambda: model(pixels)).signals
    caught: dict[str, torch.Tensor] = {}
    attention = parts.blocks[1].self_attn
    hooks = [
        attention.q_proj.register_forward_hook(lambda _, __, output: caught.update(q=output)),
        attention.k_proj.register_forward_hook(lambda _, __, output: caught.update(k=output)),
    ]
    model(pixels)
    for hook in hooks:
        hook.remove()
    images, tokens, width = caught["q"].shape
    size = width // parts.heads
    for i in range(images):
        q, k = caught["q"][i], caught["k"][i]
        maps = torch.stack(
            [
                (q[:, h * size : (h + 1) * size] @ k[:, h * size : (h + 1) * size].T / size**0.5).softmax(-1)
                for h in range(parts.heads)
            ]
        )
        assert torch.allclose(seen["attention@1"][i], maps[:, 1:, 1:], atol=1e-6)
        assert torch.allclose(seen["received_attention@1"][i], maps.mean(0).mean(0)[1:], atol=1e-6)
        joint = (q[0] @ k.T / width**0.5).softmax(-1)[1:]
        assert torch.allclose(seen["cls_attention_joint@1"][i], joint, atol=1e-6)
        mean = sum(k[1:, h * size : (h + 1) * size] for h in range(parts.heads)) / parts.heads
        assert torch.allclose(seen["head_keys@1"][i], mean, atol=1e-6)
        assert seen["attention@1"][i].shape == (parts.heads, tokens - 1, tokens - 1)
