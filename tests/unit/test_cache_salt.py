"""Sequences share blocks with sequences of the same salt, and with no others."""

from __future__ import annotations

from itertools import count

from engine.sampling_params import SamplingParams
from engine.scheduling.block_ledger import BlockOwner
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.sequence import Sequence
from prefix_hash import block_hashes, prefix_key, salted_key

PROMPT = list(range(17))
_ids = count()


def sequence(cache_salt: str) -> Sequence:
    return Sequence(next(_ids), "r", PROMPT, len(PROMPT), SamplingParams(), cache_salt=cache_salt)


def computed(manager: BlockManager, cache_salt: str) -> Sequence:
    seq = sequence(cache_salt)
    assert manager.allocate(seq, BlockOwner.SEQUENCE, num_reusable_tokens=16, num_spare_blocks=0)
    manager.register_computed(seq, len(PROMPT))
    return seq


def test_blocks_are_shared_within_a_salt() -> None:
    manager = BlockManager(num_blocks=64, block_size=4, prefix_key=b"k" * 32, enable_prefix_caching=True)
    salts = ("", "a", "b")
    first = {salt: computed(manager, salt) for salt in salts}
    for salt in salts:
        assert first[salt].num_computed_tokens == 0, "nobody else's"
        assert manager.num_shared_blocks(sequence(salt)) == 4
        again = computed(manager, salt)
        assert again.num_computed_tokens == 16
        assert again.block_table[:4] == first[salt].block_table[:4]
        manager.free(again)
    assert manager.num_shared_blocks(sequence("c")) == 0
    assert not set.intersection(*(set(seq.block_table) for seq in first.values()))
    # The freed blocks cannot be found under another salt either.
    for seq in first.values():
        manager.free(seq)
    assert computed(manager, "c").num_computed_tokens == 0
    assert not manager.check_integrity()


def test_tokens_that_are_sampled_belong_to_the_salt_too() -> None:
    manager = BlockManager(num_blocks=64, block_size=4, prefix_key=b"k" * 32, enable_prefix_caching=True)
    seq = computed(manager, "a")
    seq.token_ids.extend([5, 6, 7, 8])
    manager.append(seq)
    manager.register_computed(seq, 20)
    key = salted_key(b"k" * 32, "a")
    assert set(manager.cached_hashes()) == set(block_hashes(seq.token_ids[:20], 4, key))


def test_keys() -> None:
    key = prefix_key("digest")
    assert salted_key(key, "") == key, "as before there were salts"
    keys = {salted_key(key, salt) for salt in ("", "a", "b", "ab")} | {salted_key(prefix_key("other"), "a")}
    assert len(keys) == 5


def test_processes_of_two_versions_agree_on_names() -> None:
    """What one version writes to a registry, another must find. These are the names that have always been used."""
    key = salted_key(prefix_key("weights=abc; dtype=bfloat16"), "salt", "adapter")
    assert [name.hex() for name in block_hashes([1, 2, 3, 70000, 5, 6, 7, 8, 9], 4, key)] == [
        "0c05304573f2f351ba5b82f1b7d46160",
        "3bfefa117a547c45aa68b5847e99060b",
    ]
