"""Storage jobs on RQ: msgpack payloads, our functions only, one queue a site, no retries of RQ's own."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import msgpack
import redis
from rq import Queue, SimpleWorker
from rq.defaults import RQ_KEY_PREFIX
from rq.exceptions import DuplicateJobError, StopRequested
from rq.job import Job as RqJob
from rq.registry import BaseRegistry
from rq.utils import missing_keys
from rq.worker import WorkerStatus
from rq.worker_registration import REDIS_WORKER_KEYS, WORKERS_BY_QUEUE_KEY, get_keys

from headrace.bus import keys
from headrace.bus.client import text
from headrace.errors import HeadraceError, Unreadable
from headrace.messages import Job, RecordJob, StoreJob, decode, encode

if TYPE_CHECKING:
    from headrace.bus import Bus

Handler = Callable[[Job], None]

# The one name that a job may call. It is looked up in a table, never imported.
HANDLE = "headrace.handle"
JOB_TIMEOUT = 3600  # seconds: the storing lease is the real bound
_RESULT_KEYS = f"{RQ_KEY_PREFIX}:results:"
FAILURE_TTL = 600  # seconds that a job that raised stays visible in rq-dashboard: there may be one a lease and sample


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
    """RQ's worker without forks, which obeys a signal whenever it comes, and tells its process."""

    max_connection_wait_time = 2.0
    stop: threading.Event

    def work(self, *args: Any, **kwargs: Any) -> bool:
        """Work as RQ does; afterwards the process has its own signal handlers again.

        Returns early when Redis goes away or takes no writes while a job runs, and raises redis-py's errors when that
        is so at the start or at the end; an idle worker waits for a Redis that is away.
        """
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            return super().work(*args, **kwargs)
        except StopRequested:  # the signal came when RQ's loop, which catches this, had ended
            return False
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_warm_shutdown_request(self) -> None:
        """SIGTERM or SIGINT came: the running job ends, then `work` returns."""
        super().handle_warm_shutdown_request()  # type: ignore[no-untyped-call]
        self.stop.set()

    def handle_exception(self, job: RqJob, *exc_info: Any) -> None:
        """Log a job that raised: one line for an error of ours, which says all, else with its traceback."""
        if isinstance(exc_info[1], HeadraceError):
            self.log.warning("job %s: %s", job.id, exc_info[1])
        else:
            super().handle_exception(job, *exc_info)

    def heartbeat(self, timeout: int | None = None, pipeline: Any = None) -> None:
        """Say that this worker lives, also in its queue's index, which would stay for ever if it were killed."""
        super().heartbeat(timeout, pipeline)
        connection = self.connection if pipeline is None else pipeline
        for name in self.queue_names():
            connection.sadd(WORKERS_BY_QUEUE_KEY % name, self.key)
            connection.expire(WORKERS_BY_QUEUE_KEY % name, timeout or self.worker_ttl + 60)

    def dequeue_job_and_maintain_ttl(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for a job as RQ does, unless a signal came just before."""
        self._state = WorkerStatus.IDLE  # from here on, a signal raises
        if self._stop_requested:
            raise StopRequested
        found = super().dequeue_job_and_maintain_ttl(*args, **kwargs)
        if found is not None:
            self._state = WorkerStatus.BUSY  # and from here on it lets the job end
        return found

    def teardown(self) -> None:
        """Unregister; also where Redis refuses that, RQ's command thread ends and gives its connection back."""
        try:
            super().teardown()  # type: ignore[no-untyped-call]
        except redis.RedisError:
            commands: Any = self.pubsub_thread
            if commands and self.pubsub:
                commands.stop()
                self.pubsub.close()
            raise

    def _install_signal_handlers(self) -> None:
        super()._install_signal_handlers()  # type: ignore[no-untyped-call]
        # RQ talks to Redis several times before this line: a signal of that time went to the process's own handlers.
        if self.stop.is_set():
            self._stop_requested = True

    def _shutdown(self) -> None:
        # RQ raises unless a job runs, also where nobody catches it, and writes to Redis if one runs, though the
        # signal may have interrupted a thread that holds the connection pool's lock. Only the wait for a job has to
        # be broken off.
        self._stop_requested = True
        if self.get_state() == WorkerStatus.IDLE:
            raise StopRequested


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
        """Jobs that raised at the site, within the last ten minutes."""
        with self._bus.guard():
            return int(self.rq_queue(site).failed_job_registry.get_job_count(cleanup=False))

    def noted(self, site: str) -> set[str]:
        """Jobs that were taken from the site's queue and of which RQ has a note still.

        They run, or raised, or their worker was killed, which RQ sees after an hour.
        """
        queue = self.rq_queue(site)
        with self._bus.guard():
            names = {name for registry in _registries(queue) for name in registry.get_job_ids(cleanup=False)}
            return names | {text(name) for name in self._bus.redis.lrange(queue.intermediate_queue_key, 0, -1)}

    def workers(self, site: str) -> int:
        """Writers that are alive at the site."""
        with self._bus.guard():
            known = list(get_keys(self.rq_queue(site)))
            return len(known) - len(missing_keys(self._bus.redis, known))

    def delete_queue(self, site: str) -> None:
        """Delete the queue of an evicted site, with its jobs and with what RQ noted of them."""
        queue = self.rq_queue(site)
        with self._bus.guard():
            client = self._bus.redis
            queue.delete(delete_jobs=True)
            names = self.noted(site)
            client.delete(queue.intermediate_queue_key, *(registry.key for registry in _registries(queue)))
            for name in names:
                client.delete(StorageJob.key_for(name), _RESULT_KEYS + name)
            # Names of workers that were killed, at whatever site: nobody else removes those of sites that are gone.
            dead = missing_keys(client, [text(name) for name in client.smembers(REDIS_WORKER_KEYS)])
            if dead:
                client.srem(REDIS_WORKER_KEYS, *dead)

    def rq_queue(self, site: str) -> StorageQueue:
        """The RQ queue of a site."""
        return StorageQueue(keys.store_queue(site), connection=self._bus.redis, serializer=Serializer)

    def worker(self, site: str, name: str, handler: Handler, stop: threading.Event) -> StorageWorker:
        """An RQ worker in this process (its main thread) on the site's queue alone.

        `handler` gets each decoded message. A signal sets `stop`, and where `stop` is set the worker returns at once.
        A worker on one queue loses nothing when it is killed that the storing lease would not bring back.
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
        worker.stop = stop
        return worker


def _registries(queue: StorageQueue) -> tuple[BaseRegistry, ...]:
    return (
        queue.started_job_registry,
        queue.failed_job_registry,
        queue.finished_job_registry,
        queue.deferred_job_registry,
        queue.scheduled_job_registry,
        queue.canceled_job_registry,
    )
