"""A language model as judge, for benchmarks with free answers (MM-Vet), behind any OpenAI-compatible endpoint.

Every grade is kept in a JSONL file as soon as it is there, so that no answer is judged, or paid for, twice.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from http.client import HTTPException
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, cast
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from torino.core.errors import BadFile, BadParameter, Unreachable
from torino.evaluation.samples import Sample

# MM-Vet's grading in our words: its scale, its meaning of <AND> and <OR>. The authors' own text can be given instead.
PROMPT = """You grade answers to questions about an image that you cannot see.
Compare the prediction with the ground truth and give its correctness from 0.0 (totally wrong) to 1.0 (totally right),
in steps of 0.1. Where the ground truth joins elements by <AND>, the prediction is totally right only if it has all of
them, and partly right by the share it has. Where they are joined by <OR>, any one of them is enough. Wording and length
do not matter, only what is said. Reply with the number and nothing else.

Question: How many apples and pears are there?
Ground truth: 3 apples <AND> 2 pears
Prediction: There are three apples and four pears.
Correctness: 0.5

Question: What is the animal?
Ground truth: cougar <OR> puma
Prediction: It looks like a puma resting on a rock.
Correctness: 1.0

Question: What does the sign say?
Ground truth: no parking
Prediction: The sign tells drivers to stop.
Correctness: 0.0

Question: {question}
Ground truth: {answer}
Prediction: {prediction}
Correctness:"""

URL, MODEL, KEY = "TORINO_JUDGE_URL", "TORINO_JUDGE_MODEL", "TORINO_JUDGE_KEY"
NO_JUDGE = (
    f"Not scored: its answers are graded by a language model, and none was named. Set {URL} to the address of an "
    f"OpenAI-compatible server (such as https://api.openai.com/v1), {MODEL} to a model there and, if it asks for one, "
    f"{KEY} to a key."
)
_FIELD = re.compile(r"\{(question|answer|prediction)\}")
_NUMBER = re.compile(r"(?<![\d.])(?:0(?:\.\d+)?|1(?:\.0+)?|\.\d+)(?![\d.]*\d)")
_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)


class Grader(Protocol):
    """Whatever grades free answers: a :class:`Judge`, or the key words of the lab."""

    @property
    def name(self) -> str:
        """How a result says who graded."""
        ...

    def grade_all(self, samples: Iterable[Sample], said: Mapping[str, str]) -> dict[str, float | None]:
        """Grades from 0 to 1 by index; None where there is none."""
        ...


@dataclass
class Judge:
    """Grades answers from 0 to 1.

    Parameters
    ----------
    url : str
        Address of the server up to and without ``/chat/completions``.
    model : str
    key : str
        Sent as a bearer token where it is not empty; written nowhere.
    cache : path, optional
        JSONL file of grades; made where it is missing, added to where it is there.
    prompt : str
        With the fields ``{question}``, ``{answer}`` and ``{prediction}``.
    body : mapping
        Further fields of a request, such as ``{"max_completion_tokens": 64, "max_tokens": None}``; None takes one out.
    tries : int
        How often a request is sent when the server is busy, and how often an unreadable reply is asked for anew.
    workers : int
        Requests under way at once.
    timeout, pause : float
        Seconds a request may take, and seconds before the second try, doubled for each further one.
    """

    url: str
    model: str
    key: str = field(default="", repr=False)
    cache: Path | None = None
    prompt: str = PROMPT
    body: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tries: int = 5
    workers: int = 4
    timeout: float = 60.0
    pause: float = 1.0
    _known: dict[str, float | None] = field(default_factory=dict[str, float | None], init=False, repr=False)
    _lock: Lock = field(default_factory=Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse an address or a prompt that cannot work, and read the grades that are there."""
        if not self.url.startswith(("http://", "https://")):
            raise BadParameter(f"The judge's address must begin with http:// or https://, got {self.url!r}.")
        lacking = [name for name in ("question", "answer", "prediction") if f"{{{name}}}" not in self.prompt]
        if lacking:
            raise BadParameter(f"The judge's prompt must hold {{{lacking[0]}}}; it holds no such field.")
        if self.cache is not None:
            self.cache = Path(self.cache)
            self._known = _read_grades(self.cache)

    @classmethod
    def from_environment(cls, **given: Any) -> Judge | None:
        """The judge that the arguments and the environment name, or None if they name none.

        ``TORINO_JUDGE_URL``, ``TORINO_JUDGE_MODEL`` and ``TORINO_JUDGE_KEY``; the key may also be ``OPENAI_API_KEY``.
        """
        named: dict[str, Any] = {
            "url": os.environ.get(URL, ""),
            "model": os.environ.get(MODEL, ""),
            "key": os.environ.get(KEY) or os.environ.get("OPENAI_API_KEY", ""),
        }
        named |= {name: value for name, value in given.items() if value is not None}
        return cls(**named) if named["url"] and named["model"] else None

    @property
    def name(self) -> str:
        """The model and the prompt, for the record of a result."""
        wording = "torino's MM-Vet prompt" if self.prompt == PROMPT else "prompt " + _hash(self.prompt)[:8]
        return f"{self.model}, {wording}"

    def grade_all(self, samples: Iterable[Sample], said: Mapping[str, str]) -> dict[str, float | None]:
        """Grade all answers; None where the judge gave no number in all tries.

        Raises
        ------
        Unreachable
            If the server does not answer. Grades that were given are kept, and the next call goes on from there.
        """
        asked = [sample for sample in samples if sample.index in said]
        with ThreadPoolExecutor(max(1, self.workers)) as pool:
            futures = [(one.index, pool.submit(self.grade, one, said[one.index])) for one in asked]
            try:
                return {index: future.result() for index, future in futures}
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def grade(self, sample: Sample, prediction: str) -> float | None:
        """Grade one answer."""
        right = " <OR> ".join(sample.answers).replace("<AND>", " <AND> ").replace("<OR>", " <OR> ")
        fields = {"question": sample.question, "answer": " ".join(right.split()), "prediction": prediction}
        text = _FIELD.sub(lambda match: fields[match[1]], self.prompt)
        mark = _hash(f"{self.model}\n{text}")
        with self._lock:
            if mark in self._known:
                return self._known[mark]
        grade, reply = None, ""
        for attempt in range(max(1, self.tries)):
            reply = self._ask(text, temperature=0.0 if not attempt else 0.5)
            grade = grade_in(reply)
            if grade is not None:
                break
        self._keep({"key": mark, "index": sample.index, "model": self.model, "grade": grade, "reply": reply[:500]})
        return grade

    def _ask(self, text: str, temperature: float) -> str:
        body = {"model": self.model, "messages": [{"role": "user", "content": text}], "temperature": temperature}
        body = {name: value for name, value in {**body, "max_tokens": 16, **self.body}.items() if value is not None}
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        request = Request(f"{self.url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers)
        reason = ""
        for attempt in range(max(1, self.tries)):
            try:
                with urlopen(request, timeout=self.timeout) as answer:
                    return _content(answer.read())
            except HTTPError as error:
                reason = f"it answered {error.code} {error.reason}"
                if error.code not in _AGAIN:
                    break
            except (URLError, TimeoutError, ConnectionError, HTTPException) as error:
                reason = str(getattr(error, "reason", error)) or type(error).__name__
            except ValueError as error:
                reason = f"its reply is not that of a chat ({error})"
                break
            if attempt + 1 < self.tries:
                time.sleep(self.pause * 2**attempt)
        raise Unreachable(
            f"The judge {self.model} at {self.url} could not be asked: {reason}. Check the address, the model and the "
            "key; grades that were given so far are kept."
        )

    def _keep(self, row: dict[str, Any]) -> None:
        with self._lock:
            self._known[row["key"]] = row["grade"]
            if self.cache is None or row["grade"] is None:  # the next run may get a number
                return
            try:
                self.cache.parent.mkdir(parents=True, exist_ok=True)
                with self.cache.open("ab") as file:
                    if file.tell() and not _ends_whole(self.cache):
                        file.write(b"\n")  # after a line that a crash cut short
                    file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise BadFile(f"Cannot write {self.cache}: {error.strerror or error}.") from error


def grade_in(reply: str) -> float | None:
    """The grade in a judge's reply: its only number from 0 to 1, or None.

    Examples
    --------
    >>> [grade_in(text) for text in ("0.5", "Correctness: 1.0", "0.3 or 0.4", "7", "good", "10")]
    [0.5, 1.0, None, None, None, None]
    """
    found = {float(text) for text in _NUMBER.findall(reply)}
    return found.pop() if len(found) == 1 else None


def graded(grades: dict[str, float | None]) -> Callable[[Sample, str], tuple[float, str | None]]:
    """A scorer of samples from their grades."""

    def judge(sample: Sample, text: str) -> tuple[float, str | None]:
        grade = grades.get(sample.index)
        return (0.0, None) if grade is None else (grade, f"{grade:g}")

    return judge


def _content(raw: bytes) -> str:
    try:
        value = cast(dict[str, Any], json.loads(raw))
        return str(value["choices"][0]["message"]["content"])
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"no choices[0].message.content in it: {error!r}") from error


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:32]


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _read_grades(path: Path) -> dict[str, float | None]:
    """The grades in a cache; a line that was cut short is passed over."""
    known: dict[str, float | None] = {}
    if not path.exists():
        return known
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadFile(f"Cannot read {path}: {error.strerror or error}.") from error
    for line in lines:
        try:
            row = json.loads(line)
            known[str(row["key"])] = float(row["grade"])
        except (ValueError, KeyError, TypeError):
            continue
    return known
