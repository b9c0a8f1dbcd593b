"""The command ``torino compare``."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.command import CommandOutput, run_torino
from tests.support.tiny_vlm import QUESTION, build_llava, photo, write_clip, write_files
from torino import SAE, make
from torino.sae import SAECard
from torino.vlm import VLM, ask, load_clip_text, load_vlm


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_files(tmp_path_factory.mktemp("compare"))
    build_llava(folder / "siglip", has_cls=False)
    sae = SAE.load(folder / "sae")
    SAE(sae.W_enc, W_dec=sae.W_enc, card=SAECard(block=1)).save(folder / "other")  # of any encoder
    return folder


@pytest.fixture(scope="module")
def vlm(home: Path) -> VLM:
    return load_vlm(home / "llava")


def compare(home: Path, *options: str | Path, model: str = "llava", sae: str = "sae", code: int = 0) -> CommandOutput:
    given = ("--model", home / model, "--max-new-tokens", "4", "--device", "cpu")
    saes = ("--sae", home / sae) if sae else ()
    output = () if "-o" in options else ("-o", home / "compare.png")
    return run_torino("compare", home / "photo.png", QUESTION, *given, *saes, *output, *options, code=code)


def answers(home: Path, *options: str | Path, **others: Any) -> dict[str, dict[str, Any]]:
    """Run with ``--json`` and return the rows by spec."""
    rows = json.loads(compare(home, *options, "--json", **others).out)["answers"]
    assert rows[0]["method"] == "full"
    return {row["spec"] or "full": row for row in rows}


def test_compare_asks_with_every_method(home: Path, tmp_path: Path, vlm: VLM) -> None:
    result = json.loads(compare(home, "--budget", "6", "-o", tmp_path / "all.png", "--json").out)
    rows = {row["method"]: row for row in result["answers"]}
    assert next(iter(rows)) == "full"
    assert list(rows)[1:3] == ["torino-m", "torino-p"]
    assert {"tome-tower", "gtp-tower", "visionzip", "divprune", "random"} <= set(rows)
    assert "cdpruner" not in rows
    full = ask(photo(), QUESTION, model=vlm, max_new_tokens=4)
    assert (rows["full"]["answer"], rows["full"]["tokens"]) == (full.text.strip(), 16)
    sae = SAE.load(home / "sae")
    for name in ("torino-m", "tome-tower", "visionzip", "random"):
        reducer = make(rows[name]["spec"], **({"sae": sae} if name.startswith("torino") else {}))
        alone = ask(photo(), QUESTION, model=vlm, reducer=reducer, max_new_tokens=4)
        assert rows[name]["answer"] == alone.text.strip(), name
        assert rows[name]["tokens"] == alone.after
        assert rows[name]["same"] == (alone.text.strip() == full.text.strip())
    assert rows["tome-tower"]["plan_ms"] is None
    assert rows["visionzip"]["plan_ms"] > 0
    failed = [row["label"] for row in result["answers"] if "error" in row]
    told = [note.partition(" was left out: ")[0] for note in result["notes"] if " was left out: " in note]
    assert sorted(told) == sorted(failed)
    assert "Left out: cdpruner, which read the question: give --clip." in result["notes"]
    assert result["budget"] == [6]
    assert result["picture"] == str(tmp_path / "all.png")
    assert Image.open(tmp_path / "all.png").width > 1000


def test_compare_prints_a_table_and_encodes_once(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward_passes = list[int]()

    def load_counted(*given: Any, **options: Any) -> VLM:
        vlm = load_vlm(*given, **options)
        embedding: Any = vlm.model.model.vision_tower.get_submodule("embeddings.patch_embedding")
        embedding.register_forward_hook(lambda *_: forward_passes.append(1))
        return vlm

    monkeypatch.setattr("torino.vlm.load_vlm", load_counted)
    methods = "random(budget=16),visionzip,torino-m,hired"
    done = compare(home, "--budget", "5", "--methods", methods, "-o", tmp_path / "few.png")
    assert len(forward_passes) == 1
    lines = done.out.splitlines()
    assert re.match(r"method +tokens +plan, ms +answer", lines[0])
    assert re.match(r"All tokens +16 ", lines[1])
    assert re.match(r"random\(budget=16\) +16 +[0-9.]+ += ", lines[2]), "all patches are kept: the same answer"
    assert re.match(r"VisionZip +5 ", lines[3])
    assert re.search(r"= same answer as with all 16 tokens \([1-4] of 4 methods\), ≠ another answer", done.text)
    assert f"Wrote {tmp_path / 'few.png'}" in done.text
    assert "Loading" not in done.text


def test_other_answers_are_marked(home: Path, vlm: VLM) -> None:
    specs = [f"random(budget=3, seed={seed})" for seed in range(6)]
    full = ask(photo(), QUESTION, model=vlm, max_new_tokens=4).text
    other = [ask(photo(), QUESTION, model=vlm, reducer=make(s), max_new_tokens=4).text != full for s in specs]
    assert any(other), "a test of the mark needs a method with another answer"
    lines = compare(home, "--methods", ",".join(specs)).out.splitlines()[2:8]
    assert [("≠" in line, "=" in line.partition(")")[2]) for line in lines] == [(each, not each) for each in other]


def test_several_budgets(home: Path) -> None:
    rows = answers(home, "--budget", "8,4,8", "--methods", "random,divprune,tome(budget=5)")
    assert {spec: row["tokens"] for spec, row in rows.items()} == {
        "full": 16,
        "random(budget=8, seed=0)": 8,
        "random(budget=4, seed=0)": 4,
        "divprune(budget=8)": 8,
        "divprune(budget=4)": 4,
        "tome(budget=5)": 5,
    }


def test_a_method_in_brackets_gets_the_budget(home: Path, vlm: VLM) -> None:
    rows = answers(home, "--budget", "8", "--methods", 'divprune(space="projected"),torino-m(k=1, delta=1)')
    assert [(spec, row["tokens"]) for spec, row in rows.items()] == [
        ("full", 16),
        ("divprune(space='projected', budget=8)", 8),
        ("torino-m(k=1, delta=1, budget=8)", 8),
    ]
    alone = ask(photo(), QUESTION, model=vlm, reducer=make("divprune(space='projected', budget=8)"), max_new_tokens=4)
    assert rows["divprune(space='projected', budget=8)"]["answer"] == alone.text.strip()


def test_a_budget_that_no_method_can_meet_is_an_error(home: Path, tmp_path: Path) -> None:
    picture = tmp_path / "none.png"
    for methods in ("random,divprune", "all", "torino-m", "torino-m(budget=600)"):  # torino-m could give 600
        failed = compare(home, "--budget", "600", "--methods", methods, "-o", picture, code=2)
        assert "asks for 600 tokens, more than the 16 patches of the image" in failed.err
        assert failed.out == ""
    assert not picture.exists()


def test_a_method_that_reads_the_question(home: Path, tmp_path: Path, vlm: VLM) -> None:
    clip = write_clip(tmp_path / "clip", vlm)
    rows = answers(home, "--budget", "5", "--methods", "cdpruner,random", "--clip", clip, sae="")
    session = VLM(vlm.model, vlm.processor, text_query=load_clip_text(clip))
    alone = ask(photo(), QUESTION, model=session, reducer=make("cdpruner(budget=5)"), max_new_tokens=4)
    assert (rows["cdpruner(budget=5)"]["tokens"], rows["cdpruner(budget=5)"]["answer"]) == (5, alone.text.strip())
    everything = answers(home, "--budget", "5", "--clip", clip)
    assert "cdpruner" in {row["method"] for row in everything.values()}


def test_methods_that_the_tower_cannot_serve_are_left_out(home: Path, tmp_path: Path) -> None:
    options = ("--budget", "5", "--methods", "hired,random,torino-p", "-o", tmp_path / "a.png", "--json")
    done = compare(home, *options, model="siglip", sae="other", code=2)
    result = json.loads(done.out)
    assert [row["method"] for row in result["answers"] if "error" not in row] == ["full", "random", "torino-p"]
    (note,) = result["notes"]
    assert re.match(r"HiRED was left out: .*cls_attention", note)
    assert Image.open(tmp_path / "a.png").size[1] > 200, "the other methods are compared"
    assert done.err.startswith("torino: hired(budget=5) was asked for and could not answer: "), "it was named"
    every = compare(home, "--budget", "5", "-o", tmp_path / "b.png", model="siglip", sae="other")
    assert "HiRED was left out" in every.text, "it was not named, so it is a note"


def test_a_named_method_is_compared_or_refused(home: Path) -> None:
    for options in (("--budget", "none", "--methods", "tome(budget=5),random"), ("--budget", "none")):
        failed = compare(home, *options, code=2)
        assert re.search(r"(random|torino-m) has no number of tokens\. Give --budget", failed.text)
    dynamic = answers(home, "--budget", "none", "--methods", "torino-m(k=1, delta=1)")
    assert list(dynamic) == ["full", "torino-m(k=1, delta=1)"]
    both = answers(home, "--budget", "5", "--methods", "all,random(budget=3)")
    assert {"random(budget=3)", "random(budget=5, seed=0)"} <= set(both)
    failed = compare(home, "--budget", "5", "--methods", "all,torino-m", sae="", code=2)
    assert "torino-m reads concepts and needs an SAE" in failed.text
    without = compare(home, "--budget", "5", sae="")
    assert "Left out: scts, torino-m, torino-p, torino-q, torino-x, which read concepts: give --sae." in without.text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--methods", "cdpruner"], "chooses patches by the question"),
        (["--methods", "magic"], "magic"),
        (["--methods", ","], "--methods is empty"),
        (["--methods", "torino-m(spice=1)"], "spice"),
        (["--budget", "few"], "--budget takes token counts"),
        (["--budget", "0"], "--budget takes token counts"),
        (["--truth", ""], "--truth takes the right answer, or several separated by |, got ''."),
        (["--truth", "orange|"], "got 'orange|'"),
        (["-o", "a.gif"], "--output must end in .png"),
        (["--model", "./nowhere"], "There is no folder './nowhere'"),
    ],
)
def test_errors_are_one_sentence(home: Path, options: list[str], expected: str) -> None:
    failed = compare(home, *options, code=2)
    assert failed.err.startswith("torino: ")
    assert expected in failed.text
    assert failed.out == ""


@pytest.mark.parametrize(
    ("option", "value", "choices"),
    [
        ("--padding", "round", "'crop', 'square'"),
        ("--positions", "own", "'auto', 'compact', 'original', 'median'"),
        ("--attention", "heavy", "'auto', 'plain', 'proportional', 'restore'"),
    ],
)
def test_unknown_choices_are_usage_errors(home: Path, option: str, value: str, choices: str) -> None:
    failed = compare(home, option, value, code=2)
    assert f"'{value}' is not one of {choices}" in failed.text


def test_help_has_examples() -> None:
    assert 'torino compare photo.jpg "What is this?"' in run_torino("compare", "--help").text


def test_import_is_light() -> None:
    code = "import sys, torino.cli.compare; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "PIL", "huggingface_hub"} & set(loaded)


def test_default_budget() -> None:
    from torino.cli._common import parse_budgets
    from torino.cli.compare import compare

    default = inspect.signature(compare).parameters["budget"].default
    assert parse_budgets("--budget", default) == [64]


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        ("An Orange.", "orange", True),
        ("two", "2|several", True),
        ("blue", "orange|red", False),
        ("blue", None, None),
    ],
)
def test_answers_are_compared_with_the_truth(text: str, truth: str | None, expected: bool | None) -> None:
    from torino.cli.compare import is_correct

    assert is_correct(text, truth) is expected


def test_truth_marks_answers_right_or_wrong(home: Path, vlm: VLM) -> None:
    specs = [f"random(budget=3, seed={seed})" for seed in range(6)]
    answers_ = [ask(photo(), QUESTION, model=vlm, reducer=make(s), max_new_tokens=4).text.strip() for s in specs]
    truth = answers_[0]
    lines = compare(home, "--methods", ",".join(specs), "--truth", truth).out.splitlines()
    assert [("✓" in line, "✗" in line) for line in lines[2:8]] == [(a == truth, a != truth) for a in answers_]
    assert f"{sum(a == truth for a in answers_)} of 6 methods are right" in lines[-2] + lines[-1] + lines[-3]
    rows = answers(home, "--methods", ",".join(specs), "--truth", truth)
    assert [rows[make(spec).spec]["correct"] for spec in specs] == [a == truth for a in answers_]
    assert all(row["correct"] is None for row in answers(home, "--methods", specs[1]).values())
