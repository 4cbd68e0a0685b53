"""Which workers a request gets, with the numbers at which the choice changes."""

from __future__ import annotations

import pytest

from router.costs import Costs
from router.policy import DecodeCandidate, PolicyConfig, PrefillCandidate, choose_plan
from router.request_events import Plan, WorkerKey
from router.served_kind import Kind

BLOCK = 16
NOW_S = 100.0
HERE, THERE = Plan(WorkerKey("d", "1"), None), Plan(WorkerKey("d", "1"), WorkerKey("p", "1"))


def key(name: str) -> WorkerKey:
    return WorkerKey(name, "1")


def prefill(
    name: str, *, queued: int = 0, cached: int = 0, digest: str = "m", available: int = 0, full: bool = False
) -> PrefillCandidate:
    return PrefillCandidate(key(name), Kind(digest), queued, cached * BLOCK, 200, available, full)


def decode(
    name: str,
    *,
    available: int = 1000,
    used: int = 0,
    cached: int = 0,
    full: bool = False,
    digest: str = "m",
    queued: int = 0,
    running: int = 0,
) -> DecodeCandidate:
    return DecodeCandidate(key(name), Kind(digest), BLOCK, available, used, cached, full, queued, running)


def test_workers_of_different_transports_are_not_paired() -> None:
    sends_nixl, sends_grpc = (prefill(name)._replace(transport=name) for name in ("nixl", "grpc"))
    takes_grpc = decode("d")._replace(transport="grpc")
    assert choose(3000, [sends_nixl], [takes_grpc]) == Plan(key("d"), None)
    assert choose(3000, [sends_nixl, sends_grpc], [takes_grpc]) == Plan(key("d"), key("grpc"))


def choose(
    num_tokens: int,
    prefills: list[PrefillCandidate],
    decodes: list[DecodeCandidate],
    avoid: tuple[str, ...] = (),
    *,
    costs: Costs | None = None,
    config: PolicyConfig | None = None,
    may_stay: bool = True,
    num_waiting_tokens: int = 0,
) -> Plan | None:
    return choose_plan(
        config or PolicyConfig(),
        costs or Costs(),
        now_s=NOW_S,
        num_tokens=num_tokens,
        prefill=prefills,
        decode=decodes,
        avoid=frozenset(key(name) for name in avoid),
        may_stay=may_stay,
        num_waiting_tokens=num_waiting_tokens,
    )


def test_the_longest_cached_prefix_wins_unless_its_owner_is_much_busier() -> None:
    cold, warm = prefill("cold"), prefill("warm", cached=40)
    assert choose(800, [cold, warm], [decode("d")]) == Plan(key("d"), key("warm"))
    busy = prefill("warm", cached=40, queued=600)
    assert choose(800, [cold, busy], [decode("d")]) == Plan(key("d"), key("warm"))
    busier = prefill("warm", cached=40, queued=700)
    assert choose(800, [cold, busier], [decode("d")]) == Plan(key("d"), key("cold"))


def test_a_prefix_on_the_decode_side_counts() -> None:
    plan = choose(800, [prefill("p")], [decode("cold"), decode("warm", cached=30, used=20, running=20)])
    assert plan == Plan(key("warm"), key("p"))


def test_what_the_decode_worker_has_but_for_a_block_is_done_there() -> None:
    assert choose(800, [prefill("p")], [decode("d", cached=49)]) == Plan(key("d"), None)
    assert choose(16, [prefill("p")], [decode("d")]) == Plan(key("d"), None)
    assert choose(17, [prefill("p")], [decode("d")]) == Plan(key("d"), key("p"))
    only_all = PolicyConfig(local_max_uncached_tokens=0)
    for cached, prefiller in ((49, key("p")), (50, None)):
        busy = decode("d", cached=cached, running=500)
        assert choose(800, [prefill("p")], [busy], config=only_all) == Plan(key("d"), prefiller)


def test_without_a_prefill_worker_that_fits_the_decode_worker_does_it_all() -> None:
    assert choose(800, [], [decode("d")]) == Plan(key("d"), None)
    assert choose(800, [prefill("p", digest="other weights")], [decode("d")]) == Plan(key("d"), None)


@pytest.mark.parametrize(
    "candidates",
    [
        [decode("d", available=49)],
        [decode("d", full=True)],
        [],
    ],
)
def test_without_room_a_request_waits(candidates: list[DecodeCandidate]) -> None:
    assert choose(800, [prefill("p")], candidates) is None


def test_behind_too_long_a_backlog_a_request_waits() -> None:
    backlog, by_tokens = PolicyConfig().max_prefill_backlog_tokens, PolicyConfig(learn_costs=False)
    busy = decode("d", running=500)
    assert choose(800, [prefill("p", queued=backlog + 1)], [busy], config=by_tokens) is None
    assert choose(800, [prefill("p", queued=backlog)], [busy], config=by_tokens) == THERE


def test_behind_prompts_of_four_seconds_a_request_waits_in_the_router() -> None:
    costs = learned(p_s=1.0, d_s=1.0)
    assert choose(800, [prefill("p", queued=3900)], [decode("d", running=500)], costs=costs) == THERE
    assert choose(800, [prefill("p", queued=4100)], [decode("d", running=500)], costs=costs) is None
    assert choose(800, [prefill("p", queued=9000)], [decode("d", queued=3900)], costs=costs) == HERE
    assert choose(800, [prefill("p", queued=9000)], [decode("d", queued=4100)], costs=costs) is None
    # A prompt that takes longer than that waits for nothing.
    assert choose(8000, [prefill("p")], [decode("d", running=500)], costs=costs) == THERE


def test_the_more_prompts_wait_in_the_router_the_sooner_the_decode_worker_takes_one() -> None:
    """The prefill worker has prompts for 4.1 s, and this one takes 0.8 s. Here it would take 8.8 s, mostly for the 100
    streams that it would hold up."""
    costs, busy = learned(), decode("d", running=99)

    def plan(*prefills: PrefillCandidate, waiting: int) -> Plan | None:
        return choose(800, list(prefills), [busy], costs=costs, num_waiting_tokens=waiting)

    assert (plan(prefill("p", queued=4100), waiting=3000), plan(prefill("p", queued=4100), waiting=5000)) == (
        None,
        HERE,
    )
    assert plan(prefill("p", queued=3900), waiting=5000) == THERE, "what waits does not wait for this one"
    for num_tokens in (1000, 2000) * 10:
        costs.computed(key("q"), num_tokens, num_tokens / 1000, NOW_S)
    both = prefill("p", queued=4100), prefill("q", queued=4100)
    assert (plan(*both, waiting=7000), plan(*both, waiting=9000)) == (None, HERE)


def test_an_idle_decode_worker_takes_part_in_a_burst() -> None:
    """Until costs are learned, tokens decide, and each prompt counts 64 more. Prefilling here would delay a request
    that may yet come to decode here: that costs a tenth of 864 tokens."""
    assert choose(800, [prefill("p")], [decode("d")]) == THERE
    assert choose(800, [prefill("p", queued=86)], [decode("d")]) == THERE
    assert choose(800, [prefill("p", queued=87)], [decode("d")]) == HERE
    assert choose(800, [prefill("p", queued=286)], [decode("d", queued=200)]) == THERE
    assert choose(800, [prefill("p", queued=287)], [decode("d", queued=200)]) == HERE
    # No worker computes again what it has cached.
    assert choose(800, [prefill("p", queued=246, cached=10)], [decode("d")]) == THERE
    assert choose(800, [prefill("p", queued=247, cached=10)], [decode("d")]) == HERE
    assert choose(800, [prefill("p")], [decode("d", cached=20)]) == HERE


def test_a_busy_decode_worker_is_left_alone() -> None:
    assert choose(800, [prefill("p", queued=2 * 864)], [decode("d", running=19)]) == THERE
    assert choose(800, [prefill("p", queued=2 * 864 + 1)], [decode("d", running=19)]) == HERE


def learned(*, p_s: float = 1.0, d_s: float = 1.0, handover_s: float = 0.0) -> Costs:
    """Costs learned from prompts of 1,000 and 2,000 tokens. Alone at `p` or `d`, 1,000 tokens take `p_s` or `d_s`;
    moving any prompt takes `handover_s`."""
    costs = Costs()
    for num_tokens in (1000, 2000) * 10:
        for name, seconds in (("p", p_s), ("d", d_s)):
            costs.computed(key(name), num_tokens, seconds * num_tokens / 1000, NOW_S)
        costs.handed_over(num_tokens, handover_s, NOW_S)
    return costs


def test_short_prompts_stay_where_moving_them_takes_longer_than_they_slow_down_others() -> None:
    """Moving a prompt takes 0.1 s. Computing it takes a millisecond a token, a tenth of which counts for each request
    beside it, and for one more. The two are even at 0.1 s = 0.1 x (running + 1) x tokens / 1000."""
    costs = learned(handover_s=0.1)
    assert choose(800, [prefill("p")], [decode("d")], costs=costs) == HERE
    assert choose(1200, [prefill("p")], [decode("d")], costs=costs) == THERE
    assert choose(200, [prefill("p")], [decode("d", running=3)], costs=costs) == HERE
    assert choose(300, [prefill("p")], [decode("d", running=3)], costs=costs) == THERE
    # Only tokens that must be moved, or computed, count.
    assert choose(1200, [prefill("p", cached=40)], [decode("d", cached=40)], costs=costs) == HERE


def test_what_was_learned_may_be_left_aside() -> None:
    by_tokens = PolicyConfig(learn_costs=False)
    assert choose(800, [prefill("p")], [decode("d")], costs=learned(handover_s=0.1), config=by_tokens) == THERE
    assert choose(800, [prefill("p", queued=87)], [decode("d")], costs=learned(p_s=0.1), config=by_tokens) == HERE


def test_a_slow_decode_worker_gets_no_prompts_until_the_wait_elsewhere_is_longer() -> None:
    costs = learned(p_s=0.1, d_s=1.0)
    assert choose(800, [prefill("p", queued=6000)], [decode("d")], costs=costs) == THERE
    assert choose(800, [prefill("p", queued=9000)], [decode("d")], costs=costs) == HERE


def test_the_faster_prefill_worker_is_asked_though_more_waits_there() -> None:
    costs = learned(p_s=0.1)
    for num_tokens in (1000, 2000) * 10:
        costs.computed(key("slow"), num_tokens, num_tokens / 1000, NOW_S)
    busy = decode("d", running=50)
    assert choose(800, [prefill("slow"), prefill("p", queued=5000)], [busy], costs=costs) == THERE


def test_whoever_has_no_such_backlog_is_asked_instead() -> None:
    overdone = prefill("p", queued=PolicyConfig().max_prefill_backlog_tokens + 1, cached=5000)
    assert choose(80_000, [overdone, prefill("q")], [decode("d", available=9000, running=500)]) == Plan(
        key("d"), key("q")
    )


def test_a_worker_that_failed_is_the_last_choice() -> None:
    decodes = [decode("bad", cached=30, running=20), decode("d")]
    assert choose(800, [prefill("p")], decodes, avoid=("bad",)) == Plan(key("d"), key("p"))
    assert choose(800, [prefill("p")], decodes[:1], avoid=("bad",)) == Plan(key("bad"), key("p"))


def test_where_every_prefill_worker_has_failed_the_decode_worker_does_it_all() -> None:
    prefills = [prefill("a"), prefill("b")]
    assert choose(800, prefills, [decode("d")], avoid=("a",)) == Plan(key("d"), key("b"))
    assert choose(800, prefills, [decode("d")], avoid=("a", "b")) == Plan(key("d"), None)


def test_load_decides_between_equals() -> None:
    plan = choose(800, [prefill("a", queued=5), prefill("b")], [decode("c", used=90), decode("d", used=10)])
    assert plan == Plan(key("d"), key("b"))


def test_in_a_burst_a_prefill_worker_keeps_what_would_make_the_decode_worker_the_fuller_one() -> None:
    """A prompt's token takes 1 ms, at either worker. This prompt has 50 blocks, and 100 blocks wait behind it."""
    stay = Plan(key("p"), None, is_stay=True)

    def of(
        used: int, *, queued: int = 1100, waiting: int = 1600, costs: Costs | None = None, **prefiller: int | bool
    ) -> Plan | None:
        worker = prefill("p", queued=queued, available=150)._replace(**prefiller)
        decoding = decode("d", used=used, running=99)
        return choose(800, [worker], [decoding], costs=costs or learned(), num_waiting_tokens=waiting)

    assert (of(150), of(151)) == (THERE, stay), "only once it would have less though it kept all"
    assert (of(160, num_used_blocks=10), of(161, num_used_blocks=10)) == (THERE, stay)
    assert (of(50, waiting=0), of(51, waiting=0)) == (THERE, stay), "prompts at workers alone are a burst"
    assert (of(51, queued=900, waiting=0), of(500, queued=0, waiting=0)) == (THERE, THERE), "it has soon no prompts"
    for num_queued, plan in ((300, THERE), (500, stay)):
        both = [prefill("p", queued=600, available=150)], [decode("d", used=51, running=99, queued=num_queued)]
        assert choose(800, *both, costs=learned()) == plan, "the prompts of both are one burst"
    assert of(151, queued=4100) is None, "it will keep it, but has enough prompts"
    assert of(151, num_available_blocks=149) == THERE, "half of its pool stays free"
    assert of(151, is_full=True) == THERE
    cached = decode("d", used=151, running=99, cached=2)
    worker = prefill("p", queued=1100, available=150)
    assert choose(800, [worker], [cached], costs=learned(), num_waiting_tokens=1600) == THERE, "it has more cached"
    assert (
        choose(800, [worker._replace(num_cached_tokens=32)], [cached], costs=learned(), num_waiting_tokens=1600) == stay
    )
    by_tokens = PolicyConfig(learn_costs=False)
    assert choose(800, [worker], [decode("d", used=151)], config=by_tokens, num_waiting_tokens=1600) == HERE


def test_a_burst_keeps_no_request_that_the_decode_worker_would_compute_much_sooner() -> None:
    """One long prompt at the prefill worker is as much work as a burst, but a short prompt need not wait for it. With
    nine streams, the decode worker takes 0.32 s for it: 160 ms, and as much again for the sake of the streams."""

    def of(num_queued: int) -> Plan | None:
        worker = prefill("p", queued=num_queued, available=900)
        return choose(160, [worker], [decode("d", used=900, running=9)], costs=learned())

    assert (of(1_100), of(1_200), of(60_000)) == (Plan(key("p"), None, is_stay=True), HERE, HERE)


def test_streams_that_have_soon_ended_are_no_burst() -> None:
    """The prompts take 2.7 s, and a token 10 ms."""
    for num_tokens, expected in ((500, THERE), (600, Plan(key("p"), None, is_stay=True))):
        costs = learned()
        costs.paces.answered(num_tokens)
        costs.paces.decoded(key("d"), 100, 1.0, 0, NOW_S)
        plan = choose(
            800,
            [prefill("p", queued=1100, available=150)],
            [decode("d", used=900, running=99)],
            costs=costs,
            num_waiting_tokens=1600,
        )
        assert plan == expected


@pytest.mark.parametrize("candidates", [[decode("d", available=49)], [decode("d", full=True)]])
def test_where_no_decode_worker_has_room_an_idle_prefill_worker_keeps_the_request(
    candidates: list[DecodeCandidate],
) -> None:
    stay = Plan(key("p"), None, is_stay=True)
    assert choose(800, [prefill("p", available=150)], candidates) == stay
    assert choose(800, [prefill("p", available=150)], candidates, may_stay=False) is None, "it has not waited enough"
    assert choose(800, [prefill("p", available=149)], candidates) is None, "half of its pool stays free"
    assert choose(800, [prefill("p", available=150, queued=1)], candidates) is None, "it has prompts to compute"
    assert choose(800, [prefill("p", available=150, full=True)], candidates) is None
    assert choose(800, [prefill("p", available=150, digest="other weights")], candidates) is None
    assert choose(800, [prefill("p", available=150)], candidates, avoid=("p",)) is None
    cold, warm = prefill("cold", available=200), prefill("p", available=200, cached=10)
    assert choose(800, [cold, warm], candidates) == stay
    assert choose(800, [prefill("p", available=200)], [*candidates, decode("e")]) == Plan(key("e"), key("p"))


def test_without_any_decode_worker_nobody_keeps_requests() -> None:
    assert choose(800, [prefill("p", available=200)], []) is None


def test_a_prompt_that_is_all_cached_can_be_planned() -> None:
    costs = learned()
    for num_tokens, seconds in ((500, 0.5), (1000, 2.0), (2000, 8.0)) * 3:
        costs.computed(key("p"), num_tokens, seconds, NOW_S)
    warm = prefill("p", cached=50, available=200)
    assert choose(800, [warm, prefill("q")], [decode("d", running=5)], costs=costs) == THERE
    assert choose(800, [warm, prefill("q", available=200)], [decode("d", full=True)], costs=costs) is not None
