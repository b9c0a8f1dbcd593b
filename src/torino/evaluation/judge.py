"""Grade free-form answers (MM-Vet) with a language model behind an OpenAI-compatible server.

Every grade is appended to a JSONL file as soon as it arrives, so that no answer is graded, or paid for, twice.
Needs the package openai (``pip install "torino[judge]"``).
"""

from __future__ import annotations

import asyncio
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from torino.core.checks import check_type, to_integer, to_number
from torino.core.checksum import encode_record, split_record
from torino.core.errors import BadFile, BadParameter, Unreachable
from torino.core.extras import optional_import
from torino.core.schema import parse_json
from torino.evaluation.samples import Sample

if TYPE_CHECKING:
    from openai import AsyncOpenAI

# MM-Vet's grading scheme in our words: its scale and its meaning of <AND> and <OR>. The original text can be given too.
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
    f"Not scored: its answers are graded by a language model, and none is configured. Set {URL} to the address of an "
    f"OpenAI-compatible server (such as https://api.openai.com/v1), {MODEL} to a model there and, if the server needs "
    f"one, {KEY} to an API key."
)
MAX_REPLY_BYTES = 1_000_000
_FIELD = re.compile(r"\{(question|answer|prediction)\}")
_NUMBER = re.compile(r"(?<![\d.])(?:0(?:\.\d+)?|1(?:\.0+)?|\.\d+)(?![\d.]*\d)")


class Grader(Protocol):
    """Grades free-form answers: a :class:`Judge`, or the grader of a benchmark."""

    @property
    def name(self) -> str:
        """Name of the grader in results."""
        ...

    def grade_all(self, samples: Iterable[Sample], predictions: Mapping[str, str], /) -> dict[str, float | None]:
        """Return grades from 0 to 1 by index; None if an answer could not be graded."""
        ...


class _CachedGrade(TypedDict):
    """A line of the cache; its other fields are for readers."""

    key: str
    grade: float


class _ReplyError(Exception):
    """A reply cannot be used; the message gives the reason."""


@dataclass
class Judge:
    """Grade answers from 0 to 1 with a language model.

    Redirects are not followed, because they would send the API key to another server.

    Parameters
    ----------
    url : str
        Address of the server without ``/chat/completions``.
    model : str
    api_key : str
        Sent as a bearer token if it is not empty; never written to a file.
    cache : path, optional
        JSONL file of grades; created if it does not exist.
    other_caches : sequence of path
        Further files of grades, which are only read.
    prompt : str
        With the fields ``{question}``, ``{answer}`` and ``{prediction}``.
    extra_body : mapping
        Further fields of a request, such as ``{"max_completion_tokens": 64, "max_tokens": None}``; None removes one.
    max_retries : int
        Number of repeated requests when the server is busy or unreachable, and when a reply contains no grade.
    concurrency : int
        Number of simultaneous requests.
    timeout : float
        Seconds that the grade of one answer may take in total, with all repeated requests and the pauses between them.
        If there are repeated requests, a single request is given up after half of it.
    """

    url: str
    model: str
    api_key: str = field(default="", repr=False)
    cache: Path | None = None
    prompt: str = PROMPT
    extra_body: Mapping[str, Any] = field(default_factory=dict[str, Any])
    max_retries: int = 4
    concurrency: int = 4
    timeout: float = 120.0
    other_caches: Sequence[Path] = ()
    _grades: dict[str, float | None] = field(default_factory=dict[str, float | None], init=False, repr=False)
    _lock: Lock = field(default_factory=Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        """Validate the parameters and read the cached grades."""
        for name in ("url", "model", "api_key", "prompt"):
            check_type(name, getattr(self, name), str, "text")
        self.max_retries = to_integer("max_retries", self.max_retries)
        self.concurrency = to_integer("concurrency", self.concurrency)
        self.timeout = to_number("timeout", self.timeout)
        if not self.url.startswith(("http://", "https://")):
            raise BadParameter(f"The judge's address must begin with http:// or https://, got {self.url!r}.")
        missing = [name for name in ("question", "answer", "prediction") if f"{{{name}}}" not in self.prompt]
        if missing:
            raise BadParameter(f"The judge's prompt must contain {{{missing[0]}}}.")
        if self.max_retries < 0:
            raise BadParameter(f"max_retries must be at least 0, got {self.max_retries}.")
        if self.timeout <= 0:
            raise BadParameter(f"timeout must be greater than 0, got {self.timeout}.")
        for other in self.other_caches:
            self._grades |= _read_grades(Path(other))
        if self.cache is not None:
            self.cache = Path(self.cache)
            self._grades |= _read_grades(self.cache)

    @classmethod
    def from_environment(cls, **parameters: Any) -> Judge | None:
        """Return the judge configured by the arguments and the environment, or None.

        ``TORINO_JUDGE_URL``, ``TORINO_JUDGE_MODEL`` and ``TORINO_JUDGE_KEY``; the key may also be ``OPENAI_API_KEY``.
        """
        values: dict[str, Any] = {
            "url": os.environ.get(URL, ""),
            "model": os.environ.get(MODEL, ""),
            "api_key": os.environ.get(KEY) or os.environ.get("OPENAI_API_KEY", ""),
        }
        values |= {name: value for name, value in parameters.items() if value is not None}
        return cls(**values) if values["url"] and values["model"] else None

    @property
    def name(self) -> str:
        """The model and the prompt, recorded with a result."""
        prompt = "torino's MM-Vet prompt" if self.prompt == PROMPT else "prompt " + _hash(self.prompt)[:8]
        return f"{self.model}, {prompt}"

    def grade(self, sample: Sample, prediction: str) -> float | None:
        """Grade one answer."""
        return self.grade_all([sample], {sample.index: prediction})[sample.index]

    def grade_all(self, samples: Iterable[Sample], predictions: Mapping[str, str]) -> dict[str, float | None]:
        """Grade all answers; None if no reply of the judge contains a grade.

        Raises
        ------
        Unreachable
            If the server does not answer. Grades received so far are kept, and the next call continues from there.
        """
        answered = [sample for sample in samples if sample.index in predictions]
        prompts = {sample.index: self._write_prompt(sample, predictions[sample.index]) for sample in answered}
        keys = {index: _hash(f"{self.model}\n{text}") for index, text in prompts.items()}
        missing = {key: index for index, key in keys.items() if key not in self._grades}
        if missing:
            requests = [(key, index, prompts[index]) for key, index in missing.items()]
            stop = Event()
            # a thread of its own, because the caller's thread may already run an event loop, as in a notebook
            with ThreadPoolExecutor(1) as pool:
                try:
                    pool.submit(asyncio.run, self._request_grades(requests, stop)).result()
                finally:
                    stop.set()
        return {index: self._grades[key] for index, key in keys.items()}

    def _write_prompt(self, sample: Sample, prediction: str) -> str:
        correct = " <OR> ".join(sample.answers).replace("<AND>", " <AND> ").replace("<OR>", " <OR> ")
        fields = {"question": sample.question, "answer": " ".join(correct.split()), "prediction": prediction}
        text = _FIELD.sub(lambda match: fields[match[1]], self.prompt)
        return text.encode(errors="replace").decode()  # lone surrogates cannot be sent

    async def _request_grades(self, requests: Sequence[tuple[str, str, str]], stop: Event) -> None:
        """Request the grades of (key, index, prompt); after an error, finish the running requests and raise it."""
        slots = asyncio.Semaphore(max(1, self.concurrency))

        async def request(client: AsyncOpenAI, key: str, index: str, text: str) -> None:
            async with slots:
                if stop.is_set():
                    return
                try:
                    await self._request_grade(client, key, index, text)
                except BaseException:
                    stop.set()
                    raise

        async with self._open_client() as client:
            results = await asyncio.gather(*(request(client, *item) for item in requests), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _request_grade(self, client: AsyncOpenAI, key: str, index: str, text: str) -> None:
        grade, reply = None, ""
        try:
            async with asyncio.timeout(self.timeout):
                for attempt in range(self.max_retries + 1):
                    reply = await self._request(client, text, temperature=0.0 if not attempt else 0.5)
                    grade = parse_grade(reply)
                    if grade is not None:
                        break
        except TimeoutError as error:
            raise self._unreachable(f"it gave no grade within {self.timeout:g} s, with all retries") from error
        self._save({"key": key, "index": index, "model": self.model, "grade": grade, "reply": reply[:500]})

    async def _request(self, client: AsyncOpenAI, text: str, temperature: float) -> str:
        """Send one prompt and return the reply."""
        from openai import APIStatusError, Omit, OpenAIError

        body = {"temperature": temperature, "max_tokens": 16, **self.extra_body}
        headers: dict[str, Any] = {} if self.api_key else {"Authorization": Omit()}
        try:
            response = await client.chat.completions.with_raw_response.create(
                model=self.model,
                messages=[{"role": "user", "content": text}],
                extra_headers=headers,
                extra_body={name: value for name, value in body.items() if value is not None},
            )
            return _parse_reply(response.content)
        except APIStatusError as error:
            reason = f"it answered {error.status_code} {error.response.reason_phrase}"
            if error.response.is_redirect:
                reason += f", a redirect to {error.response.headers.get('location', '')}, which is not followed"
        except _ReplyError as error:
            reason = str(error)
        except OpenAIError as error:
            cause = error.__cause__
            reason = str(cause or error) or type(cause or error).__name__
        raise self._unreachable(reason)

    def _unreachable(self, reason: str) -> Unreachable:
        return Unreachable(
            f"The request to the judge {self.model} at {self.url} failed: {reason}. Check the address, the model and "
            "the key. Grades received so far are kept."
        )

    def _open_client(self) -> AsyncOpenAI:
        """Create the API client, with a limited reply size and total request time."""
        with optional_import("The judge needs", "torino[judge]"):
            import httpx2
            from openai import AsyncOpenAI, DefaultAsyncHttpxClient, Omit
        timeout = self.timeout / 2 if self.max_retries else self.timeout

        class LimitedClient(DefaultAsyncHttpxClient):
            """HTTP client that limits the size of a reply and the total time of a request."""

            async def send(self, request: Any, **options: Any) -> Any:
                try:
                    async with asyncio.timeout(timeout):
                        options["stream"] = True
                        response = await super().send(request, **options)
                        try:
                            content = await _read_limited(response)
                        finally:
                            await response.aclose()
                except TimeoutError as error:
                    raise httpx2.ReadTimeout(f"no complete reply within {timeout:g} s", request=request) from error
                return httpx2.Response(response.status_code, headers=response.headers, content=content, request=request)

        # the server may not be OpenAI's, so nothing from the environment of the openai package is sent
        headers: dict[str, Any] = {"OpenAI-Organization": Omit(), "OpenAI-Project": Omit()}
        return AsyncOpenAI(
            base_url=self.url,
            api_key=self.api_key or "none",  # the client requires one
            timeout=timeout,
            max_retries=self.max_retries,
            default_headers=headers | {"Accept-Encoding": "identity"},
            http_client=LimitedClient(follow_redirects=False),
        )

    def _save(self, row: dict[str, Any]) -> None:
        """Store a grade; a missing grade is not cached, because the next run may receive one."""
        with self._lock:
            self._grades[row["key"]] = row["grade"]
            if self.cache is None or row["grade"] is None:
                return
            try:
                self.cache.parent.mkdir(parents=True, exist_ok=True)
                with self.cache.open("ab") as file:
                    if file.tell() and not _ends_with_newline(self.cache):
                        file.write(b"\n")  # after a line cut short by a crash
                    file.write(encode_record(row))
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise BadFile(f"Cannot write {self.cache}: {error.strerror or error}.") from error


def parse_grade(reply: str) -> float | None:
    """Return the grade in a judge's reply: its only number from 0 to 1, or None.

    Examples
    --------
    >>> [parse_grade(text) for text in ("0.5", "Correctness: 1.0", "0.3 or 0.4", "7", "good", "10")]
    [0.5, 1.0, None, None, None, None]
    """
    numbers = {float(text) for text in _NUMBER.findall(reply)}
    return numbers.pop() if len(numbers) == 1 else None


def make_rule(grades: Mapping[str, float | None]) -> Callable[[Sample, str], tuple[float, str | None]]:
    """Return a scoring rule that looks up the grade of each sample."""

    def rule(sample: Sample, text: str) -> tuple[float, str | None]:
        grade = grades.get(sample.index)
        return (0.0, None) if grade is None else (grade, f"{grade:g}")

    return rule


async def _read_limited(response: Any) -> bytes:
    """Read the body of a reply, up to the size limit."""
    if response.headers.get("content-encoding", "identity") != "identity":
        raise _ReplyError("its reply is compressed, which was not requested")
    content = bytearray()
    async for chunk in response.aiter_raw():
        content += chunk
        if len(content) > MAX_REPLY_BYTES:
            raise _ReplyError(f"its reply is larger than {MAX_REPLY_BYTES:,} bytes")
    return bytes(content)


def _parse_reply(content: bytes) -> str:
    """Return the text of a chat completion."""
    try:
        text = parse_json(content)["choices"][0]["message"]["content"]
    except ValueError as error:
        raise _ReplyError(f"its reply is not JSON ({error})") from error
    except (KeyError, IndexError, TypeError) as error:
        raise _ReplyError(f"its reply has no choices[0].message.content ({error!r})") from error
    if not isinstance(text, str):
        raise _ReplyError(f"its reply has a {type(text).__name__} instead of a text as content")
    return text


def _hash(text: str) -> str:
    return sha256(text.encode(errors="replace")).hexdigest()[:32]


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _read_grades(path: Path) -> dict[str, float | None]:
    """Read cached grades; skip lines cut short by a crash, and damaged lines with a warning."""
    grades: dict[str, float | None] = {}
    if not path.exists():
        return grades
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadFile(f"Cannot read {path}: {error.strerror or error}.") from error
    for number, line in enumerate(lines, 1):
        content, correct = split_record(line)
        if not correct:
            text = f"{path}, line {number} is damaged: it does not match its checksum. Its answer is graded again."
            warnings.warn(text, stacklevel=4)
            continue
        try:
            row = parse_json(content, _CachedGrade)
        except ValueError:
            continue
        if 0 <= row["grade"] <= 1:
            grades[row["key"]] = float(row["grade"])
    return grades
