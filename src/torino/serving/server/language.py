"""Answer batches of requests with the language model of a session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torino.core.errors import TorinoError
from torino.datasets.images import open_image
from torino.reducers import Reducer
from torino.serving.server.decoding import GeneratedRow, RowSampling, RowStopping, end_tokens
from torino.serving.server.errors import bad_request, from_torino, internal_error
from torino.serving.server.jobs import AnswerEvent, FinishedAnswer, ImageReport, TextPiece, WorkerJob
from torino.serving.server.logs import log
from torino.serving.server.metrics import ServerMetrics
from torino.serving.server.schema import Sampling
from torino.serving.server.vision import PreparedImage
from torino.vlm.batching import join_images, pad_inputs, prompt_length, write_inputs
from torino.vlm.limits import context_length
from torino.vlm.prompt import Turn
from torino.vlm.session import VLM, Inputs, ReducedImages
from torino.vlm.trace import Generated


class AnswerJob(WorkerJob[AnswerEvent]):
    """A conversation to answer; its image parts have no image, they are in ``images`` in order."""

    def __init__(self, conversation: Sequence[Turn], images: Sequence[PreparedImage], sampling: Sampling) -> None:
        super().__init__()
        self.conversation, self.images, self.sampling = conversation, images, sampling


@dataclass
class _Prompt:
    """A job that is ready to be generated: its sampling, lengths and images."""

    job: AnswerJob
    sampling: Sampling
    tokens: int
    images: tuple[ImageReport, ...]
    inputs: Inputs | None = None


class LanguageModel:
    """The language model of a session, for jobs whose images are reduced already or are reduced with their prompt.

    Parameters
    ----------
    vlm : VLM
    reducer : Reducer, optional
    metrics : ServerMetrics
    """

    def __init__(self, vlm: VLM, reducer: Reducer | None, metrics: ServerMetrics) -> None:
        self.vlm, self.reducer, self.metrics = vlm, reducer, metrics
        self.context = context_length(vlm.adapter.config)
        self.ends = end_tokens(vlm.model)

    def answer(self, jobs: Sequence[AnswerJob]) -> None:
        """Answer some jobs together; each ends with a :class:`FinishedAnswer` or an error of its own."""
        self.metrics.batch.observe(len(jobs))
        if self.vlm.adapter.separates_images:
            self._answer_reduced(jobs)
            return
        for has_images in (True, False):  # processors take images for all prompts of a call, or for none
            chosen = [job for job in jobs if bool(job.images) is has_images]
            if chosen:
                self._answer_whole(chosen)

    # ------------------------------------------------------------------ images reduced before

    def _answer_reduced(self, jobs: Sequence[AnswerJob]) -> None:
        prompts: list[_Prompt] = []
        for job in jobs:
            parts = [image.reduced for image in job.images if image.reduced is not None]
            try:
                inputs = write_inputs(self.vlm, job.conversation, [sum(part.encoded.full) for part in parts])
                tokens, positions = prompt_length(inputs, parts)
                reports = tuple(image.report(keeps_all=self.reducer is None) for image in job.images)
                prompts.append(_Prompt(job, self._fit(job.sampling, positions), tokens, reports, inputs))
            except TorinoError as error:
                job.fail(from_torino(error))
        if not prompts:
            return
        batch = pad_inputs([prompt.inputs for prompt in prompts if prompt.inputs is not None])
        parts = [image.reduced for prompt in prompts for image in prompt.job.images if image.reduced is not None]
        self.metrics.observe_stages({"prompt": batch.seconds})
        joined = join_images(parts) if parts else None
        self._run(prompts, batch, joined, self._answer_reduced)

    # ------------------------------------------------------------------ images reduced with their prompt

    def _answer_whole(self, jobs: Sequence[AnswerJob]) -> None:
        """Process the images of all prompts with their text, for models that need both."""
        vlm, reducer = self.vlm, self.reducer
        try:
            batch = vlm.chat_inputs([_with_images(job) for job in jobs])
            reduced = vlm.reduce(vlm.encode(batch, [reducer]), reducer) if jobs[0].images else None
        except Exception as error:
            if len(jobs) > 1:
                for job in jobs:
                    self._answer_whole([job])
                return
            if not isinstance(error, TorinoError):
                raise
            jobs[0].fail(from_torino(error))
            return
        self.metrics.observe_stages({"prompt": batch.seconds, **(reduced.seconds if reduced else {})})
        lengths: list[int] = batch.tensors["attention_mask"].sum(1).tolist()
        reports = iter(() if reduced is None else self._reports(reduced))
        prompts: list[_Prompt] = []
        for job, length in zip(jobs, lengths, strict=True):
            images = tuple(next(reports) for _ in job.images)
            short = length - sum(image.before - image.after for image in images)
            original = reduced is not None and reduced.positions == "original"
            try:
                prompts.append(_Prompt(job, self._fit(job.sampling, length if original else short), short, images))
            except TorinoError as error:
                job.fail(from_torino(error))
        if len(prompts) < len(jobs):  # the batch holds refused prompts: make it again
            if prompts:
                self._answer_whole([prompt.job for prompt in prompts])
            return
        self._run(prompts, batch, reduced, self._answer_whole)

    def _reports(self, reduced: ReducedImages) -> list[ImageReport]:
        plans, units = list(reduced.plans), reduced.encoded.units
        if sum(units) != len(plans):
            units = [len(plans) // len(reduced.embeds)] * len(reduced.embeds)
        reports: list[ImageReport] = []
        for embeds, full, count in zip(reduced.embeds, reduced.encoded.full, units, strict=True):
            own, plans = plans[:count], plans[count:]
            reports.append(ImageReport(full, len(embeds.slots), () if self.reducer is None else tuple(own)))
        return reports

    # ------------------------------------------------------------------ generation

    def _fit(self, sampling: Sampling, positions: int) -> Sampling:
        """Return the sampling with a length that fits behind the prompt; refuse a prompt that leaves too little."""
        if self.context is None or positions + sampling.max_tokens <= self.context:
            return sampling
        left = self.context - positions
        if left < 1 or not sampling.at_most:
            wanted = "" if sampling.at_most else f" with max_tokens {sampling.max_tokens}"
            raise bad_request(
                f"The prompt takes {positions} positions{wanted}, and this model has {self.context}. Shorten it, send "
                "fewer images, or ask for a shorter answer.",
                "messages",
                "length",
            )
        return replace(sampling, max_tokens=left)

    def _run(
        self,
        prompts: Sequence[_Prompt],
        batch: Inputs,
        reduced: ReducedImages | None,
        again: Callable[[Sequence[AnswerJob]], None],
    ) -> None:
        rows = [self._row(prompt) for prompt in prompts]
        try:
            output = self._generate(rows, batch, reduced)
        except Exception as error:
            if len(prompts) > 1 and not any(row.ids for row in rows):  # one prompt may be at fault
                for prompt in prompts:
                    again([prompt.job])
                return
            log("generation failed", 40, failed=error)
            for prompt in prompts:
                prompt.job.fail(from_torino(error) if isinstance(error, TorinoError) else internal_error())
            return
        self.metrics.observe_stages({"prefill": output.prefill, "decode": output.decode})
        for prompt, row in zip(prompts, rows, strict=True):
            if prompt.job.cancelled:
                continue
            if row.reason is None:
                row.finish("length")
            new = len(row.ids)
            size = self.vlm.adapter.cache_bytes(prompt.tokens + new)
            text, reason = row.text or "", row.reason or "length"
            prompt.job.send(FinishedAnswer(text, reason, prompt.tokens, new, size, prompt.images))
            prompt.job.finish()

    def _generate(self, rows: Sequence[GeneratedRow], batch: Inputs, reduced: ReducedImages | None) -> Generated:
        options: dict[str, Any] = {
            "max_new_tokens": max(row.sampling.max_tokens for row in rows),
            "stopping_criteria": [RowStopping(rows)],
        }
        if any(row.sampling.temperature > 0 for row in rows):
            options["logits_processor"] = [RowSampling(rows)]
        if reduced is None:
            return self.vlm.generate_text(batch, **options)
        return self.vlm.generate(batch, [reduced], **options)

    def _row(self, prompt: _Prompt) -> GeneratedRow:
        job = prompt.job

        def decode(ids: list[int]) -> str:
            return str(self.vlm.processor.tokenizer.decode(ids, skip_special_tokens=True))

        return GeneratedRow(
            prompt.sampling, decode, self.ends, lambda text: job.send(TextPiece(text)), lambda: job.cancelled
        )


def _with_images(job: AnswerJob) -> list[Turn]:
    images = iter(job.images)
    return [
        {
            **turn,
            "content": [
                {"type": "image", "image": open_image(next(images).data)} if part["type"] == "image" else part
                for part in turn["content"]
            ],
        }
        for turn in job.conversation
    ]
