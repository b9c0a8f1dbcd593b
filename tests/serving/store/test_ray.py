"""Ray as executor: the same bytes as the plain loop, also if an actor and the main process are killed with SIGKILL."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.serving.store.conftest import OPTIONS
from tests.support.stores import (
    command_of,
    descendants,
    ended,
    kill,
    kill_after_first_shard,
    start_torino,
    store_bytes,
    wait_for_descendants,
)
from tests.support.tiny_vlm import photo
from torino.core.errors import BadParameter
from torino.serving.settings import ReductionSettings
from torino.serving.store import TokenStore, reduce_images
from torino.serving.store.on_ray import RayExecutor

ray = pytest.importorskip("ray", reason='ray is not installed: pip install "torino[ray]"')

ACTOR = "ray::RayWorker"
MANY = 160  # enough images for a run that is killed after its first shard not to be finished


def actors(pid: int) -> list[int]:
    return [child for child in descendants(pid) if ACTOR in command_of(child)]


def fail() -> None:
    raise BadParameter("This is wrong.")


def test_two_actors_on_two_cpus_equal_the_plain_loop_although_one_is_killed(
    home: Path, tmp_path: Path, reference: Path, settings: ReductionSettings
) -> None:
    ray.init(  # a cluster without a CPU to spare
        address="local", num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False
    )
    killed: list[int] = []

    def kill_an_actor(done: int, total: int, skipped: int) -> None:
        if done and not killed:
            assert done < total
            killed.append(actors(os.getpid())[0])
            kill(killed[0])

    try:
        options = replace(OPTIONS, ray="local")
        reduce_images(
            [home / "photos"], tmp_path / "store", str(home / "llava"), settings, options, progress=kill_an_actor
        )
        assert killed
        assert store_bytes(tmp_path / "store") == store_bytes(reference)
        executor = RayExecutor.__new__(RayExecutor)
        executor._ray = ray
        with pytest.raises(BadParameter, match=r"^This is wrong\.$"):  # errors are raised as they were in the actor
            executor._get(ray.remote(fail).remote())
    finally:
        ray.shutdown()


def test_a_killed_main_process_ends_the_cluster_and_the_run_continues_to_the_same_bytes(
    home: Path, tmp_path: Path, settings: ReductionSettings
) -> None:
    (tmp_path / "photos").mkdir()
    for number in range(MANY):
        photo(seed=number).save(tmp_path / "photos" / f"{number:03d}.png")
    words = ["reduce", tmp_path / "photos", "--model", home / "llava", "--sae", home / "sae", "--method", "torino-x"]
    words += ["--batch", "3", "--shard-images", "4", "--ray", "local", "--processes", "1", "-o", tmp_path / "store"]
    process = start_torino(words)
    try:
        started = wait_for_descendants(process, ACTOR)
        kill_after_first_shard(process, tmp_path / "store")
        assert ended(started)
    finally:
        process.kill()
    written = len(list((tmp_path / "store" / "shards").glob("[0-9]*.safetensors")))
    assert 0 < written < MANY // 4
    options = replace(OPTIONS, dtype="float16")
    arguments = (str(home / "llava"), settings, options)
    reports: list[int] = []
    summary = reduce_images(
        [tmp_path / "photos"], tmp_path / "store", *arguments, progress=lambda done, *_: reports.append(done)
    )
    assert reports[0] == 4 * written  # finished shards are kept
    assert summary.complete
    reduce_images([tmp_path / "photos"], tmp_path / "whole", *arguments)
    assert store_bytes(tmp_path / "store") == store_bytes(tmp_path / "whole")
    store = TokenStore(tmp_path / "store")
    assert Counter(store.names) == Counter(f"{number:03d}.png" for number in range(MANY))
