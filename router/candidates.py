"""What the policy is told about a worker for one request: numbers from its last reported load and from what this router
has planned on it since."""

from __future__ import annotations

from router.policy import DecodeCandidate, PrefillCandidate
from router.queued_request import QueuedRequest
from router.worker_handle import WorkerHandle


def prefill_candidate(handle: WorkerHandle, request: QueuedRequest) -> PrefillCandidate:
    return PrefillCandidate(
        key=handle.key,
        kind=handle.facts.kind_for(request.needs.lora_name, request.needs.kind),
        num_queued_tokens=handle.num_queued_tokens,
        num_cached_tokens=handle.num_cached_tokens(request.num_cached_blocks),
        num_blocks=handle.load.num_blocks,
        num_available_blocks=handle.num_available_blocks,
        is_full=handle.is_full or not handle.facts.can_generate,
        num_used_blocks=handle.num_used_blocks,
        transport=handle.facts.transport,
    )


def decode_candidate(handle: WorkerHandle, request: QueuedRequest, slowness: float) -> DecodeCandidate:
    ahead = request.overtakes
    # For states, too: whether the prompt comes from another worker is not known yet.
    num_blocks_kept = handle.facts.num_state_blocks
    if ahead is not None:
        num_blocks_kept += handle.facts.num_blocks(ahead.num_tokens) + handle.facts.num_state_blocks
    return DecodeCandidate(
        key=handle.key,
        kind=handle.facts.kind_for(request.needs.lora_name, request.needs.kind),
        block_size=handle.facts.block_size,
        num_available_blocks=handle.num_available_blocks + request.num_shared_blocks(handle.key) - num_blocks_kept,
        num_used_blocks=handle.num_used_blocks,
        num_cached_blocks=request.num_cached_blocks.get(handle.key, 0),
        is_full=handle.is_full or not handle.has_free_seqs(1 if ahead is None else 2),
        num_queued_tokens=handle.num_queued_tokens,
        num_running=handle.load.num_running,
        transport=handle.facts.transport,
        slowness=slowness,
    )
