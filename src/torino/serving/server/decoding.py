"""Generate the answers of several requests together: each row has its own length, stops and random numbers.

The model decodes greedily. A row with a temperature is sampled by a logits processor that leaves one token, with the
row's own generator, so an answer does not depend on the other rows. A stopping criterion collects the tokens.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from torino.serving.server.jobs import FinishReason
from torino.serving.server.schema import Sampling
from torino.vlm.loading import transformers

HELD_BACK = "\ufffd"  # what an incomplete character is decoded to


class TokenDecoder:
    """Turn tokens into text as they are generated.

    Only the last few tokens are decoded again, because the text of a token may depend on those before it.

    Parameters
    ----------
    decode : callable
        Returns the text of a list of tokens.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = self._read = 0
        self.text = ""

    def add(self, token: int) -> None:
        """Append a token; the text grows when its characters are complete."""
        self._ids.append(token)
        known = self._decode(self._ids[self._start : self._read])
        text = self._decode(self._ids[self._start :])
        if len(text) > len(known) and not text.endswith(HELD_BACK):
            self.text += text[len(known) :]
            self._start, self._read = self._read, len(self._ids)


class GeneratedRow:
    """The answer to one request while it is generated.

    Parameters
    ----------
    sampling : Sampling
    decode : callable
        Returns the text of a list of tokens, without special tokens.
    ends : set of int
        Tokens that end an answer.
    send : callable
        Receives new text, if the answer is streamed.
    is_cancelled : callable
        Whether nobody waits for the answer any more.
    """

    def __init__(
        self,
        sampling: Sampling,
        decode: Callable[[list[int]], str],
        ends: set[int],
        send: Callable[[str], None],
        is_cancelled: Callable[[], bool],
    ) -> None:
        self.sampling, self.decode, self.ends = sampling, decode, ends
        self.send, self.is_cancelled = send, is_cancelled
        self.ids: list[int] = []
        self.reason: FinishReason | None = None
        self.text: str | None = None
        self._sent = 0
        self._decoder = TokenDecoder(decode) if sampling.stream or sampling.stop else None
        self._generator: torch.Generator | None = None
        if sampling.temperature > 0:
            seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
            self._generator = torch.Generator().manual_seed(seed)

    def take(self, token: int) -> bool:
        """Receive a token; return whether the answer is complete."""
        if self.reason is not None or self.is_cancelled():
            return True
        self.ids.append(token)
        if token in self.ends:
            self.finish("stop")
        elif self._decoder is not None:
            self._decoder.add(token)
            self._emit(self._decoder.text, last=False)
        if self.reason is None and len(self.ids) >= self.sampling.max_tokens:
            self.finish("length")
        return self.reason is not None

    def finish(self, reason: FinishReason) -> None:
        """End the answer, and send the text that was held back."""
        self._emit(self.decode(self.ids), last=True)
        if self.reason is None:
            self.reason = reason

    def _emit(self, text: str, *, last: bool) -> None:
        """Send new text up to the first stop; a possible beginning of a stop waits for the next token."""
        found = [where for stop in self.sampling.stop if (where := text.find(stop)) >= 0]
        if found:
            text, last = text[: min(found)], True
            self.reason = "stop"
        safe = len(text) if last else len(text) - _overlap(text, self.sampling.stop)
        if last:
            self.text = text
        if self.sampling.stream and safe > self._sent:
            self.send(text[self._sent : safe])
            self._sent = safe

    def sample(self, scores: Tensor) -> int | None:
        """Choose the next token of a row with a temperature; None where decoding is greedy."""
        if self._generator is None or self.reason is not None:
            return None
        library = transformers()
        none = cast(Any, None)
        row = scores[None].float().cpu()
        row = library.TemperatureLogitsWarper(self.sampling.temperature)(none, row)
        if self.sampling.top_p < 1:
            row = library.TopPLogitsWarper(self.sampling.top_p)(none, row)
        return int(torch.multinomial(row.softmax(-1), 1, generator=self._generator))


def _overlap(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of a text that begins a stop."""
    lengths = [
        size for stop in stops for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])
    ]
    return max(lengths, default=0)


class RowSampling:
    """A logits processor that leaves one token in the rows that are sampled."""

    def __init__(self, rows: Sequence[GeneratedRow]) -> None:
        self.rows = rows

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores, with the chosen token first."""
        for index, row in enumerate(self.rows):
            token = row.sample(scores[index])
            if token is not None:
                scores[index] = -torch.inf
                scores[index, token] = 0.0
        return scores


class RowStopping:
    """A stopping criterion that gives each row its token and ends the rows that are complete."""

    def __init__(self, rows: Sequence[GeneratedRow]) -> None:
        self.rows = rows

    def __call__(self, input_ids: Tensor, scores: Any, **others: Any) -> Tensor:
        """Return which rows are complete."""
        tokens: list[int] = input_ids[:, -1].tolist()
        done = [row.take(token) for row, token in zip(self.rows, tokens, strict=True)]
        return torch.tensor(done, dtype=torch.bool, device=input_ids.device)


def end_tokens(model: Any) -> set[int]:
    """Return the tokens that end an answer."""
    given: Any = model.generation_config.eos_token_id
    return set() if given is None else {int(token) for token in torch.as_tensor(given).reshape(-1).tolist()}
