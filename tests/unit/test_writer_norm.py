"""The final norm on its way into the dataset, and rows that are made with it: whose it is, races, what is missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.dumpfolder import read_norm
from headrace.dumps import ENGINE_FILE, POST_NORM
from headrace.errors import HeadraceError, Unavailable, Unreadable, UsageError
from headrace.finalnorm import NORM_FILE, FinalNorm, norm_file, with_norm
from headrace.runs import Identity
from headrace.verdicts import Reason
from headrace_writer import formats
from headrace_writer.destination import Destination
from headrace_writer.formats import rmsnorm
from headrace_writer.norm import NormKeeper
from headrace_writer.store import DumpGone, Refused, Store, Stored, finish
from tests.support.dumps import BARE_ENGINE, ENGINE, WEIGHTS, make_norm
from tests.support.stores import AT, HIDDEN, lines_of, make_sample, make_spec, row_files
from tests.support.watched import BOOT, declare, put

IDENTITY = Identity(engine=ENGINE, weight_version=WEIGHTS)
NORM = make_norm(HIDDEN)
OTHER = make_norm(HIDDEN, seed=8)


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    (tmp_path / "dumps").mkdir()
    return tmp_path / "dumps"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "dataset"


def identity_of(norm: FinalNorm | None) -> Identity:
    return Identity(engine=with_norm(BARE_ENGINE, norm), weight_version=WEIGHTS)


def keeper(output: Path, writer: str = "w1", **changes: Any) -> NormKeeper:
    return NormKeeper(Destination(output, writer), make_spec(output, **changes))


@pytest.mark.parametrize("form", ["headrace", "specforge"])
def test_the_engines_norm_is_kept_in_the_dataset_and_outlives_the_engine(form: str, dumps: Path, output: Path) -> None:
    declare(dumps, NORM)
    assert keeper(output, format=form).find(dumps, IDENTITY) == NORM
    assert read_norm(output / NORM_FILE) == NORM
    (dumps / ENGINE_FILE).unlink()
    assert keeper(output, "w2", format=form).find(dumps, IDENTITY) == NORM


def test_several_writers_keep_one_norm(dumps: Path, output: Path) -> None:
    declare(dumps, NORM)
    keepers = [keeper(output, f"w{number}", format="specforge") for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda each: each.find(dumps, IDENTITY), keepers))
    assert found == [NORM] * 8
    assert read_norm(output / NORM_FILE) == NORM


@pytest.mark.parametrize("form", ["headrace", "specforge"])
def test_the_norm_kept_goes_with_the_rows_whatever_engine_is_there_now(form: str, dumps: Path, output: Path) -> None:
    declare(dumps, NORM)
    first = keeper(output, format=form)
    first.find(dumps, IDENTITY)
    declare(dumps, OTHER, boot="otherotherot")
    for each in (first, keeper(output, "w2", format=form)):
        assert each.find(dumps, IDENTITY) == NORM
    assert read_norm(output / NORM_FILE) == NORM


@pytest.mark.parametrize(
    "changes", [{}, {"fingerprint": "another"}, {"fingerprint": BARE_ENGINE}], ids=["weights", "engine", "bare"]
)
def test_the_norm_of_another_engine_is_never_taken(changes: dict[str, str], dumps: Path, output: Path) -> None:
    declare(dumps, OTHER, **changes)
    assert keeper(output).find(dumps, IDENTITY) is None
    with pytest.raises(Unavailable, match="bring it back"):
        keeper(output, "w2", format="specforge").find(dumps, IDENTITY)
    assert not (output / NORM_FILE).exists()


def test_a_dump_is_never_made_a_row_with_the_norm_of_a_later_boot(dumps: Path, output: Path) -> None:
    sample, other = make_sample(0), make_sample(1)
    declare(dumps, NORM)
    dump = sample.dump(dumps)
    declare(dumps, OTHER, boot="otherotherot")
    late = other.dump(dumps, changes={"engine": identity_of(OTHER).engine})
    store = Store(output, make_spec(output, format="specforge"), "w1")
    with pytest.raises(Unavailable, match="bring it back"):
        store.store(sample.job(), dump, AT)
    assert row_files(output) == []
    declare(dumps, NORM, boot="thirdthirdth")
    assert isinstance(store.store(sample.job(), dump, AT), Stored)
    for norm in (OTHER, NORM):
        declare(dumps, norm, boot="fourthfourth")
        refused = store.store(other.job(engine=identity_of(OTHER).engine), late, AT)
        assert isinstance(refused, Refused)
        assert refused.refusal.reason is Reason.ENGINE_CHANGED


def test_an_engine_whose_norm_is_not_the_one_it_declares_is_named(dumps: Path, output: Path) -> None:
    declare(dumps, OTHER, fingerprint=ENGINE)
    assert keeper(output).find(dumps, IDENTITY) is None
    with pytest.raises(Unreadable, match=r"bootbootboot.*not the final norm that the engine declares"):
        keeper(output, "w2", format="specforge").find(dumps, IDENTITY)
    assert not (output / NORM_FILE).exists()


def test_no_path_that_the_engine_gives_is_followed(dumps: Path, output: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere.safetensors").write_bytes(NORM.encode())
    declare(dumps, None, fingerprint=ENGINE, norm_file="../elsewhere.safetensors")
    with pytest.raises(Unavailable, match=r"its final norm is final_norm\.bootbootboot\.safetensors, or none"):
        keeper(output, format="specforge").find(dumps, IDENTITY)
    assert not (output / NORM_FILE).exists()


def test_an_engine_that_is_starting_is_waited_for_where_its_norm_is_needed(dumps: Path, output: Path) -> None:
    plain, needing = keeper(output), keeper(output, "w2", format="specforge")
    assert plain.find(dumps, IDENTITY) is None
    with pytest.raises(Unavailable, match="is the engine starting"):
        needing.find(dumps, IDENTITY)
    declare(dumps, NORM)
    (dumps / "final_norm.bootbootboot.safetensors").unlink()
    with pytest.raises(Unavailable, match="is the engine starting"):
        needing.find(dumps, IDENTITY)
    declare(dumps, NORM)
    assert needing.find(dumps, IDENTITY) == plain.find(dumps, IDENTITY) == NORM


@pytest.mark.parametrize(
    ("norm", "says"),
    [
        (None, "publishes no final norm"),
        (make_norm(2 * HIDDEN), "publishes a final norm of width 32, the run's states are of width 16"),
    ],
    ids=["none", "wider"],
)
def test_an_engine_without_a_norm_of_the_runs_width_cannot_serve_what_needs_it(
    norm: FinalNorm | None, says: str, dumps: Path, output: Path
) -> None:
    declare(dumps, norm)
    identity = identity_of(norm)
    assert keeper(output).find(dumps, identity) is None
    assert keeper(output, "w2", format="specforge", final_state=POST_NORM).find(dumps, identity) is None
    with pytest.raises(UsageError, match=rf"{says}.*capture 'post_norm' in a run of another name"):
        keeper(output, "w3", format="specforge").find(dumps, identity)
    assert not (output / NORM_FILE).exists()


def flipped(norm: FinalNorm) -> bytes:
    data = bytearray(norm.encode())
    data[-3] ^= 0x40
    return bytes(data)


@pytest.mark.parametrize("engine", ["there", "away"])
@pytest.mark.parametrize(
    "data",
    [b"torn", flipped(NORM), make_norm(HIDDEN // 2).encode(), OTHER.encode()],
    ids=["torn", "flipped", "narrow", "another"],
)
def test_a_damaged_norm_in_the_dataset_is_named_and_never_replaced(
    data: bytes, engine: str, dumps: Path, output: Path
) -> None:
    if engine == "there":
        declare(dumps, NORM)
    output.mkdir()
    (output / NORM_FILE).write_bytes(data)
    sample = make_sample()
    dump = sample.dump(dumps)
    with pytest.raises(Unreadable, match="remove it, then resume"):
        keeper(output, format="specforge").find(dumps, IDENTITY)
    assert (output / NORM_FILE).read_bytes() == data
    assert isinstance(Store(output, make_spec(output), "w2").store(sample.job(), dump, AT), Stored)  # needs none
    assert (output / NORM_FILE).read_bytes() == data
    (output / NORM_FILE).unlink()
    declare(dumps, NORM)
    assert keeper(output, "w3", format="specforge").find(dumps, IDENTITY) == NORM


def test_a_damaged_norm_of_the_engine_is_named_and_never_kept(dumps: Path, output: Path) -> None:
    declare(dumps, NORM)
    put(dumps / norm_file(BOOT), flipped(NORM))
    with pytest.raises(Unreadable, match=r"damaged.*start the engine again"):
        keeper(output, format="specforge").find(dumps, IDENTITY)
    assert keeper(output, "w2").find(dumps, IDENTITY) is None
    assert not (output / NORM_FILE).exists()
    declare(dumps, NORM, boot="otherotherot")
    kept = keeper(output, "w3", format="specforge")
    assert kept.find(dumps, IDENTITY) == NORM
    put(dumps / norm_file("otherotherot"), flipped(NORM))
    assert keeper(output, "w4", format="specforge").find(dumps, IDENTITY) == NORM


def test_a_dump_becomes_a_row_with_the_norm_and_is_adopted_and_found_by_its_line(dumps: Path, output: Path) -> None:
    declare(dumps, NORM)
    spec, sample = make_spec(output, format="specforge"), make_sample()
    form = formats.get("specforge")
    killed = Store(output, spec, "killed")
    assert not isinstance(killed._from_dump(sample.job(), sample.dump(dumps)), Refused | DumpGone)
    killed.close()
    store = Store(output, spec, "w1")
    adopted = store.store(sample.job(), sample.dump(dumps), AT)
    assert isinstance(adopted, Stored)
    assert adopted.adopted
    again = store.store(sample.job(), sample.dump(dumps), AT)
    assert isinstance(again, Stored)
    assert again.already
    assert row_files(output) == [str(form.path(sample.ordinal))]
    assert [line.path for line in lines_of(output)] == [str(form.path(sample.ordinal))]


def test_a_row_of_the_captured_state_is_no_row_of_a_format_that_stores_another(dumps: Path, output: Path) -> None:
    declare(dumps, NORM)
    spec, sample = make_spec(output, format="specforge"), make_sample()
    store = Store(output, spec, "w1")
    first = store.store(sample.job(), sample.dump(dumps), AT)
    assert isinstance(first, Stored)
    place = output / formats.get("specforge").path(sample.ordinal)
    place.write_bytes(place.read_bytes().replace(b'"final_state": "post_norm"', b'"final_state": "pre_norm" '))
    (manifest,) = (output / "manifest").iterdir()
    manifest.unlink()
    again = Store(output, spec, "w2").store(sample.job(attempt=1), sample.dump(dumps, attempt=1), AT)
    assert isinstance(again, Stored)
    assert not again.adopted
    # Trainers look for rows by suffix, everywhere below the dataset: nothing else may have it.
    assert [path.relative_to(output) for path in output.rglob("*.ckpt")] == [place.relative_to(output)]
    assert len(list((output / ".quarantine").glob("*.ckpt.bad"))) == 1


def test_a_norm_that_gives_no_number_refuses_the_dump(dumps: Path, output: Path) -> None:
    infinite = replace(NORM, weight=b"\x80\x7f" * HIDDEN)
    declare(dumps, infinite)
    sample, engine = make_sample(), identity_of(infinite).engine
    dump = sample.dump(dumps, changes={"engine": engine})
    outcome = Store(output, make_spec(output, format="specforge"), "w1").store(sample.job(engine=engine), dump, AT)
    assert isinstance(outcome, Refused)
    assert outcome.refusal.reason is Reason.NOT_FINITE
    assert not list(output.rglob("*.ckpt*"))


@pytest.mark.parametrize(("captured", "needs"), [("pre_norm", True), ("post_norm", False)])
def test_a_writer_without_torch_stores_what_needs_none(
    captured: str, needs: bool, dumps: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    spec, sample = make_spec(output, format="specforge", final_state=captured), make_sample()
    dump = sample.dump(dumps, changes={"final_state": captured})
    if not needs:
        assert isinstance(Store(output, spec, "w1").store(sample.job(), dump, AT), Stored)
        return
    for _ in range(2):
        with pytest.raises(UsageError, match=r"pip install 'headrace\[trainers\]', then: headrace resume tale"):
            Store(output, spec, "w1")
    monkeypatch.undo()
    declare(dumps, NORM)
    assert isinstance(Store(output, spec, "w1").store(sample.job(), dump, AT), Stored)


@contextmanager
def broken_torch(folder: Path, module: str) -> Iterator[None]:
    """A fresh interpreter's view of a torch whose `__init__` is this; the real one is back afterwards."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(module)
    ours = (rmsnorm.__name__, "torch")
    real = {name: entry for name, entry in sys.modules.items() if name in ours or name.startswith("torch.")}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        for name in real:
            patch.delitem(sys.modules, name)
        patch.delattr(formats, "rmsnorm")
        try:
            yield
        finally:
            for name in [name for name in sys.modules if name in ours or name.startswith("torch.")]:
                del sys.modules[name]


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("", "ImportError: cannot import name 'Tensor' from 'torch'"),
        ("import torch.nowhere", "No module named 'torch.nowhere'"),
        ("raise ImportError('libtorch.so: cannot open')", "ImportError: libtorch.so: cannot open"),
        ("raise RuntimeError('operator\\ndoes not exist')", "RuntimeError: operator does not exist"),
        ("raise OSError('libtorch.so: file too short')", "OSError: libtorch.so: file too short"),
        ("def torn(", "SyntaxError"),
    ],
    ids=["empty", "half", "import", "runtime", "os", "torn"],
)
def test_a_torch_that_is_not_whole_is_named_before_a_dump_is_touched(
    module: str, says: str, dumps: Path, output: Path, tmp_path: Path
) -> None:
    declare(dumps, NORM)
    spec, sample = make_spec(output, format="specforge"), make_sample()
    dump = sample.dump(dumps)
    with broken_torch(tmp_path / "broken", module):
        for _ in range(2):
            with pytest.raises(UsageError) as caught:
                Store(output, spec, "w1")
            assert says in str(caught.value)
            assert "--force-reinstall torch, start the writer again, then: headrace resume tale" in str(caught.value)
        Store(output, make_spec(output, format="specforge", final_state=POST_NORM), "w1").close()
    assert isinstance(Store(output, spec, "w1").store(sample.job(), dump, AT), Stored)


def test_a_torch_that_computes_wrongly_is_named(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rsqrt", torch.sqrt)
    with pytest.raises(UsageError, match=r"RuntimeError: it computes [0-9a-f]+ in BF16 where 803f00c0404080c0 is"):
        Store(output, make_spec(output, format="specforge"), "w1")


def test_a_store_whose_norm_is_missing_holds_nothing(dumps: Path, output: Path) -> None:
    sample = make_sample()
    dump = sample.dump(dumps)
    store = Store(output, make_spec(output, format="specforge"), "w1")
    with pytest.raises(HeadraceError, match="no final norm"):
        store.store(sample.job(), dump, AT)
    assert lines_of(output) == []
    assert not list(output.rglob("*.ckpt*"))
    declare(dumps, NORM)
    assert isinstance(store.store(sample.job(), dump, AT), Stored)
    finish(dump)
