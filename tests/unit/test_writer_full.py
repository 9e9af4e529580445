from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace_writer.destination import DestinationFull
from headrace_writer.store import Store, Stored
from tests.support.filesystems import fill, small_tmpfs
from tests.support.stores import AT, assert_stored, make_sample, make_spec


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    with small_tmpfs(tmp_path / "small", 256) as place:
        yield place


def test_a_row_without_room_is_destination_full_and_is_stored_once_there_is_room(tmp_path: Path, small: Path) -> None:
    sample = make_sample(tokens=600)  # 600 tokens x 4 states x 16 values x 2 bytes + ids + mask: 86 KB
    folder = small / "dataset"
    store = Store(folder, make_spec(folder), "w1")
    dump = sample.dump(tmp_path)
    filler = small / "filler"
    filler.write_bytes(bytes(200_000))
    for _ in range(3):
        with pytest.raises(DestinationFull, match="free some room"):
            store.store(sample.job(), dump, AT)
        assert not list(folder.glob("rows/*/*"))
        assert [path.name for path in (folder / ".tmp" / "w1").iterdir()] == ["lock"]
    filler.unlink()
    assert isinstance(store.store(sample.job(), dump, AT), Stored)
    assert_stored(folder, [sample])
    store.close()


def test_a_line_without_room_is_destination_full_and_the_row_is_adopted_later(tmp_path: Path, small: Path) -> None:
    first, second = make_sample(1), make_sample(2)
    folder = small / "dataset"
    store = Store(folder, make_spec(folder), "w1")
    store.store(first.job(), first.dump(tmp_path), AT)
    # As a writer that was killed between the row and its line.
    other = Store(folder, make_spec(folder), "w2")
    assert other._from_dump(second.job(), second.dump(tmp_path)) is not None
    # The first line's page has room for the second, so another page is begun.
    segment = next((folder / "manifest").iterdir())
    with segment.open("ab") as file:
        file.write(b" " * (4096 - segment.stat().st_size - 10) + b"\n")
    filler = fill(small)
    for _ in range(3):
        with pytest.raises(DestinationFull):
            store.store(second.job(), second.dump(tmp_path), AT)
    filler.unlink()
    outcome = store.store(second.job(), second.dump(tmp_path), AT)
    assert isinstance(outcome, Stored)
    assert outcome.adopted
    assert_stored(folder, [first, second])
    names = [path.name for path in (folder / "manifest").iterdir()]
    assert len(names) == 2, "one abandoned segment and the one that followed, no empty ones"
    assert not segment.read_bytes().endswith(b"\n"), "the short append left its torn tail"
    store.close()
    other.close()


def test_a_dataset_that_cannot_be_opened_for_want_of_room_is_destination_full(tmp_path: Path, small: Path) -> None:
    sample = make_sample()
    folder = small / "dataset"
    store = Store(folder, make_spec(folder), "w1")
    filler = fill(small)
    with pytest.raises(DestinationFull):
        store.store(sample.job(), sample.dump(tmp_path), AT)
    assert not (folder / "headrace.json").exists()
    filler.unlink()
    assert isinstance(store.store(sample.job(), sample.dump(tmp_path), AT), Stored)
    assert_stored(folder, [sample])
