from __future__ import annotations

from headrace.ids import RequestId
from headrace.verdicts import Reason
from headrace_capture.assembly import Assembly, Loss, Plan
from headrace_capture.forward import Piece

A = str(RequestId.make("run", 1, "aaaaaaaa", range(1300)))
B = str(RequestId.make("run", 2, "bbbbbbbb", range(1300)))
SHORT = str(RequestId.make("run", 3, "cccccccc", range(10)))


def piece(rid: str, prefix: int, rows: int, prompt_tokens: int = 1300) -> Piece:
    return Piece(rid=rid, prompt_tokens=prompt_tokens, prefix=prefix, rows=rows)


def fresh(deadline: float = 100.0, remember: int = 100) -> Assembly:
    return Assembly(deadline=deadline, remember=remember)


def plan(assembly: Assembly, *pieces: Piece, version: str = "v", now: float = 0.0) -> Plan:
    return assembly.plan(pieces, version, now)


def reasons(losses: tuple[Loss, ...] | list[Loss]) -> dict[str, Reason]:
    return {loss.request: loss.reason for loss in losses}


def test_a_whole_prompt_is_complete_at_once() -> None:
    made = plan(fresh(), piece(A, 0, 1300))
    (place,) = made.places
    assert (place.first, place.complete, place.begin, place.end, place.parts) == (True, True, 0, 1300, 1)
    assert made.losses == () and made.ignored == 0


def test_chunks_complete_with_the_last_one() -> None:
    assembly = fresh()
    places = [plan(assembly, piece(A, at, min(512, 1300 - at))).places[0] for at in (0, 512, 1024)]
    assert [place.first for place in places] == [True, False, False]
    assert [place.complete for place in places] == [False, False, True]
    assert (places[-1].parts, places[-1].retractions) == (3, 0)
    assert assembly.half_assembled == 0


def test_a_retraction_repeats_rows_and_is_counted_once() -> None:
    assembly = fresh()
    for at in (0, 512):
        plan(assembly, piece(A, at, 512))
    again = plan(assembly, piece(A, 512, 512)).places[0]
    assert (again.begin, again.end, again.retractions) == (512, 1024, 1)
    assert plan(assembly, piece(A, 1024, 276)).places[0].complete


def test_a_retraction_to_the_first_row_counts_once_although_every_chunk_repeats() -> None:
    assembly = fresh()
    for at in (0, 512, 0, 512):
        plan(assembly, piece(A, at, 512))
    last = plan(assembly, piece(A, 1024, 276)).places[0]
    assert (last.complete, last.parts, last.retractions) == (True, 5, 1)


def test_rows_beyond_the_prompt_are_not_taken() -> None:
    # A request retracted while it decodes is prefilled again with what it generated.
    place = plan(fresh(), piece(SHORT, 0, 14, 10)).places[0]
    assert (place.begin, place.end, place.complete) == (0, 10, True)


def test_a_prefix_hit_is_told_from_missing_rows() -> None:
    assembly = fresh()
    assert reasons(plan(assembly, piece(A, 1299, 1)).losses) == {A: Reason.PREFIX_CACHED}
    plan(assembly, piece(B, 0, 512))
    assert reasons(plan(assembly, piece(B, 1024, 276)).losses) == {B: Reason.INCOMPLETE}


def test_a_first_part_beyond_row_0_waits_for_the_rest() -> None:
    assembly = fresh()
    assert plan(assembly, piece(A, 512, 512)).losses == ()
    assert plan(assembly, piece(A, 0, 512)).places[0].retractions == 0
    assert plan(assembly, piece(A, 1024, 276)).places[0].complete


def test_a_decode_row_of_a_half_assembled_request_concludes_it() -> None:
    assembly = fresh()
    plan(assembly, piece(A, 0, 512))
    assert reasons(plan(assembly, piece(A, 1300, 1)).losses) == {A: Reason.INCOMPLETE}


def test_decode_rows_and_ids_of_others_move_the_rows_and_nothing_else() -> None:
    made = plan(fresh(), piece("0c7e", 0, 5, 5), piece(SHORT, 0, 10, 10), piece("hr-x", 0, 3, 3), piece(B, 1300, 1))
    assert [(place.request, place.source) for place in made.places] == [(SHORT, 5)]
    assert made.ignored == 3 and made.losses == ()


def test_an_id_with_more_around_it_is_not_ours() -> None:
    made = plan(fresh(), piece(SHORT + "_0", 0, 10, 10), piece("x" + SHORT, 0, 10, 10), piece(SHORT + "\n", 0, 10, 10))
    assert made.places == () and made.losses == () and made.ignored == 3


def test_a_prompt_of_another_length_is_lost_and_stays_so() -> None:
    assembly = fresh()
    (loss,) = plan(assembly, piece(A, 0, 1, prompt_tokens=1)).losses
    assert loss.reason is Reason.INCOMPLETE and "1300" in loss.detail and "has 1" in loss.detail
    assert plan(assembly, piece(A, 0, 1300)) == Plan(places=(), losses=(), ignored=1)


def test_two_weight_versions_do_not_mix() -> None:
    assembly = fresh()
    plan(assembly, piece(A, 0, 512), version="v1")
    (loss,) = plan(assembly, piece(A, 512, 512), version="v2").losses
    assert loss.reason is Reason.INCOMPLETE and "weights" in loss.detail
    assert plan(assembly, piece(A, 1024, 276), version="v2").places == ()


def test_another_half_prefilled_request_evicts_and_the_late_part_is_ignored() -> None:
    assembly = fresh()
    plan(assembly, piece(A, 0, 512))
    made = plan(assembly, piece(B, 0, 512))
    assert reasons(made.losses) == {A: Reason.EVICTED} and [place.request for place in made.places] == [B]
    assert plan(assembly, piece(A, 512, 512)).ignored == 1
    assert assembly.half_assembled == 1


def test_a_last_chunk_beside_the_next_requests_first_chunk_evicts_nobody() -> None:
    assembly = fresh()
    plan(assembly, piece(A, 0, 1024))
    made = plan(assembly, piece(B, 0, 200), piece(A, 1024, 276))
    assert made.losses == () and [place.complete for place in made.places] == [False, True]


def test_whole_requests_do_not_evict_a_retracted_one() -> None:
    assembly = fresh()
    plan(assembly, piece(A, 0, 512))
    assert plan(assembly, piece(SHORT, 0, 10, 10)).losses == ()
    assert plan(assembly, piece(A, 0, 1300)).places[0].complete


def test_of_two_half_prefilled_requests_in_one_forward_the_last_stays() -> None:
    made = plan(fresh(), piece(A, 0, 512), piece(B, 0, 512))
    assert reasons(made.losses) == {A: Reason.EVICTED} and [place.request for place in made.places] == [B]


def test_the_deadline_counts_from_the_last_part_and_a_late_part_is_ignored() -> None:
    assembly = fresh(deadline=10)
    plan(assembly, piece(A, 0, 512), now=0)
    plan(assembly, piece(A, 512, 512), now=9)
    assert assembly.expire(19) == []
    assert reasons(assembly.expire(19.5)) == {A: Reason.EVICTED}
    assert plan(assembly, piece(A, 1024, 276), now=20).ignored == 1


def test_a_forward_checks_the_deadline_too() -> None:
    assembly = fresh(deadline=10)
    plan(assembly, piece(A, 0, 512), now=0)
    assert reasons(plan(assembly, piece(SHORT, 0, 10, 10), now=11).losses) == {A: Reason.EVICTED}


def test_an_abort_concludes_what_is_half_assembled_and_nothing_else() -> None:
    assembly = fresh()
    assert assembly.abort(A, "x") is None
    plan(assembly, piece(A, 0, 512))
    loss = assembly.abort(A, "x")
    assert loss is not None and loss.reason is Reason.ABORTED
    assert assembly.abort(A, "x") is None
    assert plan(assembly, piece(A, 512, 512)).ignored == 1


def test_concluded_ids_are_remembered_up_to_a_bound() -> None:
    assembly = fresh(remember=2)
    for ordinal in range(3):
        rid = str(RequestId.make("run", ordinal, "dddddddd", range(10)))
        assert plan(assembly, piece(rid, 0, 10, 10)).places
    assert plan(assembly, piece(rid, 0, 10, 10)).ignored == 1
    forgotten = str(RequestId.make("run", 0, "dddddddd", range(10)))
    assert plan(assembly, piece(forgotten, 0, 10, 10)).places


def test_a_forward_that_cannot_be_used_loses_its_requests_of_ours_once() -> None:
    assembly = fresh()
    plan(assembly, piece(A, 0, 512))
    bad = [piece(A, 512, 512), piece("other", 0, 4, 4), piece(SHORT, 0, 10, 10), piece(B, 1300, 1)]
    assert reasons(assembly.refuse(bad, "why")) == {A: Reason.INTERNAL, SHORT: Reason.INTERNAL}
    assert assembly.refuse(bad, "why") == []
