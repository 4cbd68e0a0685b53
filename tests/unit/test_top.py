"""What `tandem top` computes from two looks at a cluster."""

from __future__ import annotations

from rich.console import Console

from protos import tandem_worker_pb2 as pb
from tandem.tables import router_line
from tandem.top import Look, rates_of, view


def worker(
    worker_id: str, *, incarnation: str = "1", prompt: int = 0, generated: int = 0, **counts: int
) -> pb.WorkerStatus:
    blocks = pb.BlockLedger(num_blocks=100, num_free=40, num_cached=10, num_sequence=50)
    record = pb.WorkerRecord(
        worker_id=worker_id,
        incarnation=incarnation,
        role=pb.ROLE_DECODE,
        load=pb.WorkerLoad(num_running=3, num_waiting=1, num_waiting_tokens=77, blocks=blocks),
    )
    return pb.WorkerStatus(record=record, num_prompt_tokens=prompt, num_generation_tokens=generated, **counts)


def look(at_s: float, *workers: pb.WorkerStatus, **status: object) -> Look:
    return Look(pb.ClusterStatus(router_id="r", workers=workers, **status), at_s)  # type: ignore[arg-type]


def test_rates_are_of_the_time_between_two_looks() -> None:
    before = look(10, worker("a", prompt=100, generated=5, num_prefix_queries_tokens=100, num_prefix_hits_tokens=50))
    now = look(12, worker("a", prompt=300, generated=25, num_prefix_queries_tokens=300, num_prefix_hits_tokens=200))
    rate = rates_of(before, now)["a"]
    assert (rate.prompt_tokens_per_s, rate.generation_tokens_per_s, rate.hit_rate) == (100, 10, 0.75)


def test_a_worker_without_a_past_has_no_rates() -> None:
    now = look(12, worker("a", incarnation="2", generated=7))
    assert rates_of(None, now) == {}
    assert rates_of(look(11), now) == {}
    assert rates_of(look(11, worker("a", incarnation="1", generated=900)), now) == {}, "another process"
    assert rates_of(look(12, worker("a", incarnation="2")), now) == {}, "no time has passed"


def test_no_prompts_are_no_hit_rate() -> None:
    rates = rates_of(look(1, worker("a")), look(2, worker("a")))
    assert rates["a"].hit_rate is None


def test_the_screen_shows_queue_rates_pools_and_remarks() -> None:
    console = Console(width=140, record=True, force_terminal=False)
    before = look(0, worker("decode-1"))
    now = look(
        2, worker("decode-1", generated=3000, num_repairs=2), num_queued_requests=4, num_queued_tokens=900,
        ejected=["decode-1"], unreachable=["decode-2 (somewhere): gone"], unused=["other: another model"],
    )  # fmt: skip
    console.print(view(before, now, [router_line(now.status, "here:1")]))
    text = console.export_text()
    for part in ("here:1", "4 queued (900 tokens)", "generated 1,500 tokens/s", "1 (77 t)", "50 %", "ejected",
                 "2 blocks repaired", "unreachable: decode-2", "not used: other: another"):  # fmt: skip
        assert part in text, part


def test_the_first_look_shows_no_rates_instead_of_zeros() -> None:
    console = Console(width=140, record=True, force_terminal=False)
    console.print(view(None, look(0, worker("decode-1", prompt=9, generated=9)), ["here:1"]))
    text = console.export_text()
    assert "prompt - tokens/s computed, generated - tokens/s" in text
    [row] = [line.split() for line in text.splitlines() if line.startswith("decode-1")]
    assert row[:8] == ["decode-1", "decode", "3", "1", "(77", "t)", "-", "-"]


def test_a_narrow_screen_still_tells_workers_apart() -> None:
    console = Console(width=40, record=True, force_terminal=False)
    console.print(view(None, look(0, worker("decode-1"), worker("decode-2")), "here:1"))
    text = console.export_text()
    assert "decode-1" in text
    assert "decode-2" in text
