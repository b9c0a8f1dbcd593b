"""Fill the generated tables of README.md and docs/ from research/results/*.json.

A region is marked by ``<!-- begin: NAME -->`` and ``<!-- end -->``; everything between the marks is replaced.

python scripts/make_tables.py            # write
python scripts/make_tables.py --check    # fail if a page is out of date
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path
from typing import Any

import serving_tables
from markdown_tables import table

from torino.core.io import write_atomic

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "research" / "results"
REGION = re.compile(r"(<!-- begin: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
BUDGETS = (217, 192, 129, 128, 64, 47)


@cache
def result(name: str) -> dict[str, Any]:
    """Read a result file."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def rounded(value: float) -> str:
    """Round to one digit, halves away from zero, as the reports do.

    Examples
    --------
    >>> rounded(95.35)
    '95.4'
    """
    return str(Decimal(str(value)).quantize(Decimal("0.1"), ROUND_HALF_UP))


def row_of(name: str, tokens: int, method: str) -> dict[str, Any] | None:
    """Return one method's row in a fixed-budget tier, or None if it was not run."""
    for tier in result(name)["tiers"]:
        if tier["tokens"] == tokens and not tier["dynamic"]:
            return next((row for row in tier["rows"] if row["method"] == method), None)
    return None


def relative(name: str, tokens: int, method: str) -> str:
    """Return a relative score as printed, or a dash."""
    row = row_of(name, tokens, method)
    return "–" if row is None else rounded(row["relative"]["value"])


def versus(name: str, tokens: int, method: str) -> str:
    """Return the lead of torino-x over a method with its interval, or a dash."""
    row = row_of(name, tokens, method)
    if row is None or "difference" not in row:
        return "–"
    value, low, high = (row["difference"][key] for key in ("value", "low", "high"))
    sign = "" if value > 0 else "+"
    return f"{sign}{rounded(-value)} [{rounded(-high)}, {rounded(-low)}]".replace("-", "−")


# ---------------------------------------------------------------------- regions

SETTINGS = (
    ("own", "lab-fourth"),
    ("original positions", "lab-fourth-original-positions"),
    ("proportional attention", "lab-fourth-proportional"),
)


def equal_settings() -> str:
    """Fourth model: torino-x and others when all get the same settings."""
    methods = ("TORINO-X", "FOLDER (full)", "PruneSID", "SCTS", "TORINO_FB-P", "Random")
    heads = [
        "tokens",
        "setting for all",
        "`torino-x`",
        "`folder-full`",
        "`prunesid`",
        "`scts`",
        "`torino-p`",
        "`random`",
    ]
    rows = [
        [tokens, label, *(relative(name, tokens, method) for method in methods)]
        for tokens in (192, 64)
        for label, name in SETTINGS
    ]
    return table(heads, rows, left=2)


def lead() -> str:
    """Fourth model: lead of torino-x over FOLDER (full), by setting."""
    budgets = [tokens for tokens in BUDGETS if tokens != 129]  # next to 128
    rows = [[label, *(versus(name, tokens, "FOLDER (full)") for tokens in budgets)] for label, name in SETTINGS]
    return table(["setting for all", *map(str, budgets)], rows)


def fourth_model() -> str:
    """Fourth model: all methods with their own settings."""
    heads = ["method", *map(str, BUDGETS)]
    by_method: dict[str, list[str]] = {}
    for tokens in BUDGETS:
        for tier in result("lab-fourth")["tiers"]:
            if tier["tokens"] == tokens:
                for row in tier["rows"]:
                    by_method.setdefault(_plain(row["method"]), []).append(rounded(row["relative"]["value"]))
    ordered = sorted(by_method.items(), key=lambda item: -float(item[1][BUDGETS.index(64)]))
    return table(heads, [[method, *values] for method, values in ordered])


def _plain(method: str) -> str:
    """Return a method label of a run in today's names."""
    if method.startswith("cdpruner"):
        return "CDPruner without text (plain DPP)"
    if match := re.fullmatch(r"torino-x\(budget=\d+, reach=(\S+), mass=False\)", method):
        locality = "" if match[1] == "0.2" else f", locality={match[1]}"
        return f"torino-x, plain attention{locality}"
    names = {
        "TORINO_FB-P": "torino-p",
        "TORINO_FB-M": "torino-m",
        "TORINO-X": "torino-x",
        "Random": "random (mean of 3 seeds)",
    }
    return names.get(method, method)


def first_model() -> str:
    """First model: dynamic TORINO beside the same mean length for others."""
    heads = [
        "mean tokens",
        "(k, δ)",
        "TORINO-P",
        "TORINO-M",
        "TORINO-P, fixed",
        "TORINO-M, fixed",
        "best other",
        "random",
    ]
    rows = []
    for tier in result("lab-first")["tiers"]:
        if not tier["dynamic"]:
            continue
        scores = {row["method"]: row["relative"]["value"] for row in tier["rows"]}
        others = {name: value for name, value in scores.items() if not name.startswith("TORINO") and name != "Random"}
        best = max(others, key=others.__getitem__)
        shown = [scores[name] for name in ("TORINO-P", "TORINO-M", "TORINO_FB-P", "TORINO_FB-M")]
        cells = [rounded(value) for value in shown]
        pair = f"({tier['k']}, {tier['delta']})"
        rows.append([tier["tokens"], pair, *cells, f"{best} {rounded(others[best])}", rounded(scores["Random"])])
    return table(heads, rows, left=2)


def plain_baselines() -> str:
    """First model: plain baselines at 64 tokens."""
    data = result("plain-baselines")
    rows = [["all 576 tokens", "", "", f"{data['all_tokens']:.3f}"]]
    rows += [[method, positions, attention, f"{nats:.3f}"] for method, positions, attention, nats in data["rows"]]
    return table(["64 tokens", "positions", "attention", "nats per right answer"], rows, left=3)


def findings() -> str:
    """Which findings of the paper hold on the lab."""
    rows = [[item["number"], item["paper"], item["lab"], item["holds"]] for item in result("findings")["findings"]]
    return table(["", "paper, LLaVA-1.5-7B", "first lab model", "holds?"], rows, left=4)


def dictionary_sizes() -> str:
    """First model: dictionaries of several sizes."""
    found = next(item for item in result("findings")["tables"] if item["rows"][0][0] == "no SAE")
    heads = ["SAE", *(f"({k}, {k}) {what}" for k in (3, 2, 1) for what in ("tokens", "P", "M"))]
    return table(heads, [[row[0].replace(", which ships", " (included)"), *row[1:]] for row in found["rows"]])


def speed_prefill() -> str:
    """Prefill by number of visual tokens."""
    rows = [
        [tokens, removed, f"{prefill:.2f}", f"{first:.2f}", faster, cache_size]
        for tokens, removed, prefill, _, _, first, faster, cache_size in result("speed-prefill")["tables"][0]["rows"]
    ]
    heads = ["visual tokens", "prompt removed", "prefill, s", "first token, s", "faster by", "cache, MiB"]
    return table(heads, rows, left=0)


def explorer() -> str:
    found = result("explorer")
    rows = [[row[0], row[1], *(f"{value:.0f}" for value in row[2:])] for row in found["tables"][0]["rows"]]
    errors = found["recorded"]["errors"]
    failed = "no request failed" if not errors else f"{errors} requests failed"
    heads = ["milliseconds", "count", "median", "95th percentile", "longest"]
    return f"{table(heads, rows).rstrip()}\n\n{found['recorded']['measured']} {failed[0].upper()}{failed[1:]}.\n"


def speed_core() -> str:
    """Cost of the core relative to one matrix product."""
    names = {
        "(b) lone matrix product, into a buffer that is there": "matrix product alone",
        "(c) torino-m, tokens to reduced tokens": "`torino-m`, tokens to reduced tokens",
        "— concepts (sae.top)": "– concepts (`sae.top`)",
        "— grouping": "– grouping",
        "— reduction (plan and apply)": "– reduction (plan and apply)",
        "(a) as the paper writes it": "as written in the paper: dense latents, all pairs",
    }
    rows = [row for row in result("speed-core")["tables"][1]["rows"] if row[0] in names]
    return table(["", "median ms", "relative"], [[names[row[0]], f"{row[1]:.1f}", f"{row[3]:.3f}"] for row in rows])


def speed_methods() -> str:
    """Milliseconds of every method at two budgets."""
    tables = {
        item["title"].split(" to ")[1].split(";")[0]: item["rows"] for item in result("speed-methods")["tables"][1:4]
    }
    small = {row[0]: row[1] for row in tables["64"]}
    rows = [
        [row[0].replace("randomised", "randomized"), f"{row[1]:.1f}", f"{small[row[0]]:.1f}"] for row in tables["192"]
    ]
    half = (len(rows) - 1) // 2 + 1  # without the reference product
    pairs = zip(rows[2 : half + 1], rows[half + 1 :], strict=True)
    return table(["method", "192", "64", "method", "192", "64"], [[*a, *b] for a, b in pairs], left=0)


def speed_inside() -> str:
    """Cache and prefill of methods inside the language model, beside methods before it."""
    rows = [
        [
            row["method"] if row["method"] == "all tokens" else f"`{row['method']}`",
            f"{row['tokens_layer_averaged']:g}",
            f"{row['cache_mb']:.1f}",
            f"{row['cache_of_full']:.2f}",
            f"{row['prefill_of_full']:.2f}",
        ]
        for row in result("inside")["rows"]
    ]
    heads = ["method", "layer-averaged tokens", "cache, MB", "cache, of all tokens", "prefill, of all tokens"]
    return table(heads, rows)


def speed_prefilter() -> str:
    """Time with and without the int8 prefilter."""
    rows = [[row[0], f"{row[4]:.2f}", f"{row[5]:.2f}"] for row in result("speed-prefilter")["tables"][1]["rows"]]
    return table(["", "float32 search", "int8 prefilter"], rows)


def speed_training() -> str:
    """Training steps per second beside other libraries."""
    rows = []
    for item in result("speed-training")["tables"][1:]:
        size = item["title"].split(", batches")[0]
        rows += [
            [size, row[0], f"{row[1]:.2f}", f"{row[3]:,}" if isinstance(row[3], int) else row[3], row[5]]
            for row in item["rows"]
        ]
    return table(["size", "trainer", "steps/s", "peak MiB", "FVU at the end"], rows, left=2)


def sae_token_kinds() -> str:
    """SAEs of three kinds of tokens."""
    data = result("sae-token-kinds")["tables"][0]
    wanted = ["trained on", "ε", "rows", "FVU", "L0", "dead", "(1,1)", "(2,2)", "(3,3)"]
    places = [data["columns"].index(name) for name in wanted]
    rows = [[f"{row[p]:,}" if isinstance(row[p], int) else row[p] for p in places] for row in data["rows"]]
    return table(wanted, rows)


# ---------------------------------------------------------------------- the lab's model


def lab_questions() -> str:
    """Twenty questions about the bundled photos."""
    data = result("lab-questions")

    def marked(text: str, right: bool) -> str:
        return f"{'✓' if right else '✗'} {text}"

    rows = [
        [
            row["photo"],
            row["question"],
            row["accepted"][0],
            marked(row["all tokens"], row["all tokens right"]),
            marked(row["reduced"], row["reduced right"]),
        ]
        for row in data["rows"]
    ]
    right = [sum(row[f"{kind} right"] for row in data["rows"]) for kind in ("all tokens", "reduced")]
    rows.append(["", "**right**", "", *(f"**{count} of {len(data['rows'])}**" for count in right)])
    heads = ["photo", "question", "right answer", "196 tokens", f"{data['budget']} tokens (`{data['method']}`)"]
    return table(heads, rows, left=len(heads))


def lab_descriptions() -> str:
    """One sentence about each bundled photo."""
    data = result("lab-questions")
    rows = [[row["photo"], row["all tokens"], row["reduced"]] for row in data["descriptions"]]
    return table(["photo", "196 tokens", f"{data['budget']} tokens (`{data['method']}`)"], rows, left=3)


def lab_names() -> str:
    """Accuracy of concept names in trials with two names."""
    data = result("concept-names")
    judged: list[tuple[str, str, dict[str, Any]]] = []
    if data["sheets"]:
        judged.append(("contact sheets, labelled blind", "same photos", data["sheets"]))
    for judge, kinds in data["clip"].items():
        for distractor in ("same photos", "other"):
            scores = {kind: kinds[kind][distractor] for kind in ("patches", "captions")}
            if min(score["trials"] for score in scores.values()) >= 20:
                judged.append((f"CLIP on crops, {judge}", distractor, scores))
    rows = [
        [
            judge,
            "in the same photos" if distractor == "same photos" else "anywhere",
            *(
                f"{100 * scores[kind]['accuracy']:.0f} % of {scores[kind]['trials']}"
                for kind in ("patches", "captions")
            ),
        ]
        for judge, distractor, scores in judged
    ]
    return table(["judge", "wrong name fires", "names from patches", "names from captions"], rows, left=2)


def lab_tasks() -> str:
    """The lab's model against guessing, on all tasks."""
    rows = [
        [
            row["task"].replace("-", " ", 1),
            row["metric"],
            f"{row['questions']:,}",
            rounded(row["photo"]),
            rounded(row["no photo"]),
            rounded(row["one answer"]),
            "yes" if row["learned"] else "**no**",
        ]
        for row in result("lab-tasks")["rows"]
    ]
    heads = ["task", "score", "questions", "with the photo", "without it", "one answer to all", "learned"]
    return table(heads, rows, left=2)


def lab_parts() -> str:
    """Question types of the lab's tasks."""
    rows: list[list[str]] = []
    for row in result("lab-tasks")["rows"]:
        parts = {part: value for part, value in row["parts"].items() if part.startswith("category ")}
        rows += [
            [
                row["task"].replace("-", " ", 1),
                part.removeprefix("category "),
                rounded(value),
                rounded(row["parts without photo"].get(part, 0.0)),
            ]
            for part, value in parts.items()
            if len(parts) > 1
        ]
    return table(["task", "question type", "with the photo", "without it"], rows, left=2)


REGIONS: dict[str, Callable[[], str]] = {
    "equal-settings": equal_settings,
    "lead": lead,
    "fourth-model": fourth_model,
    "first-model": first_model,
    "plain-baselines": plain_baselines,
    "findings": findings,
    "dictionary-sizes": dictionary_sizes,
    "speed-prefill": speed_prefill,
    "speed-core": speed_core,
    "explorer": explorer,
    "speed-methods": speed_methods,
    "speed-prefilter": speed_prefilter,
    "speed-inside": speed_inside,
    "speed-training": speed_training,
    "sae-token-kinds": sae_token_kinds,
    "lab-questions": lab_questions,
    "lab-descriptions": lab_descriptions,
    "lab-names": lab_names,
    "serving-transformers": lambda: serving_tables.load_test(result("serving-transformers")),
    "serving-vllm": lambda: serving_tables.load_test(result("serving-vllm")),
    "serving-vllm-engine": lambda: serving_tables.load_test(result("serving-vllm-engine")),
    "serving-store": lambda: serving_tables.store(result("serving-store")),
    "serving-faults": lambda: serving_tables.faults(result("serving-faults")),
    "lab-tasks": lab_tasks,
    "lab-parts": lab_parts,
}


def pages() -> list[Path]:
    """Return the pages that may have regions."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def fill(text: str) -> str:
    """Return a page with all of its regions filled."""
    return REGION.sub(lambda match: f"{match[1]}{REGIONS[match[2]]()}\n{match[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    check = parser.parse_args().check
    stale = [path for path in pages() if fill(path.read_text(encoding="utf-8")) != path.read_text(encoding="utf-8")]
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'is out of date' if check else 'updated'}")
        if not check:
            text = fill(path.read_text(encoding="utf-8"))
            write_atomic(path, lambda target, text=text: target.write_text(text, encoding="utf-8"))
    if check and stale:
        sys.exit("Run python scripts/make_tables.py.")


if __name__ == "__main__":
    main()
