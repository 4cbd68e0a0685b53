"""What a scheduler counts about its cache, for the metrics of a worker."""

from __future__ import annotations

from test_offloading_order import again, end_copies, gave_way, offloading
from test_scheduler import step


def test_prompts_and_what_is_found_of_them_and_copies_both_ways_are_counted() -> None:
    scheduler = offloading(12)
    earlier = gave_way(scheduler)
    stats, copies = scheduler.stats, scheduler.block_manager.host_ledger().num_kept
    assert (stats.num_saved_blocks, stats.num_loaded_blocks) == (copies, 0)
    assert (stats.num_prefix_queries_tokens, stats.num_prefix_hits_tokens) == (25 + 40 + 40, 0)
    scheduler.sequences.add(again(earlier, "again"))
    step(scheduler)
    loads = [copy for copy in end_copies(scheduler) if copy.is_load]
    assert stats.num_loaded_blocks == len(loads) > 0
    assert stats.num_prefix_queries_tokens == 25 + 40 + 40 + 25
    assert stats.num_loaded_tokens == stats.num_prefix_hits_tokens == 4 * len(loads)
