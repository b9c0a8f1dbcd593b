"""Several processes: the same bytes as one, also if a process or the main process is killed with SIGKILL."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from torino import TorinoError
from torino.datasets import SourceUnavailable
from torino.serving.settings import ReductionSettings
from torino.serving.store import TokenStore, reduce_images
from torino.serving.store import executors as executors_module
from torino.serving.store.format import StoreSettings, TokenShard

TWO = replace(OPTIONS, processes=2)
MANY = 240  # enough images for a run that is killed after its first shard not to be finished


def write(home: Path, folder: Path, settings: ReductionSettings, **others: Any) -> Any:
    return reduce_images([home / "photos"], folder, str(home / "llava"), settings, TWO, **others)


def workers() -> list[int]:
    return [pid for pid in descendants(os.getpid()) if "spawn_main" in command_of(pid)]


def test_two_processes_equal_one_also_if_one_is_killed(
    home: Path, tmp_path: Path, reference: Path, settings: ReductionSettings
) -> None:
    killed: list[int] = []

    def kill_a_worker(done: int, total: int, skipped: int) -> None:
        if done and not killed and workers():
            assert done < total
            killed.append(workers()[0])
            kill(killed[0])

    summary = write(home, tmp_path / "store", settings, progress=kill_a_worker)
    assert killed
    assert summary.complete
    assert not workers()
    assert store_bytes(tmp_path / "store") == store_bytes(reference)


def test_processes_that_always_die_end_the_run_with_one_sentence(
    home: Path, tmp_path: Path, settings: ReductionSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors_module, "MAX_DEATHS", 1)
    with pytest.raises(TorinoError, match=r"Processes died 1 times without .* Finished shards are kept\."):
        write(home, tmp_path / "store", settings, progress=lambda *_: [kill(pid) for pid in workers()])
    assert not workers()


def test_errors_of_other_processes_are_raised_here(home: Path, tmp_path: Path, settings: ReductionSettings) -> None:
    with pytest.raises(TorinoError, match=r"05\.png cannot be used"):
        reduce_images(
            [home / "photos"], tmp_path / "store", str(home / "llava"), settings, replace(TWO, on_error="stop")
        )
    assert not workers()


def test_the_error_of_a_lost_source_can_be_sent_to_another_process() -> None:
    import pickle

    error = SourceUnavailable(Path("photos"))
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), type(again)) == (str(error), SourceUnavailable)


def test_a_killed_main_process_leaves_no_process_and_the_run_continues_to_the_same_bytes(
    home: Path, tmp_path: Path, settings: ReductionSettings
) -> None:
    (tmp_path / "photos").mkdir()
    for number in range(MANY):
        photo(seed=number).save(tmp_path / "photos" / f"{number:03d}.png")
    words = ["reduce", tmp_path / "photos", "--model", home / "llava", "--sae", home / "sae", "--method", "torino-x"]
    words += ["--batch", "3", "--shard-images", "4", "--processes", "2", "-o", tmp_path / "store"]
    process = start_torino(words)
    try:
        started = wait_for_descendants(process, "spawn_main")
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
    assert isinstance(store.settings, StoreSettings)
    for number in range(store.settings.shards):
        path = store.settings.shard_path(tmp_path / "store", number)
        assert len(TokenShard.open(path, store.settings, number).names) == 4


def test_the_main_process_has_no_children_left() -> None:
    assert not multiprocessing.active_children()
