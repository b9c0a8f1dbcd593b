"""Recipes, estimates, downloads and the comparison with the paper."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.synthetic_run import write_synthetic_run
from torino.core.errors import BadFile, BadParameter, TorinoError, Unreachable
from torino.evaluation import BENCHMARKS, paper_table
from torino.evaluation.protocol import FULL, fixed_settings
from torino.evaluation.reporting.summary import summarize
from torino.evaluation.reproduction import download as downloading
from torino.evaluation.reproduction import estimate, machine, plan
from torino.evaluation.reproduction.comparison import compare_with_paper, table_lines, to_markdown
from torino.evaluation.reproduction.recipe import FOLDER, load_recipe, recipe_names
from torino.evaluation.results import open_run
from torino.evaluation.runner import RunPlan

CONTENT = bytes(range(256)) * 9000
MD5 = hashlib.md5(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")


class Files(BaseHTTPRequestHandler):
    """A server of one file with ranges; ``cut`` ends each reply after so many bytes, ``status`` refuses."""

    cut: int | None = None
    status = 200
    ranges = True
    requests: list[str | None]

    def do_GET(self) -> None:
        given = self.headers.get("Range")
        type(self).requests.append(given)
        if self.status != 200:
            self.send_error(self.status)
            return
        start = int(given[6:-1]) if given and self.ranges else 0
        if start >= len(CONTENT):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        self.wfile.write(CONTENT[start:][: self.cut])

    def log_message(self, *args: Any) -> None:
        """Print nothing."""


@contextmanager
def serve(**options: Any) -> Generator[tuple[str, type[Files]]]:
    handler = type("Handler", (Files,), {"requests": [], **options})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/a.tsv", handler
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# ---------------------------------------------------------------------- recipes


def test_the_recipe_is_the_paper_s_protocol() -> None:
    assert recipe_names() == ["llava-1.5-7b"]
    recipe = load_recipe("llava-1.5-7b")
    assert [source.task for source in recipe.tasks] == list(BENCHMARKS)
    assert (recipe.kd, recipe.budget, recipe.budget_kd) == ("3,3 2,2 1,1", "192,128,64", "3,3 2,2 1,1")
    labels = {row.method for table in recipe.paper_tables() for row in table.rows if "-r2" not in row.method}
    run_plan = RunPlan(recipe.methods, fixed_pairs=[(3, 3), (2, 2), (1, 1)], seeds=1)
    phases = estimate.plan_phases(run_plan, "x64", recipe.paper_tables(), 576)
    specs = {setting.spec for phase in phases for setting in phase}
    assert {"torino-p(k=3, delta=3, budget=192)", "torino-m(k=1, delta=1, budget=64)"} <= specs
    assert "torino-m(k=2, delta=2, budget=129)" in specs, "TORINO_FB at the paper's mean length"
    assert labels == {"Random", "FOLDER", "PruneSID", "PruMerge", "TORINO-P", "TORINO-M", "TORINO_FB-P", "TORINO_FB-M"}


def test_wrong_recipes(tmp_path: Path) -> None:
    content = json.loads((FOLDER / "llava-1.5-7b.json").read_text(encoding="utf-8"))
    task = content["tasks"][0]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tasks": [task | {"md5": "12"}]}, "with its MD5"),
        ({"tasks": [task | {"file": "POPE.tsv"}]}, "not a file of a benchmark called 'GQA'"),
        ({"tasks": [task | {"file": "../GQA_TestDev_Balanced.tsv"}]}, "name of a .tsv file"),
        ({"colour": 1}, "the field 'colour' is unknown"),
        ({"seeds": 0}, "seeds"),
        ({"tables": ["x"]}, "No table of the paper is called 'x'"),
    ]
    for changes, expected in cases:
        (tmp_path / "r.json").write_text(json.dumps(content | changes), encoding="utf-8")
        with pytest.raises(TorinoError, match=expected):
            load_recipe(str(tmp_path / "r.json"))
    with pytest.raises(TorinoError, match=r"No recipe is called 'llava-1.5-13b'"):
        load_recipe("llava-1.5-13b")
    with pytest.raises(BadFile, match="There is no recipe"):
        load_recipe(str(tmp_path / "none.json"))
    with pytest.raises(TorinoError, match=r"No task of the recipe llava-1.5-7b is called 'Birds'"):
        load_recipe("llava-1.5-7b").select(["Birds"])
    assert [source.task for source in load_recipe("llava-1.5-7b").select(["mme", "gqa"]).tasks] == ["GQA", "MME"]


def test_limits_count_what_is_scored_together() -> None:
    source = next(item for item in load_recipe("llava-1.5-7b").tasks if item.task == "MMBench_EN")
    limited = source.limited(291)  # a quarter of 1164 questions
    assert (limited.questions, limited.images) == (round(4329 / 4), 291)
    assert source.limited(None) is source
    assert source.limited(5000) is source


# ---------------------------------------------------------------------- estimates


def test_an_estimate_by_hand() -> None:
    recipe = load_recipe("llava-1.5-7b")
    model = replace(recipe.model, parameters=1_000_000_000, visual_tokens=100, image_flops=8_000_000_000)
    task = replace(recipe.tasks[0], questions=10, images=4, question_tokens=20, answer_tokens=3)
    settings = [FULL, *fixed_settings(["tome", "divprune", "random"], [50], [], 1)]
    gpu = estimate.GPU("test", 1e12, 1e10)
    result = estimate.estimate_run([task], [settings], [], model, 2, gpu)
    # Read: 4 images x (100 + 3 x 50) visual tokens, and 10 questions x 4 settings x 20 tokens.
    assert result.parts["reading"] == pytest.approx(2e9 * (4 * 250 + 10 * 4 * 20) / 0.4e12)
    # Written: 3 calls per question (all tokens; two batches of at most 2) of 3 + 1 steps of 2e9 bytes at 1e10 per s.
    assert result.parts["writing"] == pytest.approx(10 * 3 * 4 * 0.2)
    assert result.parts["encoding"] == pytest.approx(4 * 8e9 / 0.4e12)
    assert result.parts["reducing"] == pytest.approx(4 * 3 * 0.03)
    assert result.answers == 40
    assert result.seconds == pytest.approx(sum(result.parts.values()))
    training = replace(recipe.sae.training, images=1000, width=10, expansion=4, steps=5, batch=7)
    seconds = estimate.estimate_training(training, 8e9, gpu)
    assert seconds == pytest.approx(1000 * 8e9 / 0.4e12 + 3 * 5 * 7 * 2 * 10 * 40 * 8 / 0.4e12)


def test_expected_tokens_are_the_paper_s() -> None:
    tables = load_recipe("llava-1.5-7b").paper_tables()
    assert [estimate.expected_tokens(tier, tables, 576) for tier in ("3,3", "2,2", "1,1", "96", "4,1")] == [
        217,
        129,
        47,
        96,
        288,
    ]


def test_measured_speed_by_hand() -> None:
    def row(setting: str, index: str, **seconds: float) -> dict[str, Any]:
        return {"task": "GQA", "index": index, "setting": setting, "image": "a", "seconds": seconds}

    rows = [
        row("full", "1", tower=4.0, answer=3.0, batch=1),
        row("tome", "1", tower=4.0, plan=1.0, projector=0.5, answer=2.0, batch=2),
        row("tome", "2", tower=4.0, plan=1.0, projector=0.5, answer=4.0, batch=2),
        {"task": "GQA", "index": "3", "setting": "tome", "image": "a", "error": "x"},
    ]
    run: Any = SimpleNamespace(rows=lambda: iter(rows))
    # The tower and each reduction once, answers by their share of the batch: 4 + 1.5 + 3 + 1 + 2 seconds, 3 answers.
    assert estimate.measure_speed(run) == {"GQA": pytest.approx(11.5 / 3)}
    recipe = load_recipe("llava-1.5-7b")
    tasks = [replace(source, questions=5) for source in recipe.tasks[:2]]
    rest = estimate.estimate_rest(tasks, 2, run)
    assert rest is not None
    assert (rest.answers, rest.measured) == (10 - 4 + 10, True), "a failed answer is not asked again"
    assert rest.seconds == pytest.approx(16 * 11.5 / 3)
    assert estimate.estimate_rest(tasks, 2, SimpleNamespace(rows=lambda: iter(()))) is None  # type: ignore[arg-type]


# ---------------------------------------------------------------------- the machine


def test_too_little_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: SimpleNamespace(free=5_000_000_000))
    needs = [
        machine.SpaceNeeded(tmp_path / "a" / "b", 3_000_000_000, "benchmarks"),
        machine.SpaceNeeded(tmp_path, 2_500_000_000, "model"),
    ]
    assert machine.check_space(needs[:1]) is None
    problem = machine.check_space(needs)
    assert problem is not None
    assert "5.0 GB free, and 5.5 GB are needed (benchmarks 3.0 GB, model 2.5 GB)" in problem


def test_no_gpu_and_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    assert machine.find_device("cpu") == ("CPU", None)
    name, problem = machine.find_device("auto")
    assert (name, "There is no GPU" in str(problem)) == ("CPU", True)
    monkeypatch.setattr(machine, "resolve_device", lambda _: SimpleNamespace(type="cuda"))
    monkeypatch.setattr(machine, "_gpu_name", lambda _: "Tesla T4")
    properties = SimpleNamespace(total_memory=16_000_000_000)
    monkeypatch.setattr(machine.torch.cuda, "get_device_properties", lambda _: properties)
    assert machine.check_memory("cuda", 13_000_000_000) is None
    assert "Tesla T4 has 16 GB of memory, and the weights alone take 15 GB" in str(
        machine.check_memory("cuda", 15_000_000_000)
    )


# ---------------------------------------------------------------------- downloads


def test_a_download(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    with serve() as (url, handler):
        path = downloading.download(url, tmp_path / "d" / "a.tsv", md5=MD5, progress=lambda *now: seen.append(now))
        assert path.read_bytes() == CONTENT
        assert seen[-1] == (len(CONTENT), len(CONTENT))
        downloading.download(url, path, md5=MD5)
        assert handler.requests == [None], "a complete file is not asked for again"
    assert not (tmp_path / "d" / "a.tsv.part").exists()


@pytest.mark.parametrize("ranges", [True, False])
def test_an_interrupted_download_resumes(tmp_path: Path, ranges: bool) -> None:
    (tmp_path / "a.tsv.part").write_bytes(CONTENT[:1000])
    with serve(ranges=ranges) as (url, handler):
        assert downloading.download(url, tmp_path / "a.tsv", md5=MD5).read_bytes() == CONTENT
        assert handler.requests == ["bytes=1000-"]


def test_broken_connections_are_repeated(tmp_path: Path) -> None:
    with serve(cut=900_000) as (url, handler):
        path = downloading.download(url, tmp_path / "a.tsv", md5=MD5, pause=0)
        assert path.read_bytes() == CONTENT
        assert handler.requests == [None, "bytes=900000-", "bytes=1800000-"]
    with serve(cut=10) as (url, _), pytest.raises(Unreachable, match="in 5 attempts: the connection ended early"):
        downloading.download(url, tmp_path / "b.tsv", md5=MD5, pause=0)
    assert (tmp_path / "b.tsv.part").stat().st_size == 50, "what was received is kept"


def test_a_wrong_checksum(tmp_path: Path) -> None:
    with serve() as (url, _):
        with pytest.raises(BadFile, match=f"has the MD5 {MD5}, expected {'0' * 32}"):
            downloading.download(url, tmp_path / "a.tsv", md5="0" * 32)
        assert list(tmp_path.glob("a.tsv*")) in ([], [tmp_path / "a.tsv.part.lock"]), "nothing wrong is left"
        (tmp_path / "a.tsv.part").write_bytes(CONTENT + b"more")  # the server answers 416
        with pytest.raises(BadFile, match="is damaged or another version"):
            downloading.download(url, tmp_path / "a.tsv", md5=MD5)
        (tmp_path / "c.tsv").write_bytes(b"other")
        with pytest.raises(BadFile, match="Remove it to download it again"):
            downloading.download(url, tmp_path / "c.tsv", md5=MD5)
        assert (tmp_path / "c.tsv").read_bytes() == b"other"


def test_servers_that_refuse(tmp_path: Path) -> None:
    with serve(status=404) as (url, handler):
        with pytest.raises(Unreachable, match="the server answers 404"):
            downloading.download(url, tmp_path / "a.tsv", md5=MD5)
        assert len(handler.requests) == 1
    with serve(status=503) as (url, handler):
        with pytest.raises(Unreachable, match="the server answers 503"):
            downloading.download(url, tmp_path / "a.tsv", md5=MD5, pause=0)
        assert len(handler.requests) == downloading.ATTEMPTS
    with pytest.raises(Unreachable, match="could not be downloaded"):
        downloading.download(url, tmp_path / "a.tsv", md5=MD5, pause=0)  # nobody listens any more
    with pytest.raises(BadFile, match="is not an address of the web"):
        downloading.download("file:///etc/passwd", tmp_path / "a.tsv", md5=MD5)


def test_an_invalid_certificate_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def expired(request: Any, **_: Any) -> Any:
        asked.append(request.full_url)
        raise downloading.URLError(downloading.ssl.SSLCertVerificationError(1, "certificate has expired"))

    monkeypatch.setattr(downloading, "urlopen", expired)
    with pytest.raises(Unreachable, match=r"certificate of example\.org is not valid .*has expired.*--data"):
        downloading.download("https://example.org/a.tsv", tmp_path / "a.tsv", md5=MD5, pause=0)
    assert asked == ["https://example.org/a.tsv"]  # never without encryption


# ---------------------------------------------------------------------- state and comparison


def test_the_state_of_a_folder(tmp_path: Path) -> None:
    recipe = load_recipe("llava-1.5-7b")
    state = plan.open_state(tmp_path / "new", recipe, {"model": None, "limit": 5})
    assert not (tmp_path / "new").exists()
    plan.finish_step(tmp_path / "new", state, "data", folder="x")
    again = plan.open_state(tmp_path / "new", recipe, {"model": None, "limit": 5})
    assert again["steps"]["data"]["folder"] == "x"
    with pytest.raises(BadParameter, match="was started with --limit 5"):
        plan.open_state(tmp_path / "new", recipe, {"model": None, "limit": None})
    with pytest.raises(BadParameter, match="was started with another recipe"):
        plan.open_state(tmp_path / "new", replace(recipe, seeds=1), {"model": None, "limit": 5})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(BadParameter, match="contains other files"):
        plan.open_state(tmp_path / "other", recipe, {})


def test_the_comparison(tmp_path: Path) -> None:
    write_synthetic_run(tmp_path / "run")
    summary = summarize(open_run(tmp_path / "run"), draws=100)
    table = paper_table("llava-1.5-7b-x64")
    comparison = compare_with_paper(summary, [table], recipe="r", changes=["--limit 3"], notes=["n"])
    rows = {(tier["tier"], row["method"]): row for tier in comparison["tiers"] for row in tier["rows"]}
    assert table.baseline is not None
    tasks = [name for name in comparison["columns"] if name != "relative"]
    ours = {row["label"]: row for row in next(t for t in summary["tiers"] if t["tier"] == "2,2")["rows"]}
    paper = next(row for row in table.rows if row.method == "TORINO-M" and row.tokens == 129)
    for task in tasks:
        cell = rows["2,2", "TORINO-M"]["scores"][task]
        score = ours["TORINO-M"]["scores"][task]
        assert cell["ours"] == score["value"]
        assert cell["paper"] == float(paper.scores[task])
        assert cell["difference"] == score["value"] - float(paper.scores[task])
        assert cell["inside"] == (score["low"] <= float(paper.scores[task]) <= score["high"])
    over = rows["2,2", "TORINO-M"]["relative_over"]
    assert over == ["GQA", "POPE"]
    ratios = [float(paper.scores[name]) / float(table.baseline.scores[name]) for name in over]
    relative = rows["2,2", "TORINO-M"]["scores"]["relative"]
    assert relative["paper"] == pytest.approx(100 * sum(ratios) / len(ratios))
    lines = list(table_lines(comparison["tiers"][0], comparison["columns"]))
    assert [line[0] for line in lines] == ["All tokens", "  paper", "  difference"]
    text = to_markdown(comparison)
    assert "**Not the recipe:** --limit 3" in text
    assert "*paper*" in text
    assert any("leave out" in sentence for sentence in comparison["verdict"])
    nothing = compare_with_paper(summary | {"tiers": [], "baseline": None}, [table])
    assert nothing["verdict"][0].startswith("No row of this run")
