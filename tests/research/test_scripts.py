"""The scripts that settle what is reported: which tasks were learned, how far one thing is from another."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from torino.evaluation import ImageRef, Sample, Task
from torino.evaluation.benchmarks import CUSTOM, all_benchmarks

ROOT = Path(__file__).parents[2]
SCRIPTS = (ROOT / "research" / "scripts", ROOT / "lab" / "scripts")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The scripts as modules, each found beside the others."""
    for folder in SCRIPTS:
        monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    import blind_lab
    import by_task
    import draw_tiers
    import lead
    import models_lab
    import try_reducers

    yield SimpleNamespace(
        blind=blind_lab,
        lead=lead,
        models=models_lab,
        tasks=by_task,
        tiers=draw_tiers,
        tries=try_reducers,
    )
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent in SCRIPTS:
            del sys.modules[name]


def task(name: str, kind: Any, answers: dict[str, tuple[str, str]]) -> Task:
    """Questions by index, with the picture they are about and their answer."""
    samples = tuple(
        Sample(index, "?", (answer,), (ImageRef(Path("none.tsv"), picture),), group=index)
        for index, (picture, answer) in answers.items()
    )
    return Task(name, kind, samples, Path("none.tsv"), "0", all_benchmarks().get(name, CUSTOM))


def test_one_answer_for_all_is_made_of_words_not_of_keys(scripts: SimpleNamespace) -> None:
    keys = {str(i): (str(i), f"word{i}<OR>dog<AND>b{i}<OR>cat") for i in range(8)}
    of = task("Lab-MMVet", all_benchmarks()["Lab-MMVet"].kind, keys)
    assert "word0 b0" in scripts.blind.guesses(of)
    assert not any("<OR>" in text for text in scripts.blind.guesses(of))
    assert scripts.blind.most_right(of) == pytest.approx(12.5)  # one of eight; a key given as it is would find dogs


def test_what_looking_adds_is_drawn_by_picture(scripts: SimpleNamespace) -> None:
    of = task("GQA", "exact", {str(i): (str(i // 5), "dog") for i in range(100)})
    indices = [str(i) for i in range(100)]
    own, other = dict.fromkeys(indices, 80.0), dict.fromkeys(indices, 50.0)
    assert scripts.blind.gained(of, own, other) == pytest.approx((30.0, 30.0))
    # the same questions, all right or all wrong by picture: five times as wide as their number would say, less a little
    own = {str(i): 100.0 * (i // 5 % 2) for i in range(100)}
    low, high = scripts.blind.gained(of, own, dict.fromkeys(indices, 0.0))
    assert low == pytest.approx(50 - 1.96 * 50 / 20**0.5, abs=4)
    assert high == pytest.approx(50 + 1.96 * 50 / 20**0.5, abs=4)


def test_a_lead_is_over_other_methods_not_over_itself(scripts: SimpleNamespace) -> None:
    def row(method: str, label: str, value: float, dynamic: bool = False) -> dict[str, Any]:
        versus = {"value": value - 96.0, "low": value - 99.0, "high": value - 95.0, "p": 0.04}
        versus = None if label == "TORINO-X" else versus
        return {
            "ids": [label],
            "method": method,
            "label": label,
            "dynamic": dynamic,
            "relative": {"value": value},
            "versus": versus,
        }

    rows = [
        row("torino-x", "torino-x(budget=192, locality=None)", 97.0),
        row("random", "Random", 94.0),
        row("torino-x", "TORINO-X", 96.0),
        row("torino-p", "TORINO-P", 93.0, dynamic=True),
        row("torino-p", "TORINO_FB-P", 92.0),
    ]
    line = scripts.lead.lead({"tokens": 192, "rows": rows}, "torino-x")
    assert line == [
        "192",
        "96.0",
        "1",
        "Random 94.0",
        "**+2.0 [1.0, 5.0]**",
        "0.040",
        "3 of 3",
        "dynamic TORINO-P 93.0",
        "92.0",
    ]
    rows[2]["versus"], rows[3]["versus"] = rows[1]["versus"], None  # as --versus torino-p has it: the dynamic row
    assert scripts.lead.lead({"tokens": 192, "rows": rows}, "torino-p")[:3] == ["192", "93.0", "4"]


def report(path: Path, tiers: dict[str, dict[str, str]]) -> Path:
    """Tables as ``torino report`` writes them."""
    text = "## Scores\n"
    for tier, scores in tiers.items():
        text += f"\n**Retain {tier}**\n\n| Method | Tokens | Relative |\n"
        text += "".join(f"| {label} | 9 | {score} |\n" for label, score in scores.items())
    path.write_text(text + "\n## How sure\n\n| TORINO-X | 9 | 11.00% |\n", encoding="utf-8")
    return path


def test_places_over_models_are_read_from_reports(scripts: SimpleNamespace, tmp_path: Path) -> None:
    dynamic = {"~64 tokens on average (↓1 %)": {"A": "1.00%"}}
    one = report(tmp_path / "1.md", dynamic | {"64 tokens (↓89 %)": {"A": "**90.00%**", "TORINO-X": "<u>80.50%</u>"}})
    again = report(tmp_path / "2.md", {"64 tokens (↓89 %)": {"A": "1.00%"}, "9 tokens (↓98 %)": {"A": "50.00%"}})
    other = report(
        tmp_path / "3.md", {"64 tokens (↓89 %)": {"A": "70.00% ± 0.77", "B": "99.00%", "TORINO-X": "95.00%"}}
    )
    first, second = scripts.models.read([one, again]), scripts.models.read([other])
    assert first == {64: {"A": 90.0, "TORINO-X": 80.5}, 9: {"A": 50.0}}
    row = scripts.models.line(64, [first[64], second[64]], "TORINO-X")
    assert row == ["64", "87.8", "1", "2, 1", "A 80.0", "+7.8", "−9.5, +25.0"]
    variant = {"A": 1.0, "TORINO-X": 2.0, "torino-x(budget=64, locality=None)": 3.0}
    assert scripts.models.line(64, [variant], "TORINO-X")[2:5] == ["1", "1", "A 1.0"]
    with pytest.raises(SystemExit, match="B is not in every table of 64 tokens"):
        scripts.models.line(64, [first[64], second[64]], "B")


def test_what_a_report_changes_by_task(scripts: SimpleNamespace, tmp_path: Path) -> None:
    def table(name: str, rows: str) -> dict[int, dict[str, dict[str, float]]]:
        file = tmp_path / name
        heads = "| Method | Tokens | Lab GQA | Lab MME | Relative |\n| --- | ---: | ---: | ---: | ---: |\n"
        file.write_text(
            f"## Scores\n\n**Retain 64 tokens (↓89 %)**\n\n{heads}{rows}\n## Sure\n\n| A | 1 | 2.0% |\n", "utf-8"
        )
        return scripts.tasks.read_tasks(file)

    one = table(
        "1.md", "| A | 64 | **30.00 ± 1.50** | 500.00 | <u>90.00%</u> |\n| B | 64 | 20.00 | 400.00 | 80.00% |\n"
    )
    other = table(
        "2.md",
        "| B | 64 | 20.00 | 410.00 | 82.00% |\n| A | 64 | 31.00 | 480.00 | **91.00% ± 0.50** |\n"
        "| C | 64 | 1.00 | 1.00 | 1.00% |\n",
    )
    assert one == {
        64: {"A": {"Lab GQA": 30, "Lab MME": 500, "Relative": 90}, "B": {"Lab GQA": 20, "Lab MME": 400, "Relative": 80}}
    }
    changed = scripts.tasks.change(one[64], other[64], [])
    assert changed == {"Lab GQA": (0.5, 1, 2), "Lab MME": (-5.0, 1, 2), "Relative": (1.5, 2, 2)}
    assert scripts.tasks.change(one[64], other[64], ["A"])["Lab MME"] == (10.0, 1, 1)
    assert scripts.tasks.change(one[64], other[64], ["A", "B"]) == {}


def test_a_difference_is_that_of_the_means(scripts: SimpleNamespace) -> None:
    kinds = ["presence", "cell", "small"]
    bench = SimpleNamespace(pictures=list(range(30)), asked=[[{"kind": kind} for kind in kinds] for _ in range(30)])
    bench.order = lambda: scripts.tries.Bench.order(bench)
    table = scripts.tries.Table(bench)
    source = np.random.default_rng(0)
    first = {"tokens": 64.0, "right": [1] * 90, "surprise": source.exponential(size=90).tolist()}
    other = {"tokens": 64.0, "right": [0] * 90, "surprise": (np.array(first["surprise"]) + 0.25).tolist()}
    line = table.line("it", other, first)
    assert "+0.250 [+0.250, +0.250]" in line
    assert line.count("*") == 3  # in every family by more than chance
    assert "right   0.0" in line
    assert not {"[", "*"} & set(table.line("it", first, first))


def test_tiers_are_drawn_and_name_who_comes_next(
    scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variant = {"torino-x(budget=9, locality=None)": "99.00%"}
    one = report(
        tmp_path / "1.md",
        {
            "64 tokens (↓89 %)": {"A": "90.00%", "B": "95.00%", "TORINO-X": "80.00%"} | variant,
            "47 tokens (↓92 %)": {"A": "92.00%", "B": "91.00%", "TORINO-X": "93.00%"},
        },
    )
    other = report(tmp_path / "2.md", {"64 tokens (↓89 %)": {"A": "94.00%", "C": "1.00%", "TORINO-X": "95.00%"}})
    models = [scripts.models.read([one]), scripts.models.read([other])]
    assert scripts.tiers.best_others(models, "TORINO-X") == ["A", "B"]  # neither C nor the method's own variant
    said = ["draw_tiers.py", "--model", "one", str(one), "--model", "two", str(other), "--output"]
    monkeypatch.setattr(sys, "argv", [*said, str(tmp_path / "tiers.png")])
    scripts.tiers.main()
    with Image.open(tmp_path / "tiers.png") as picture:
        assert picture.width > picture.height > 300
    monkeypatch.setattr(sys, "argv", [*said, str(tmp_path / "none.png"), "--tiers", "7"])
    with pytest.raises(SystemExit):
        scripts.tiers.main()
    assert "no report of 'one' has TORINO-X at any of [7] tokens" in capsys.readouterr().err
