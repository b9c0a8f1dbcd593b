"""Samples of a benchmark, read from a TSV of gigabytes or from a JSONL without holding a picture in memory.

A TSV in VLMEvalKit's layout keeps pictures as base64 text between the other columns. The file is read once, row by row;
what stays is the text of each row and the place of its picture, which is read again when it is asked for.
"""

from __future__ import annotations

import ast
import binascii
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b, sha1
from pathlib import Path
from string import ascii_letters, ascii_uppercase, digits
from typing import Any, Literal, NamedTuple, cast

from torino.core.errors import BadFile
from torino.evaluation.tsv import TsvRow, rows, unquoted

Broken = Literal["skip", "raise"]

REFERENCE = 64  # a picture column of at most so many characters is the index of the row that holds the picture
LETTERS = frozenset(ascii_uppercase)
_ALPHABET = f"{ascii_letters}{digits}+/".encode()
_EMPTY = ("", "nan", "NaN")
_QUOTED = re.compile(rb"""(['"])([^'"]+)\1""")


@dataclass(frozen=True)
class Place:
    """Where a picture is kept: a stretch of base64 text in a larger file, or a file of its own.

    Attributes
    ----------
    path : Path
    key : str
        Equal for equal pictures of a file, so that what was computed for one serves all questions about it.
    start, length : int
        The stretch of base64 text in ``path``; no length says that the file is the picture.
    """

    path: Path
    key: str
    start: int = 0
    length: int = 0

    def read(self) -> bytes:
        """The bytes of the picture file (JPEG, PNG, …)."""
        try:
            if not self.length:
                return self.path.read_bytes()
            with self.path.open("rb") as file:
                file.seek(self.start)
                return decode_base64(file.read(self.length))
        except (OSError, ValueError) as error:
            raise BadFile(
                f"Cannot read a picture from {self.path}: {error}. Was the file changed meanwhile?"
            ) from error


@dataclass(frozen=True)
class Sample:
    """One question about one picture.

    Attributes
    ----------
    index : str
        Its name in the file, unique in a task.
    question : str
    answers : tuple of str
        The right answers; for a multiple choice the right letter.
    images : tuple of Place
        Its pictures, nearly always one.
    options : mapping of letter to text
        Empty unless it is a multiple choice.
    hint : str
        Context that goes before the question; may be empty.
    group : str
        Samples that are judged together share it: the rotations of a question, the two questions of MME about an image.
    meta : mapping
        The other columns, such as ``category`` and ``split``.
    row : int
        Line of the file at which it begins, from 1.
    """

    index: str
    question: str
    answers: tuple[str, ...]
    images: tuple[Place, ...]
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    hint: str = ""
    group: str = ""
    meta: Mapping[str, str] = field(default_factory=dict[str, str])
    row: int = 0

    @property
    def image(self) -> Place:
        """Its picture; where it has several, the first."""
        return self.images[0]


@dataclass(frozen=True)
class Problem:
    """A row that could not be used, and why."""

    row: int
    index: str
    what: str

    def __str__(self) -> str:
        return f"line {self.row}{f' (index {self.index})' if self.index else ''}: {self.what}"


class SampleTable(NamedTuple):
    """What a file of samples holds."""

    samples: list[Sample]
    problems: list[Problem]
    columns: tuple[str, ...]
    fingerprint: str


class _Bad(Exception):
    """A row cannot be used; the message says why."""


def read_tsv(path: str | Path, *, image_root: str | Path | None = None, broken: Broken = "skip") -> SampleTable:
    """Read a TSV in VLMEvalKit's layout.

    Parameters
    ----------
    path : path
        Columns ``index``, ``question``, ``answer`` or ``answers``, and ``image`` (base64, or the index of the row that
        has the same picture) or ``image_path``; optionally ``A``, ``B``, … and ``hint``; others become ``meta``.
    image_root : path, optional
        Folder that relative image paths start from; by default that of the file, its ``images`` and
        ``images/<name of the file>``.
    broken : {"skip", "raise"}
        What to do with a row that cannot be used: note it in ``problems``, or stop with a :class:`BadFile`.
    """
    path = Path(path)
    samples: list[Sample] = []
    wanted: list[tuple[int, str]] = []  # position in samples, index of the row that has its picture
    problems = _Problems(path, broken)
    digest = blake2b(digest_size=16)
    seen: dict[str, int] = {}
    held: dict[str, tuple[Place, ...]] = {}  # also of rows that cannot be used otherwise
    try:
        with path.open("rb") as file:
            table = rows(file)
            columns = _header(path, next(table, None))
            finder = _Finder(path, image_root)
            for number, start, raw, spans in table:
                index = ""
                try:
                    cells, image = _cells(raw, spans, columns)
                    index = cells.get("index", "").strip() or str(len(seen))
                    if index in seen:
                        raise _Bad(f"its index is also that of line {seen[index]}")
                    seen[index] = number
                    images, reference = _images(path, start, raw, image, cells, finder)
                    held[index] = images
                    digest.update(repr((sorted(cells.items()), [one.key for one in images], reference)).encode())
                    sample = sample_of(cells, images, number, index)
                except _Bad as error:
                    problems.add(number, index, str(error))
                    continue
                if reference:
                    wanted.append((len(samples), reference))
                samples.append(sample)
    except OSError as error:
        raise BadFile(f"Cannot read {path}: {error.strerror or error}.") from error
    _resolve(samples, wanted, held, problems)
    return SampleTable(samples, problems.found, tuple(columns), digest.hexdigest())


def read_jsonl(path: str | Path, *, image_root: str | Path | None = None, broken: Broken = "skip") -> SampleTable:
    """Read questions from a JSONL file, one object a line, with their pictures in a folder.

    Each object has ``image`` (a path, or a list of them), ``question``, ``answer`` or ``answers``; optionally ``index``
    or ``id``, ``options`` (a list, or letters to texts), ``hint`` and others, which become ``meta``.
    """
    path = Path(path)
    samples: list[Sample] = []
    problems = _Problems(path, broken)
    digest = blake2b(digest_size=16)
    seen: dict[str, int] = {}
    columns: dict[str, None] = {}
    finder = _Finder(path, image_root)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                index = ""
                try:
                    cells, names = _json_cells(line)
                    index = cells.get("index", "").strip() or str(number - 1)
                    if index in seen:
                        raise _Bad(f"its index is also that of line {seen[index]}")
                    seen[index] = number
                    digest.update(line)
                    images = tuple(finder.find(name) for name in names)
                    if not images:
                        raise _Bad("it has no picture")
                    samples.append(sample_of(cells, images, number, index))
                    columns |= dict.fromkeys(cells)
                except _Bad as error:
                    problems.add(number, index, str(error))
    except OSError as error:
        raise BadFile(f"Cannot read {path}: {error.strerror or error}.") from error
    return SampleTable(samples, problems.found, tuple(columns), digest.hexdigest())


def sample_of(cells: Mapping[str, str], images: tuple[Place, ...], row: int, index: str) -> Sample:
    """Make a sample of the texts of a row."""
    question = cells.get("question", "").strip()
    if question in _EMPTY:
        raise _Bad("it has no question")
    answers = answers_of(cells.get("answers", "")) or answers_of(cells.get("answer", ""))
    if not answers:
        raise _Bad("it has no answer")
    options = {letter: cells[letter].strip() for letter in ascii_uppercase if cells.get(letter, "") not in _EMPTY}
    if options:
        answers = (_letter(answers[0], options),)
    used = {"index", "question", "answer", "answers", "image", "image_path", "hint", *ascii_uppercase}
    meta = {name: text for name, text in cells.items() if name not in used and text not in _EMPTY}
    if cells.get("image_path", "") not in _EMPTY:
        meta["image_path"] = cells["image_path"]
    hint = cells.get("hint", "").strip()
    return Sample(
        index, question, answers, images, options, "" if hint in _EMPTY else hint, group=index, meta=meta, row=row
    )


def _letter(answer: str, options: Mapping[str, str]) -> str:
    """The letter of the right option, which may be given in either case or by its text."""
    if answer.strip().upper() in options:
        return answer.strip().upper()
    same = [letter for letter, text in options.items() if text.strip() == answer.strip()]
    if len(same) == 1:
        return same[0]
    raise _Bad(f"its answer {answer!r} is none of its options {', '.join(options)}")


def answers_of(text: str) -> tuple[str, ...]:
    """The right answers in a cell: one text, or a list of texts or of objects with the field ``answer``.

    Examples
    --------
    >>> answers_of("['two', '2']"), answers_of("a dog"), answers_of('[{"answer": "red"}]')
    (('two', '2'), ('a dog',), ('red',))
    """
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        for parse in (json.loads, ast.literal_eval):
            try:
                found = cast(list[Any], parse(text))
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):  # what a cell may do to a parser
                continue
            each = [cast(dict[str, Any], one).get("answer", "") if isinstance(one, dict) else one for one in found]
            return tuple(str(one) for one in each)
    return () if text in _EMPTY else (text,)


def decode_base64(text: bytes) -> bytes:
    """Decode base64, with or without a ``data:`` header; anything else raises ``ValueError``."""
    if text.startswith(b"data:"):
        text = text.partition(b",")[2]
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except binascii.Error:
        return binascii.a2b_base64(b"".join(text.split()), strict_mode=True)  # some wrap their lines


def _is_base64(text: bytes) -> bool:
    """Whether the text can be decoded; for plain text that is seen without decoding it."""
    rest = text.translate(None, _ALPHABET)
    if len(text) % 4 == 0 and rest in (b"", b"=", b"==") and text.endswith(rest):
        return True
    try:
        return bool(decode_base64(text))
    except ValueError:
        return False


class _Problems:
    def __init__(self, path: Path, broken: Broken) -> None:
        self.path, self.broken, self.found = path, broken, list[Problem]()

    def add(self, row: int, index: str, what: str) -> None:
        problem = Problem(row, index, what)
        if self.broken == "raise":
            raise BadFile(f"{self.path}, {problem}. Mend the row, or let such rows be skipped and counted.")
        self.found.append(problem)


class _Finder:
    """Finds picture files: paths in a table may start from several places."""

    def __init__(self, path: Path, root: str | Path | None) -> None:
        base = path.parent
        self.stem = stem = path.stem.removesuffix("_local")
        usual = (base, base / "images", base / "images" / stem, base / "images" / stem.split("_")[0])
        self.roots = usual if root is None else (Path(root),)

    def find(self, name: str) -> Place:
        for root in self.roots:
            found = root / name  # an absolute name stays what it is
            if found.is_file():
                # of names, so that it is the same on every machine; of the size, in case a picture is exchanged
                told = f"{self.stem}/{name}/{found.stat().st_size}"
                return Place(found, blake2b(told.encode(), digest_size=16).hexdigest())
        raise _Bad(f"there is no picture {name} in {', '.join(map(str, self.roots))}")


def _header(path: Path, row: TsvRow | None) -> list[str]:
    if row is None or row.spans is None:
        raise BadFile(f"{path} is empty or has no header line. Accepted: a TSV whose first line names its columns.")
    try:
        names = [
            unquoted(row.raw[a:b]).decode("utf-8-sig" if not a else "utf-8").strip().strip('"') for a, b in row.spans
        ]
    except UnicodeDecodeError as error:
        raise BadFile(f"{path} is not a text file in UTF-8: {error}.") from error
    # letters of options stay; other names are written in either case
    names = [name if name in LETTERS else name.lower() for name in names]
    lacking = [name for name in ("question",) if name not in names]
    if not {"answer", "answers"} & set(names):
        lacking.append("answer")
    if not {"image", "image_path"} & set(names):
        lacking.append("image")
    if lacking:
        more = (
            " Test sets without answers can only be scored by their makers; take the development set."
            if lacking == ["answer"]
            else ""
        )
        raise BadFile(
            f"{path} has no column {' and no column '.join(lacking)}; it has {', '.join(names)}. Accepted: index, "
            f"question, answer (or answers), image (or image_path), and A, B, … for a multiple choice.{more}"
        )
    return names


def _cells(
    raw: bytes, spans: Sequence[tuple[int, int]] | None, columns: Sequence[str]
) -> tuple[dict[str, str], tuple[int, int]]:
    """The texts of a row, but for its picture, of which the stretch in the row is given."""
    if spans is None:
        raise _Bad("a quote is opened and never closed")
    if len(spans) != len(columns):
        raise _Bad(f"it has {len(spans)} cells, and the header has {len(columns)}")
    cells: dict[str, str] = {}
    image = (0, 0)
    for name, (start, stop) in zip(columns, spans, strict=True):
        if name == "image":
            if raw[start : start + 1] == b'"' and raw[stop - 1 : stop] == b'"' and stop - start > 1:
                start, stop = start + 1, stop - 1
            image = (start, stop)
            continue
        try:
            cells[name] = unquoted(raw[start:stop]).decode("utf-8")
        except UnicodeDecodeError:
            raise _Bad(f"its {name} is not text in UTF-8") from None
    return cells, image


def _images(
    path: Path, start: int, raw: bytes, image: tuple[int, int], cells: Mapping[str, str], finder: _Finder
) -> tuple[tuple[Place, ...], str]:
    """The pictures of a row, or the index of the row that has them."""
    first, last = image
    text = raw[first : min(last, first + REFERENCE + 1)]
    if last - first <= REFERENCE:
        reference = text.decode("utf-8", errors="replace").strip()
        if reference not in _EMPTY:
            return (), reference
        names = answers_of(cells.get("image_path", ""))
        if not names:
            raise _Bad("it has no picture")
        return tuple(finder.find(name) for name in names), ""
    stretches = [image]
    if text[:1] == b"[":
        stretches = [(first + one.start(2), first + one.end(2)) for one in _QUOTED.finditer(raw[first:last])]
    places: list[Place] = []
    for a, b in stretches:
        data = raw[a:b]
        if not _is_base64(data):
            raise _Bad("its picture is not base64 text")
        key = sha1(data, usedforsecurity=False).hexdigest()  # the quickest, and gigabytes go through it
        places.append(Place(path, key, start + a, b - a))
    return tuple(places), ""


def _resolve(
    samples: list[Sample],
    wanted: Sequence[tuple[int, str]],
    held: Mapping[str, tuple[Place, ...]],
    problems: _Problems,
) -> None:
    """Give each row that names another one for its picture that row's picture."""
    lost: list[int] = []
    for position, reference in wanted:
        sample = samples[position]
        images = held.get(reference, ())
        if images:
            samples[position] = replace(sample, images=images)
        else:
            lost.append(position)
            problems.add(sample.row, sample.index, f"its picture is that of index {reference!r}, which has none")
    for position in reversed(lost):
        del samples[position]


def _json_cells(line: bytes) -> tuple[dict[str, str], tuple[str, ...]]:
    try:
        value = json.loads(line)
    except ValueError:
        raise _Bad("it is not JSON") from None
    if not isinstance(value, dict):
        raise _Bad("it is not a JSON object")
    given = {str(name): one for name, one in cast(dict[Any, Any], value).items() if one is not None}
    images = given.pop("image", given.pop("images", []))
    names = tuple(str(name) for name in cast(list[Any], images)) if isinstance(images, list) else (str(images),)
    options = given.pop("options", given.pop("choices", None))
    if isinstance(options, list):
        options = dict(zip(ascii_uppercase, cast(list[Any], options), strict=False))
    if isinstance(options, dict):
        given |= cast(dict[Any, Any], options)
    cells = {name: one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for name, one in given.items()}
    if "index" not in cells:
        cells["index"] = cells.pop("id", cells.pop("question_id", ""))
    return cells, names
