from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.messages import Record
from headrace_writer import formats
from headrace_writer.lines import line_of_row
from headrace_writer.store import DumpGone, Refused, Store, Stored, _due, finish
from tests.support.stores import AT, Sample, assert_stored, make_sample, make_spec

SAMPLES = [make_sample(3), make_sample(4, tokens=9)]
FORM = formats.get("headrace")

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *("dump", "corrupt dump", "store", "failed", "wrong row", "row lost", "finish", "new writer"),
                *("killed before the row", "killed before the line", "killed in the line", "killed after the line"),
            ]
        ),
        st.sampled_from(SAMPLES),
        st.integers(0, 2),
    ),
    max_size=14,
)


def sample_record(sample: Sample, attempt: int) -> Record:
    return Record(
        ordinal=sample.ordinal,
        sample=sample.name,
        status="failed",
        reason="why",
        request=str(sample.request(attempt)),
        tokens=0,
        mask=sample.mask,
    )


class Site:
    """A dataset, a dump folder, and writers that come and go."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output = folder / "dataset"
        self.lives = 0
        self.writers: list[Store] = []
        self.new_writer()

    def new_writer(self) -> None:
        self.lives += 1
        self.writers.append(Store(self.output, make_spec(self.output), f"w{self.lives}"))

    def act(self, step: str, sample: Sample, attempt: int) -> None:
        writer = self.writers[attempt % len(self.writers)]
        dump = self.folder / f"{sample.request(attempt)}.safetensors"
        job = sample.job(attempt)
        place = self.output / FORM.path(sample.ordinal)
        match step:
            case "dump":
                sample.dump(self.folder, attempt)
            case "corrupt dump":
                data = bytearray(sample.dump(self.folder, attempt).read_bytes())
                data[-1] ^= 1
                dump.write_bytes(data)
            case "store":
                outcome = writer.store(job, dump, AT)
                assert isinstance(outcome, Stored | Refused | DumpGone)
                if isinstance(outcome, Stored):
                    assert place.stat().st_size == outcome.line.bytes
            case "killed before the row":
                (self.output / ".tmp" / f"w{self.lives}" / "0-row").write_bytes(b"half")
            case "killed before the line":
                writer._from_row(job) or writer._from_dump(job, dump)
            case "killed in the line":
                made = writer._from_row(job) or writer._from_dump(job, dump)
                if made is not None and not isinstance(made, Refused | DumpGone):
                    line = line_of_row(writer._spec, _due(job), made, AT)
                    segment = self.output / "manifest" / f"torn-{len(list(self.output.glob('manifest/*')))}.jsonl"
                    segment.parent.mkdir(exist_ok=True)
                    segment.write_bytes(line.encode()[:-5])
            case "killed after the line":
                writer.store(job, dump, AT)
                self.new_writer()
            case "finish":
                # The caller unlinks a dump only once its sample is stored.
                if isinstance(writer.store(job, dump, AT), Stored):
                    finish(dump)
            case "wrong row":
                if not place.exists():
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_bytes(b"torn")
            case "row lost":
                place.unlink(missing_ok=True)
            case "failed":
                (held,) = writer.record([sample_record(sample, attempt)], AT)
                assert held.ordinal == sample.ordinal
                # What lies there now was proven.
                known = (self.output / "headrace.json").exists()
                assert held.status == "stored" or not (place.exists() and known)
            case "new writer":
                self.new_writer()


@settings(max_examples=60)
@given(STEPS)
def test_whatever_happened_before_one_more_dump_ends_with_exactly_one_right_row(
    steps: list[tuple[str, Sample, int]],
) -> None:
    with tempfile.TemporaryDirectory() as name:
        site = Site(Path(name))
        for step, sample, attempt in steps:
            site.act(step, sample, attempt)
        for sample in SAMPLES:
            outcome = site.writers[-1].store(sample.job(9), sample.dump(site.folder, 9), AT)
            assert isinstance(outcome, Stored)
        for sample in SAMPLES:
            again = site.writers[0].store(sample.job(), site.folder / "gone", AT)
            assert isinstance(again, Stored)
            assert again.already
        assert_stored(site.output, SAMPLES)
        for writer in site.writers:
            writer.close()
