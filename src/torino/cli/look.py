"""The command ``torino look``: one picture, its concepts, and what is left of its tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torino.cli._common import LAB, hushed, one_picture, open_sae, picture_file, split_pairs
from torino.core.errors import BadParameter

if TYPE_CHECKING:  # torch, Pillow and transformers are only fetched by those who look
    from collections.abc import Mapping

    from torino.core.reduction import Reduction
    from torino.vlm.towers import Tower

out = Console()
errors = Console(stderr=True)

EPILOG = (
    "Examples: [cyan]torino look[/] (a bundled photo) · [cyan]torino look photo.jpg -o photo-look.png --show[/] · "
    '[cyan]torino look photo.jpg --method torino-p --pairs "2,1 2,2 4,4"[/] · '
    "[cyan]torino look photo.jpg --tower openai/clip-vit-large-patch14-336 --block 22 --sae ./my-sae[/]"
)
METHODS = ("torino-m", "torino-p")
PICTURE = Path("look.png")
LARGEST = 4  # groups that are told of each setting


def look(
    image: Annotated[
        str | None,
        typer.Argument(metavar="IMAGE", help="An image file, or astronaut (if left out), coffee, chelsea or rocket."),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The picture: .png, .jpg or .webp.")] = PICTURE,
    method: Annotated[
        str, typer.Option(help="torino-m merges the patches of a group, torino-p keeps one of them.")
    ] = "torino-m",
    pairs: Annotated[
        str, typer.Option(help="Pairs k,delta, separated by spaces, each a row of the picture.")
    ] = "1,1 2,2 3,3",
    sae: Annotated[
        str | None,
        typer.Option(
            help="Folder, file or hub repository of the SAE; 'lab' is that of --tower lab, which takes it by itself; "
            "'raw' is the no-SAE ablation."
        ),
    ] = None,
    tower: Annotated[
        str, typer.Option(help="Hub name or folder of a vision tower; 'lab' is the one that comes with torino.")
    ] = LAB,
    block: Annotated[
        int | None, typer.Option(help="Block whose output is tapped; by default the one that the SAE was trained on.")
    ] = None,
    padding: Annotated[
        str, typer.Option(help="crop: as the tower's processor does it; square: pad first, so that nothing is cut.")
    ] = "crop",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, …")] = "auto",
    show: Annotated[bool, typer.Option("--show", help="Also draw the groups here in the terminal.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Look at an image: which patches share concepts, and how few tokens are left of it.

    Prints the counts for each pair of k and delta, and writes a picture. No language model is asked.
    """
    # Whatever can be wrong without the tower is said before it is fetched.
    if padding not in ("crop", "square"):
        raise BadParameter(f"--padding must be crop or square, got {padding!r}.")
    if method not in METHODS:
        raise BadParameter(f"--method must be {' or '.join(METHODS)}, got {method!r}. Others: torino compare.")
    wanted = split_pairs(pairs)
    if not wanted:
        raise BadParameter("There is no pair to look at. Give at least one, such as --pairs '2,2'.")
    picture_file("--output", output)
    if sae is None and tower != LAB:
        raise BadParameter(
            f"Say which SAE reads the tokens of {tower}: --sae FOLDER, --sae owner/repository, or --sae raw for none."
        )
    with errors.status("Starting …") as told:
        from torino_lab.shipped import lab_photo

        from torino.core.explanation import names_of
        from torino.datasets.images import prepare
        from torino.vlm.towers import device_of

        source = str(lab_photo() if image is None else image)
        picture = one_picture(source)
        prepare(picture, padding)  # type: ignore[arg-type]: checked above
        encoder: Any = open_sae(sae or LAB, device=device_of(device))
        with hushed():
            told.update(f"Opening the tower {escape(tower)} …")
            opened = _open(tower, block, encoder, device)
            told.update("Looking …")
            plans = _plans(opened, picture, encoder, method, wanted, padding)
            photo = _seen(opened, picture, padding)
        told.update("Drawing …")
        words = names_of(next(iter(plans.values()))[0])
        shown = [(f"k = {k}, δ = {delta}", plan) for (k, delta), (_, plan) in plans.items()]
        _draw(output, photo, shown, words, f"{Path(source).stem} · {opened.origin} · {method}")
    rows = [_facts(k, delta, plan, words) for (k, delta), (_, plan) in plans.items()]
    if as_json:
        facts = {
            "image": source,
            "method": method,
            "tower": str(opened.origin),
            "patches": shown[0][1].patches,
            "settings": rows,
            "picture": str(output),
        }
        out.print_json(json.dumps(facts))
        return
    _print(rows, shown[0][1].patches, Path(source).name, str(opened.origin), method)
    if show:
        from torino.viz.terminal import draw_groups

        out.print(draw_groups([(heading.replace(" ", ""), plan) for heading, plan in shown], out.width, words))
    out.print(f"Drew the groups, the kept patches and what is left to {escape(str(output))}.", highlight=False)


def _open(name: str, block: int | None, encoder: Any, device: str) -> Tower:
    """The tower, tapped where the SAE was trained unless told otherwise."""
    from torino_lab.tower import lab_tower

    from torino.vlm.towers import load_tower

    if block is None:
        block = getattr(getattr(encoder, "card", None), "block", None)
    if name == LAB:
        return lab_tower(device=device) if block is None else lab_tower(block, device=device)
    return load_tower(name, block=block, device=device)


def _plans(
    tower: Tower, picture: Any, encoder: Any, method: str, pairs: list[tuple[int, int]], padding: Any
) -> dict[tuple[int, int], tuple[Any, Reduction]]:
    """One look of the tower, and what each pair makes of it."""
    from torino.reducers import make

    (tokens,) = tower.look(picture, padding=padding)
    reducers = {pair: make(method, sae=encoder, k=pair[0], delta=pair[1]) for pair in pairs}
    return {pair: (reducer, reducer.plan(tokens)) for pair, reducer in reducers.items()}


def _seen(tower: Tower, picture: Any, padding: Any) -> Any:
    """The picture as the tower saw it, scaled and cropped."""
    from torino.datasets.images import as_seen, mean_colour, prepare

    prepared = prepare(picture, padding, mean_colour(tower.processor))
    return as_seen(tower.processor(images=[prepared], return_tensors="pt"), tower.processor, [prepared])[0]


def _draw(path: Path, photo: Any, shown: list[tuple[str, Reduction]], words: Mapping[int, str], title: str) -> None:
    from torino.viz.draw import save_picture
    from torino.viz.figures import draw_look

    save_picture(draw_look(photo, shown, title=title, names=words), path)


def _facts(k: int, delta: int, plan: Reduction, words: Mapping[int, str]) -> dict[str, Any]:
    """What became of the tokens under one pair."""
    sizes: list[int] = plan.assigned[plan.assigned >= 0].bincount(minlength=len(plan)).tolist()
    largest = sorted(range(len(plan)), key=lambda token: (-sizes[token], token))[:LARGEST]
    groups = [
        {
            "patches": sizes[token],
            "concept": None if int(plan.concept[token]) < 0 else int(plan.concept[token]),
            "name": words.get(int(plan.concept[token])),
        }
        for token in largest
    ]
    return {
        "k": k,
        "delta": delta,
        "tokens": len(plan),
        "removed": round(1 - len(plan) / plan.patches, 4),
        "alone": sum(size == 1 for size in sizes),
        "largest": groups,
    }


def _print(rows: list[dict[str, Any]], patches: int, name: str, tower: str, method: str) -> None:
    out.print(
        f"[bold]{escape(name)}[/]: {patches} patches of {escape(tower)}, grouped by {method}",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    for heading in ("k", "δ", "tokens", "removed", "alone"):
        table.add_column(heading, justify="right")
    table.add_column("largest groups, in patches")
    for row in rows:
        groups = ", ".join(_group(one) for one in row["largest"] if one["patches"] > 1)
        table.add_row(
            str(row["k"]),
            str(row["delta"]),
            f"[bold]{row['tokens']}[/]",
            f"{row['removed']:.1%}",
            str(row["alone"]),
            groups or "none of more than one",
        )
    out.print(table)


def _group(one: Mapping[str, Any]) -> str:
    if one["name"]:
        return f"{one['patches']} {escape(one['name'])}"
    return str(one["patches"]) if one["concept"] is None else f"{one['patches']} [dim]#{one['concept']}[/]"
