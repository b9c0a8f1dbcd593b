"""The command ``torino eval``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command import CommandOutput, run_torino
from tests.support.tiny_run import make_sae, write_task_file
from tests.support.tiny_vlm import build_llava
from torino.evaluation.results import open_run


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    build_llava(folder / "llava")
    make_sae().save(folder / "sae")
    write_task_file(folder / "small.tsv", images=2)
    return folder


def evaluate(home: Path, output: Path, *options: str | Path, code: int = 0) -> CommandOutput:
    given = ("--model", home / "llava", "--tasks", home / "small.tsv", "-o", output, "--device", "cpu", "--seeds", "1")
    return run_torino("eval", *given, *options, code=code)


def test_a_run(home: Path, tmp_path: Path) -> None:
    options = ("--sae", f"s={home / 'sae'}", "--methods", "torino-m,random", "--kd", "2,2", "--budget", "6")
    done = evaluate(home, tmp_path / "run", *options, "--limit", "3", "--save-images", "1")
    assert f"Next: torino report {tmp_path / 'run'}" in done.text
    run = open_run(tmp_path / "run")
    assert {setting.method for setting in run.settings.values()} == {"full", "torino-m", "random"}
    assert {"torino-m(2,2)[s]", "torino-m@6", "random@6#0", "random@2,2#0"} <= set(run.settings)
    rows = list(run.rows())
    assert len(rows) == 3 * len(run.settings)
    assert {row["tokens"] for row in rows if row["setting"] == "random@6#0"} == {6}
    assert run.metadata["arguments"]["kd"] == "2,2"
    assert any((tmp_path / "run").rglob("*.png")), "an image was saved"


def test_none_leaves_out_tiers_and_the_sae(home: Path, tmp_path: Path) -> None:
    evaluate(home, tmp_path / "fixed", "--methods", "torino-m", "--sae", "none", "--kd", "none", "--budget", "6,5")
    run = open_run(tmp_path / "fixed")
    assert {setting.tier for setting in run.settings.values()} == {"full", "6", "5"}
    assert {setting.sae for setting in run.settings.values()} == {None, "none"}
    options = ("--methods", "torino-m", "--sae", "none", "--kd", "2,2 1,1", "--budget", "none", "--no-matched")
    evaluate(home, tmp_path / "dynamic", *options)
    assert {setting.tier for setting in open_run(tmp_path / "dynamic").settings.values()} == {"full", "2,2", "1,1"}


def test_a_method_in_brackets_runs_at_the_budgets(home: Path, tmp_path: Path) -> None:
    evaluate(home, tmp_path / "run", "--methods", 'divprune(space="projected"),tome(budget=7)', "--budget", "6,5")
    run = open_run(tmp_path / "run")
    assert {setting.spec: set(run.token_counts("small", setting.id)) for setting in run.settings.values()} == {
        "": {16},
        "divprune(space='projected', budget=6)": {6},
        "divprune(space='projected', budget=5)": {5},
        "tome(budget=7)": {7},
    }


def test_failures_are_reported(home: Path, tmp_path: Path) -> None:
    data = write_task_file(tmp_path / "small.tsv", images=1)
    with data.open("a", encoding="utf-8") as file:
        file.write("9\tnone [/b]\twhat ?\tword1\n")  # brackets are not markup
    done = evaluate(home, tmp_path / "run", "--tasks", data, "--methods", "random", "--budget", "99,5", code=2)
    assert "none [/b]" in done.text
    assert "2 answers failed" in done.text
    assert "--retry" in done.text
    assert "torino: random@99#0 answered no question: UnmetBudget: random cannot give 99 tokens" in done.text
    done = evaluate(home, tmp_path / "run", "--tasks", data, "--methods", "tome", "--budget", "5")
    assert "answered no question" not in done.text, "random was not named now"


def test_a_named_method_yields_a_setting_or_an_error(home: Path, tmp_path: Path) -> None:
    cases = [
        (("--methods", "random", "--budget", "none", "--kd", "none"), "random has no tier to run in"),
        (("--methods", "random", "--budget", "none"), "random has no tier to run in"),
        (("--methods", 'divprune(space="projected")', "--budget", "none"), "has no tier to run in"),
        (("--methods", "random", "--budget", "5", "--kd", "2,2"), "neither torino-p nor torino-m"),
        (("--methods", "all,torino-m", "--budget", "5"), "need an SAE"),
        (("--methods", ","), "--methods is empty"),
    ]
    for options, expected in cases:
        failed = evaluate(home, tmp_path / "x", *options, code=2)
        assert expected in failed.text, options
    assert not (tmp_path / "x").exists()
    evaluate(home, tmp_path / "alone", "--methods", "none")
    assert list(open_run(tmp_path / "alone").settings) == ["full"]
    everything = evaluate(home, tmp_path / "all", "--budget", "5", "--limit", "1")
    assert "Left out: scts, torino-m, torino-p, torino-q, torino-x, which read concepts: give --sae." in everything.text
    assert "Left out: cdpruner, which read the question: give --clip." in everything.text


def test_prompts_are_recorded_and_other_ones_are_another_run(home: Path, tmp_path: Path) -> None:
    evaluate(home, tmp_path / "run", "--methods", "none")
    (task,) = open_run(tmp_path / "run").metadata["tasks"]
    assert (task["prompts"], task["prompts_from"]) == ("standard", "default")
    assert task["prompt"] == "question\nAnswer the question using a single word or phrase."
    evaluate(home, tmp_path / "plain", "--methods", "none", "--prompts", "plain")
    (task,) = open_run(tmp_path / "plain").metadata["tasks"]
    assert (task["prompts"], task["prompts_from"], task["prompt"]) == ("plain", "option", "question")
    failed = evaluate(home, tmp_path / "plain", "--methods", "none", code=2)
    assert "asked small with the prompts 'plain' ('question'), and now they are 'standard'" in failed.text


def test_a_baseline_that_is_always_wrong_is_reported_last(home: Path, tmp_path: Path) -> None:
    done = evaluate(home, tmp_path / "run", "--methods", "random", "--budget", "5")  # random weights
    last = done.err.rstrip().splitlines()[-1]
    assert last.startswith("warning: small: with all tokens the model scores 0.00: no answer is right.")
    assert "Check the prompt style (standard: 'question\\nAnswer the question using a single word or phrase.')" in last


def test_errors_are_one_sentence(home: Path, tmp_path: Path) -> None:
    target = tmp_path / "x"
    cases: list[tuple[Path, tuple[str | Path, ...], str]] = [
        (home / "small.tsv", ("--methods", "random"), "is a file"),
        (target, ("--methods", "random", "--budget", "5,some"), "--budget takes"),
        (target, ("--methods", "random", "--kd", "2,3"), "--kd takes"),
        (target, ("--methods", "random", "--kd", "no"), "--kd takes"),
        (target, ("--methods", "random", "--shard", "3/2"), "--shard takes"),
        (target, ("--methods", "nobody"), "nobody"),
        (target, ("--methods", "torino-m"), "--sae"),
        (target, ("--methods", "torino-m(k=2)"), "--sae"),
        (target, ("--methods", "cdpruner", "--budget", "5"), "--clip"),
        (target, ("--methods", "torino-x(budget=5, pooled=True)", "--sae", "none"), "plans each image alone"),
        (target, ("--methods", "torino-m", "--sae", home / "sae", "--sae", home / "sae"), "Two SAEs are called 'sae'"),
        (target, ("--methods", "random", "--tasks", tmp_path / "none.tsv"), "none.tsv"),
        (target, ("--methods", "random", "--model", tmp_path / "none" / "at" / "all"), "no folder"),
    ]
    for output, options, expected in cases:
        failed = evaluate(home, output, *options, code=2)
        assert failed.err.startswith("torino: "), options
        assert expected in failed.text, options
        assert len(failed.err) < 700
    assert not target.exists()


@pytest.mark.parametrize(
    ("option", "value", "choices"),
    [
        ("--padding", "stretch", "'crop', 'square'"),
        ("--positions", "own", "'auto', 'compact', 'original', 'median'"),
        ("--attention", "heavy", "'auto', 'plain', 'proportional', 'restore'"),
        ("--prompts", "mine", "'auto', 'plain', 'standard', 'vlmevalkit', 'llava'"),
        ("--on-error", "cry", "'skip', 'stop'"),
    ],
)
def test_unknown_choices_are_usage_errors(home: Path, tmp_path: Path, option: str, value: str, choices: str) -> None:
    failed = evaluate(home, tmp_path / "x", option, value, code=2)
    assert f"'{value}' is not one of {choices}" in failed.text
