"""Broken streams: when the client resumes them (`tandem.resume`), and where the router does
(`router.validation.resumption`)."""

from __future__ import annotations

from typing import Any

import pytest
from test_detokenizer import SAMPLES, byte_level_tokenizer
from validation_cases import MODEL, violations_of

from protos import tandem_inference_pb2 as pb
from router.text.detokenizer import IncrementalDetokenizer
from router.validation.request import check_prompt_length, validate
from router.validation.resumption import BegunAnswer, kind_name, resumption_of
from rpc.errors import (
    DeadlinePassed,
    Draining,
    InvalidRequest,
    NoWorker,
    Overloaded,
    RequestExists,
    TandemError,
    Unreachable,
)
from rpc.metadata import ACCEPTED_KEY
from tandem.resume import ANOTHER_ROUTER_S, FIRST_WAIT_S, LAST_WAIT_S, OnBroken, ResumableStream

LOST = Unreachable("gone")


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def tokens(offset: int, *token_ids: int, kind: str = "") -> pb.GenerateResponse:
    return pb.GenerateResponse(request_id="r", offset=offset, token_ids=token_ids, worker_kind=kind)


def stream_of(
    n: int = 1,
    *,
    resume_s: float = 10.0,
    timeout_s: float | None = None,
    clock: Clock | None = None,
    has_others: bool = False,
    on_broken: OnBroken = lambda error, left_s: None,
) -> ResumableStream:
    request = pb.GenerateRequest(text="hi", sampling_params=pb.SamplingParams(n=n))
    return ResumableStream(
        request,
        timeout_s=timeout_s,
        resume_s=resume_s,
        has_others=has_others,
        on_broken=on_broken,
        now_s=clock or Clock(),
        jitter=lambda: 1.0,
    )


# -- the client's side ----------------------------------------------------------------------------------------------


def test_a_random_seed_is_drawn_here() -> None:
    def seed_for(asked: int) -> int:
        request = pb.GenerateRequest(text="hi", sampling_params=pb.SamplingParams(seed=asked))
        return ResumableStream(request, timeout_s=None, resume_s=1.0).request().sampling_params.seed

    assert min(seed_for(-1) for _ in range(10)) >= 0
    assert seed_for(-2) == -2


@pytest.mark.parametrize("error", [LOST, Draining("leaving")])
def test_the_next_call_asks_for_what_is_missing(error: TandemError) -> None:
    stream = stream_of()
    seed = stream.request().sampling_params.seed
    assert stream.request().sampling_params.HasField("seed"), "nobody could go on with a draw of unknown seed"
    stream.accept(tokens(0, 5, kind="k"))
    stream.accept(tokens(1, 6, 7))
    assert stream.wait_s(error) == FIRST_WAIT_S
    expected = pb.GenerateRequest(
        text="hi", sampling_params=pb.SamplingParams(n=1, seed=seed), output_token_ids=[5, 6, 7], worker_kind="k"
    )
    assert stream.request() == expected
    stream.accept(tokens(3, 8, kind="k"))
    assert stream.num_resumed == 1
    assert list(stream.request().output_token_ids) == [5, 6, 7, 8]


@pytest.mark.parametrize(("asked", "again"), [(-1, 60), (70, 70), (None, None)])
def test_a_prompt_that_was_cut_to_the_room_there_was_is_cut_there_again(asked: int | None, again: int | None) -> None:
    """The next router may have more room for the prompt, or less."""
    request = pb.GenerateRequest(text="hi", truncate_prompt_tokens=asked)
    stream = ResumableStream(request, timeout_s=None, resume_s=10.0)
    stream.accept(pb.GenerateResponse(token_ids=[5], worker_kind="k", prompt_tokens=60))
    stream.accept(tokens(1, 6))
    sent = stream.request()
    assert (sent.truncate_prompt_tokens if sent.HasField("truncate_prompt_tokens") else None) == again


def test_of_several_answers_each_goes_on_where_it_was() -> None:
    stream = stream_of(n=4)
    seed = stream.request().sampling_params.seed
    for message in (
        tokens(0, 5, kind="k"),
        pb.GenerateResponse(sequence=2, token_ids=[7], worker_kind="l"),
        pb.GenerateResponse(sequence=3, token_ids=[9], worker_kind="k"),
        pb.GenerateResponse(sequence=2, offset=1, token_ids=[8]),
        pb.GenerateResponse(
            sequence=3, offset=1, finish_reason=pb.FINISH_REASON_STOP, usage=pb.Usage(completion_tokens=1)
        ),
    ):
        stream.accept(message)
    assert stream.wait_s(LOST) == FIRST_WAIT_S
    expected = pb.GenerateRequest(
        text="hi",
        sampling_params=pb.SamplingParams(n=4, seed=seed),
        answers_so_far=[
            pb.AnswerSoFar(sequence=0, token_ids=[5], worker_kind="k"),
            pb.AnswerSoFar(sequence=2, token_ids=[7, 8], worker_kind="l"),
            pb.AnswerSoFar(sequence=3, is_complete=True, worker_kind="k"),
        ],
    )
    assert stream.request() == expected
    stream.accept(pb.GenerateResponse(sequence=2, offset=2, token_ids=[6], worker_kind="l"))
    assert stream.num_resumed == 1
    assert list(stream.request().answers_so_far[1].token_ids) == [7, 8, 6]


@pytest.mark.parametrize("num_tokens", [0, 2])
@pytest.mark.parametrize(
    "error",
    [Overloaded("full"), InvalidRequest([("text", "wrong")]), RequestExists("running"), NoWorker("given up")],
)
def test_what_is_no_loss_is_the_callers(error: TandemError, num_tokens: int) -> None:
    stream = stream_of()
    for offset in range(num_tokens):
        stream.accept(tokens(offset, 5, kind="k"))
    with pytest.raises(type(error)):
        stream.wait_s(error)


def test_what_has_shown_nothing_is_the_callers_to_ask_again() -> None:
    with pytest.raises(Unreachable):
        stream_of().wait_s(LOST)
    several = stream_of(n=2)
    several.accept(tokens(0, 5, kind="k"))
    several.accept(pb.GenerateResponse(sequence=1, token_ids=[6]))  # as an older router sends it
    with pytest.raises(Unreachable):
        several.wait_s(LOST)
    never = stream_of(resume_s=0)
    never.accept(tokens(0, 5, kind="k"))
    with pytest.raises(Unreachable):
        never.wait_s(LOST)
    older = stream_of()
    older.accept(tokens(0, 5))
    with pytest.raises(Unreachable):
        older.wait_s(LOST)


@pytest.mark.parametrize("n", [1, 2])
def test_what_a_router_took_on_and_lost_is_asked_anew(n: int) -> None:
    stream = stream_of(n)
    first = pb.GenerateRequest()
    first.CopyFrom(stream.request())
    stream.note_metadata([("x", "y"), (ACCEPTED_KEY, "1")])
    assert stream.wait_s(LOST) == FIRST_WAIT_S
    stream.note_metadata(None)  # the next call was refused
    assert stream.wait_s(LOST) == 2 * FIRST_WAIT_S
    assert stream.request() == first, "the same seed, too"
    refused = stream_of()
    refused.note_metadata([(ACCEPTED_KEY, "1")])
    with pytest.raises(NoWorker):
        refused.wait_s(NoWorker("nobody could compute it: the router's word"))


def test_who_is_full_or_has_not_noticed_is_asked_again_for_a_while() -> None:
    clock = Clock()
    stream = stream_of(resume_s=10, clock=clock)
    stream.accept(tokens(0, 5, kind="k"))
    waits = [stream.wait_s(error) for error in (LOST, RequestExists("r"), NoWorker("none yet"), LOST, LOST, LOST, LOST)]
    assert waits == [0.05, 0.1, 0.2, 0.4, 0.8, LAST_WAIT_S, LAST_WAIT_S]
    assert stream.wait_s(Overloaded("full", retry_after_s=3)) == 3
    clock.now_s += 9.5
    assert stream.wait_s(Overloaded("full", retry_after_s=3)) == 0.5, "once more at the end"
    clock.now_s += 0.5
    with pytest.raises(Overloaded):
        stream.wait_s(Overloaded("full", retry_after_s=3))


def test_what_a_lost_call_has_left_running_is_waited_for() -> None:
    """Where there may be other routers, the client asks again at once, perhaps the same router, which runs the lost
    call and has not noticed yet that its client is gone. Only this request uses its id, and nobody else can choose
    it."""
    clock = Clock()
    stream = stream_of(resume_s=10, has_others=True, clock=clock)
    waits = [stream.wait_s(error) for error in (LOST, RequestExists("r"), RequestExists("r"), LOST)]
    assert waits == [0, 0.05, 0.1, 0.2]
    clock.now_s += 10
    with pytest.raises(RequestExists):
        stream.wait_s(RequestExists("r"))
    for refused in (Draining("leaving"), None):  # no router has accepted this call
        another = stream_of(resume_s=10, has_others=True)
        assert refused is None or another.wait_s(refused) == 0
        with pytest.raises(RequestExists):
            another.wait_s(RequestExists("r"))


def test_a_request_that_a_leaving_router_refused_waits_for_its_successor() -> None:
    """Its successor may not be known yet: gRPC looks the routers' addresses up only when one is gone."""
    clock = Clock()
    leaving = Draining("leaving", retry_after_s=1)
    told: list[tuple[Exception, float]] = []
    stream = stream_of(resume_s=30, has_others=True, clock=clock, on_broken=lambda *what: told.append(what))
    assert [stream.wait_s(leaving), told] == [0, []], "the other router is asked at once"
    assert [stream.wait_s(error) for error in (leaving, LOST, leaving)] == [0.05, 0.1, 0.2]
    assert told == [(leaving, ANOTHER_ROUTER_S)], "told once"
    clock.now_s += ANOTHER_ROUTER_S - 0.3
    assert stream.wait_s(leaving) == pytest.approx(0.3)
    clock.now_s += 0.3
    with pytest.raises(Draining):
        stream.wait_s(leaving)
    # It stays the first time that counts, and other errors are the caller's at once.
    other = stream_of(resume_s=30, has_others=True, clock=clock)
    assert [other.wait_s(error) for error in (leaving, leaving)] == [0, 0.05]
    with pytest.raises(Overloaded):
        other.wait_s(Overloaded("full", retry_after_s=1))
    lost = stream_of(resume_s=30, has_others=True, clock=clock)
    assert lost.wait_s(LOST) == 0
    with pytest.raises(Unreachable):  # nothing says that there is a successor
        lost.wait_s(LOST)
    # Neither with only one router, nor against the caller's wish, nor beyond the deadline.
    with pytest.raises(Draining):
        stream_of(resume_s=30, clock=clock).wait_s(leaving)
    impatient = stream_of(resume_s=0, has_others=True, clock=clock)
    assert impatient.wait_s(leaving) == 0
    with pytest.raises(Draining):
        impatient.wait_s(leaving)
    hasty = stream_of(resume_s=30, has_others=True, timeout_s=0.02, clock=clock)
    assert [hasty.wait_s(leaving), hasty.wait_s(leaving)] == [0, pytest.approx(0.02)]


def test_a_stream_that_goes_on_has_all_its_time_again() -> None:
    clock = Clock()
    stream = stream_of(resume_s=10, clock=clock)
    for offset in range(5):
        stream.accept(tokens(offset, 5, kind="k"))
        assert stream.wait_s(LOST) == FIRST_WAIT_S
        clock.now_s += 9
    with pytest.raises(InvalidRequest):
        stream.wait_s(InvalidRequest([("output_token_ids", "wrong")]))


def test_the_deadline_is_that_of_all_calls() -> None:
    clock = Clock()
    stream = stream_of(timeout_s=30, clock=clock)
    assert stream.timeout_s() == 30
    clock.now_s += 20
    assert stream.timeout_s() == 10
    stream.accept(tokens(0, 5, kind="k"))
    clock.now_s += 8
    assert stream.wait_s(Draining("leaving", retry_after_s=5)) == 2, "a wait ends with it"
    clock.now_s += 2
    with pytest.raises(DeadlinePassed):
        stream.timeout_s()
    assert stream_of().timeout_s() is None


@pytest.mark.parametrize("n", [1, 2])
def test_an_answer_that_lacks_only_its_status_is_whole(n: int) -> None:
    stream = stream_of(n)
    for sequence in range(n):
        assert not stream.has_ended
        usage = pb.Usage(completion_tokens=1)
        last = pb.GenerateResponse(token_ids=[5], finish_reason=pb.FINISH_REASON_STOP, usage=usage, sequence=sequence)
        stream.accept(last)
    assert stream.has_ended


def test_clients_of_a_lost_router_do_not_come_back_all_at_once() -> None:
    waits = set()
    for _ in range(20):
        stream = ResumableStream(pb.GenerateRequest(text="hi"), timeout_s=None, resume_s=10)
        stream.accept(tokens(0, 5, kind="k"))
        waits.add(stream.wait_s(LOST))
    assert len(waits) > 10
    assert all(FIRST_WAIT_S / 2 <= wait <= FIRST_WAIT_S for wait in waits)


# -- the router's side ----------------------------------------------------------------------------------------------

SEVERAL = pb.SamplingParams(temperature=0, n=2)
COMPLETE = [pb.AnswerSoFar(sequence=sequence, is_complete=True) for sequence in range(2)]


@pytest.mark.parametrize(
    ("request_fields", "field", "description"),
    [
        (
            {"text": "x", "sampling_params": SEVERAL, "answers_so_far": [pb.AnswerSoFar(sequence=2, token_ids=[5])]},
            "answers_so_far[0].sequence",
            "must be less than n=2, is 2",
        ),
        (
            {"text": "x", "sampling_params": SEVERAL, "answers_so_far": [pb.AnswerSoFar(token_ids=[5])] * 2},
            "answers_so_far[1].sequence",
            "must be given once, 0 is given again",
        ),
        (
            {"text": "x", "sampling_params": SEVERAL, "answers_so_far": [pb.AnswerSoFar(sequence=9)] * 3},
            "answers_so_far",
            "must have at most n=2 answers, has 3",
        ),
        (
            {"text": "x", "sampling_params": SEVERAL, "answers_so_far": COMPLETE},
            "answers_so_far",
            "must leave something to continue: all 2 answers are complete",
        ),
        (
            {"text": "x", "sampling_params": SEVERAL, "answers_so_far": COMPLETE[:1], "worker_kind": "k"},
            "answers_so_far",
            "must be empty with output_token_ids and worker_kind, which continue a single answer",
        ),
        (
            {
                "text": "x",
                "sampling_params": SEVERAL,
                "answers_so_far": [COMPLETE[0], pb.AnswerSoFar(sequence=1, token_ids=[5, 1000])],
            },
            "answers_so_far[1].token_ids",
            "ids must be below the vocabulary's size 1000, is 1000 at 1",
        ),
        (
            {
                "text": "x",
                "sampling_params": SEVERAL,
                "answers_so_far": [pb.AnswerSoFar(token_ids=[5] * 100, worker_kind="k")],
            },
            "answers_so_far[0].token_ids",
            "must have at most 99 ids (the context of 100), has 100",
        ),
        (
            {
                "text": "x",
                "sampling_params": SEVERAL,
                "answers_so_far": [pb.AnswerSoFar(token_ids=[5], worker_kind="k" * 65)],
            },
            "answers_so_far[0].worker_kind",
            "must be at most 64 characters, has 65",
        ),
        (
            {"text": "x", "sampling_params": pb.SamplingParams(n=2), "answers_so_far": COMPLETE[:1]},
            "sampling_params.seed",
            "must be given with answers_so_far, unless temperature is 0: the seed that the tokens were drawn with",
        ),
    ],
)
def test_several_answers_that_cannot_go_on(request_fields: dict[str, Any], field: str, description: str) -> None:
    assert violations_of(pb.GenerateRequest(**request_fields)) == {field: description}


def test_several_answers_go_on_those_that_are_complete_do_not() -> None:
    so_far = [
        pb.AnswerSoFar(sequence=2, token_ids=[5, 6], worker_kind="k"),
        pb.AnswerSoFar(sequence=0, is_complete=True),
    ]
    request = pb.GenerateRequest(text="x", sampling_params=pb.SamplingParams(n=4, temperature=0), answers_so_far=so_far)
    validated = validate(request, MODEL)
    assert validated.open_sequences == [1, 2, 3]
    assert (validated.begun[2].token_ids, validated.begun[2].worker_kind) == ((5, 6), "k")
    check_prompt_length(validated, 98, MODEL)
    with pytest.raises(
        InvalidRequest, match=r"answers_so_far\[0\].token_ids: must have at most 1 ids beside a prompt of 99"
    ):
        check_prompt_length(validated, 99, MODEL)


TOKENIZER = byte_level_tokenizer()
EOS = 2


def begun(token_ids: list[int]) -> BegunAnswer:
    return BegunAnswer(token_ids=tuple(token_ids))


def detokenizer(**settings: object) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(TOKENIZER, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("stop", [(), ("zzz", "\U0001f389\u00e9"), ("with",)], ids=["none", "never", "in the middle"])
def test_the_text_goes_on_wherever_the_stream_broke(stop: tuple[str, ...]) -> None:
    """The break may be inside a character, or where the text so far may be the beginning of a stop string."""
    token_ids = [token for sample in SAMPLES for token in TOKENIZER.encode(sample)]
    whole = detokenizer(stop=stop)
    pieces, num_tokens = [], 0
    for token_id in token_ids:
        delta = whole.push([token_id])
        pieces.append(delta.text)
        num_tokens += 1
        if delta.is_stopped:
            break
    text = "".join(pieces) + whole.finish()
    for cut in range(1, num_tokens):
        later = detokenizer(stop=stop)
        resumption = resumption_of(begun(token_ids[:cut]), "", later, max_tokens=10**6, stop_token_ids=())
        assert not resumption.finish_reason
        rest = later.push(token_ids[cut:num_tokens]).text + later.finish()
        assert "".join(pieces[:cut]) + rest == text


@pytest.mark.parametrize(
    ("token_ids", "finish_reason"),
    [
        ([5, 6, 7], pb.FINISH_REASON_UNSPECIFIED),
        ([5, 6, 7, 8], pb.FINISH_REASON_LENGTH),
        ([5, 6, EOS], pb.FINISH_REASON_STOP),
        ([5, 6, 7, EOS], pb.FINISH_REASON_STOP),
    ],
)
def test_what_was_complete_ends(token_ids: list[int], finish_reason: pb.FinishReason) -> None:
    resumption = resumption_of(begun(token_ids), "d", detokenizer(), max_tokens=4, stop_token_ids={EOS})
    assert (resumption.finish_reason, resumption.token_ids) == (finish_reason, tuple(token_ids))


def test_a_stop_string_was_the_end() -> None:
    token_ids = TOKENIZER.encode("one two")
    at_end = resumption_of(begun(token_ids), "", detokenizer(stop=["two"]), max_tokens=99, stop_token_ids=())
    assert at_end.finish_reason == pb.FINISH_REASON_STOP


@pytest.mark.parametrize(
    ("token_ids", "stop", "position"),
    [([5, EOS, 6], [], 1), (TOKENIZER.encode("one two"), ["one"], 2), ([EOS, *TOKENIZER.encode("one two")], ["t"], 0)],
)
def test_tokens_after_the_end_are_refused(token_ids: list[int], stop: list[str], position: int) -> None:
    with pytest.raises(InvalidRequest, match=f"output_token_ids: continues after the answer's end at {position}"):
        resumption_of(begun(token_ids), "", detokenizer(stop=stop), max_tokens=99, stop_token_ids={EOS})


def test_clients_learn_nothing_of_what_a_kind_is() -> None:
    assert kind_name("model=secret") == kind_name("model=secret") != kind_name("model=other")
    assert "secret" not in kind_name("model=secret")
