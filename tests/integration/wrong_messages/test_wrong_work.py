"""Requests that cannot be served, and grants that were never made."""

from __future__ import annotations

import math
from typing import Any

import pytest

from protos import tandem_worker_pb2 as pb
from rpc.errors import InvalidRequest, code_of
from wrong_messages.saying import (
    BAD,
    BLOCK_SIZE,
    COMMANDS,
    GONE,
    HUGE,
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    PROMPT,
    Peers,
    Session,
    StatusCode,
    engine_request,
    grant_of,
    sampling,
    say_work,
)

NAN, INF = math.nan, math.inf
WORK: dict[str, dict[str, Any]] = {
    "prompt_token_ids: none": {"prompt_token_ids": []},
    "prompt_token_ids: none, but an answer": {"prompt_token_ids": [], "output_token_ids": [5]},
    "prompt_token_ids: as long as the context": {"prompt_token_ids": [5] * MAX_MODEL_LEN},
    "prompt_token_ids: longer than the pool": {"prompt_token_ids": [5] * (BLOCK_SIZE * NUM_BLOCKS + 1)},
    "prompt_token_ids: a million": {"prompt_token_ids": [5] * 1_000_000},
    "prompt_token_ids: with the answer too long": {
        "prompt_token_ids": [5] * (MAX_MODEL_LEN - 2),
        "output_token_ids": [5, 5],
        "sampling_params": sampling(max_tokens=9),
    },
    "prompt_token_ids: one beyond the vocabulary": {"prompt_token_ids": [*PROMPT, 49_152]},
    "prompt_token_ids: the largest number": {"prompt_token_ids": [HUGE, *PROMPT]},
    "output_token_ids: one beyond the vocabulary": {
        "output_token_ids": [49_152],
        "sampling_params": sampling(max_tokens=9),
    },
    "output_token_ids: as many as there may be": {"output_token_ids": [5] * 4},
    "bad_words: an empty one": {"bad_words": [pb.BadWord()]},
    "bad_words: too many": {"bad_words": [pb.BadWord(token_ids=[5])] * 513},
    "bad_words: one beyond the vocabulary": {"bad_words": [pb.BadWord(token_ids=[5, 49_152])]},
    "bad_words: beside what is allowed": {
        "bad_words": [pb.BadWord(token_ids=[5])],
        "sampling_params": sampling(allowed_token_ids=[6]),
    },
    **{
        f"thinking_budget: one beyond the vocabulary, {name}": {
            "thinking_budget": pb.ThinkingBudget(**{"end_token_id": 5, "has_begun": True, name: value})
        }
        for name, value in {
            "end_token_id": 49_152,
            "begin_token_ids": [5, 49_152],
            "other_end_token_ids": [HUGE],
            "space_token_ids": [49_152],
        }.items()
    },
    "lora_name: none that is there": {"lora_name": "poet"},
    "lora_name: a megabyte": {"lora_name": "x" * 1_000_000},
    "max_tokens: no parameters": {"sampling_params": None},
    **{
        f"{name}: {value}": {"sampling_params": sampling(**{name: value})}
        for name, values in {
            "max_tokens": (None, 0),
            "min_tokens": (5, HUGE),
            "temperature": (None, -1, NAN, INF),
            "top_p": (None, 0, -0.5, 1.5, NAN),
            "top_k": (-2, -(2**31)),
            "min_p": (-0.5, 1.5, NAN),
            "presence_penalty": (2.5, -INF, NAN),
            "frequency_penalty": (-2.5, INF, NAN),
            "repetition_penalty": (None, 0, -1, 2.5, NAN),
            "seed": (None,),
            "stop_token_ids": (range(65), [49_152], [HUGE]),
            "allowed_token_ids": (range(4097), [49_152], [HUGE]),
            "logit_bias": ({5: NAN}, {5: 101}, {5: -101}, {49_152: 1}, {HUGE: 1}, dict.fromkeys(range(1025), 1)),
            "logprobs": (21, HUGE),
            "prompt_logprobs": (21, HUGE),
        }.items()
        for value in values
    },
}


@COMMANDS
def test_work_that_cannot_be_done_names_its_field(peers: Peers, command: str) -> None:
    """All are sent in one session, which stays open."""
    with Session(peers, "Prefill" if command == "prefill" else "Decode") as session:
        session.hello()
        for attempt, (name, changes) in enumerate(WORK.items()):
            request = engine_request(attempt=attempt, **changes)
            if command == "prefill" and len(request.prompt_token_ids) > NUM_BLOCKS * BLOCK_SIZE:
                continue  # no grant can have so many blocks: see GRANTS
            say_work(session, peers, command, request)
            event = session.event()
            assert event.attempt == attempt
            assert event.failed.code == code_of(InvalidRequest()), (name, event)
            assert name.partition(":")[0] in event.failed.message, (name, event)
            assert not event.failed.can_retry


@COMMANDS
def test_another_adapter_than_the_one_that_is_meant_may_be_had_elsewhere(peers: Peers, command: str) -> None:
    with Session(peers, "Prefill" if command == "prefill" else "Decode") as session:
        session.hello()
        say_work(session, peers, command, engine_request(lora_name="sql", lora_digest="of another"))
        failed = session.event().failed
    assert (failed.code, failed.can_retry) == (StatusCode.FAILED_PRECONDITION.value[0], True)
    assert "lora_name 'sql' with lora_digest 'of another' is not loaded here" in failed.message


ODD_BUT_RIGHT: dict[str, dict[str, Any]] = {
    "endless": {"max_tokens": HUGE, "stop_token_ids": range(64)},
    "almost cold": {"temperature": 1e-45},
    "hot": {"temperature": 3e38},
    "hardly a nucleus": {"temperature": 1, "top_p": 1e-45, "min_p": 1},
    "tiny penalty": {"repetition_penalty": 1e-45},
    "banned": {"logit_bias": dict.fromkeys(range(1024), -100)},
    "lowest seed": {"temperature": 1, "seed": -(2**63), "top_k": 2**31 - 1},
}


@pytest.mark.parametrize("name", ODD_BUT_RIGHT)
def test_numbers_at_their_bounds_are_served(peers: Peers, name: str) -> None:
    with Session(peers, "Decode") as session:
        session.hello().say(generate=engine_request(sampling_params=sampling(**ODD_BUT_RIGHT[name])))
        for _ in range(4):
            event = session.event()
            assert event.HasField("tokens"), event


GRANTS: dict[str, tuple[dict[str, Any] | None, StatusCode, str]] = {
    "none": (None, BAD, "grant must have 3 blocks"),
    "too few blocks": ({"block_ids": [1, 2]}, BAD, "grant must have 3 blocks for 40 tokens, has 2"),
    "too many blocks": ({"block_ids": range(1000)}, BAD, "grant must have 3 blocks for 40 tokens, has 1000"),
    "a block twice": ({"block_ids": [1, 2, 1]}, BAD, "each block once"),
    "a block beyond the pool": ({"block_ids": [1, 2, NUM_BLOCKS]}, BAD, "blocks beyond the 40"),
    "a block beyond everything": ({"block_ids": [1, 2, HUGE]}, BAD, "blocks beyond the 40"),
    "more cached than there are": ({"num_cached_blocks": 4}, BAD, "num_cached_blocks"),
    "far more cached": ({"num_cached_blocks": HUGE}, BAD, "num_cached_blocks"),
    "no lease": ({"lease_ms": 0}, BAD, "lease_ms"),
    "endless lease": ({"lease_ms": HUGE}, BAD, "lease_ms"),
    "no worker": ({"worker_id": ""}, BAD, "a worker"),
    "endless worker": ({"worker_id": "x" * 1_000_000}, BAD, "a worker"),
    "other worker": ({"worker_id": "d-9"}, GONE, "not 'd-9'"),
    "no incarnation": ({"incarnation": ""}, BAD, "an incarnation"),
    "other incarnation": ({"incarnation": "of old"}, GONE, "'of old'"),
    "no address": ({"kv_address": ""}, BAD, "address"),
    "endless address": ({"kv_address": "x" * 1_000_000}, BAD, "address"),
    "address that is none": ({"kv_address": "nonsense"}, BAD, "kv_address"),
    "address with a zero": ({"kv_address": "127.0.0.1\0:1"}, BAD, "kv_address"),
    "port beyond": ({"kv_address": "127.0.0.1:99999"}, BAD, "kv_address"),
    "address of another scheme": ({"kv_address": "unix:///tmp/nobody"}, BAD, "kv_address"),
    "address of nobody": ({"kv_address": "127.0.0.1:1"}, StatusCode.UNAVAILABLE, ""),
    "grant that was never made": ({}, GONE, "is gone"),
    "grant of the last number": ({"grant_id": 2**64 - 1, "epoch": 2**64 - 1}, GONE, "is gone"),
}


@pytest.mark.parametrize("name", GRANTS)
def test_prefill_under_a_wrong_grant(peers: Peers, name: str) -> None:
    changes, code, says = GRANTS[name]
    grant = None if changes is None else grant_of(peers, **changes)
    with Session(peers, "Prefill") as session:
        session.hello().say(prefill=pb.PrefillRequest(request=engine_request(), grant=grant))
        event = session.event()
        while not event.HasField("failed"):
            event = session.event()
    assert event.failed.code == code.value[0], event
    assert says in event.failed.message


def test_prefill_of_another_prompt_than_the_grant_is_for(peers: Peers) -> None:
    """The wrong prompt has the same length, so that its KV would fit. Nothing of it is computed, so no token can have
    been sent. The grant stays valid: the next prompt may be right."""
    wrong, right = (
        engine_request(prompt_token_ids=[first, *PROMPT[1:]], attempt=attempt)
        for attempt, first in enumerate((44_998, 44_999), start=1)
    )

    def num_computed() -> int:
        answer = peers.call("Worker/GetStatus", b"", worker=peers.prefill)
        return pb.WorkerStatus.FromString(answer).num_prompt_tokens

    before = num_computed()
    with Session(peers, "Decode") as decode, Session(peers, "Prefill") as prefill:
        grant = decode.hello().say(reserve=right).event().granted
        prefill.hello().say(prefill=pb.PrefillRequest(request=wrong, grant=grant))
        failed = prefill.event().failed
        assert (failed.code, failed.can_retry) == (StatusCode.FAILED_PRECONDITION.value[0], True), failed
        assert failed.message.startswith(f"prompt_digest: worker {peers.decode.worker_id} has another prompt")
        prefill.say(prefill=pb.PrefillRequest(request=right, grant=grant))
        while not (event := prefill.event()).HasField("handed_over"):
            assert not event.HasField("failed"), event
    assert num_computed() - before == len(PROMPT)


def test_prefill_for_a_worker_that_takes_no_kv(peers: Peers) -> None:
    with Session(peers, "Prefill") as session:
        grant = grant_of(peers, kv_address=peers.prefill.address)
        session.hello().say(prefill=pb.PrefillRequest(request=engine_request(), grant=grant))
        failed = session.event().failed
    assert (failed.code, failed.can_retry) == (StatusCode.UNAVAILABLE.value[0], True)
    assert "UNIMPLEMENTED" in failed.message
