"""Read benchmark samples from TSV or JSONL files without loading the images.

A TSV in VLMEvalKit's layout stores images as base64 text between the other columns. The file is read once, row by row.
A sample holds the text of its row and the location of its image, which is read on demand.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b, sha1
from pathlib import Path
from string import ascii_letters, ascii_uppercase, digits
from typing import Any, Literal, NamedTuple, cast

from torino.core.errors import BadFile
from torino.core.io import is_file
from torino.core.safety import is_inside
from torino.core.schema import parse_json
from torino.evaluation.images import ImageRef, decode_base64
from torino.evaluation.tsv import TsvRow, read_rows, unquote
from torino.evaluation.videos import COLUMNS, VideoRef, add_options, video_names, video_part

OnBadRow = Literal["skip", "raise"]

MAX_REFERENCE = 64  # an image cell of at most this many characters is the index of the row that holds the image
MAX_LITERAL = 100_000  # characters of a Python list; parsing one takes hundreds of bytes per character
LETTERS = frozenset(ascii_uppercase)
_BASE64_ALPHABET = f"{ascii_letters}{digits}+/".encode()
_EMPTY = ("", "nan", "NaN")
_QUOTED = re.compile(rb"""(['"])([^'"]+)\1""")


@dataclass(frozen=True)
class Sample:
    """One question about one image.

    Attributes
    ----------
    index : str
        Its name in the file, unique within a task.
    question : str
    answers : tuple of str
        The correct answers; for a multiple choice the correct letter.
    images : tuple of ImageRef
        Its images, nearly always one.
    options : mapping of letter to text
        Empty unless it is a multiple choice.
    hint : str
        Context that precedes the question; may be empty.
    group : str
        Shared by samples that are scored together: the rotations of a question, the two MME questions about an image.
    meta : mapping
        The other columns, such as ``category`` and ``split``.
    row : int
        Number of its first line in the file, from 1.
    """

    index: str
    question: str
    answers: tuple[str, ...]
    images: tuple[ImageRef, ...]
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    hint: str = ""
    group: str = ""
    meta: Mapping[str, str] = field(default_factory=dict[str, str])
    row: int = 0

    @property
    def image(self) -> ImageRef:
        """Its image; the first if there are several."""
        return self.images[0]


@dataclass(frozen=True)
class RowProblem:
    """A row that cannot be used, and why."""

    row: int
    index: str
    reason: str

    def __str__(self) -> str:
        return f"line {self.row}{f' (index {self.index})' if self.index else ''}: {self.reason}"


class SampleTable(NamedTuple):
    """Contents of a file of samples."""

    samples: list[Sample]
    problems: list[RowProblem]
    columns: tuple[str, ...]
    fingerprint: str


class _BadRow(Exception):
    """A row cannot be used; the message gives the reason."""


def read_tsv(
    path: str | Path,
    *,
    image_root: str | Path | None = None,
    on_bad_row: OnBadRow = "skip",
    allow_outside: bool = False,
    frames: int | None = None,
) -> SampleTable:
    """Read a TSV in VLMEvalKit's layout.

    Parameters
    ----------
    path : path
        Columns ``index``, ``question``, ``answer`` or ``answers``, and ``image`` (base64, or the index of the row with
        the same image) or ``image_path``; optionally ``A``, ``B``, … and ``hint``. Other columns become ``meta``.
        Videos are read as :mod:`torino.evaluation.videos` says.
    image_root : path, optional
        Folder of relative image paths; by default the folder of the file, its ``images`` and
        ``images/<name of the file>``.
    on_bad_row : {"skip", "raise"}
        Add a row that cannot be used to ``problems``, or raise :class:`BadFile`.
    allow_outside : bool
        Accept image files outside ``image_root`` or the folder of the file, after symbolic links are resolved;
        otherwise they raise :class:`BadFile`.
    frames : int, optional
        Number of frames to read of each video, 8 by default.
    """
    path = Path(path)
    samples: list[Sample] = []
    references: list[tuple[int, str]] = []  # position in samples, index of the row that holds the image
    problems = _ProblemList(path, on_bad_row)
    digest = blake2b(digest_size=16)
    line_by_index: dict[str, int] = {}
    images_by_index: dict[str, tuple[ImageRef, ...]] = {}  # includes rows that cannot be used otherwise
    try:
        with path.open("rb") as file:
            rows = read_rows(file)
            columns = _read_header(path, next(rows, None))
            finder = _ImageFinder(path, image_root, allow_outside, frames)
            for number, start, raw, spans in rows:
                index = ""
                try:
                    cells, span = _read_cells(raw, spans, columns)
                    index = cells.get("index", "").strip() or str(len(line_by_index))
                    _register(line_by_index, index, number)
                    if reason := add_options(cells):
                        raise _BadRow(reason)
                    images, reference = _locate_images(path, start, raw, span, cells, finder)
                    images_by_index[index] = images
                    digest.update(repr((sorted(cells.items()), [image.key for image in images], reference)).encode())
                    sample = make_sample(cells, images, number, index)
                except _BadRow as error:
                    problems.add(number, index, str(error))
                    continue
                if reference:
                    references.append((len(samples), reference))
                samples.append(sample)
    except OSError as error:
        raise BadFile(f"Cannot read {path}: {error.strerror or error}.") from error
    _resolve_references(samples, references, images_by_index, problems)
    return SampleTable(samples, problems.entries, tuple(columns), digest.hexdigest())


def read_jsonl(
    path: str | Path,
    *,
    image_root: str | Path | None = None,
    on_bad_row: OnBadRow = "skip",
    allow_outside: bool = False,
) -> SampleTable:
    """Read samples from a JSONL file, one object per line, with their images in a folder.

    Each object has ``image`` (a path, or a list of them), ``question``, ``answer`` or ``answers``; optionally ``index``
    or ``id``, ``options`` (a list, or letters to texts) and ``hint``. Other fields become ``meta``. The parameters are
    those of :func:`read_tsv`.
    """
    path = Path(path)
    samples: list[Sample] = []
    problems = _ProblemList(path, on_bad_row)
    digest = blake2b(digest_size=16)
    line_by_index: dict[str, int] = {}
    columns: dict[str, None] = {}
    finder = _ImageFinder(path, image_root, allow_outside)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                index = ""
                try:
                    cells, names = _read_json_cells(line)
                    index = cells.get("index", "").strip() or str(number - 1)
                    _register(line_by_index, index, number)
                    digest.update(line)
                    images = tuple(finder.find(name) for name in names)
                    if not images:
                        raise _BadRow("no image")
                    samples.append(make_sample(cells, images, number, index))
                    columns |= dict.fromkeys(cells)
                except _BadRow as error:
                    problems.add(number, index, str(error))
    except OSError as error:
        raise BadFile(f"Cannot read {path}: {error.strerror or error}.") from error
    return SampleTable(samples, problems.entries, tuple(columns), digest.hexdigest())


def make_sample(cells: Mapping[str, str], images: tuple[ImageRef, ...], row: int, index: str) -> Sample:
    """Build a sample from the texts of a row."""
    question = cells.get("question", "").strip()
    if question in _EMPTY:
        raise _BadRow("no question")
    answers = parse_answers(cells.get("answers", "")) or parse_answers(cells.get("answer", ""))
    if not answers:
        raise _BadRow("no answer")
    options = {letter: cells[letter].strip() for letter in ascii_uppercase if cells.get(letter, "") not in _EMPTY}
    if options:
        answers = (_correct_letter(answers[0], options),)
    used = {"index", "question", "answer", "answers", "image", "image_path", "hint", *ascii_uppercase}
    meta = {name: text for name, text in cells.items() if name not in used and text not in _EMPTY}
    if cells.get("image_path", "") not in _EMPTY:
        meta["image_path"] = cells["image_path"]
    hint = cells.get("hint", "").strip()
    return Sample(
        index, question, answers, images, options, "" if hint in _EMPTY else hint, group=index, meta=meta, row=row
    )


def _register(line_by_index: dict[str, int], index: str, line: int) -> None:
    if index in line_by_index:
        raise _BadRow(f"duplicate index, first used on line {line_by_index[index]}")
    line_by_index[index] = line


def _correct_letter(answer: str, options: Mapping[str, str]) -> str:
    """Return the letter of the correct option, which may be given in either case or by its text."""
    if answer.strip().upper() in options:
        return answer.strip().upper()
    matches = [letter for letter, text in options.items() if text.strip() == answer.strip()]
    if len(matches) == 1:
        return matches[0]
    raise _BadRow(f"the answer {answer!r} is not among the options {', '.join(options)}")


def parse_answers(text: str) -> tuple[str, ...]:
    """Return the correct answers in a cell: one text, or a list of texts or of objects with the field ``answer``.

    Examples
    --------
    >>> parse_answers("['two', '2']"), parse_answers("a dog"), parse_answers('[{"answer": "red"}]')
    (('two', '2'), ('a dog',), ('red',))
    """
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        for parse in (parse_json, ast.literal_eval) if len(text) <= MAX_LITERAL else (parse_json,):
            try:
                items = cast(list[Any], parse(text))
                answers = [
                    str(cast(dict[str, Any], item).get("answer", "") if isinstance(item, dict) else item)
                    for item in items
                ]
                "".join(answers).encode()  # raises for a lone surrogate
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):  # cells hold arbitrary text
                continue
            return tuple(answers)
    return () if text in _EMPTY else (text,)


def _is_base64(text: bytes) -> bool:
    """Return whether the text can be decoded; well-formed text is recognized without decoding it."""
    rest = text.translate(None, _BASE64_ALPHABET)
    if len(text) % 4 == 0 and rest in (b"", b"=", b"==") and text.endswith(rest):
        return True
    try:
        return bool(decode_base64(text))
    except ValueError:
        return False


class _ProblemList:
    """Collect rows that cannot be used, or raise at the first."""

    def __init__(self, path: Path, on_bad_row: OnBadRow) -> None:
        self.path, self.on_bad_row, self.entries = path, on_bad_row, list[RowProblem]()

    def add(self, row: int, index: str, reason: str) -> None:
        problem = RowProblem(row, index, reason)
        if self.on_bad_row == "raise":
            raise BadFile(f"{self.path}, {problem}. Fix the row, or skip such rows with on_bad_row='skip'.")
        self.entries.append(problem)


class _ImageFinder:
    """Find image files in the usual folders of a table."""

    def __init__(self, path: Path, root: str | Path | None, allow_outside: bool, frames: int | None = None) -> None:
        self.path, self.allow_outside, self.frames = path, allow_outside, frames
        base = path.parent
        self.stem = stem = path.stem.removesuffix("_local")
        usual = (base, base / "images", base / "images" / stem, base / "images" / stem.split("_")[0])
        self.roots = usual if root is None else (Path(root),)

    def find_video(self, cells: Mapping[str, str]) -> VideoRef:
        """Return the video of a row; one image for the same part of the same file."""
        names = video_names(cells)
        for name in names:
            try:
                found = self.find(name, folders=True)
            except _BadRow:
                continue
            part, frames = video_part(cells), self.frames
            key = blake2b(f"{found.key}/{part}/{frames}".encode(), digest_size=16).hexdigest()
            given = {} if frames is None else {"frames": frames}
            return VideoRef(found.path, key, between=part, **given)
        shown = names[0][:100] if names else ""
        raise _BadRow(f"video {shown} not found in {', '.join(map(str, self.roots))}" if names else "no video")

    def find(self, name: str, *, folders: bool = False) -> ImageRef:
        for root in self.roots:
            path = root / name  # an absolute name ignores root
            if is_file(path) or (folders and path.is_dir()):
                if not self.allow_outside and not is_inside(path, self.roots[0]):
                    raise BadFile(
                        f"{self.path} names the image {name}, which is outside its folder {self.roots[0]}. Copy the "
                        "image there, or allow other folders with --allow-outside (allow_outside=True)."
                    )
                # names, so that the key is the same on every machine; the size, in case the image is replaced
                identity = f"{self.stem}/{name}/{path.stat().st_size}"
                return ImageRef(path, blake2b(identity.encode(), digest_size=16).hexdigest())
        shown = name if len(name) <= 100 else f"{name[:100]}… ({len(name):,} characters)"
        raise _BadRow(f"image {shown} not found in {', '.join(map(str, self.roots))}")


def _read_header(path: Path, row: TsvRow | None) -> list[str]:
    if row is None or row.spans is None:
        raise BadFile(f"{path} is empty or has no header line. Accepted: a TSV whose first line names its columns.")
    try:
        names = [
            unquote(row.raw[a:b]).decode("utf-8-sig" if not a else "utf-8").strip().strip('"') for a, b in row.spans
        ]
    except UnicodeDecodeError as error:
        raise BadFile(f"{path} is not a text file in UTF-8: {error}.") from error
    # letters of options keep their case; other names are accepted in either case
    names = [name if name in LETTERS else name.lower() for name in names]
    missing = [name for name in ("question",) if name not in names]
    if not {"answer", "answers", "correct_choice"} & set(names):
        missing.append("answer")
    if not {"image", "image_path", *COLUMNS} & set(names):
        missing.append("image")
    if missing:
        advice = (
            " Only the authors can score a test set without answers; use the development set."
            if missing == ["answer"]
            else ""
        )
        raise BadFile(
            f"{path} has no column {' and no column '.join(missing)}; it has {', '.join(names)}. Accepted: index, "
            f"question, answer (or answers), image (or image_path), and A, B, … for a multiple choice.{advice}"
        )
    return names


def _read_cells(
    raw: bytes, spans: Sequence[tuple[int, int]] | None, columns: Sequence[str]
) -> tuple[dict[str, str], tuple[int, int]]:
    """Return the texts of a row except its image, and the span of the image."""
    if spans is None:
        raise _BadRow("unclosed quote")
    if len(spans) != len(columns):
        raise _BadRow(f"{len(spans)} cells, but the header has {len(columns)}")
    cells: dict[str, str] = {}
    image = (0, 0)
    for name, (start, stop) in zip(columns, spans, strict=True):
        if name == "image":
            if raw[start : start + 1] == b'"' and raw[stop - 1 : stop] == b'"' and stop - start > 1:
                start, stop = start + 1, stop - 1
            image = (start, stop)
            continue
        try:
            cells[name] = unquote(raw[start:stop]).decode("utf-8")
        except UnicodeDecodeError:
            raise _BadRow(f"column {name} is not text in UTF-8") from None
    return cells, image


def _locate_images(
    path: Path, offset: int, raw: bytes, span: tuple[int, int], cells: Mapping[str, str], finder: _ImageFinder
) -> tuple[tuple[ImageRef, ...], str]:
    """Return the images of a row, or the index of the row that holds them."""
    start, stop = span
    text = raw[start : min(stop, start + MAX_REFERENCE + 1)]
    if stop - start <= MAX_REFERENCE:
        reference = text.decode("utf-8", errors="replace").strip()
        if reference not in _EMPTY:
            return (), reference
        names = parse_answers(cells.get("image_path", ""))
        if not names and any(cells.get(name, "") not in _EMPTY for name in COLUMNS):
            return (finder.find_video(cells),), ""
        if not names:
            raise _BadRow("no image")
        return tuple(finder.find(name) for name in names), ""
    spans = [span]
    if text[:1] == b"[":
        spans = [(start + match.start(2), start + match.end(2)) for match in _QUOTED.finditer(raw[start:stop])]
        if not spans:
            raise _BadRow("the list of images contains no quoted base64 text")
    images: list[ImageRef] = []
    for first, last in spans:
        data = raw[first:last]
        if not _is_base64(data):
            raise _BadRow("the image is not base64 text")
        key = sha1(data, usedforsecurity=False).hexdigest()  # the fastest hash; files are gigabytes large
        images.append(ImageRef(path, key, offset + first, last - first))
    return tuple(images), ""


def _resolve_references(
    samples: list[Sample],
    references: Sequence[tuple[int, str]],
    images_by_index: Mapping[str, tuple[ImageRef, ...]],
    problems: _ProblemList,
) -> None:
    """Fill in the images of rows that refer to another row; drop those whose image is missing."""
    dropped: list[int] = []
    for position, reference in references:
        sample = samples[position]
        images = images_by_index.get(reference, ())
        if images:
            samples[position] = replace(sample, images=images)
        else:
            dropped.append(position)
            problems.add(sample.row, sample.index, f"it refers to the image of index {reference!r}, which has none")
    for position in reversed(dropped):
        del samples[position]


def _read_json_cells(line: bytes) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the texts of a JSON line, and the names of its images."""
    try:
        value: dict[str, Any] = parse_json(line, dict)
    except ValueError as error:
        raise _BadRow(str(error)) from None
    fields = {name: item for name, item in value.items() if item is not None}
    images = fields.pop("image", fields.pop("images", []))
    names = tuple(str(name) for name in cast(list[Any], images)) if isinstance(images, list) else (str(images),)
    options = fields.pop("options", fields.pop("choices", None))
    if isinstance(options, list):
        options = dict(zip(ascii_uppercase, cast(list[Any], options), strict=False))
    if isinstance(options, dict):
        fields |= cast(dict[Any, Any], options)
    cells = {
        name: item if isinstance(item, str) else json.dumps(item, ensure_ascii=False) for name, item in fields.items()
    }
    if "index" not in cells:
        cells["index"] = cells.pop("id", cells.pop("question_id", ""))
    return cells, names
