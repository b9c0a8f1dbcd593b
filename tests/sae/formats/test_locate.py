"""Finding SAE files in folders and on the hub."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_cases import (
    make_full_sae,
    write_files,
)

from torino.core.errors import BadFile, MissingPackage, Unreachable
from torino.sae import SAE
from torino.sae.formats import read_sae
from torino.sae.formats.locate import locate


# ------------------------------------------------------------------ finding the file
@pytest.mark.parametrize("place", ["", "trainer_0", "run/trainer_0", "a/b/c/d"])
def test_the_only_sae_below_a_folder_is_found(tmp_path: Path, place: str) -> None:
    folder = make_full_sae("topk").export(tmp_path / place, "dictionary_learning")
    (folder / "checkpoints").mkdir()
    torch.save({}, folder / "checkpoints" / "ae_100.pt")
    for source in (tmp_path, str(tmp_path) + "/", folder / "ae.pt", folder / "config.json"):
        assert SAE.load(source).kind == "topk"


def test_checkpoints_of_a_run_find_its_config(tmp_path: Path) -> None:
    make_full_sae("topk").export(tmp_path, "dictionary_learning")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "ae.pt").rename(tmp_path / "checkpoints" / "ae_100.pt")
    assert SAE.load(tmp_path).kind == "topk"


def test_a_folder_itself_comes_before_what_is_below_it(tmp_path: Path) -> None:
    make_full_sae("relu").save(tmp_path)
    make_full_sae("topk").save(tmp_path / "checkpoints" / "step_100")
    assert SAE.load(tmp_path).kind == "relu"


def test_several_candidates_are_listed(tmp_path: Path) -> None:
    for place in ("trainer_0", "trainer_1"):
        make_full_sae("topk").export(tmp_path / place, "dictionary_learning")
    with pytest.raises(BadFile, match=r"2 files .*: trainer_0/ae\.pt, trainer_1/ae\.pt\. Give the path of one"):
        SAE.load(tmp_path)
    assert SAE.load(tmp_path / "trainer_1").kind == "topk"


def test_many_candidates_are_not_all_listed(tmp_path: Path) -> None:
    for number in range(25):
        write_files(tmp_path / f"t{number}", "ae.pt", {})
    with pytest.raises(BadFile, match=r"25 files .* and 5 more"):
        SAE.load(tmp_path)


@pytest.mark.parametrize(
    "name", ["nothing", "./nothing", "a/b/../c", "a//b", "runs/ae.pt", "~no-such-user/x", "x" * 5000]
)
def test_a_source_that_does_not_exist(name: str) -> None:
    with pytest.raises(BadFile, match=r"no file or folder .* hub repository either") as caught:
        SAE.load(name)
    assert "owner/repository" in str(caught.value)


def test_folders_and_files_without_an_sae(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="no SAE in"):
        SAE.load(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(BadFile, match=r"suffix is '\.txt'"):
        SAE.load(tmp_path / "notes.txt")
    with pytest.raises(BadFile, match="no file or folder ''"):
        SAE.load("")


# ------------------------------------------------------------------ the hub
@pytest.fixture
def hub() -> Any:
    pytest.importorskip("huggingface_hub.errors")
    return pytest.importorskip("huggingface_hub")


def http_error(kind: type[Exception]) -> Exception:
    response = SimpleNamespace(headers={}, request=None, status_code=404)
    return kind("no", response=response)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("LocalEntryNotFoundError", "cannot be reached"),
        ("OfflineModeIsEnabled", "cannot be reached"),
        ("RepositoryNotFoundError", "no model repository 'owner/repo'"),
        ("GatedRepoError", "gated: accept its terms"),
        ("HfHubHTTPError", "HfHubHTTPError"),
        ("ConnectionError", "ConnectionError"),
    ],
)
def test_the_hub_cannot_be_reached(hub: Any, monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    kind = getattr(hub.errors, name, ConnectionError)
    error = http_error(kind) if issubclass(kind, hub.errors.HfHubHTTPError) else kind("no")

    def fail(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(Unreachable, match=words) as caught:
        SAE.load("owner/repo/sub")
    assert "no local path" in str(caught.value)
    assert "'owner/repo/sub'" in str(caught.value)


class Hub:
    """Replacement for snapshot_download that copies matching files into a snapshot folder."""

    def __init__(self, repository: Path, snapshot: Path, *, lists: bool = True) -> None:
        self.repository, self.snapshot, self.lists = repository, snapshot, lists
        self.fetched: list[str] = []

    def __call__(self, repo_id: str, *, allow_patterns: list[str], dry_run: bool = False) -> Any:
        from huggingface_hub.utils import filter_repo_objects

        assert repo_id == "owner/repo"
        files = [path.relative_to(self.repository).as_posix() for path in self.repository.rglob("*") if path.is_file()]
        matching = list(filter_repo_objects(files, allow_patterns=allow_patterns))
        if dry_run and not self.lists:
            raise TypeError("an older client has no dry_run")
        if dry_run:
            return [SimpleNamespace(filename=name) for name in matching]
        self.snapshot.mkdir(exist_ok=True)
        for name in matching:
            (self.snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            (self.snapshot / name).write_bytes((self.repository / name).read_bytes())
        self.fetched += matching
        return str(self.snapshot)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of three SAEs in three layouts, with additional files."""
    make_full_sae("relu").save(tmp_path / "repo" / "torino" / "block_22")
    make_full_sae("topk").export(tmp_path / "repo" / "dl" / "trainer_0", "dictionary_learning")
    make_full_sae("jumprelu").export(tmp_path / "repo" / "lens[1]", "saelens")
    (tmp_path / "repo" / "README.md").write_text("# hello")
    (tmp_path / "repo" / "dl" / "trainer_0" / "optimizer.bin").write_bytes(b"x")
    return tmp_path / "repo"


@pytest.mark.parametrize("lists", [True, False])
@pytest.mark.parametrize(
    ("inside", "kind"),
    [
        ("torino", "relu"),
        ("torino/block_22/", "relu"),
        ("torino/block_22/sae.safetensors", "relu"),
        ("dl", "topk"),
        ("lens[1]", "jumprelu"),
    ],
)
def test_a_sub_folder_on_the_hub(
    hub: Any, monkeypatch: pytest.MonkeyPatch, repository: Path, tmp_path: Path, inside: str, kind: str, lists: bool
) -> None:
    fake = Hub(repository, tmp_path / "snapshot", lists=lists)
    monkeypatch.setattr(hub, "snapshot_download", fake)
    assert SAE.load(f"owner/repo/{inside}").kind == kind
    assert len(fake.fetched) == 2  # only weights and settings
    assert {name.split("/")[0] for name in fake.fetched} == {inside.split("/")[0]}


def test_several_saes_on_the_hub_are_listed_before_any_is_fetched(
    hub: Any, monkeypatch: pytest.MonkeyPatch, repository: Path, tmp_path: Path
) -> None:
    fake = Hub(repository, tmp_path / "snapshot")
    monkeypatch.setattr(hub, "snapshot_download", fake)
    with pytest.raises(BadFile, match=r"owner/repo contains 3 files .*: dl/trainer_0/ae\.pt, lens") as caught:
        SAE.load("owner/repo")
    assert "owner/repo/dl/trainer_0/ae.pt" in str(caught.value)
    assert not fake.fetched


@pytest.mark.parametrize("lists", [True, False])
def test_a_sub_folder_that_the_hub_does_not_have(
    hub: Any, monkeypatch: pytest.MonkeyPatch, repository: Path, tmp_path: Path, lists: bool
) -> None:
    monkeypatch.setattr(hub, "snapshot_download", Hub(repository, tmp_path / "snapshot", lists=lists))
    for inside in ("absent", "absent/ae.pt"):
        with pytest.raises(Unreachable, match=f"no SAE in '{inside}'"):
            SAE.load(f"owner/repo/{inside}")


def test_offline_an_sae_used_before_is_found_again(
    hub: Any, monkeypatch: pytest.MonkeyPatch, repository: Path, tmp_path: Path
) -> None:
    fake = Hub(repository, tmp_path / "snapshot")
    monkeypatch.setattr(hub, "snapshot_download", fake)
    SAE.load("owner/repo/dl")

    def incomplete(*args: Any, **kwargs: Any) -> str:
        error = hub.errors.LocalEntryNotFoundError("incomplete")
        error.snapshot_path = str(fake.snapshot)
        raise error

    monkeypatch.setattr(hub, "snapshot_download", incomplete)
    assert SAE.load("owner/repo/dl").kind == "topk"


def test_a_local_path_wins_over_the_hub(
    hub: Any, monkeypatch: pytest.MonkeyPatch, repository: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(hub, "snapshot_download", Hub(repository, tmp_path / "snapshot"))
    monkeypatch.chdir(tmp_path)
    make_full_sae("batchtopk").save("owner/repo")
    assert read_sae("owner/repo").kind == "batchtopk"
    assert locate(Path("owner/repo")) == Path("owner/repo/sae.safetensors")


def test_without_the_hub_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingPackage, match=r'hub needs huggingface_hub, .*: pip install "torino\[vlm\]"\.$'):
        SAE.load("owner/repo")
