"""Training: a planted dictionary comes back, what is saved is what was trained, and a stopped run goes on exactly."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import planted as plant
import pytest
import torch
from torch import Tensor

from torino import SAE, BadFile, BadParameter, TorinoError
from torino.core.errors import BadTokens
from torino.core.io import read_arrays
from torino.training.activations.base import InMemory
from torino.training.checkpoint import CheckpointStore
from torino.training.config import TrainConfig
from torino.training.distributed import World, device_here
from torino.training.init import geometric_median
from torino.training.logging import JsonLines
from torino.training.metrics import group_counts, measure
from torino.training.sweep import sweep
from torino.training.trainer import Trainer, train

KINDS = ("matryoshka", "batchtopk", "topk", "relu")
ROWS, CONCEPTS = plant.planted()
PLANTED = InMemory(ROWS, facts=plant.FACTS)


def trained(kind: str, folder: Path, **changes: Any) -> SAE:
    train(PLANTED, plant.recipe(kind=kind, steps=250, l1=0.1, **changes), folder)
    return SAE.load(folder)


# ---------------------------------------------------------------------- what training finds


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_dictionary_is_recovered(kind: str, tmp_path: Path) -> None:
    sae = trained(kind, tmp_path)
    assert plant.recovered(CONCEPTS, sae.W_dec) >= 0.95  # type: ignore[arg-type]
    fresh = measure(sae, [plant.planted(seed=0)[0][:2048]])
    assert fresh.fvu < 0.15
    assert fresh.l0 == pytest.approx(plant.ACTIVE, rel=0.1) or kind == "relu"
    assert sae.kind == kind
    assert (sae.card.encoder, sae.card.block, sae.card.token_kind) == ("tiny/tower", 4, "patch")
    assert "250 steps" in sae.card.notes
    assert "seed 0" in sae.card.notes


@pytest.mark.parametrize(
    "changes",
    [{"centre": True}, {"scale": False, "lr": 0.05}, {"bias": "zero"}, {"k_start": 12}, {"precision": "bfloat16"}],
    ids=lambda changes: next(iter(changes)),
)
def test_variants_recover_it_too(changes: dict[str, Any], tmp_path: Path) -> None:
    sae = trained("batchtopk", tmp_path, **changes)
    assert plant.recovered(CONCEPTS, sae.W_dec) >= 0.9  # type: ignore[arg-type]


def test_dead_latents_are_revived_by_the_auxiliary_loss() -> None:
    dead, found = {}, {}
    for aux in (0.0, 0.1):
        trainer = Trainer(PLANTED, plant.recipe(kind="topk", latents=80, steps=200, aux=aux))
        trainer.weights.b_enc[:40] = -0.8  # half of the dictionary, which is needed, fires nowhere at the start
        while trainer.step < 200:
            trainer.take(PLANTED.batch(trainer.step, 256))
        dead[aux] = float((trainer.silent >= 2000).double().mean())
        found[aux] = plant.recovered(CONCEPTS, trainer.weights.W_dec)
    assert dead[0.0] > 0.4
    assert dead[0.1] < 0.25  # 16 of the 80 are more than the 64 concepts need
    assert found[0.1] > 0.99 > found[0.0]


def test_the_threshold_keeps_k_latents_on_new_rows(tmp_path: Path) -> None:
    sae = trained("batchtopk", tmp_path)
    assert sae.threshold is not None
    active = (sae.encode(plant.planted(seed=0)[0][4096:]) > 0).sum(1)
    assert float(active.double().mean()) == pytest.approx(plant.ACTIVE, rel=0.1)
    trainer = Trainer(PLANTED, plant.recipe(kind="batchtopk"))
    z = trainer.weights.W_enc @ (trainer.scaling(PLANTED.batch(0, 256)) - trainer.weights.b_dec).T
    outcome = trainer.take(PLANTED.batch(0, 256))
    assert outcome.edge == pytest.approx(float(z.flatten().topk(256 * plant.ACTIVE).values[-1]), rel=1e-5)
    assert trainer.threshold == outcome.edge


@pytest.mark.parametrize("centre", [False, True])
def test_scaling_is_folded_back(centre: bool) -> None:
    trainer = Trainer(PLANTED, plant.recipe(kind="batchtopk", centre=centre))
    for step in range(30):
        trainer.take(PLANTED.batch(step, 256))
    x = ROWS[:100]
    u = trainer.scaling(x)
    assert float(trainer.scaling(ROWS).square().sum(1).mean()) == pytest.approx(1, rel=0.05)
    w = trainer.weights
    z = ((u - w.b_dec) @ w.W_enc.T + w.b_enc).relu()
    z = z * (z > trainer.threshold)
    sae = trainer.sae()
    scale = trainer.scaling.scale
    assert scale > 2
    torch.testing.assert_close(sae.encode(x), z * scale, rtol=1e-4, atol=1e-4)
    rebuilt = (z @ w.W_dec + w.b_dec) * scale + trainer.scaling.centre
    torch.testing.assert_close(sae.reconstruct(x), rebuilt, rtol=1e-4, atol=1e-4)
    assert sae.W_dec is not None
    torch.testing.assert_close(sae.W_dec.norm(dim=1), torch.ones(128))


def test_measures_are_what_they_say(tmp_path: Path) -> None:
    sae, x = trained("matryoshka", tmp_path), ROWS[:500]
    found = measure(sae, [x[:300], x[300:]])
    assert found.fvu == pytest.approx(float((x - sae.reconstruct(x)).square().sum() / (x - x.mean(0)).square().sum()))
    first = sae.first(1)
    rebuilt = first.reconstruct(x)
    assert found.levels[0] == pytest.approx(float((x - rebuilt).square().sum() / (x - x.mean(0)).square().sum()))
    assert len(found.levels) == 4
    z = sae.encode(x) > 0
    assert found.l0 == pytest.approx(float(z.sum(1).double().mean()))
    assert found.top_frequency == pytest.approx(float(z.double().mean(0).max()))
    assert found.dead == pytest.approx(float((~z.any(0)).double().mean()))
    assert list(found.levels) == sorted(found.levels, reverse=True)
    assert measure(sae, [x[:300], x[:0], x[300:]]) == found, "a photo that could not be opened has no rows"
    with pytest.raises(BadTokens, match="no rows"):
        measure(sae, [x[:0]])


def test_group_counts_are_those_of_the_reducer(tmp_path: Path) -> None:
    from torino import VisualTokens, make

    sae = trained("matryoshka", tmp_path)
    photos = [ROWS[:16], ROWS[16:32], ROWS[:0]]
    counts = group_counts(sae, photos)
    for k in (1, 2, 3):
        plans = [make("torino-m", sae=sae, k=k, delta=k).plan(VisualTokens(rows, (4, 4))) for rows in photos[:2]]
        assert counts[f"({k},{k})"] == sum(len(plan) for plan in plans) / 2


def test_geometric_median_minds_outliers_less_than_the_mean() -> None:
    points = torch.cat([torch.randn(99, 4, generator=torch.Generator().manual_seed(0)), torch.full((1, 4), 1e4)])
    assert float(geometric_median(points).norm()) < 0.5 < float(points.mean(0).norm())


# ---------------------------------------------------------------------- stopping and going on


def lines_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "training" / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "steps_per_second"} for line in lines]


def same_run(one: Path, two: Path) -> None:
    ours, theirs = (read_arrays(folder / "sae.safetensors")[0] for folder in (one, two))
    assert all(torch.equal(ours[name], theirs[name]) for name in {**ours, **theirs})
    assert (one / "card.json").read_bytes() == (two / "card.json").read_bytes()
    assert lines_of(one) == lines_of(two)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_by_bit(kind: str, tmp_path: Path) -> None:
    def stop(step: int, report: object) -> None:
        if step == 40:
            raise Stopped

    plant.run(str(tmp_path / "whole"), kind=kind)
    activations = InMemory(plant.planted(2048)[0], seed=5, facts=plant.FACTS)
    with pytest.raises(Stopped):
        train(activations, plant.recipe(kind=kind), tmp_path / "part", log_every=5, save_every=7, watch=stop)
    assert [path.name for path in sorted((tmp_path / "part" / "training").glob("step*"))] == [
        "step-00000028.safetensors",
        "step-00000035.safetensors",
    ]
    plant.run(str(tmp_path / "part"), kind=kind)
    same_run(tmp_path / "whole", tmp_path / "part")
    assert not list((tmp_path / "part" / "training").glob("step*"))


def test_a_run_survives_kill_9_at_a_random_step(tmp_path: Path) -> None:
    moments, command = random.Random(7), [sys.executable, plant.__file__, str(tmp_path / "killed")]
    log, wanted = tmp_path / "killed" / "training" / "log.jsonl", moments.randrange(5, 45)
    with subprocess.Popen([*command, "0.02"], stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 200
        while not (log.exists() and any(line["step"] >= wanted for line in lines_of_half(log))):
            assert process.poll() is None, process.stderr.read().decode()  # type: ignore[union-attr]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(moments.random() * 0.2)
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "killed" / "sae.safetensors").exists()
    (tmp_path / "killed" / "training" / ".step-00000999.half.safetensors").write_bytes(b"half a file")
    plant.run(str(tmp_path / "killed"))
    plant.run(str(tmp_path / "whole"))
    same_run(tmp_path / "whole", tmp_path / "killed")
    assert not list((tmp_path / "killed" / "training").glob(".step*"))


def lines_of_half(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().split("\n")[:-1]]


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path) -> None:
    def stop(step: int, report: object) -> None:
        if step == 30:
            raise Stopped

    plant.run(str(tmp_path / "whole"))
    activations = InMemory(plant.planted(2048)[0], seed=5, facts=plant.FACTS)
    with pytest.raises(Stopped):
        train(activations, plant.recipe(), tmp_path / "part", log_every=5, save_every=7, watch=stop)
    last = tmp_path / "part" / "training" / "step-00000028.safetensors"
    last.write_bytes(last.read_bytes()[:1000])
    with pytest.warns(UserWarning, match="going on from the one before"):
        plant.run(str(tmp_path / "part"))
    same_run(tmp_path / "whole", tmp_path / "part")


def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    first = plant.run(str(tmp_path))
    seen = (tmp_path / "sae.safetensors").stat().st_mtime_ns
    again = plant.run(str(tmp_path))
    assert again.already
    assert not first.already
    assert again.measures == first.measures
    assert (tmp_path / "sae.safetensors").stat().st_mtime_ns == seen


def test_what_a_run_left_that_was_killed_while_it_finished_is_dropped(tmp_path: Path) -> None:
    plant.run(str(tmp_path))
    left = [tmp_path / "training" / "step-00000056.safetensors", tmp_path / ".sae.safetensors.half.safetensors"]
    for path in left:
        path.write_bytes(b"large")
    assert plant.run(str(tmp_path)).already
    assert not any(path.exists() for path in left)
    assert SAE.load(tmp_path).latents


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        plant.run(str(tmp_path / name), seed=seed)
    same_run(tmp_path / "one", tmp_path / "two")
    one, three = (SAE.load(tmp_path / name) for name in ("one", "three"))
    assert not torch.equal(one.W_enc, three.W_enc)


# ---------------------------------------------------------------------- logs


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_too_full_for_the_log_is_said_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").symlink_to("/dev/full")
    log = JsonLines(tmp_path / "log.jsonl")
    with pytest.raises(BadFile, match=r"log\.jsonl: No space left on device.*goes on from its last checkpoint"):
        log.write(1, {"fvu": 0.5})
    log.close()  # holds nothing back that would fail once more


def test_a_log_that_cannot_be_cut_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = CheckpointStore(tmp_path)
    log = JsonLines(records.log)
    for step in (5, 10, 15):
        log.write(step, {"fvu": 0.5})
    log.close()

    def killed(self: Path, target: Path) -> None:
        raise Stopped

    before = records.log.read_bytes()
    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(Stopped):
        records.cut_log(10)
    monkeypatch.undo()
    assert records.log.read_bytes() == before
    records.cut_log(10)
    assert [line["step"] for line in lines_of(tmp_path)] == [5, 10]


def test_tensorboard_gets_what_the_log_has(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(PLANTED, plant.recipe(steps=20), tmp_path, logs=["tensorboard"], log_every=5)
    events = EventAccumulator(str(tmp_path / "training" / "tensorboard"))
    events.Reload()
    seen = {event.step: event.value for event in events.Scalars("fvu")}
    assert seen == pytest.approx({line["step"]: line["fvu"] for line in lines_of(tmp_path)}, rel=1e-6)
    assert set(events.Tags()["scalars"]) >= {"loss", "l0", "dead", "top_frequency", "levels/1", "levels/4"}


# ---------------------------------------------------------------------- sweeps


def test_a_sweep_writes_one_table_and_goes_on_where_it_stood(tmp_path: Path) -> None:
    photos = [ROWS[:16], ROWS[16:32]]
    given: dict[str, Any] = {"heldout": lambda: photos, "log_every": 10}
    recipe = plant.recipe(steps=20, latents=None)
    sweep(PLANTED, recipe, [1], tmp_path, **given)
    seen = (tmp_path / "x1" / "sae.safetensors").stat().st_mtime_ns
    rows = sweep(PLANTED, recipe, [1, 2.5], tmp_path, **given)
    assert (tmp_path / "x1" / "sae.safetensors").stat().st_mtime_ns == seen
    assert [row["latents"] for row in rows] == [32, 80]
    assert SAE.load(tmp_path / "x2.5").latents == 80
    table = (tmp_path / "table.md").read_text().splitlines()
    assert len(table) == 4
    for heading in ("latents", "fvu", "l0", "dead", "top_frequency", "groups (1,1)", "groups (2,2)", "groups (3,3)"):
        assert heading in table[0]
    lines = (tmp_path / "table.csv").read_text().splitlines()
    assert len(lines) == 3
    assert float(lines[2].split(",")[lines[0].split(",").index("fvu")]) == rows[1]["fvu"]
    with pytest.raises(BadParameter, match="at least one expansion"):
        sweep(PLANTED, recipe, [], tmp_path)


# ---------------------------------------------------------------------- sentences


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"latents": 2}, "3 of 2 latents cannot be active"),
        ({"latents": 8}, "8 latents are too few for the groups"),
        ({"kind": "sparse"}, "kind must be one of matryoshka, batchtopk, topk, relu"),
        ({"fractions": (0.5, 0.4)}, "add up to 1"),
        ({"weights": (1.0, 2.0)}, "4 numbers, one a level"),
        ({"lr": -1.0}, "lr must be a positive number"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"k_start": 2}, "k_start must be at least k=3"),
        ({"decay_from": 100}, "up to the last, 60"),
        ({"threshold_beta": 1.0}, "below 1"),
        ({"precision": "int8"}, "precision must be one of"),
        ({"fractions": (float("nan"), 1.0)}, "fractions must be positive"),
        ({"weights": (float("inf"), 1.0, 1.0, 1.0)}, "weights must be numbers .*inf"),
        ({"kind": "relu", "latents": None, "expansion": 0.001}, "no latent at all"),
    ],
)
def test_bad_settings_are_said_in_a_sentence(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match=sentence):
        plant.run(str(tmp_path), **changes)
    assert not (tmp_path / "card.json").exists()


def test_bad_activations_are_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadTokens, match="nothing to learn"):
        train(InMemory(torch.zeros(64, 8)), plant.recipe(latents=16), tmp_path)

    class Empty(InMemory):
        rows = 0  # type: ignore[assignment]

    with pytest.raises(BadTokens, match="empty"):
        train(Empty(ROWS), plant.recipe(), tmp_path)


def test_other_settings_are_named(tmp_path: Path) -> None:
    plant.run(str(tmp_path), steps=10)
    with pytest.raises(BadParameter, match=r"k was 3, now 4; lr was .*, now 0\.5\.") as caught:
        plant.run(str(tmp_path), steps=10, k=4, lr=0.5)
    assert "steps" not in str(caught.value)
    other = InMemory(ROWS, seed=6, facts=plant.FACTS)
    with pytest.raises(BadParameter, match=r"activations.rows was 2048, now 8192; activations.order was 5, now 6"):
        train(other, plant.recipe(steps=10), tmp_path)


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    Trainer(PLANTED, plant.recipe()).sae().save(tmp_path / "sae")
    with pytest.raises(BadFile, match="holds an SAE already"):
        plant.run(str(tmp_path / "sae"))
    (tmp_path / "file").write_text("")
    with pytest.raises(BadFile, match="Cannot write to"):
        plant.run(str(tmp_path / "file"))


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    def second(step: int, report: object) -> None:
        with pytest.raises(BadFile, match="Another run is training"):
            plant.run(str(tmp_path))

    train(PLANTED, plant.recipe(steps=1), tmp_path, watch=second)


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    class Poisoned(InMemory):
        def batch(self, step: int, size: int, part: tuple[int, int] = (0, 1)) -> Tensor:
            rows = super().batch(step, size, part)
            return rows * torch.nan if step == 45 else rows

    with pytest.raises(TorinoError, match=r"The loss is nan at step 45\. .*step-00000042.*lower learning rate"):
        train(Poisoned(ROWS), plant.recipe(), tmp_path, save_every=7)
    assert (tmp_path / "training" / "step-00000042.safetensors").exists()


def test_a_gradient_that_is_no_number_stops_the_run_before_it_reaches_the_weights() -> None:
    trainer = Trainer(PLANTED, plant.recipe())
    trainer.weights.W_dec *= 1e25  # the loss still fits into float64, the gradient not into float32
    before = trainer.weights.W_enc.clone()
    with pytest.raises(TorinoError, match="at step 0"):
        trainer.take(PLANTED.batch(0, 256))
    assert torch.equal(trainer.weights.W_enc, before)


def test_logs_that_cannot_be_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadParameter, match="tensorboard or wandb"):
        train(PLANTED, plant.recipe(), tmp_path, logs=["mlflow"])
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(BadParameter, match="pip install wandb"):
        train(PLANTED, plant.recipe(), tmp_path, logs=["wandb"])


def test_the_defaults_follow_the_width() -> None:
    recipe = TrainConfig().settled(1024)
    assert recipe.latents == 16384
    assert recipe.lr == pytest.approx(16 / (125 * 128))
    assert recipe.groups() == (1024, 2048, 4096, 9216)
    assert recipe.settled(1024) == recipe
    assert recipe.aux_k == 512
    assert [TrainConfig(k_start=100, anneal=10).k_at(step) for step in (0, 5, 10, 11)] == [100, 60, 20, 20]
    relu = replace(recipe, kind="relu", l1=0.5)
    assert (relu.l1_at(0), relu.l1_at(249), relu.l1_at(4000)) == pytest.approx((0.002, 0.5, 0.5))


# ---------------------------------------------------------------------- several processes


def test_two_processes_equal_one_on_the_same_batches(tmp_path: Path) -> None:
    """The batch is cut in two, BatchTopK is over both halves, and weights agree to 1e-4."""
    kinds = ["matryoshka", "relu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, plant.__file__, str(tmp_path / "two"), "0", ",".join(kinds)]
    ranks = [
        subprocess.Popen(command, env={**environment, "WORLD_SIZE": "2", "RANK": str(rank)}, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        told = [process.communicate(timeout=300)[1].decode() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], told
    for kind in kinds:
        plant.run(str(tmp_path / "one" / kind), kind=kind)
        one, two = (SAE.load(tmp_path / count / kind) for count in ("one", "two"))
        for name in ("W_enc", "W_dec", "b_enc", "b_dec"):
            torch.testing.assert_close(getattr(two, name), getattr(one, name), rtol=0, atol=1e-4)
        for mine, theirs in zip(lines_of(tmp_path / "two" / kind), lines_of(tmp_path / "one" / kind), strict=True):
            assert mine["l0"] == pytest.approx(theirs["l0"], rel=1e-3)
            assert mine["fvu"] == pytest.approx(theirs["fvu"], rel=1e-3)


def test_every_process_needs_a_row(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="at least 1 row for each of 4 processes, got 3"):
        train(PLANTED, plant.recipe(batch=3), tmp_path, world=World(0, 4))


def test_the_gpu_of_a_process_is_the_one_that_torchrun_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    for name in ("auto", "cuda"):
        assert device_here(name) == torch.device("cuda:3")
    assert device_here("cuda:1") == torch.device("cuda:1")
    assert device_here("cpu") == torch.device("cpu")
    assert [device.index for device in chosen] == [3, 3, 1], "set_device takes no device without a number"


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
