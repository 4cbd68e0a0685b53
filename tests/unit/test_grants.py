"""The grant table: first each end of a grant in a test of its own, then random operations against the table's
promises."""

from __future__ import annotations

import copy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kv_transfer.grants import CommitResult, CommitStart, Grant, GrantState, GrantTable, Verdict

BLOCK_BYTES = 32
LEASE_S = 10.0
ME = "incarnation-1"


def make_table() -> GrantTable:
    return GrantTable(incarnation=ME, num_layers=3, num_blocks=20, block_bytes=BLOCK_BYTES, lease_s=LEASE_S)


def write(table: GrantTable, grant: Grant, block_ids: list[int], layer: int = 0) -> Verdict:
    num_bytes = len(block_ids) * BLOCK_BYTES
    return table.check_write(grant.grant_id, grant.epoch, ME, layer, block_ids, num_bytes).verdict


def commit(table: GrantTable, grant: Grant, now_s: float = 0.0, num_mismatched_blocks: int = 0) -> CommitResult:
    assert table.begin_commit(grant.grant_id, grant.epoch, ME) is CommitStart.VERIFY
    return table.finish_commit(grant.grant_id, grant.epoch, num_mismatched_blocks, now_s)


def attach(table: GrantTable, grant: Grant) -> int:
    check, attachment_id = table.attach(grant.grant_id, grant.epoch, ME)
    assert check.verdict is Verdict.ACCEPTED
    return attachment_id


def test_write_is_accepted_only_where_it_was_granted() -> None:
    table = make_table()
    grant = table.issue("owner", [4, 7, 9], 1, 0.0)
    assert write(table, grant, [9, 7], layer=2) is Verdict.ACCEPTED
    assert write(table, grant, [4]) is Verdict.MALFORMED  # block 4 is cached: another request may read it
    assert write(table, grant, [7, 8]) is Verdict.MALFORMED
    assert write(table, grant, [7], layer=3) is Verdict.MALFORMED
    assert write(table, grant, [7], layer=-1) is Verdict.MALFORMED
    assert write(table, grant, [2**32 - 1]) is Verdict.MALFORMED
    assert table.check_write(grant.grant_id, grant.epoch, ME, 0, [7], BLOCK_BYTES - 1).verdict is Verdict.MALFORMED
    assert table.check_write(grant.grant_id, grant.epoch, ME, 0, [7], 2 * BLOCK_BYTES).verdict is Verdict.MALFORMED
    assert table.counters.num_late_writes == 0


@pytest.mark.parametrize(
    ("grant_id_change", "epoch_change", "incarnation"), [(1, 0, ME), (0, 1, ME), (0, -1, ME), (0, 0, "incarnation-0")]
)
def test_strays_are_late(grant_id_change: int, epoch_change: int, incarnation: str) -> None:
    table = make_table()
    grant = table.issue("owner", [4, 7], 0, 0.0)
    stray = (grant.grant_id + grant_id_change, grant.epoch + epoch_change, incarnation)
    assert table.check_write(*stray, 0, [4, 7], 2 * BLOCK_BYTES).verdict is Verdict.LATE
    assert table.counters.num_late_writes == 2
    assert table.attach(*stray)[0].verdict is Verdict.LATE
    assert table.begin_commit(*stray) is CommitStart.GONE
    assert write(table, grant, [4]) is Verdict.ACCEPTED
    attachment_id = attach(table, grant)
    assert table.revoke(grant.grant_id) == []
    assert table.abandon(*stray) == []  # the attached sender may still write
    assert table.detach(grant.grant_id, attachment_id) == [grant]


def test_commit_hands_over_and_ends_the_epoch() -> None:
    table = make_table()
    grant = table.issue("owner", [4, 7], 0, 0.0)
    assert commit(table, grant, 1.0) is CommitResult.COMMITTED
    assert write(table, grant, [4]) is Verdict.LATE
    assert table.revoke(grant.grant_id) == []
    assert table.drop_owner("owner") == []
    assert table.begin_commit(grant.grant_id, grant.epoch, ME) is CommitStart.COMMITTED
    assert table.begin_commit(grant.grant_id, grant.epoch + 1, ME) is CommitStart.GONE
    assert table.begin_commit(grant.grant_id, grant.epoch, "incarnation-0") is CommitStart.GONE
    assert table.next_expiry_s() == 1.0 + LEASE_S
    assert table.expire(1.0 + LEASE_S) == []
    assert table.begin_commit(grant.grant_id, grant.epoch, ME) is CommitStart.GONE
    assert table.next_expiry_s() is None


def test_unwanted_commit_is_forgotten() -> None:
    table = make_table()
    grant = table.issue("owner", [4], 0, 0.0)
    commit(table, grant)
    table.forget_commit(grant.grant_id)
    assert table.begin_commit(grant.grant_id, grant.epoch, ME) is CommitStart.GONE
    assert table.expire(LEASE_S) == []


def test_no_write_while_it_is_verified_and_again_after_a_mismatch() -> None:
    table = make_table()
    grant = table.issue("owner", [4, 7], 0, 0.0)
    assert table.begin_commit(grant.grant_id, grant.epoch, ME) is CommitStart.VERIFY
    assert write(table, grant, [4]) is Verdict.LATE
    assert table.finish_commit(grant.grant_id, grant.epoch, 1, 0.0) is CommitResult.MISMATCH
    assert table.counters.num_mismatched_blocks == 1
    assert write(table, grant, [4]) is Verdict.ACCEPTED
    assert commit(table, grant) is CommitResult.COMMITTED


def test_revoked_while_it_is_verified() -> None:
    table = make_table()
    grant = table.issue("owner", [4, 7], 0, 0.0)
    table.begin_commit(grant.grant_id, grant.epoch, ME)
    assert table.revoke(grant.grant_id) == [grant]
    assert table.finish_commit(grant.grant_id, grant.epoch, 0, 0.0) is CommitResult.GONE
    assert table.state(grant.grant_id) is None


def test_one_sided_sender_keeps_blocks_in_quarantine() -> None:
    table = make_table()
    detached, abandoned, lost = (table.issue("owner", [block_id], 0, 0.0) for block_id in (1, 2, 3))
    attachments = {grant.grant_id: attach(table, grant) for grant in (detached, abandoned, lost)}
    assert table.drop_owner("owner") == []
    assert {table.state(grant.grant_id) for grant in (detached, abandoned, lost)} == {GrantState.QUARANTINED}
    assert sorted(table.reserved_block_ids()) == [1, 2, 3]
    assert table.detach(detached.grant_id, attachments[abandoned.grant_id]) == []
    assert table.detach(detached.grant_id, attachments[detached.grant_id]) == [detached]
    assert table.abandon(abandoned.grant_id, abandoned.epoch, ME) == [abandoned]
    assert table.next_expiry_s() is None
    table.sender_gone(lost.grant_id, attachments[lost.grant_id], 5.0)
    assert table.next_expiry_s() == 5.0 + LEASE_S
    assert table.expire(4.9 + LEASE_S) == []
    assert table.expire(5.0 + LEASE_S) == [lost]
    assert table.reserved_block_ids() == []


def test_the_end_of_an_earlier_sender_is_not_that_of_the_one_that_writes_now() -> None:
    """The earlier one has abandoned the grant, and its connection breaks only then."""
    table = make_table()
    grant = table.issue("owner", [4], 0, 0.0)
    earlier = attach(table, grant)
    assert table.abandon(grant.grant_id, grant.epoch, ME) == []
    now = attach(table, grant)
    table.sender_gone(grant.grant_id, earlier, 1.0)
    assert table.revoke(grant.grant_id) == []
    assert table.expire(1.0 + LEASE_S) == []
    assert table.detach(grant.grant_id, now) == [grant]


def test_one_sided_senders_come_one_after_another() -> None:
    table = make_table()
    grant = table.issue("owner", [1], 0, 0.0)
    first = attach(table, grant)
    assert table.attach(grant.grant_id, grant.epoch, ME)[0].verdict is Verdict.LATE
    assert table.detach(grant.grant_id, first) == []
    second = attach(table, grant)
    assert second != first
    assert table.detach(grant.grant_id, first) == []  # detached again: the second sender stays attached
    assert table.revoke(grant.grant_id) == []
    assert table.detach(grant.grant_id, second) == [grant]


def test_leases_live_by_their_owners_signs_of_life() -> None:
    table = make_table()
    silent = table.issue("silent", [1], 0, 0.0)
    alive = table.issue("alive", [2], 0, 0.0)
    table.renew("alive", 6.0)
    table.renew("stranger", 6.0)
    assert table.next_expiry_s() == LEASE_S
    assert table.expire(LEASE_S) == [silent]
    assert table.expire(LEASE_S) == []
    assert table.counters.num_expired_leases == 1
    assert table.expire(6.0 + LEASE_S) == [alive]
    assert table.next_expiry_s() is None


def test_a_further_grant_is_a_sign_of_life_of_its_owner() -> None:
    """Its lease is as long as that of the owner's first grant was, and the first grant lives as long."""
    table = make_table()
    first = table.issue("owner", [1], 0, 0.0)
    second = table.issue("owner", [2], 0, 6.0)
    assert table.expire(LEASE_S) == []
    assert write(table, second, [2]) is Verdict.ACCEPTED
    assert table.expire(6.0 + LEASE_S) == [first, second]


def test_plain_data() -> None:
    table = make_table()
    grant = table.issue("owner", [1], 0, 0.0)
    copied = copy.deepcopy(table)
    assert copied == table
    copied.revoke(grant.grant_id)
    assert copied != table
    assert table.state(grant.grant_id) is GrantState.GRANTED


class GrantMachine(RuleBasedStateMachine):
    """Plays the block allocator, routers, two-sided and one-sided senders, and time."""

    grants: Bundle[Grant] = Bundle("grants")
    attachments: Bundle[tuple[Grant, int]] = Bundle("attachments")

    def __init__(self) -> None:
        super().__init__()
        self.table = make_table()
        self.now_s = 0.0
        self.free = list(range(20))
        self.owned_by_grant: dict[int, Grant] = {}
        self.ended: set[int] = set()
        """Grants under which no further write may be accepted."""
        self.verifying: dict[int, Grant] = {}
        self.writing: dict[int, set[int]] = {}
        """Grant id -> one-sided senders that may have writes under way."""
        self.lost_s: dict[int, float] = {}
        self.seen_s: dict[str, float] = {}

    def take_back(self, freed: list[Grant]) -> None:
        for grant in freed:
            assert self.owned_by_grant.pop(grant.grant_id) == grant, "freed what was not reserved"
            self.ended.add(grant.grant_id)
            assert not self.writing.get(grant.grant_id), "freed under a one-sided sender's hands"
            self.free.extend(grant.block_ids)

    @rule(target=grants, owner=st.sampled_from("ABC"), num_blocks=st.integers(1, 5), num_cached=st.integers(0, 5))
    def issue(self, owner: str, num_blocks: int, num_cached: int) -> Grant:
        block_ids, self.free = self.free[:num_blocks], self.free[num_blocks:]
        grant = self.table.issue(owner, block_ids, min(num_cached, len(block_ids)), self.now_s)
        assert grant.grant_id not in self.ended
        assert grant.grant_id not in self.owned_by_grant
        self.owned_by_grant[grant.grant_id] = grant
        self.seen_s[owner] = self.now_s
        return grant

    @rule(grant=grants, layer=st.integers(-1, 3), block_ids=st.lists(st.integers(0, 20), min_size=1, max_size=4))
    def write_anything(self, grant: Grant, layer: int, block_ids: list[int]) -> None:
        before = self.table.counters.num_late_writes
        verdict = write(self.table, grant, block_ids, layer)
        is_live = grant.grant_id not in self.ended and grant.grant_id not in self.verifying
        is_right = 0 <= layer < 3 and set(block_ids) <= set(grant.writable_block_ids)
        wanted = Verdict.LATE if not is_live else Verdict.ACCEPTED if is_right else Verdict.MALFORMED
        assert verdict is wanted
        assert self.table.counters.num_late_writes - before == (len(block_ids) if wanted is Verdict.LATE else 0)

    @rule(target=attachments, grant=grants)
    def attach(self, grant: Grant) -> tuple[Grant, int]:
        check, attachment_id = self.table.attach(grant.grant_id, grant.epoch, ME)
        is_live = grant.grant_id not in self.ended and grant.grant_id not in self.verifying
        assert (check.verdict is Verdict.ACCEPTED) == (is_live and not self.writing.get(grant.grant_id))
        if check.verdict is Verdict.ACCEPTED:
            self.writing[grant.grant_id] = {attachment_id}
        return grant, attachment_id

    @rule(attachment=attachments)
    def detach(self, attachment: tuple[Grant, int]) -> None:
        grant, attachment_id = attachment
        self.writing.get(grant.grant_id, set()).discard(attachment_id)
        if not self.writing.get(grant.grant_id):
            self.lost_s.pop(grant.grant_id, None)
        self.take_back(self.table.detach(grant.grant_id, attachment_id))

    @rule(attachment=attachments)
    def lose_sender(self, attachment: tuple[Grant, int]) -> None:
        grant, attachment_id = attachment
        if grant.grant_id in self.lost_s or not attachment_id:  # 0: it was not let in, so its stream is no push
            return
        if attachment_id in self.writing.get(grant.grant_id, set()):
            self.lost_s[grant.grant_id] = self.now_s
        self.table.sender_gone(grant.grant_id, attachment_id, self.now_s)

    @rule(grant=grants)
    def abandon(self, grant: Grant) -> None:
        self.writing.pop(grant.grant_id, None)
        self.lost_s.pop(grant.grant_id, None)
        self.take_back(self.table.abandon(grant.grant_id, grant.epoch, ME))

    @rule(grant=grants)
    def begin_commit(self, grant: Grant) -> None:
        if grant.grant_id in self.verifying and grant.grant_id not in self.ended:
            return  # the receiver makes a second commit wait
        start = self.table.begin_commit(grant.grant_id, grant.epoch, ME)
        assert (start is CommitStart.VERIFY) == (grant.grant_id not in self.ended)
        if start is CommitStart.VERIFY:
            self.verifying[grant.grant_id] = grant

    @rule(data=st.data(), num_mismatched_blocks=st.sampled_from([0, 0, 1, 2]))
    def finish_commit(self, data: st.DataObject, num_mismatched_blocks: int) -> None:
        if not self.verifying:
            return
        grant = self.verifying.pop(data.draw(st.sampled_from(sorted(self.verifying))))
        result = self.table.finish_commit(grant.grant_id, grant.epoch, num_mismatched_blocks, self.now_s)
        if grant.grant_id in self.ended:
            assert result is CommitResult.GONE
        elif num_mismatched_blocks:
            assert result is CommitResult.MISMATCH
        else:
            assert result is CommitResult.COMMITTED
            del self.owned_by_grant[grant.grant_id]
            self.ended.add(grant.grant_id)
            self.writing.pop(grant.grant_id, None)  # by its commit, the sender said that it had written all
            self.lost_s.pop(grant.grant_id, None)
            self.free.extend(grant.block_ids)  # the request ends at once

    @rule(grant=grants)
    def revoke(self, grant: Grant) -> None:
        freed = self.table.revoke(grant.grant_id)
        self.ended.add(grant.grant_id)
        self.take_back(freed)

    @rule(owner=st.sampled_from("ABC"))
    def drop_owner(self, owner: str) -> None:
        self.end_all(owner)
        self.take_back(self.table.drop_owner(owner))

    @rule(owner=st.sampled_from("ABC"))
    def renew(self, owner: str) -> None:
        self.table.renew(owner, self.now_s)
        self.seen_s[owner] = self.now_s

    @rule(step_s=st.sampled_from([0.5, 4.0, LEASE_S]))
    def let_time_pass(self, step_s: float) -> None:
        self.now_s += step_s
        next_s = self.table.next_expiry_s()
        for owner in "ABC":
            if self.now_s - self.seen_s.get(owner, self.now_s) >= LEASE_S:
                if any(g.owner == owner and g.grant_id not in self.ended for g in self.owned_by_grant.values()):
                    assert next_s is not None
                    assert next_s <= self.now_s
                self.end_all(owner)
        for grant_id, lost_s in list(self.lost_s.items()):
            if self.now_s - lost_s >= LEASE_S:
                self.writing.pop(grant_id, None)
                del self.lost_s[grant_id]
        freed = self.table.expire(self.now_s)
        assert all(grant.grant_id in self.ended for grant in freed), "freed before its lease was over"
        self.take_back(freed)
        after_s = self.table.next_expiry_s()
        assert after_s is None or after_s > self.now_s

    @rule(grant=consumes(grants))
    def forget(self, grant: Grant) -> None:
        """The sender and the router of a grant vanish, so only time can end the grant."""

    def end_all(self, owner: str) -> None:
        self.ended |= {g.grant_id for g in self.owned_by_grant.values() if g.owner == owner}

    @invariant()
    def every_block_has_one_owner(self) -> None:
        reserved = self.table.reserved_block_ids()
        assert sorted(reserved + self.free) == list(range(20))
        assert sorted(reserved) == sorted(b for g in self.owned_by_grant.values() for b in g.block_ids)

    def teardown(self) -> None:
        for grant_id in list(self.writing):
            for attachment_id in self.writing[grant_id]:
                self.table.sender_gone(grant_id, attachment_id, self.now_s)
        self.writing.clear()
        self.now_s += LEASE_S
        self.take_back(self.table.expire(self.now_s))
        assert sorted(self.free) == list(range(20)), "something leaked"
        assert self.table.next_expiry_s() is None


GrantMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestGrantMachine = GrantMachine.TestCase
