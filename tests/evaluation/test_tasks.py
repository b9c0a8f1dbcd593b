"""Reading benchmarks: TSV and JSONL files, whole and broken ones; names; prompts; rotations."""

from __future__ import annotations

import base64
import csv
import io
import json
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torino.core.errors import BadFile, BadParameter, UnknownName
from torino.evaluation import BENCHMARKS, open_task, read_answers
from torino.evaluation.samples import parse_answers, read_tsv
from torino.evaluation.tasks import find_task, make_rotations
from torino.evaluation.tsv import read_rows, unquote


def picture(number: int) -> bytes:
    """Bytes that stand for a picture file; reading tasks never looks into them."""
    return b"\x89PNG" + bytes([number]) * 60


def coded(number: int) -> str:
    return base64.b64encode(picture(number)).decode()


def write(path: Path, table: list[dict[str, Any]], quoting: int = csv.QUOTE_MINIMAL) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        names = list(dict.fromkeys(name for row in table for name in row))
        writer = csv.DictWriter(file, names, delimiter="\t", quoting=quoting, lineterminator="\n")  # type: ignore[arg-type]
        writer.writeheader()
        writer.writerows(table)
    return path


def question(index: int | str, **more: Any) -> dict[str, Any]:
    return {"index": index, "image": coded(7), "question": "What is it?", "answer": "dog"} | more


def choice(index: int | str, right: str = "B", **more: Any) -> dict[str, Any]:
    options = {"A": "cat", "B": "dog", "C": "bird"}
    return {"index": index, "image": coded(7), "question": "Which animal?", **options, "answer": right} | more


# --- the rows of a TSV ---------------------------------------------------------------------------------------------

cells = st.text(alphabet=st.sampled_from('ab"\t\n\r ,é选'), max_size=8)


@given(st.lists(st.lists(cells, min_size=2, max_size=2), min_size=1, max_size=6), st.booleans())
def test_rows_agree_with_the_csv_module(table: list[list[str]], always: bool) -> None:
    if not always:  # the csv module of Python 3.11 does not quote \r, which then reads as a Windows line end
        table = [[cell.replace("\r", "") for cell in row] for row in table]
    buffer = io.StringIO(newline="")
    quoting = csv.QUOTE_ALL if always else csv.QUOTE_MINIMAL
    csv.writer(buffer, delimiter="\t", quoting=quoting, lineterminator="\n").writerows(table)
    raw = buffer.getvalue().encode()
    result = []
    for row in read_rows(io.BytesIO(raw)):
        assert row.spans is not None
        result.append([unquote(row.raw[a:b]).decode() for a, b in row.spans])
        for a, b in row.spans:  # the places are those in the file
            assert raw[row.start + a : row.start + b] == row.raw[a:b]
        assert row.number == 1 + raw[: row.start].count(b"\n")
    assert result == table


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
@pytest.mark.parametrize("cell", ["What is it?", "dog"])
def test_unclosed_quote_loses_one_row(tmp_path: Path, quoting: int, cell: str) -> None:
    path = write(tmp_path / "X.tsv", [question(n) for n in range(5)], quoting)
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[2] = lines[2].replace(f'"{cell}"', f'"{cell}') if quoting else lines[2].replace(cell, f'"{cell}')
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    task = open_task(path)
    assert [sample.index for sample in task] == ["0", "2", "3", "4"]
    assert [problem.row for problem in task.problems] == [3]
    assert "quote" in task.problems[0].reason or "cells" in task.problems[0].reason
    assert task["4"].image.read() == picture(7)  # places behind the broken row still hold


def test_quotes_inside_an_unquoted_cell(tmp_path: Path) -> None:
    path = write(tmp_path / "X.tsv", [question(1, question="Q")])
    path.write_text(path.read_text(encoding="utf-8").replace("Q", 'a 5" pipe?'), encoding="utf-8")
    assert open_task(path)["1"].question == 'a 5" pipe?'
    path.write_text(path.read_text(encoding="utf-8").replace('a 5" pipe?', '"Stop" or what?'), encoding="utf-8")
    assert open_task(path)["1"].question == "Stop or what?"  # as the csv module and pandas read it


def test_unclosed_quote_does_not_read_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torino.evaluation.tsv.MAX_EXTRA_BYTES", 200)
    path = write(tmp_path / "X.tsv", [question(n) for n in range(50)])
    text = path.read_text(encoding="utf-8").replace("What", '"What', 1)
    path.write_text(text, encoding="utf-8")
    task = open_task(path)
    assert len(task) == 49
    assert task.problems[0].reason == "unclosed quote"
    assert {sample.image.read() for sample in task} == {picture(7)}


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_row_keeps_texts_and_image(tmp_path: Path, quoting: int) -> None:
    text = 'Is it "5\tpm"?\nOr later?'
    table = [question(3, question=text, category="时间", split="dev"), question(4, image=coded(9))]
    task = open_task(write(tmp_path / "Clocks.tsv", table, quoting))
    assert task.name == "Clocks"
    assert task["3"].question == text
    assert task["3"].meta == {"category": "时间", "split": "dev"}
    assert [sample.row for sample in task] == [2, 4]  # the first question takes two lines
    assert [sample.images[0].read() for sample in task] == [picture(7), picture(9)]
    assert task["3"].images[0].key != task["4"].images[0].key


def test_windows_line_ends_byte_order_mark_and_uppercase_names(tmp_path: Path) -> None:
    path = write(tmp_path / "X.tsv", [question(1, question="Ende?")])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n").replace(b"index", b"Index"))
    task = open_task(path)
    assert task["1"].question == "Ende?"
    assert task["1"].answers == ("dog",)


def test_images_referenced_by_index(tmp_path: Path) -> None:
    table = [
        question(1, image="3"),  # a row further on
        question(2, image="9"),  # one that is not there
        question(3),
        question(4, image="3"),
        question(5, image="6"),
        question(6, image=coded(5), answer=""),  # of no use itself, but it has the picture
    ]
    task = open_task(write(tmp_path / "X.tsv", table))
    assert [sample.index for sample in task] == ["1", "3", "4", "5"]
    assert task["1"].images == task["3"].images == task["4"].images
    assert task["5"].images[0].read() == picture(5)
    assert [str(problem) for problem in task.problems] == [
        "line 3 (index 2): it refers to the image of index '9', which has none",
        "line 7 (index 6): no answer",
    ]


BROKEN = {
    "the image is not base64 text": question(1, image="!" + coded(7)[1:]),
    "no image": question(1, image=""),
    "no question": question(1, question=""),
    "no answer": question(1, answer="nan"),
    "duplicate index, first used on line 2": question(0),
}


@pytest.mark.parametrize("what", BROKEN)
def test_bad_rows_are_skipped_or_raise(tmp_path: Path, what: str) -> None:
    path = write(tmp_path / "X.tsv", [question(0), BROKEN[what], question(2)])
    task = open_task(path)
    assert [sample.index for sample in task] == ["0", "2"]
    assert [(problem.row, problem.reason) for problem in task.problems] == [(3, what)]
    assert task.describe()["skipped_rows"] == 1
    with pytest.raises(BadFile, match=rf"X\.tsv, line 3.*{what}.*skip such rows"):
        open_task(path, on_bad_row="raise")


def test_truncated_and_wrapped_base64_and_data_urls(tmp_path: Path) -> None:
    wrapped = "\n".join(coded(7)[at : at + 4] for at in range(0, len(coded(7)), 4))
    table = [
        question(0, image=coded(7)[:-3]),
        question(1, image=wrapped),
        question(2, image="data:image/png;base64," + coded(7)),
    ]
    task = open_task(write(tmp_path / "X.tsv", table))
    assert [problem.reason for problem in task.problems] == ["the image is not base64 text"]
    assert [sample.images[0].read() for sample in task] == [picture(7), picture(7)]


def test_rows_with_wrong_width_or_encoding(tmp_path: Path) -> None:
    path = write(tmp_path / "X.tsv", [question(0), question(1), question(2)])
    lines = path.read_bytes().split(b"\n")
    lines[2] += b"\tone more"
    lines[3] = lines[3].replace(b"What", b"\xff\xfe")
    path.write_bytes(b"\n".join(lines))
    task = open_task(path)
    assert [problem.reason for problem in task.problems] == [
        "5 cells, but the header has 4",
        "column question is not text in UTF-8",
    ]


def test_missing_columns_are_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "X.tsv", [{"index": 1, "question": "?", "answer": "a"}])
    with pytest.raises(BadFile, match=r"has no column image; it has index, question, answer"):
        open_task(path)
    path = write(
        tmp_path / "MMBench_TEST_EN.tsv", [{"index": 1, "question": "?", "image": coded(1), "A": "a", "B": "b"}]
    )
    with pytest.raises(BadFile, match=r"no column answer.*Only the authors can score"):
        open_task("MMBench_TEST_EN", tmp_path)
    (tmp_path / "E.tsv").touch()
    with pytest.raises(BadFile, match="is empty"):
        open_task(tmp_path / "E.tsv")
    with pytest.raises(BadFile, match=r"contains no usable sample; 1 rows were skipped\. The first: line 2"):
        open_task(write(tmp_path / "N.tsv", [question(1, answer="")]))


def test_several_images_in_a_row(tmp_path: Path) -> None:
    table = [question(1, image=str([coded(1), coded(2)]))]
    task = open_task(write(tmp_path / "X.tsv", table))
    assert [place.read() for place in task["1"].images] == [picture(1), picture(2)]


def test_image_paths_are_searched_in_the_usual_folders(tmp_path: Path) -> None:
    folder = tmp_path / "images" / "Mine"
    folder.mkdir(parents=True)
    for number, place in enumerate([tmp_path, folder]):
        (place / f"{number}.png").write_bytes(picture(number))
    table = [{"index": n, "image_path": f"{n}.png", "question": "?", "answer": "x"} for n in range(3)]
    task = open_task(write(tmp_path / "Mine_local.tsv", table))
    assert task.name == "Mine"
    assert [sample.images[0].read() for sample in task] == [picture(0), picture(1)]
    assert "image 2.png not found in" in task.problems[0].reason
    # keys and fingerprint are the same wherever the folder lies
    moved = tmp_path / "moved"
    shutil.copytree(tmp_path / "images", moved / "images")
    shutil.copy(tmp_path / "0.png", moved)
    again = open_task(write(moved / "Mine_local.tsv", table))
    assert [sample.image.key for sample in again] == [sample.image.key for sample in task]
    assert again.fingerprint == task.fingerprint
    elsewhere = write(tmp_path / "away.tsv", table[1:2])
    assert len(open_task(elsewhere, image_root=folder)) == 1
    with pytest.raises(BadFile):
        open_task(elsewhere)


def test_large_file_is_not_loaded_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "Large.tsv"
    big = base64.b64encode(bytes(1_000_000)).decode()
    write(path, [question(n, image=big) for n in range(20)])
    tracemalloc.start()
    task = open_task(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert path.stat().st_size > 26_000_000
    assert most < 10_000_000  # a row is 1.3 MB
    assert len({sample.images[0].key for sample in task}) == 1
    assert task["19"].images[0].read() == bytes(1_000_000)


def test_fingerprint_depends_on_the_data(tmp_path: Path) -> None:
    def fingerprint(**more: Any) -> str:
        return open_task(write(tmp_path / "X.tsv", [question(1, **more)])).fingerprint

    assert fingerprint() == fingerprint()
    assert (
        len({fingerprint(), fingerprint(question="Else?"), fingerprint(image=coded(8)), fingerprint(answer="cat")}) == 4
    )


# --- names ---------------------------------------------------------------------------------------------------------

FILES = {
    "GQA": "GQA_TestDev_Balanced",
    "MMBench_EN": "MMBench_DEV_EN",
    "MMBench_CN": "MMBench_DEV_CN",
    "MME": "MME",
    "POPE": "POPE",
    "ScienceQA": "ScienceQA_TEST",
    "TextVQA": "TextVQA_VAL",
    "VizWiz": "VizWiz",
    "MMVet": "MMVet",
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmarks_open_by_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kind = BENCHMARKS[name].kind
    row = choice(1) if kind in ("mcq", "circular") else question(1)
    if kind in ("mme", "pope"):
        row = question(1, answer="Yes", category="existence")
    write(tmp_path / f"{FILES[name]}.tsv", [row])
    monkeypatch.setenv("LMUData", str(tmp_path))
    for spelling in (name, FILES[name], name.lower(), FILES[name].replace("_", "-"), tmp_path / f"{FILES[name]}.tsv"):
        task = open_task(spelling)
        assert (task.name, task.kind) == (name, kind)


def test_named_file_is_preferred(tmp_path: Path) -> None:
    write(tmp_path / "MMBench_DEV_CN.tsv", [choice(1)])
    assert find_task("MMBench_CN", tmp_path).name == "MMBench_DEV_CN.tsv"
    write(tmp_path / "MMBench_CN.tsv", [choice(1)])
    assert find_task("MMBench_CN", tmp_path).name == "MMBench_CN.tsv"


def test_missing_tasks_are_reported(tmp_path: Path) -> None:
    write(tmp_path / "MME.tsv", [question(1)])
    with pytest.raises(BadFile, match=r"POPE is not in .*it contains MME\.tsv\. Put POPE\.tsv there"):
        open_task("POPE", tmp_path)
    with pytest.raises(UnknownName, match=r"No task is called 'MMME'\. Did you mean 'MME'.*it contains MME\.tsv"):
        open_task("MMME", tmp_path)
    with pytest.raises(BadFile, match=r"There is no file .*none\.jsonl"):
        open_task(tmp_path / "none.jsonl", tmp_path)
    with pytest.raises(BadParameter, match="prompts must be"):
        open_task("MME", tmp_path, prompts="mine")  # type: ignore[arg-type]
    with pytest.raises(BadParameter, match="kind must be"):
        open_task("MME", tmp_path, kind="best")  # type: ignore[arg-type]


# --- tasks of one's own --------------------------------------------------------------------------------------------


def test_file_with_options_is_a_multiple_choice(tmp_path: Path) -> None:
    assert open_task(write(tmp_path / "Own.tsv", [choice(1)])).kind == "mcq"
    assert open_task(write(tmp_path / "Own.tsv", [question(1)])).kind == "vqa"
    assert open_task(write(tmp_path / "Own.tsv", [choice(1)]), kind="circular").kind == "circular"
    task = open_task(write(tmp_path / "Own.tsv", [choice(1, "b"), choice(2, "bird"), choice(3, "E")]))
    assert [sample.answers for sample in task] == [("B",), ("C",)]
    assert task.problems[0].reason == "the answer 'E' is not among the options A, B, C"


def test_jsonl_with_an_image_folder(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(picture(1))
    lines: list[Any] = [
        {"image": "a.jpg", "question": "How many?", "answer": 2, "level": "easy"},
        {"image": "a.jpg", "question": "What?", "answers": ["dog", "puppy"], "id": "x7"},
        {"image": "b.jpg", "question": "What?", "answer": "dog"},
        {"image": "a.jpg", "question": "Which?", "options": ["cat", "dog"], "answer": "dog"},
        ["no", "object"],
    ]
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n{cut", encoding="utf-8")
    task = open_task(path, image_root=tmp_path / "photos", kind="vqa")
    assert [(sample.index, sample.answers) for sample in task] == [
        ("0", ("2",)),
        ("x7", ("dog", "puppy")),
        ("3", ("B",)),
    ]
    assert task["0"].meta == {"level": "easy"}
    assert task["3"].options == {"A": "cat", "B": "dog"}
    assert task["x7"].images[0].read() == picture(1)
    assert [problem.row for problem in task.problems] == [3, 5, 7]
    with pytest.raises(BadFile, match=r"own\.jsonl, line 3 \(index 2\): image b\.jpg not found"):
        open_task(path, image_root=tmp_path / "photos", on_bad_row="raise")


def test_parse_answers() -> None:
    assert parse_answers("['1', 'one']") == ("1", "one")
    assert parse_answers('["it\'s", "no"]') == ("it's", "no")
    assert parse_answers("[{'answer': 'red', 'answer_confidence': 'yes'}]") == ("red",)
    assert parse_answers("[exit]") == ("[exit]",)
    assert parse_answers("[{[]: 1}]") == ("[{[]: 1}]",)
    assert parse_answers("") == parse_answers("nan") == ()
    assert parse_answers("__import__('os').getcwd()") == ("__import__('os').getcwd()",)  # a text, never run


def test_take(tmp_path: Path) -> None:
    task = open_task(write(tmp_path / "MMBench_DEV_EN.tsv", [choice(n) for n in range(6)]))
    few = task.take(2)
    assert (len(task), len(few)) == (18, 6)
    assert [sample.group for sample in few] == ["0"] * 3 + ["1"] * 3
    assert few["1000001"] is task["1000001"]
    some = task.take(2, seed=1)
    assert len(some) == 6
    assert [sample.index for sample in task.take(2, seed=1)] == [sample.index for sample in some]
    assert {tuple(s.index for s in task.take(2, seed=seed)) for seed in range(5)} != {tuple(s.index for s in some)}
    with pytest.raises(BadParameter):
        task.take(0)


# --- rotations -----------------------------------------------------------------------------------------------------


def test_rotations_are_added_if_the_file_has_none(tmp_path: Path) -> None:
    task = open_task(write(tmp_path / "MMBench_DEV_EN.tsv", [choice(5)]))
    assert [sample.index for sample in task] == ["5", "1000005", "2000005"]
    assert [list(sample.options.values()) for sample in task] == [
        ["cat", "dog", "bird"],
        ["dog", "bird", "cat"],
        ["bird", "cat", "dog"],
    ]
    assert [sample.answers[0] for sample in task] == ["B", "A", "C"]
    assert all(sample.options[sample.answers[0]] == "dog" for sample in task)
    assert len(open_task(write(tmp_path / "MMBench_DEV_EN.tsv", [choice("²")]))) == 3  # a digit that is no number
    named = open_task(write(tmp_path / "MMBench_DEV_EN.tsv", [choice("q")]))
    assert [sample.index for sample in named] == ["q", "q+1", "q+2"]
    assert {sample.group for sample in named} == {"q"}


def test_rotations_in_the_file_are_kept(tmp_path: Path) -> None:
    first = open_task(write(tmp_path / "MMBench_DEV_EN.tsv", [choice(5)]))
    table = [
        choice(item.index, item.answers[0], image=coded(7) if item.index == "5" else "5", **item.options)
        for item in first
    ]
    task = open_task(write(tmp_path / "MMBench_DEV_EN.tsv", [*table, choice(6, image="5")]))
    assert [(item.index, item.group, dict(item.options), item.answers) for item in task.samples[:3]] == [
        (item.index, item.group, dict(item.options), item.answers) for item in first
    ]
    assert len(task) == 4  # none is made for question 6: this file brings its own
    by_column = [choice(n, g_index=1) for n in (1, 2)]
    assert {item.group for item in open_task(write(tmp_path / "MMBench_DEV_EN.tsv", by_column))} == {"1"}


def test_two_options_have_two_rotations(tmp_path: Path) -> None:
    task = open_task(write(tmp_path / "MMBench_DEV_EN.tsv", [choice(1, "A", C="")]))
    assert [sample.answers[0] for sample in task] == ["A", "B"]
    assert len(make_rotations(task[0])) == 2


# --- prompts -------------------------------------------------------------------------------------------------------


def asked(tmp_path: Path, file: str, row: dict[str, Any], prompts: Any = "standard") -> str:
    task = open_task(write(tmp_path / f"{file}.tsv", [row]), prompts=prompts)
    text = task.prompt(task[0])
    assert task.describe()["prompts"] == prompts
    assert text.split("\n")[-1] in task.describe()["prompt"] or text == row["question"]
    return text


SHORT = "Answer the question using a single word or phrase."


def test_prompts_of_questions(tmp_path: Path) -> None:
    row = question(1)
    for file in ("GQA_TestDev_Balanced", "TextVQA_VAL", "Own"):
        assert asked(tmp_path, file, row) == asked(tmp_path, file, row, "llava") == f"What is it?\n{SHORT}"
    assert asked(tmp_path, "MMVet", row) == "What is it?"
    insufficient = "When the provided information is insufficient, respond with 'Unanswerable'."
    assert (
        asked(tmp_path, "VizWiz", row)
        == asked(tmp_path, "VizWiz", row, "llava")
        == f"What is it?\n{insufficient}\n{SHORT}"
    )
    assert asked(tmp_path, "VizWiz", row, "vlmevalkit") == "What is it?"
    already = question(1, question=f"What is it?\n{SHORT}")
    assert asked(tmp_path, "GQA_TestDev_Balanced", already) == f"What is it?\n{SHORT}"


def test_prompts_of_yes_no_questions(tmp_path: Path) -> None:
    row = question(1, question="Is there a dog? Please answer yes or no.", answer="Yes", category="existence")
    for file in ("MME", "POPE"):
        assert asked(tmp_path, file, row) == asked(tmp_path, file, row, "vlmevalkit") == row["question"]
        assert asked(tmp_path, file, row, "llava") == f"Is there a dog?\n{SHORT}"


def test_prompts_of_multiple_choices(tmp_path: Path) -> None:
    letter = "Answer with the option's letter from the given choices directly."
    row = choice(1, hint="Look at the ears.")
    want = f"Look at the ears.\nWhich animal?\nA. cat\nB. dog\nC. bird\n{letter}"
    for file in ("ScienceQA_TEST", "MMBench_DEV_EN", "Own"):
        assert asked(tmp_path, file, row) == want
    chinese = {"question": "哪种动物？", "A": "猫", "B": "狗", "C": ""}
    assert asked(tmp_path, "MMBench_DEV_CN", choice(1, **chinese)) == "哪种动物？\nA. 猫\nB. 狗\n请直接回答选项字母。"
    assert asked(tmp_path, "ScienceQA_TEST", choice(1, hint="nan")).startswith("Which animal?")


def test_plain_prompts_are_the_questions(tmp_path: Path) -> None:
    for file in ("GQA_TestDev_Balanced", "VizWiz", "Own"):
        assert asked(tmp_path, file, question(1), "plain") == "What is it?"
    row = question(1, question="Is there a dog? Please answer yes or no.", answer="Yes", category="existence")
    assert asked(tmp_path, "MME", row, "plain") == row["question"]
    task = open_task(write(tmp_path / "Options.tsv", [choice(1)]), prompts="plain")
    assert task.prompt(task[0]) == "Which animal?\nA. cat\nB. dog\nC. bird"
    assert task.describe()["prompt"] == "hint\nquestion\nA. …\nB. …"


def test_the_prompt_style_is_that_of_the_option_the_task_or_the_model(tmp_path: Path) -> None:
    task = open_task(write(tmp_path / "Own.tsv", [question(1)]))
    own = replace(task, benchmark=replace(task.benchmark, instruction="One word."))
    chosen = [(item.prompts, item.prompts_from) for item in (task.for_model("plain"), task.for_model(None))]
    assert chosen == [("plain", "model"), ("standard", "default")]
    assert task.prompt(task[0]) == task.for_model(None).prompt(task[0]) == f"What is it?\n{SHORT}"
    assert task.for_model("plain").prompt(task[0]) == "What is it?"
    resolved = own.for_model("plain")
    assert (resolved.prompts, resolved.prompts_from) == ("task", "task")
    assert own.prompt(own[0]) == resolved.prompt(own[0]) == "What is it?\nOne word."
    given = replace(own, prompts="llava").for_model("plain")
    assert (given.prompts, given.prompts_from) == ("llava", "option")
    assert given.prompt(own[0]) == f"What is it?\n{SHORT}"
    assert given.describe()["prompts_from"] == "option"


# --- rows that a rule cannot score; answers files ------------------------------------------------------------------


def test_mme_questions_are_grouped_by_image(tmp_path: Path) -> None:
    more = {"answer": "Yes", "category": "OCR"}
    by_name = [question(n, image_path=f"{n // 2}.png", **more) for n in range(4)]
    task = open_task(write(tmp_path / "MME.tsv", by_name))
    assert [item.group for item in task] == ["OCR|0.png"] * 2 + ["OCR|1.png"] * 2
    by_picture = [question(n, image=coded(n // 2), **more) for n in range(4)]  # no name: the picture itself tells
    groups = [item.group for item in open_task(write(tmp_path / "MME.tsv", by_picture))]
    assert groups[0] == groups[1] != groups[2] == groups[3]


def test_rows_that_cannot_be_scored(tmp_path: Path) -> None:
    task = open_task(write(tmp_path / "MME.tsv", [question(1, answer="Yes", category="x"), question(2, answer="No")]))
    assert [problem.reason for problem in task.problems] == ["no category"]
    task = open_task(write(tmp_path / "POPE.tsv", [question(1, answer="yes"), question(2, answer="maybe")]))
    assert [problem.reason for problem in task.problems] == ["the answer must be yes or no, got 'maybe'"]
    with pytest.raises(BadFile, match=r"line 3.*maybe"):
        open_task("POPE", tmp_path, on_bad_row="raise")


def test_read_answers(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(
        '{"index": 1, "prediction": "a"}\n\n{"index": "2", "error": "x"}\n{"index": 3, "pred', encoding="utf-8"
    )
    assert [row["index"] for row in read_answers(path)] == [1, "2"]
    path.write_text('{"index": 1}\n{"prediction": 3}\n{"index": 2}\n', encoding="utf-8")
    with pytest.raises(BadFile, match=r"line 2 is not an answer"):
        read_answers(path)
    with pytest.raises(BadFile, match="Cannot read"):
        read_answers(tmp_path / "none.jsonl")


def test_read_tsv(tmp_path: Path) -> None:
    table = read_tsv(write(tmp_path / "X.tsv", [question(1)]))
    assert table.columns == ("index", "image", "question", "answer")
    assert len(table.samples) == 1


@pytest.mark.parametrize("kind", ["absolute", "parent", "link"])
@pytest.mark.parametrize("suffix", ["tsv", "jsonl"])
def test_images_outside_the_folder_of_a_task_need_a_flag(tmp_path: Path, suffix: str, kind: str) -> None:
    data, secret = tmp_path / "data", tmp_path / "secret.png"
    data.mkdir()
    secret.write_bytes(base64.b64decode(coded(7)))
    name = {"absolute": str(secret), "parent": "../secret.png", "link": "link.png"}[kind]
    if kind == "link":
        (data / "link.png").symlink_to(secret)
    path = data / f"X.{suffix}"
    if suffix == "tsv":
        path.write_text(f"index\timage_path\tquestion\tanswer\n0\t{name}\twhat ?\ta\n")
    else:
        path.write_text(json.dumps({"index": 0, "image": name, "question": "what ?", "answer": "a"}) + "\n")
    with pytest.raises(BadFile, match=r"which is outside its folder .* allow other folders with --allow-outside"):
        open_task(path)
    assert open_task(path, allow_outside=True)[0].image.read() == secret.read_bytes()
