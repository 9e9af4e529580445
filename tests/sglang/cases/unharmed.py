"""An engine under a fault of its capture: what it held before, and the proof that nothing of it grew or changed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from headrace.reasons import Reason
from tests.sglang.cases.asking import Prompt
from tests.sglang.cases.resources import Resources, resources_of
from tests.sglang.cases.rig import CHUNK, Rig
from tests.support.waiting import wait_until

_AT_ONCE = 8
_RESIDENT = 24 << 20  # bytes by which a warm process may differ from itself


class Unharmed:
    """Made before the fault; warms the engine up, so that what is allocated once is there."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        for prompt in self.capture(16):
            rig.take(prompt)
        self._others = [rig.prompts.ids(CHUNK) for _ in range(3)]
        self._answers = self._ask()
        self._before = self._settled()
        self._counts = rig.settled_counts()

    def capture(self, count: int) -> list[Prompt]:
        """Send prompts of one to three chunks, several at a time; each is answered, whatever becomes of its states."""
        prompts = self._rig.prompts.some(count, 1, 3 * CHUNK)
        for first in range(0, count, _AT_ONCE):
            answers = [self._rig.client.begin_capture(prompt) for prompt in prompts[first : first + _AT_ONCE]]
            assert [answer.result().status_code for answer in answers] == [200] * len(answers)
        return prompts

    def assert_lost(self, prompts: Sequence[Prompt], reasons: Collection[Reason], published: int = 0) -> None:
        """Each of the prompts is counted as lost, for these reasons; else so many were published, and that is all."""
        now = self._rig.settled_counts() - self._counts
        assert now["published"] == published
        del now["published"]
        assert now.total() == len(prompts), now
        assert set(now) == {f"lost: {reason}" for reason in reasons}, now
        assert all(not self._rig.folder.dump_path(prompt.rid).exists() for prompt in prompts)

    def assert_recovers(self) -> None:
        """Prompts are captured again, a moment after the fault is gone: the engine looks now and then."""

        def captured() -> bool:
            prompt = self._rig.prompts.new(CHUNK)
            assert self._rig.client.capture(prompt).status_code == 200
            path, notice = self._rig.folder.dump_path(prompt.rid), self._rig.folder.notice_path(prompt.rid)
            wait_until(lambda: path.exists() or notice.exists(), what=f"the fate of {prompt.rid}")
            if not path.exists():
                return False
            self._rig.take(prompt)
            return True

        wait_until(captured, 30.0, "the engine to recover")
        self._rig.folder.remove_notices()

    def assert_steady(self) -> None:
        """Others are answered as before, and the scheduler's process holds what it held."""
        assert self._ask() == self._answers
        now, before = self._settled(), self._before
        assert now.resident - before.resident < _RESIDENT, (now, before)
        assert (now.descriptors, now.threads) == (before.descriptors, before.threads)

    def assert_unharmed(self) -> None:
        """The same, now that the fault is over; and a prompt is captured as ever."""
        self._rig.capture(self._rig.prompts.new(2 * CHUNK))
        self.assert_steady()
        stats = self._rig.stats()
        assert (stats.half_assembled, stats.buffer_bytes) == (0, 0)

    def _ask(self) -> list[list[int]]:
        answers = [self._rig.client.generate(ids, None, 5) for ids in self._others]
        return [answer.json()["output_ids"] for answer in answers]

    def _settled(self) -> Resources:
        """What it holds once it is idle: descriptors of the last requests are closed a moment later."""
        last = [resources_of(self._rig.server.pid)]

        def still() -> bool:
            last.append(resources_of(self._rig.server.pid))
            return last[-1].descriptors == last[-2].descriptors and last[-1].threads == last[-2].threads

        wait_until(still, 10.0, "descriptors and threads to settle")
        return last[-1]
