"""Run the shard function on a Ray cluster.

Plain actors are used, not Ray Data: nothing flows between the steps. An actor gets the number of a shard, reads its
images and writes its file, so blocks, an object store and a reader that needs CPUs of its own would only add ways to
wait for each other. Two actors of one CPU each therefore run on a machine with two CPUs.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Generator, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any, cast

from torino.core.errors import BadParameter, TorinoError
from torino.core.extras import optional_import
from torino.serving.store.executors import Report
from torino.serving.store.format import StoreSettings
from torino.serving.store.worker import OnError, ShardWorker, StoreFacts, StoreJob
from torino.vlm.loading import quiet_loading

LOCAL = "local"
RETRIES = 3  # times that an actor is started again
POLL_SECONDS = 1.0  # between two reports of progress
START_SECONDS = 60.0  # without an answer of the first actor, after which the user is told
OBJECT_STORE_BYTES = 100_000_000  # of a local cluster; only numbers and settings are sent


class RayWorker:
    """A worker that Ray starts somewhere; it counts the images of its current shard."""

    def __init__(self, job: StoreJob) -> None:
        self._job, self._done = job, 0
        self._lock = threading.RLock()  # Ray runs methods in several threads

    @cached_property
    def _worker(self) -> ShardWorker:  # not in the constructor, whose errors Ray reports as the death of the actor
        with quiet_loading():
            return ShardWorker(self._job)

    def ready(self) -> None:
        """Load the model."""
        with self._lock:
            _ = self._worker

    def inspect(self) -> StoreFacts:
        """Return the description of model and images."""
        with self._lock:
            return self._worker.inspect()

    def write(self, number: int, settings: StoreSettings, on_error: OnError) -> int:
        """Write a shard; return how many of its images were skipped."""

        def count(images: int) -> None:
            self._done += images

        with self._lock:
            self._done = 0
            return self._worker.write(number, settings, on_error, count)

    def progress(self) -> int:
        """Return how many images of the current shard are done."""
        return self._done


class RayExecutor:
    """Write shards in actors of a Ray cluster.

    An actor that dies is started again by Ray, on this or another machine, and its shard is written again. All machines
    need torino, and must reach the images, the model and the folder of the store under the same paths.

    Parameters
    ----------
    job : StoreJob
    address : str
        Address of the cluster: ``auto``, ``host:port`` or ``ray://host:port``; ``local`` starts one on this machine.
    actors : int, optional
        Number of actors. By default as many as the cluster has GPUs or, on the CPU, CPUs.
    """

    def __init__(self, job: StoreJob, address: str, actors: int | None = None) -> None:
        with optional_import("--ray needs", "torino[ray]"):
            ray: Any = import_module("ray")
        self._ray = ray
        self._owns = not ray.is_initialized()
        if self._owns:
            self._connect(address)
        resources = cast("dict[str, float]", ray.cluster_resources())
        on_gpu = job.device != "cpu" and resources.get("GPU", 0) >= 1
        available = int(resources.get("GPU", 0) if on_gpu else resources.get("CPU", 0) // job.threads)
        count = available if actors is None else min(actors, available)
        if count < 1:
            raise BadParameter(
                f"The Ray cluster has {resources.get('CPU', 0):g} CPUs, and each actor uses {job.threads}. Use fewer "
                "--threads, or add machines."
            )
        # Ray would otherwise let GPU actors share all CPUs; progress() answers in a second thread
        options: dict[str, Any] = {"num_cpus": job.threads, "num_gpus": int(on_gpu)}
        options |= {"max_restarts": RETRIES, "max_task_retries": RETRIES, "max_concurrency": 2}
        actor: Any = ray.remote(RayWorker)
        self._actors = [actor.options(**options).remote(job) for _ in range(count)]

    def _connect(self, address: str) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options: dict[str, Any] = {"address": None if address == LOCAL else address, "log_to_driver": False}
        if address == LOCAL:
            os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would let everything else go first
            options |= {"address": "local", "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        try:
            self._ray.init(logging_level=logging.ERROR, **options)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            reason = " ".join(str(error).split())
            raise TorinoError(
                f"Cannot connect to the Ray cluster at {address!r}: {reason[:300]}. Give the address of a running "
                "cluster, such as auto or host:6379, or local to start one on this machine."
            ) from error

    def inspect(self) -> StoreFacts:
        """Return the description of model and images, by the first actor that is ready."""
        task = self._actors[0].inspect.remote()
        if not self._ray.wait([task], timeout=START_SECONDS)[0]:
            warnings.warn(
                f"No actor was ready after {START_SECONDS:.0f} s: it is loading the model, or waits for a CPU or "
                "GPU of the cluster that nothing else uses.",
                stacklevel=2,
            )
        return self._get(task)

    def run(
        self, shards: Sequence[int], settings: StoreSettings, on_error: OnError, report: Report
    ) -> Generator[tuple[int, int]]:
        """Write shards; yield the number of each finished one and how many of its images were skipped."""
        missing, finished = list(reversed(shards)), 0
        # an actor gets a shard when it has started: one that waits for resources holds up nothing
        tasks: dict[Any, tuple[Any, int | None]] = {actor.ready.remote(): (actor, None) for actor in self._actors}
        counts: dict[Any, int] = {}  # images that are done, of each unfinished shard
        while any(number is not None for _, number in tasks.values()) or missing:
            done, _ = self._ray.wait(list(tasks), num_returns=1, timeout=POLL_SECONDS)
            for task in done:
                actor, number = tasks.pop(task)
                counts.pop(task, None)
                skipped = self._get(task)
                if missing:
                    following = missing.pop()
                    tasks[actor.write.remote(following, settings, on_error)] = (actor, following)
                if number is not None:
                    finished += len(settings.photo_range(number))
                    yield number, cast(int, skipped)
            if not done:  # there is time to ask
                counts = self._count({task: actor for task, (actor, number) in tasks.items() if number is not None})
            report(finished + sum(counts.values()))

    def _count(self, actors: Mapping[Any, Any]) -> dict[Any, int]:
        """Return how many images of unfinished shards are done, by task, as far as the actors answer in time."""
        answers = {actor.progress.remote(): task for task, actor in actors.items()}
        if not answers:
            return {}
        counts: dict[Any, int] = {}
        for answer in self._ray.wait(list(answers), num_returns=len(answers), timeout=POLL_SECONDS)[0]:
            try:
                counts[answers[answer]] = int(self._ray.get(answer))
            except self._ray.exceptions.RayError:  # it was killed, and Ray starts it again
                continue
        return counts

    def _get(self, task: Any) -> Any:
        """Return the result of a task; errors of the worker are raised as they were there."""
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(task)
        except exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, TorinoError):
                raise cause from None
            raise
        except exceptions.RayError as error:
            raise TorinoError(
                f"An actor died more than {RETRIES} times ({' '.join(str(error).split())[:200]}). The memory of its "
                "machine may be too small: use a smaller --batch or fewer --processes. Finished shards are kept."
            ) from error

    def close(self) -> None:
        """End the actors, and the cluster if it was started here."""
        if self._owns:
            self._ray.shutdown()  # ends the actors of this run too
        else:
            for actor in self._actors:
                self._ray.kill(actor)
