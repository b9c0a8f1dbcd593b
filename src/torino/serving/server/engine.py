"""The interface between the HTTP side of a server and what answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass

from torino.serving.server.jobs import AnswerEvent
from torino.serving.server.schema import Sampling
from torino.vlm.prompt import Turn


@dataclass(frozen=True)
class ChatInput:
    """A checked request.

    Attributes
    ----------
    conversation : conversation
        Image parts have no image.
    images : sequence of bytes
        The files of the images, in order.
    sampling : Sampling
    """

    conversation: Sequence[Turn]
    images: Sequence[bytes]
    sampling: Sampling


class ChatEngine(ABC):
    """What answers conversations."""

    names: Mapping[int, str] = {}
    """Names of the concepts of the SAE."""

    async def start(self) -> None:  # noqa: B027 (most engines are ready)
        """Start what needs an event loop."""

    async def close(self) -> None:  # noqa: B027
        """Stop after running requests have ended."""

    @abstractmethod
    def generate(self, chat: ChatInput) -> AsyncGenerator[AnswerEvent, None]:
        """Yield text as it is generated and then a :class:`~torino.serving.server.jobs.FinishedAnswer`.

        Raises
        ------
        ApiError
            If the request cannot be answered.
        """

    @abstractmethod
    def health(self) -> dict[str, str]:
        """Return the state of each part: ``ok``, or what is wrong with it."""
