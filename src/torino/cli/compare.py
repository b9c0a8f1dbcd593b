"""The command ``torino compare``: one question about one picture, answered with the tokens that each method leaves."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torino.cli._common import LAB, hushed, one_picture, open_sae, picture_file, reads_concepts, split_words
from torino.core.errors import BadParameter, TorinoError

if TYPE_CHECKING:  # torch, Pillow and transformers are only fetched by those who compare
    from collections.abc import Mapping, Sequence

    from torino.core.reduction import Reduction
    from torino.evaluation.engine import Answered
    from torino.evaluation.protocol import Setting
    from torino.reducers import Reducer

out = Console()
errors = Console(stderr=True)

EPILOG = (
    'Examples: [cyan]torino compare photo.jpg "What is on the table?"[/] (the lab, a small model that comes with '
    'torino) · [cyan]torino compare photo.jpg "How many cups?" --budget 128 -o cups.png[/] · '
    "[cyan]torino compare photo.jpg \"What is this?\" --methods torino-m,torino-p,visionzip,'tome(budget=32)'[/] · "
    '[cyan]torino compare photo.jpg "What is this?" --model llava-hf/llava-1.5-7b-hf --sae ./my-sae[/]'
)
PICTURE = Path("compare.png")
NAME = "SAE"


def compare(
    image: Annotated[
        str, typer.Argument(metavar="IMAGE", help="An image file, or astronaut, coffee, chelsea or rocket: bundled.")
    ],
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="What to ask about it.")],
    budget: Annotated[int, typer.Option(min=1, help="Tokens that each method leaves of the image.")] = 64,
    methods: Annotated[
        str, typer.Option(help="Methods, separated by commas, or 'all'; specs with brackets run as they are written.")
    ] = "all",
    model: Annotated[
        str,
        typer.Option(help="Hub name or folder of a vision-language model; 'lab' is the one that comes with torino."),
    ] = LAB,
    sae: Annotated[
        str | None,
        typer.Option(
            help="Folder, file or hub repository of the SAE; 'lab' is that of --model lab, which takes it by itself; "
            "'raw' is the no-SAE ablation."
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The picture: .png, .jpg or .webp.")] = PICTURE,
    padding: Annotated[
        str, typer.Option(help="crop: as the model's processor does it; square: pad first, so that nothing is cut.")
    ] = "crop",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 32,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, …")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or auto.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Ask one question with the tokens that each method leaves, side by side, at the same budget.

    Prints the answers, those equal to the one with all tokens marked, and writes a picture of what each kept.
    """
    # Whatever can be wrong without the model is said before the model is fetched.
    if padding not in ("crop", "square"):
        raise BadParameter(f"--padding must be crop or square, got {padding!r}.")
    picture_file("--output", output)
    with errors.status("Starting …") as told:
        from torino.datasets.images import prepare
        from torino.vlm.session import check_vlm
        from torino.vlm.towers import device_of

        if model == LAB:
            sae = sae or LAB
        else:
            check_vlm(model)
        picture = one_picture(image)
        prepare(picture, padding)  # type: ignore[arg-type]: checked above
        settings, notes = _settings(methods, budget, sae)
        saes = {NAME: open_sae(sae, device=device_of(device))} if sae and any(one.sae for one in settings) else {}
        reducers = {one.id: one.reducer(saes) for one in settings}
        with hushed():
            from torino.vlm.session import load_vlm

            told.update(f"Opening {escape(model)} …")
            opened, processor = load_vlm(model, device, dtype)
            told.update("Looking, and answering with each method …")
            asked = _Asked(opened, processor, picture, question, max_new_tokens, padding)
            seen = asked.under(reducers)
        full = seen.answers["full"]
        if full.text is None:
            raise TorinoError(f"The model could not answer with all tokens: {full.error.partition(': ')[2]}")
        told.update("Drawing …")
        drawn = _draw(output, question, settings, seen)
    rows = [_facts(one, seen.answers[one.id], full.text) for one in settings]
    for row in rows:
        if row.get("error"):
            notes.append(f"{row['label']} was left out: {row['error']}")
    if not drawn:
        notes.append("No picture was drawn: this model sees an image in tiles, or no method answered.")
    if as_json:
        told_ = {
            "model": model,
            "image": image,
            "question": question,
            "budget": budget,
            "answers": rows,
            "notes": notes,
        }
        out.print_json(json.dumps({**told_, "picture": str(output) if drawn else None}))
        return
    _print([row for row in rows if not row.get("error")])
    for note in notes:
        errors.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True, highlight=False)
    if drawn:
        out.print(f"Drew what each method kept to {escape(str(output))}.", highlight=False)


def _settings(methods: str, budget: int, sae: str | None) -> tuple[list[Setting], list[str]]:
    """All tokens first, then the methods in the order they were named; and what was left out of 'all'."""
    from torino.evaluation.protocol import FULL, default_methods, fixed_settings, own_settings
    from torino.reducers import get

    words, notes = split_words(methods), list[str]()
    if words == ["all"]:
        words = sorted(default_methods(), key=lambda name: (not name.startswith("torino-"), name))
        left = [name for name in words if reads_concepts(name) and sae is None]
        if left:
            notes.append(f"Left out: {', '.join(left)}, which read concepts: give --sae.")
        words = [name for name in words if name not in left]
    found = [FULL]
    for word in words:
        if reads_concepts(word) and sae is None:
            raise BadParameter(
                f"{word} groups patches by concepts, so say which SAE reads them: --sae FOLDER, --sae "
                "owner/repository, or --sae raw for none."
            )
        if "(" in word:
            made = own_settings([word], [NAME])
        else:
            get(word)
            made = fixed_settings([word], [budget], [NAME], 1)
        for one in made:
            reducer = one.reducer({NAME: open_sae("raw")})
            if reducer is not None and reducer.needs & {"joint", "text"}:
                raise BadParameter(
                    f"{one.spec} chooses patches by the question, which takes a CLIP that reads it. Leave it out here, "
                    "and ask with torino ask --method cdpruner --clip NAME."
                )
        found += [one for one in made if one.id not in {other.id for other in found}]
    if len(found) == 1:
        raise BadParameter("There is nothing to compare. Give --methods, or leave it out for all.")
    return found, notes


@dataclass
class _Seen:
    """Answers, the photo as the tower saw it, and what each setting made of it; also what the engine keeps these in."""

    answers: dict[str, Answered] = field(default_factory=dict[str, Any])
    plans: dict[str, Reduction] = field(default_factory=dict[str, Any])
    image: Any = None

    def photo(self, image: Any) -> None:
        self.image = image

    def plan(self, setting: str, plan: Reduction) -> None:
        self.plans[setting] = plan


@dataclass(frozen=True)
class _Asked:
    """One question about one picture."""

    model: Any
    processor: Any
    picture: Any
    question: str
    length: int
    padding: Any

    def under(self, reducers: Mapping[str, Reducer | None]) -> _Seen:
        """Answer under all settings; methods that read what the tower does not give say so in place of an answer."""
        seen = self._once(reducers, _Seen())
        failures = {answer.error for answer in seen.answers.values()}
        if len(failures) > 1 or not failures.pop():
            return seen
        # all failed alike: the tower lacks a signal, and it is asked anew for each set of signals
        seen = _Seen()
        kinds: dict[frozenset[str], dict[str, Reducer | None]] = {}
        for name, reducer in reducers.items():
            kinds.setdefault(frozenset[str]() if reducer is None else reducer.needs, {})[name] = reducer
        for some in kinds.values():
            self._once(some, seen)
        return seen

    def _once(self, reducers: Mapping[str, Reducer | None], seen: _Seen) -> _Seen:
        from torino.evaluation.engine import Asked, Engine

        engine = Engine(self.model, self.processor, reducers, padding=self.padding)
        asked = [Asked(0, self.question, self.length)]
        for some in engine.answers([self.picture], asked, lambda *_: True, seen):  # type: ignore[arg-type]: kept in memory
            seen.answers.update({answer.setting: answer for answer in some})
        return seen


def _facts(setting: Setting, answer: Answered, full: str) -> dict[str, Any]:
    """One row of the table."""
    told: dict[str, Any] = {"method": setting.method, "label": setting.label, "spec": setting.spec}
    if answer.text is None:
        return {**told, "error": answer.error.partition(": ")[2] or answer.error}
    inside = setting.method != "full" and _works_inside(setting.method)
    return {
        **told,
        "tokens": answer.tokens,
        "answer": answer.text,
        "same": _alike(answer.text) == _alike(full),
        # what works inside the tower plans as the tower runs
        "plan_ms": None if inside or setting.method == "full" else round(answer.seconds["plan"] * 1e3, 2),
        "inside": inside,
    }


def _works_inside(method: str) -> bool:
    from torino.reducers import get

    return get(method).inside


def _alike(text: str) -> str:
    """An answer without what makes no difference: case, spaces and the full stop."""
    return " ".join(text.lower().split()).rstrip(" .")


def _draw(path: Path, question: str, settings: Sequence[Setting], seen: _Seen) -> bool:
    """Draw what each method kept, where the model sees an image whole."""
    from torino.viz.draw import save_picture
    from torino.viz.figures import ComparedAnswer, draw_compare

    full = seen.answers["full"].text or ""
    told: list[ComparedAnswer] = []
    for one in settings:
        text = seen.answers[one.id].text
        if text is not None and one.id in seen.plans:
            told.append(ComparedAnswer(one.label, seen.plans[one.id], text, _alike(text) == _alike(full)))
    if not told or seen.image is None:
        return False
    save_picture(draw_compare(seen.image, question, full, told), path)
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
        time = "" if full else "in the tower" if row["inside"] else f"{row['plan_ms']:.1f}"
        mark = "" if full else "[green]✓[/]" if row["same"] else ""
        answer = escape(row["answer"]) or "[dim](nothing)[/]"
        table.add_row(
            escape(row["label"]), str(row["tokens"]), time, mark, answer, style="bold" if full else "", end_section=full
        )
    out.print(table)
    others = [row for row in rows if row["method"] != "full"]
    same = sum(bool(row["same"]) for row in others)
    out.print(
        f"✓ {same} of {len(others)} methods answer as with all {rows[0]['tokens']} tokens. Plan: one cold run; for "
        "more see torino bench.",
        highlight=False,
        soft_wrap=True,
    )
