"""Top activations equal those of a search over all activations, also after an interrupted run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.colored_squares import make_tied_sae, make_tied_tokens
from torino.core.errors import BadFile, BadParameter, SAEMismatch
from torino.interpret import (
    PrecomputedPhotos,
    TopActivations,
    collect_top_activations,
    monosemanticity_score,
    running_stats,
)
from torino.interpret.top_activations import FILE, PARTIAL_FILE, EncodedPhoto

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("pending", [1, 40, 1 << 20])
@pytest.mark.parametrize("options", [{}, {"kind": "topk", "k": 2}, {"kind": "batchtopk", "threshold": 1.5}])
def test_result_equals_a_search_over_all_activations(
    monkeypatch: pytest.MonkeyPatch, pending: int, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(running_stats, "MAX_PENDING", pending)
    monkeypatch.setattr(running_stats, "MAX_DENSE", 30)  # three patches at a time
    images, sae = make_tied_tokens(), make_tied_sae(**options)
    result = collect_top_activations(sae, PrecomputedPhotos(images), keep=4, batch=5)
    z = torch.stack([sae.encode(image.patches) for image in images])
    assert (result.photo_count, result.patch_count, result.keep, result.latents) == (21, 126, 4, 9)
    assert torch.equal(result.active_patches, (z > 0).sum((0, 1)))
    assert torch.equal(result.active_photos, (z > 0).any(1).sum(0))
    torch.testing.assert_close(result.patch_share, (z > 0).double().mean((0, 1)))
    torch.testing.assert_close(result.photo_share, (z > 0).any(1).double().mean(0))
    torch.testing.assert_close(result.activation_sum, z.double().sum((0, 1)))
    torch.testing.assert_close(result.mean_activation, z.double().sum((0, 1)) / (z > 0).sum((0, 1)).clamp(min=1))
    assert torch.equal(result.max_activation, z.amax((0, 1)))
    for latent in range(9):
        maxima = z[:, :, latent].amax(1).tolist()
        photos = sorted((i for i in range(21) if maxima[i] > 0), key=lambda i: (-maxima[i], i))[:4]
        assert result.get_photos(latent) == [(i, maxima[i]) for i in photos]
        active = [(i, p, float(z[i, p, latent])) for i in range(21) for p in range(6) if z[i, p, latent] > 0]
        assert result.get_patches(latent) == sorted(active, key=lambda entry: (-entry[2], entry[0], entry[1]))[:4]
        for rank, photo in enumerate(photos):
            patches, values = result.get_map(latent, rank)
            assert patches.tolist() == z[photo, :, latent].nonzero()[:, 0].tolist()
            assert torch.equal(values, z[photo, patches, latent])
    cls = torch.stack([image.cls for image in images if image.cls is not None])
    torch.testing.assert_close(
        result.monosemanticity.values, monosemanticity_score(z.double().mean(1), cls).values, equal_nan=True
    )
    pooled = collect_top_activations(sae, PrecomputedPhotos(images), keep=4, pool="max").monosemanticity
    torch.testing.assert_close(pooled.values, monosemanticity_score(z.amax(1), cls).values, equal_nan=True)
    given = collect_top_activations(sae, PrecomputedPhotos(images, cls.flip(0)), keep=4).monosemanticity
    expected = monosemanticity_score(z.double().mean(1), cls.flip(0))
    torch.testing.assert_close(given.values, expected.values, equal_nan=True)


def assert_identical(first: TopActivations, second: TopActivations) -> None:
    for name, value in vars(first).items():
        other = getattr(second, name)
        if isinstance(value, Tensor):
            assert value.dtype == other.dtype
            assert torch.equal(value, other), name
        elif name == "monosemanticity":
            assert torch.equal(value.values.nan_to_num(9), other.values.nan_to_num(9))
            assert (value.chance, value.dead, value.unpaired) == (other.chance, other.dead, other.unpaired)
        else:
            assert value == other, name


def test_saved_result_can_be_loaded(tmp_path: Path) -> None:
    result = collect_top_activations(make_tied_sae(), PrecomputedPhotos(make_tied_tokens()), keep=4)
    assert_identical(result, TopActivations.load(result.save(tmp_path / FILE)))
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / FILE).read_bytes()[:500])
    with pytest.raises(BadFile, match="not a readable"):
        TopActivations.load(tmp_path / "cut.safetensors")


class InterruptedPhotos(PrecomputedPhotos):
    """Photos that raise KeyboardInterrupt at one of them, and count the calls of ``read``."""

    def __init__(self, *given: Any, at: int | None = None) -> None:
        super().__init__(*given)
        self.at, self.calls = at, 0

    def read(self, start: int, stop: int) -> list[EncodedPhoto | str]:
        self.calls += 1
        if self.at is not None and start <= self.at < stop:
            raise KeyboardInterrupt
        return super().read(start, stop)


@pytest.mark.parametrize("at", [3, 12, 20])
def test_interrupted_run_gives_the_same_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    monkeypatch.setattr(running_stats, "MAX_PENDING", 20)
    sae = make_tied_sae()
    expected = collect_top_activations(sae, PrecomputedPhotos(make_tied_tokens()), keep=4, batch=4)
    options: dict[str, Any] = {"keep": 4, "batch": 4, "output": tmp_path, "save_every": 0}
    with pytest.raises(KeyboardInterrupt):
        collect_top_activations(sae, InterruptedPhotos(make_tied_tokens(), at=at), **options)
    assert (tmp_path / PARTIAL_FILE).is_file() == (at >= 4)
    photos = InterruptedPhotos(make_tied_tokens())
    reported: list[int] = []
    result = collect_top_activations(sae, photos, **options, progress=lambda done, total: reported.append(done))
    assert photos.calls == 6 - at // 4, "finished photos are not read again"
    assert reported[-1] == 21
    assert_identical(expected, result)
    assert not (tmp_path / PARTIAL_FILE).exists()
    photos = InterruptedPhotos(make_tied_tokens())
    assert_identical(expected, collect_top_activations(sae, photos, **options))
    assert photos.calls == 0, "a finished result is loaded"


def test_result_of_other_inputs_is_not_reused(tmp_path: Path) -> None:
    sae = make_tied_sae()
    photos = PrecomputedPhotos(make_tied_tokens())
    collect_top_activations(sae, photos, keep=4, output=tmp_path)
    for other, images in ((make_tied_sae(kind="topk", k=1), make_tied_tokens()), (sae, make_tied_tokens(seed=1))):
        assert_identical(
            collect_top_activations(other, PrecomputedPhotos(images), keep=4, output=tmp_path),
            collect_top_activations(other, PrecomputedPhotos(images), keep=4),
        )
    interrupted = InterruptedPhotos(make_tied_tokens(), at=15)
    with pytest.raises(KeyboardInterrupt):
        collect_top_activations(sae, interrupted, keep=4, batch=4, output=tmp_path, save_every=0)
    assert_identical(
        collect_top_activations(sae, photos, keep=5, output=tmp_path), collect_top_activations(sae, photos, keep=5)
    )
    (tmp_path / FILE).write_bytes(b"broken")
    (tmp_path / PARTIAL_FILE).write_bytes(b"broken")
    assert_identical(
        collect_top_activations(sae, photos, keep=4, output=tmp_path), collect_top_activations(sae, photos, keep=4)
    )


def test_killed_run_continues(tmp_path: Path) -> None:
    code = """
        import sys, time
        sys.path.insert(0, sys.argv[1])
        from pathlib import Path
        from tests.support.colored_squares import make_tied_sae, make_tied_tokens
        from torino.interpret import PrecomputedPhotos, collect_top_activations

        class Slow(PrecomputedPhotos):
            def read(self, start, stop):
                if start >= 12:
                    print("waiting", flush=True)
                    time.sleep(60)
                return super().read(start, stop)

        photos = Slow(make_tied_tokens())
        collect_top_activations(make_tied_sae(), photos, keep=4, batch=4, output=Path(sys.argv[2]), save_every=0)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(ROOT), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "waiting\n"
        os.kill(run.pid, signal.SIGKILL)
    photos = InterruptedPhotos(make_tied_tokens())
    result = collect_top_activations(make_tied_sae(), photos, keep=4, batch=4, output=tmp_path)
    assert photos.calls == 3
    expected = collect_top_activations(make_tied_sae(), PrecomputedPhotos(make_tied_tokens()), keep=4, batch=4)
    assert_identical(expected, result)


def test_invalid_input_is_refused() -> None:
    photos = PrecomputedPhotos(make_tied_tokens())
    with pytest.raises(BadParameter, match=r"needs more than 4 photos, got 4\. Give more photos or a smaller keep"):
        collect_top_activations(make_tied_sae(), PrecomputedPhotos(make_tied_tokens(4)), keep=4)
    with pytest.raises(BadParameter, match="pool must be 'mean' or 'max', got 'sum'"):
        collect_top_activations(make_tied_sae(), photos, pool="sum")  # type: ignore[arg-type]
    with pytest.raises(SAEMismatch, match="reads tokens of width 4"):
        collect_top_activations(make_tied_sae(width=4), photos, keep=4)
    with pytest.raises(BadParameter, match="21 photos need as many embeddings, got 3"):
        PrecomputedPhotos(make_tied_tokens(), torch.ones(3, 2))
