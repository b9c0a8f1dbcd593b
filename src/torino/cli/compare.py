"""``torino compare``: answer one question with the tokens that each method keeps, side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from torino.cli._common import (
    LAB,
    AttentionOption,
    ClipOption,
    DeviceOption,
    DtypeOption,
    ImageArgument,
    JsonOption,
    MethodsOption,
    ModelOption,
    PaddingOption,
    PositionsOption,
    QuestionArgument,
    SaeOption,
    all_methods,
    check_image_path,
    errors,
    examples,
    find_package,
    load_sae,
    load_session,
    memory_errors,
    missing_sae,
    named_methods,
    note,
    open_single_image,
    out,
    parse_budgets,
    quiet_transformers,
    reads_concepts,
    split_list,
    split_names,
)
from torino.cli._stop import START_OVER, on_stop
from torino.core.errors import BadParameter, TorinoError

if TYPE_CHECKING:
    from torino.core.reduction import Reduction
    from torino.evaluation.protocol import Setting
    from torino.reducers import Reducer
    from torino.vlm import VLM

EPILOG = examples(
    'torino compare astronaut "What color is the shirt?" --budget 32',
    'torino compare astronaut "What color is the suit?" --truth orange --budget 32',
    'torino compare photo.jpg "How many cups?" --budget 128,64 -o cups.png',
    "torino compare photo.jpg \"What is this?\" --methods torino-m,visionzip,'tome(budget=32)'",
    'torino compare photo.jpg "What is this?" --model llava-hf/llava-1.5-7b-hf --sae ./my-sae',
)
PICTURE = Path("compare.png")
LABEL = "SAE"


@dataclass(frozen=True)
class ComparedMethod:
    """The answer of one method, or the reason why it has none."""

    setting: Setting
    text: str | None
    tokens: int = 0
    plan_ms: float | None = None
    reduction: Reduction | None = None
    error: str = ""


def compare(
    image: ImageArgument,
    question: QuestionArgument,
    budget: Annotated[str, typer.Option(help="Tokens per image, one or several: 64 or 128,64.")] = "64",
    methods: MethodsOption = "all",
    truth: Annotated[
        str | None, typer.Option(help="The right answer, to mark answers right or wrong; several separated by |.")
    ] = None,
    model: ModelOption = LAB,
    sae: SaeOption = None,
    clip: ClipOption = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The picture: .png, .jpg or .webp.")] = PICTURE,
    padding: PaddingOption = "crop",
    positions: PositionsOption = "auto",
    attention: AttentionOption = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 32,
    device: DeviceOption = "auto",
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer one question with the tokens that each method keeps, side by side, at the same budget.

    Prints the answers and writes a picture of what each method kept.
    """
    on_stop(START_OVER)
    check_image_path("--output", output)
    if truth is not None and not all(answer.strip() for answer in truth.split("|")):
        raise BadParameter(f"--truth takes the right answer, or several separated by |, got {truth!r}.")
    budgets = parse_budgets("--budget", budget)
    with errors.status("Starting …") as status:
        from torino.core.device import resolve_device
        from torino.datasets.images import prepare
        from torino.vlm.loading import check_model

        check_model(model)
        package = find_package(model)
        if sae is None and package is not None and package.sae is not None:
            sae = model
        opened = open_single_image(image)
        prepare(opened, padding)
        settings, notes = _settings(methods, budgets, sae, clip)
        needs_sae = any(setting.sae for setting in settings)
        saes = {LABEL: load_sae(sae, device=resolve_device(device))} if sae is not None and needs_sae else {}
        reducers = {setting.id: setting.reducer(saes) for setting in settings}
        with quiet_transformers(), memory_errors(model, device):
            status.update(f"Loading {escape(model)} …")
            vlm = load_session(model, device, dtype, padding, positions, attention, clip)
            status.update("Encoding the image …")
            results, shown = _answer_all(vlm, opened, question, settings, reducers, max_new_tokens, status)
        full = results[0]
        if full.text is None:
            raise TorinoError(f"The model could not answer with all tokens: {full.error}")
        if all(result.error for result in results[1:]):
            raise TorinoError(f"No method could answer. {results[1].setting.label}: {results[1].error}")
        status.update("Drawing …")
        drawn = _draw(output, question, results, shown, truth)
    failed = [result for result in results if result.error]
    notes += [f"{result.setting.label} was left out: {result.error}" for result in failed]
    named = [result for result in failed if result.setting.method in named_methods(split_list(methods))]
    if not drawn:
        notes.append("No picture was drawn: this model splits images into tiles.")
    rows = [_row(result, full.text, truth) for result in results]
    if as_json:
        facts: dict[str, Any] = {"model": model, "image": image, "question": question}
        facts |= {"budget": budgets, "truth": truth}
        facts["answers"] = rows
        out.print_json(json.dumps({**facts, "notes": notes, "picture": str(output) if drawn else None}))
    else:
        _print([row for row in rows if not row.get("error")])
        for text in notes:
            note(text)
        if drawn:
            out.print(f"Wrote {escape(str(output))}: what each method kept.", highlight=False)
    if named:
        raise TorinoError(f"{named[0].setting.spec} was asked for and could not answer: {named[0].error}")


def _settings(
    methods: str, budgets: Sequence[int], sae: str | None, clip: str | None
) -> tuple[list[Setting], list[str]]:
    """Return all tokens first, then the methods in their order, and notes about what 'all' leaves out."""
    from torino.evaluation.protocol import FULL, fixed_settings, own_settings, split_specs
    from torino.reducers import get
    from torino.reducers.base import method_name

    words, notes = split_list(methods), list[str]()
    if not words:
        raise BadParameter("--methods is empty. Name methods, or omit it for all.")
    if "all" in words:
        every, notes = all_methods(sae=sae is not None, clip=clip is not None)
        every.sort(key=lambda name: (not name.startswith("torino-"), name))
        words = [*every, *(word for word in words if word != "all" and word not in every)]
    settings = [FULL]
    for word in words:
        if reads_concepts(word) and sae is None:
            raise missing_sae(word)
        get(method_name(word))
        budgeted, own = split_specs([word]) if split_names([word])[1] else ([word], [])
        as_written = bool(own) and not (budgeted and budgets)
        if not as_written and not budgets:
            raise BadParameter(f"{word} has no number of tokens. Give --budget, or a budget in its brackets.")
        added = own_settings([word], [LABEL]) if as_written else fixed_settings([word], budgets, [LABEL], 1)
        for setting in added:
            reducer = setting.reducer({LABEL: load_sae("none")})
            if clip is None and reducer is not None and reducer.needs & {"joint", "text"}:
                raise BadParameter(
                    f"{setting.spec} chooses patches by the question and needs the CLIP that reads it: --clip NAME."
                )
        settings += [setting for setting in added if setting.id not in {other.id for other in settings}]
    return settings, notes


def _answer_all(
    vlm: VLM,
    image: Any,
    question: str,
    settings: Sequence[Setting],
    reducers: Mapping[str, Reducer | None],
    length: int,
    status: Any,
) -> tuple[list[ComparedMethod], Any]:
    """Answer under all settings; the tower encodes the image once."""
    from torino.datasets.images import as_seen

    inputs = vlm.inputs(image, question)
    encoded = vlm.encode(inputs, reducers.values())
    patches = max(len(unit) for unit in encoded.run(None)[0].tokens)
    for setting in settings:
        if setting.budget is not None and setting.budget > patches:
            raise BadParameter(
                f"{setting.spec} asks for {setting.budget} tokens, more than the {patches} patches of the image, so "
                f"nothing would be reduced. Give a budget of at most {patches}."
            )
    results: list[ComparedMethod] = []
    for setting in settings:
        status.update(f"Answering with {escape(setting.label)} ({len(results) + 1} of {len(settings)}) …")
        try:
            reduction = vlm.reduce(encoded, reducers[setting.id])
            output = vlm.generate(inputs, [reduction], max_new_tokens=length)
            text, plans = output.texts[0].strip(), output.plans[0]
        except TorinoError as error:
            results.append(ComparedMethod(setting, None, error=str(error)))
            continue
        plan = plans[0] if len(plans) == 1 and setting.method != "full" else None
        in_tower = setting.method != "full" and "plan" not in reduction.seconds
        plan_ms = None if in_tower or setting.method == "full" else 1e3 * reduction.seconds["plan"]
        results.append(ComparedMethod(setting, text, reduction.tokens, plan_ms, plan))
    shown = as_seen(inputs.tensors, vlm.processor, inputs.images)
    return results, shown[0] if len(shown) == 1 else None


def _row(result: ComparedMethod, full: str, truth: str | None) -> dict[str, Any]:
    setting = result.setting
    facts: dict[str, Any] = {"method": setting.method, "label": setting.label, "spec": setting.spec}
    if result.text is None:
        return {**facts, "error": result.error}
    return {
        **facts,
        "tokens": result.tokens,
        "answer": result.text,
        "same": _normalized(result.text) == _normalized(full),
        "correct": is_correct(result.text, truth),
        "plan_ms": None if result.plan_ms is None else round(result.plan_ms, 2),
    }


def _normalized(text: str) -> str:
    """Drop case, extra spaces and the final full stop."""
    return " ".join(text.lower().split()).rstrip(" .")


def is_correct(text: str, truth: str | None) -> bool | None:
    """Return whether an answer equals one of the right answers after VQA's normalization; None without them."""
    if truth is None:
        return None
    from torino.evaluation.extraction import normalize_answer

    return normalize_answer(text) in {normalize_answer(answer) for answer in truth.split("|")}


def _draw(path: Path, question: str, results: Sequence[ComparedMethod], image: Any, truth: str | None) -> bool:
    """Draw what each method kept, if the model encodes the image whole."""
    from torino.viz.draw import save_picture
    from torino.viz.figures import ComparedAnswer, draw_compare

    full = results[0].text or ""
    answers = [
        ComparedAnswer(
            result.setting.label,
            result.reduction,
            result.text,
            _normalized(result.text) == _normalized(full),
            is_correct(result.text, truth),
        )
        for result in results
        if result.text is not None and result.reduction is not None
    ]
    if not answers or image is None:
        return False
    save_picture(draw_compare(image, question, full, answers, correct=is_correct(full, truth)), path)
    return True


def _print(rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("method", no_wrap=True)
    table.add_column("tokens", justify="right")
    table.add_column("plan, ms", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("answer")
    for row in rows:
        full = row["method"] == "full"
        time = "" if full else "in the tower" if row["plan_ms"] is None else f"{row['plan_ms']:.1f}"
        mark = "" if full else "=" if row["same"] else "≠"
        if row["correct"] is not None:
            mark = "[green]✓[/]" if row["correct"] else "[red]✗[/]"
        answer = escape(row["answer"]) or "[dim](nothing)[/]"
        style = "bold" if full else ""
        table.add_row(escape(row["label"]), str(row["tokens"]), time, mark, answer, style=style, end_section=full)
    out.print(table)
    others = [row for row in rows if row["method"] != "full"]
    same, correct = (sum(bool(row[name]) for row in others) for name in ("same", "correct"))
    legend = (
        f"= same answer as with all {rows[0]['tokens']} tokens ({same} of {len(others)} methods), ≠ another answer."
    )
    if rows[0]["correct"] is not None:
        legend = f"✓ right, ✗ wrong: {correct} of {len(others)} methods are right."
    out.print(
        f"{legend} Plan times are of one cold run; torino bench measures them.",
        highlight=False,
        soft_wrap=True,
    )
