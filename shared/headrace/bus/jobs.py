"""Storage jobs on RQ: msgpack payloads, our functions only, one queue a site, no retries of RQ's own."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import msgpack
import redis
from rq import Queue, SimpleWorker
from rq.exceptions import DuplicateJobError
from rq.job import Job as RqJob

from headrace.bus import keys
from headrace.errors import Unreadable
from headrace.messages import Job, RecordJob, StoreJob, decode, encode

if TYPE_CHECKING:
    from headrace.bus import Bus

Handler = Callable[[Job], None]

# The one name that a job may call. It is looked up in a table, never imported.
HANDLE = "headrace.handle"
JOB_TIMEOUT = 3600  # seconds: the storing lease is the real bound
FAILURE_TTL = 86400  # seconds that a job that raised stays visible in rq-dashboard


class Serializer:
    """RQ's payloads as msgpack: data only."""

    @staticmethod
    def dumps(value: Any) -> bytes:
        """Pack."""
        packed: bytes = msgpack.packb(value, use_bin_type=True)
        return packed

    @staticmethod
    def loads(data: bytes) -> Any:
        """Unpack."""
        return msgpack.unpackb(data, raw=False, strict_map_key=False)


class StorageJob(RqJob):
    """A job that can call what `handlers` names and nothing else, with one validated message as its argument."""

    handlers: ClassVar[dict[str, Handler]] = {}

    def restore(self, raw_data: Any) -> None:
        """Restore from Redis, less what would have RQ import a callback, call a URL or run the job again."""
        super().restore(raw_data)
        self._success_callback_name = self._failure_callback_name = self._stopped_callback_name = None
        self.webhooks = []
        self.retries_left = self.repeats_left = None

    @property
    def func(self) -> Callable[[bytes], None]:
        """The handler that the payload names, with the message decoded; nothing is ever imported by name."""
        handler = self.handlers.get(self.func_name or "")
        if handler is None:
            raise Unreadable(f"job {self.id} names {self.func_name!r}, which is not a storage job")
        if self.kwargs or len(self.args) != 1 or not isinstance(self.args[0], bytes):
            raise Unreadable(f"job {self.id} carries no single message")

        def call(data: bytes) -> None:
            handler(decode(data))

        return call


class StorageQueue(Queue):
    """A queue of `StorageJob`."""

    job_class = StorageJob


class StorageWorker(SimpleWorker):
    """RQ's worker without forks, which tells its process when it is asked to stop."""

    max_connection_wait_time = 2.0
    on_stop: Callable[[], None]

    def handle_warm_shutdown_request(self) -> None:
        """SIGTERM or SIGINT came: the running job ends, then `work` returns."""
        super().handle_warm_shutdown_request()  # type: ignore[no-untyped-call]
        self.on_stop()

    def set_shutdown_requested_date(self) -> None:
        """Runs in the signal handler: while Redis is away it must not break into the running job."""
        with suppress(redis.ConnectionError, redis.TimeoutError):
            super().set_shutdown_requested_date()  # type: ignore[no-untyped-call]

    def work(self, *args: Any, **kwargs: Any) -> bool:
        """Work as RQ does; afterwards the process has its own signal handlers again.

        Returns early when Redis goes away while a job runs, and raises redis-py's errors when it is away at the start
        or at the end; an idle worker waits for it.
        """
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            return super().work(*args, **kwargs)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Jobs:
    """Queues storage jobs and runs them."""

    def __init__(self, bus: Bus) -> None:
        """Work over this bus."""
        self._bus = bus

    def queue_store(self, site: str, job: StoreJob) -> bool:
        """Queue one dump; False when job k of this request is queued already."""
        return self._queue(site, f"{job.request}-{job.job}", job)

    def queue_record(self, site: str, job: RecordJob, name: str) -> bool:
        """Queue the lines of failed and rejected samples under a name of `[a-z0-9-]`."""
        return self._queue(site, name, job)

    def _queue(self, site: str, job_id: str, job: Job) -> bool:
        with self._bus.guard():
            try:
                self.rq_queue(site).enqueue_call(
                    HANDLE,
                    args=(encode(job),),
                    job_id=job_id,
                    unique=True,
                    timeout=JOB_TIMEOUT,
                    result_ttl=0,
                    failure_ttl=FAILURE_TTL,
                    description=job_id,
                )
            except DuplicateJobError:
                return False
        return True

    def queued(self, site: str) -> list[str]:
        """Request ids of the store jobs that RQ still queues at the site."""
        with self._bus.guard():
            names = self.rq_queue(site).get_job_ids()
        return [name.rpartition("-")[0] for name in names if name.startswith("hr-")]

    def depth(self, site: str) -> int:
        """Jobs queued at the site."""
        with self._bus.guard():
            return int(self.rq_queue(site).count)

    def failed(self, site: str) -> int:
        """Jobs that raised at the site, within the last day."""
        with self._bus.guard():
            return int(self.rq_queue(site).failed_job_registry.get_job_count(cleanup=False))

    def workers(self, site: str) -> int:
        """Writers that are alive at the site."""
        with self._bus.guard():
            return len(StorageWorker.all_keys(self._bus.redis, queue=self.rq_queue(site)))

    def delete_queue(self, site: str) -> None:
        """Delete the queue of an evicted site, with its jobs."""
        with self._bus.guard():
            self.rq_queue(site).delete(delete_jobs=True)

    def rq_queue(self, site: str) -> StorageQueue:
        """The RQ queue of a site."""
        return StorageQueue(keys.store_queue(site), connection=self._bus.redis, serializer=Serializer)

    def worker(self, site: str, name: str, handler: Handler, on_stop: Callable[[], None]) -> StorageWorker:
        """An RQ worker in this process (its main thread) on the site's queue alone.

        `handler` gets each decoded message; `on_stop` is called when a signal asked the worker to stop. A worker on
        one queue loses nothing when it is killed that the storing lease would not bring back.
        """
        StorageJob.handlers[HANDLE] = handler
        worker = StorageWorker(
            [self.rq_queue(site)],
            name=name,
            connection=self._bus.redis,
            job_class=StorageJob,
            queue_class=StorageQueue,
            serializer=Serializer,
            worker_ttl=60,
            maintenance_interval=60,
            log_job_description=False,
        )
        worker.on_stop = on_stop
        return worker
