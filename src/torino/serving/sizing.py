"""How many requests per second a machine serves, and what fewer visual tokens gain: formulas on paper.

:class:`Accelerator` and :class:`LlavaShape` give a roofline of a GPU from its data sheet. :class:`MeasuredCosts` uses
times of single requests instead, and predicts a batch of them on the machine where they were measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from torino.core.checks import to_integer
from torino.core.errors import BadParameter


@dataclass(frozen=True)
class Accelerator:
    """A GPU by its data sheet, and the share of it that inference reaches.

    Attributes
    ----------
    memory : float
        Bytes.
    flops : float
        Peak multiply-add operations per second, times 2, in the precision of the model.
    bandwidth : float
        Bytes per second.
    prefill_share, tower_share, bandwidth_share : float
        Shares of the peaks that prefill, tower and decoding reach.
    memory_share, workspace : float
        Share of the memory that is used, and bytes of it for activations.
    """

    memory: float = 80e9
    flops: float = 312e12
    bandwidth: float = 2.039e12
    prefill_share: float = 0.55
    tower_share: float = 0.4
    bandwidth_share: float = 0.8
    memory_share: float = 0.9
    workspace: float = 3e9


@dataclass(frozen=True)
class LlavaShape:
    """The shape of a LLaVA, by default LLaVA-1.5-7B in half precision with an SAE of expansion 64.

    Attributes
    ----------
    layers, width, parameters
        Of the language model; parameters that a token passes.
    tower_layers, tower_width, tower_parameters, patches
        Of the vision tower.
    latents : int
        Of the SAE.
    element_size : int
        Bytes of a number.
    """

    layers: int = 32
    width: int = 4096
    parameters: float = 6.6e9
    tower_layers: int = 24
    tower_width: int = 1024
    tower_parameters: float = 0.303e9
    patches: int = 576
    latents: int = 65536
    element_size: int = 2

    @property
    def kv_bytes(self) -> int:
        """Key-value cache of one token, in bytes."""
        return 2 * self.layers * self.width * self.element_size

    @property
    def weight_bytes(self) -> float:
        """All weights, in bytes."""
        embedding = 0.45e9 * self.element_size  # token embeddings, which no token passes as a product
        return self.element_size * (self.parameters + self.tower_parameters) + embedding


@dataclass(frozen=True)
class ServingEstimate:
    """What a formula predicts.

    Attributes
    ----------
    batch : int
        Requests that are answered at once.
    prefill, step : float
        Seconds to read a prompt, and for one token of every request in the batch.
    requests_per_second : float
    kv_bytes : int
        Key-value cache of one request.
    """

    batch: int
    prefill: float
    step: float
    requests_per_second: float
    kv_bytes: int


def estimate(
    tokens: int,
    text: int,
    answer: int,
    *,
    shape: LlavaShape | None = None,
    device: Accelerator | None = None,
    most: int = 512,
) -> ServingEstimate:
    """Estimate the throughput of a server with one image per request.

    Parameters
    ----------
    tokens : int
        Visual tokens of the image; with all of them, no reducer runs.
    text, answer : int
        Tokens of the question with its prompt, and of the answer.
    shape : LlavaShape, optional
    device : Accelerator, optional
        An A100 with 80 GB by default.
    most : int
        Most requests at once, whatever the memory.

    Examples
    --------
    >>> full, reduced = estimate(576, 60, 128), estimate(128, 60, 128)
    >>> full.batch, reduced.batch, round(reduced.requests_per_second / full.requests_per_second, 1)
    (135, 327, 2.8)
    """
    shape, device = shape or LlavaShape(), device or Accelerator()
    for name, value in (("tokens", tokens), ("text", text), ("answer", answer), ("most", most)):
        to_integer(name, value, 1)
    length = tokens + text
    cache = device.memory * device.memory_share - shape.weight_bytes - device.workspace
    batch = min(most, int(cache / shape.kv_bytes / (length + answer)))
    if batch < 1:
        raise BadParameter(
            f"A request of {length + answer} tokens needs more key-value cache than the memory leaves beside the "
            "weights. Use a larger device, fewer tokens, or a smaller model."
        )
    speed = device.flops * device.prefill_share
    prefill = (2 * shape.parameters * length + 2 * shape.layers * shape.width * length**2) / speed
    seen = shape.patches + 1
    tower = 2 * shape.tower_parameters * seen + shape.tower_layers * 4 * seen**2 * shape.tower_width
    sae = 0 if tokens >= shape.patches else 2 * shape.patches * shape.tower_width * shape.latents
    vision = (tower + sae) / (device.flops * device.tower_share)
    read = (shape.parameters * shape.element_size + batch * (length + answer / 2) * shape.kv_bytes) / (
        device.bandwidth * device.bandwidth_share
    )
    step = max(read, 2 * shape.parameters * batch / speed)
    seconds = prefill + vision + answer * step / batch
    return ServingEstimate(batch, prefill, step, 1 / seconds, (length + answer) * shape.kv_bytes)


@dataclass(frozen=True)
class MeasuredCosts:
    """Times of single requests on one machine, for one number of visual tokens.

    Attributes
    ----------
    first : float
        Seconds to the first token: decoding, tower, reducer, projector and prefill.
    step : float
        Seconds for one token of the answer.
    token : float
        Seconds that the language model computes for one more token of a prompt: the slope of ``first`` over the
        length. A further request in a batch adds as much to a step.
    """

    first: float
    step: float
    token: float

    def requests_per_second(self, batch: int, answer: float) -> float:
        """Predict the throughput of batches of this size with answers of this length.

        Examples
        --------
        >>> MeasuredCosts(first=0.3, step=0.05, token=0.001).requests_per_second(1, 5)
        2.0
        """
        to_integer("batch", batch, 1)
        step = self.step + (batch - 1) * self.token
        # the first token comes with the prefill
        return 1 / (self.first + max(answer - 1, 0) * step / batch)


def predicted_gain(reduced: MeasuredCosts, full: MeasuredCosts, batch: int, answer: float) -> float:
    """Predict how many times as many requests per second are served with fewer tokens."""
    return reduced.requests_per_second(batch, answer) / full.requests_per_second(batch, answer)
