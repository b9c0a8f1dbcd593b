"""Training: a planted dictionary is recovered, and an interrupted run resumes to the same weights."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import planted_dictionary as planted
from tests.support.files import flip_byte
from torino import SAE, TorinoError
from torino.core.errors import BadFile, BadParameter, BadTokens
from torino.core.io import read_arrays
from torino.training.activations.base import InMemory
from torino.training.metrics import compute_metrics
from torino.training.trainer import Trainer, train

KINDS = ("matryoshka", "batchtopk", "topk", "relu")
ROWS, CONCEPTS = planted.make_rows()
ACTIVATIONS = InMemory(ROWS, metadata=planted.METADATA)


def train_sae(kind: str, folder: Path, **changes: Any) -> SAE:
    train(ACTIVATIONS, planted.make_config(kind=kind, steps=250, l1=0.1, **changes), folder)
    return SAE.load(folder)


# ---------------------------------------------------------------------- results of training


@pytest.mark.parametrize("kind", KINDS)
def test_planted_dictionary_is_recovered(kind: str, tmp_path: Path) -> None:
    sae = train_sae(kind, tmp_path)
    assert planted.recovery(CONCEPTS, sae.W_dec) >= 0.95  # type: ignore[arg-type]
    metrics = compute_metrics(sae, [planted.make_rows(seed=0)[0][:2048]])
    assert metrics.fvu < 0.15
    assert metrics.l0 == pytest.approx(planted.ACTIVE, rel=0.1) or kind == "relu"
    assert sae.kind == kind
    assert (sae.card.encoder, sae.card.block, sae.card.token_kind) == ("tiny/tower", 4, "patch")
    assert "250 steps" in sae.card.notes
    assert "seed 0" in sae.card.notes


@pytest.mark.parametrize(
    "changes",
    [{"center": True}, {"scale": False, "lr": 0.05}, {"bias": "zero"}, {"k_start": 12}, {"precision": "bfloat16"}],
    ids=lambda changes: next(iter(changes)),
)
def test_variants_recover_the_dictionary(changes: dict[str, Any], tmp_path: Path) -> None:
    sae = train_sae("batchtopk", tmp_path, **changes)
    assert planted.recovery(CONCEPTS, sae.W_dec) >= 0.9  # type: ignore[arg-type]


def test_dead_latents_are_revived_by_the_auxiliary_loss() -> None:
    dead, recovery = {}, {}
    for aux in (0.0, 0.1):
        trainer = Trainer(ACTIVATIONS, planted.make_config(kind="topk", latents=80, steps=200, aux=aux))
        trainer.weights.b_enc[:40] = -0.8  # half of the dictionary, which is needed, is never active at the start
        while trainer.step < 200:
            trainer.train_step(ACTIVATIONS.batch(trainer.step, 256))
        dead[aux] = float((trainer.rows_since_active >= 2000).double().mean())
        recovery[aux] = planted.recovery(CONCEPTS, trainer.weights.W_dec)
    assert dead[0.0] > 0.4
    assert dead[0.1] < 0.25  # 16 of the 80 are more than the 64 concepts need
    assert recovery[0.1] > 0.99 > recovery[0.0]


def test_the_threshold_keeps_k_latents_on_new_rows(tmp_path: Path) -> None:
    sae = train_sae("batchtopk", tmp_path)
    assert sae.threshold is not None
    active = (sae.encode(planted.make_rows(seed=0)[0][4096:]) > 0).sum(1)
    assert float(active.double().mean()) == pytest.approx(planted.ACTIVE, rel=0.1)
    trainer = Trainer(ACTIVATIONS, planted.make_config(kind="batchtopk"))
    z = trainer.weights.W_enc @ (trainer.scaling(ACTIVATIONS.batch(0, 256)) - trainer.weights.b_dec).T
    stats = trainer.train_step(ACTIVATIONS.batch(0, 256))
    assert stats.min_kept == pytest.approx(float(z.flatten().topk(256 * planted.ACTIVE).values[-1]), rel=1e-5)
    assert trainer.threshold == stats.min_kept


# ---------------------------------------------------------------------- interrupted runs


def assert_same_run(first: Path, second: Path) -> None:
    left, right = (read_arrays(folder / "sae.safetensors")[0] for folder in (first, second))
    assert all(torch.equal(left[name], right[name]) for name in {**left, **right})
    assert (first / "card.json").read_bytes() == (second / "card.json").read_bytes()
    assert planted.read_log(first) == planted.read_log(second)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_run_is_bit_identical(kind: str, tmp_path: Path) -> None:
    def stop(step: int, report: object) -> None:
        if step == 40:
            raise Stopped

    planted.run_training(str(tmp_path / "uninterrupted"), kind=kind)
    activations = planted.make_activations()
    with pytest.raises(Stopped):
        train(
            activations, planted.make_config(kind=kind), tmp_path / "resumed", log_every=5, save_every=7, callback=stop
        )
    assert [path.name for path in sorted((tmp_path / "resumed" / "training").glob("step*"))] == [
        "step-00000028.safetensors",
        "step-00000035.safetensors",
    ]
    planted.run_training(str(tmp_path / "resumed"), kind=kind)
    assert_same_run(tmp_path / "uninterrupted", tmp_path / "resumed")
    assert not list((tmp_path / "resumed" / "training").glob("step*"))


def test_killed_run_resumes(tmp_path: Path) -> None:
    rng, command = random.Random(7), [sys.executable, planted.__file__, str(tmp_path / "killed")]
    log, kill_step = tmp_path / "killed" / "training" / "log.jsonl", rng.randrange(5, 45)
    with subprocess.Popen([*command, "0.02"], stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 200
        while not (log.exists() and any(line["step"] >= kill_step for line in read_partial_log(log))):
            assert process.poll() is None, process.stderr.read().decode()  # type: ignore[union-attr]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(rng.random() * 0.2)
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "killed" / "sae.safetensors").exists()
    (tmp_path / "killed" / "training" / ".step-00000999.half.safetensors").write_bytes(b"partial")
    planted.run_training(str(tmp_path / "killed"))
    planted.run_training(str(tmp_path / "uninterrupted"))
    assert_same_run(tmp_path / "uninterrupted", tmp_path / "killed")
    assert not list((tmp_path / "killed" / "training").glob(".step*"))


def read_partial_log(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().split("\n")[:-1]]


def test_damaged_checkpoint_is_skipped(tmp_path: Path) -> None:
    def stop(step: int, report: object) -> None:
        if step == 30:
            raise Stopped

    planted.run_training(str(tmp_path / "uninterrupted"))
    activations = planted.make_activations()
    with pytest.raises(Stopped):
        train(activations, planted.make_config(), tmp_path / "resumed", log_every=5, save_every=7, callback=stop)
    last = tmp_path / "resumed" / "training" / "step-00000028.safetensors"
    last.write_bytes(last.read_bytes()[:1000])
    with pytest.warns(UserWarning, match="resuming from the previous checkpoint"):
        planted.run_training(str(tmp_path / "resumed"))
    assert_same_run(tmp_path / "uninterrupted", tmp_path / "resumed")


def test_flipped_byte_of_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    def stop(step: int, report: object) -> None:
        if step == 30:
            raise Stopped

    planted.run_training(str(tmp_path / "uninterrupted"))
    activations = planted.make_activations()
    with pytest.raises(Stopped):
        train(activations, planted.make_config(), tmp_path / "resumed", log_every=5, save_every=7, callback=stop)
    flip_byte(tmp_path / "resumed" / "training" / "step-00000028.safetensors", -200)
    with pytest.warns(UserWarning, match=r"28\.safetensors is damaged: .* checksum.*resuming from the previous"):
        planted.run_training(str(tmp_path / "resumed"))
    assert_same_run(tmp_path / "uninterrupted", tmp_path / "resumed")


def test_files_of_the_same_run_have_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        subprocess.run([sys.executable, planted.__file__, str(tmp_path / name), "0"], check=True)
    for name in ("two", "three"):
        assert (tmp_path / name / "sae.safetensors").read_bytes() == (tmp_path / "one" / "sae.safetensors").read_bytes()
        assert (tmp_path / name / "card.json").read_bytes() == (tmp_path / "one" / "card.json").read_bytes()


def test_other_rows_of_the_same_shape_are_rejected(tmp_path: Path) -> None:
    def stop(step: int, report: object) -> None:
        if step == 8:
            raise Stopped

    one, two = (InMemory(planted.make_rows(512, seed)[0], metadata=planted.METADATA) for seed in (0, 1))
    with pytest.raises(Stopped):
        train(one, planted.make_config(steps=10), tmp_path, save_every=7, callback=stop)
    with pytest.raises(BadParameter, match=r"activations\.content was '\w+', now '\w+'\. Use the same settings"):
        train(two, planted.make_config(steps=10), tmp_path)
    run = json.loads((tmp_path / "training" / "run.json").read_text())
    del run["checksum"], run["settings"]["activations.content"]  # as an earlier version wrote it
    (tmp_path / "training" / "run.json").write_text(json.dumps(run))
    train(one, planted.make_config(steps=10), tmp_path)


def test_finished_run_with_another_sae_is_reported(tmp_path: Path) -> None:
    planted.run_training(str(tmp_path / "one"))
    planted.run_training(str(tmp_path / "two"), seed=1)
    for name in ("sae.safetensors", "card.json"):
        (tmp_path / "one" / name).write_bytes((tmp_path / "two" / name).read_bytes())
    with pytest.raises(BadFile, match="is finished, but the SAE there is missing or is another one"):
        planted.run_training(str(tmp_path / "one"))


def test_finished_run_is_not_repeated(tmp_path: Path) -> None:
    first = planted.run_training(str(tmp_path))
    modified = (tmp_path / "sae.safetensors").stat().st_mtime_ns
    again = planted.run_training(str(tmp_path))
    assert again.already_finished
    assert not first.already_finished
    assert again.metrics == first.metrics
    assert (tmp_path / "sae.safetensors").stat().st_mtime_ns == modified


def test_files_of_a_run_killed_while_finishing_are_removed(tmp_path: Path) -> None:
    planted.run_training(str(tmp_path))
    leftovers = [tmp_path / "training" / "step-00000056.safetensors", tmp_path / ".sae.safetensors.half.safetensors"]
    for path in leftovers:
        path.write_bytes(b"large")
    assert planted.run_training(str(tmp_path)).already_finished
    assert not any(path.exists() for path in leftovers)
    assert SAE.load(tmp_path).latents


def test_weights_depend_on_the_seed(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        planted.run_training(str(tmp_path / name), seed=seed)
    assert_same_run(tmp_path / "one", tmp_path / "two")
    one, three = (SAE.load(tmp_path / name) for name in ("one", "three"))
    assert not torch.equal(one.W_enc, three.W_enc)


# ---------------------------------------------------------------------- error messages


def test_invalid_activations_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(BadTokens, match="nothing to learn"):
        train(InMemory(torch.zeros(64, 8)), planted.make_config(latents=16), tmp_path)

    class Empty(InMemory):
        rows = 0  # type: ignore[assignment]

    with pytest.raises(BadTokens, match="empty"):
        train(Empty(ROWS), planted.make_config(), tmp_path)


def test_changed_settings_are_reported(tmp_path: Path) -> None:
    planted.run_training(str(tmp_path), steps=10)
    with pytest.raises(BadParameter, match=r"k was 3, now 4; lr was .*, now 0\.5\.") as raised:
        planted.run_training(str(tmp_path), steps=10, k=4, lr=0.5)
    assert "steps" not in str(raised.value)
    other = InMemory(ROWS, seed=6, metadata=planted.METADATA)
    with pytest.raises(BadParameter, match=r"activations.rows was 2048, now 8192; activations.order was 5, now 6"):
        train(other, planted.make_config(steps=10), tmp_path)


def test_folder_with_another_sae_is_not_changed(tmp_path: Path) -> None:
    Trainer(ACTIVATIONS, planted.make_config()).to_sae().save(tmp_path / "sae")
    with pytest.raises(BadFile, match="already contains an SAE"):
        planted.run_training(str(tmp_path / "sae"))
    (tmp_path / "file").write_text("")
    with pytest.raises(BadFile, match="Cannot write to"):
        planted.run_training(str(tmp_path / "file"))


def test_two_runs_cannot_share_a_folder(tmp_path: Path) -> None:
    def start_second_run(step: int, report: object) -> None:
        with pytest.raises(BadFile, match="Another run is training"):
            planted.run_training(str(tmp_path))

    train(ACTIVATIONS, planted.make_config(steps=1), tmp_path, callback=start_second_run)


def test_nan_loss_stops_the_run(tmp_path: Path) -> None:
    class WithNaN(InMemory):
        def batch(self, step: int, size: int, part: tuple[int, int] = (0, 1)) -> Tensor:
            rows = super().batch(step, size, part)
            return rows * torch.nan if step == 45 else rows

    with pytest.raises(TorinoError, match=r"The loss is nan at step 45\. .*step-00000042.*learning rate lower"):
        train(WithNaN(ROWS), planted.make_config(), tmp_path, save_every=7)
    assert (tmp_path / "training" / "step-00000042.safetensors").exists()


def test_infinite_gradient_does_not_reach_the_weights() -> None:
    trainer = Trainer(ACTIVATIONS, planted.make_config())
    trainer.weights.W_dec *= 1e25  # the loss is finite in float64, the gradient overflows float32
    before = trainer.weights.W_enc.clone()
    with pytest.raises(TorinoError, match="at step 0"):
        trainer.train_step(ACTIVATIONS.batch(0, 256))
    assert torch.equal(trainer.weights.W_enc, before)
