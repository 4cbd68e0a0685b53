"""How a prefill worker handles a request, from top to bottom: it computes the prompt for a decode worker or, if none
has room, answers the request alone.

    opened ──engine computes, each layer is pushed as it is written──> first token ──to the router at once
       │                                                                   │
       │                                                   HELD ──commit acknowledged──> released, handed over
       └── cancelled or failed: HELD ──no transfer reads the blocks any more──> released

    generate ──no room──> Busy, else prefilling and decoding here ──tokens──> finished
       (half of the pool, and of the sequences that may run, are reserved for prompts that decode workers decode;
        where answers grow beyond the other half, the engine preempts the youngest)

The blocks of a prompt that moves stay in the engine, owned by the sequence or held, until no transfer can read them.
They are released in one place, `_let_go`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from engine.async_llm_engine import AsyncLLMEngine
from engine.llm_engine import LLMEngine
from engine.scheduling.sequence import BlockExport
from kv_transfer import STATUS_OF, IncompatiblePeer, KVSender, Push, TransferError
from protos import tandem_worker_pb2 as pb
from protos.tandem_inference_pb2 import KVTransferStats
from protos.tandem_kv_transfer_pb2 import Grant
from rpc.errors import InvalidRequest, error_of_code
from rpc.failpoints import reach
from worker_service.generation import generate
from worker_service.messages import EngineArguments, engine_arguments
from worker_service.sessions import RouterSession, SessionHost, Stream


class PrefillRole:
    """Runs every prefill command as a task of its own. Used only on the event loop's thread."""

    def __init__(
        self,
        *,
        host: SessionHost,
        engine: AsyncLLMEngine,
        sender: KVSender,
        num_blocks: int,
        on_handed_over: Callable[[KVTransferStats], None],
    ) -> None:
        """`num_blocks`: of the pool. `on_handed_over` is called for each prompt that another worker has taken over."""
        self._host = host
        self._engine = engine
        self._sender = sender
        self._pushes: dict[str, Push] = {}
        """By engine id."""
        self._tasks: dict[Stream, asyncio.Task[None]] = {}
        self._num_blocks = num_blocks
        self._staying: dict[Stream, _Size] = {}
        """Streams that are answered here."""
        self._on_handed_over = on_handed_over

    # -- commands -----------------------------------------------------------------------------------------------

    def on_command(self, session: RouterSession, command: pb.PrefillCommand | pb.DecodeCommand) -> None:
        assert isinstance(command, pb.PrefillCommand)
        kind = command.WhichOneof("command")
        if kind not in ("prefill", "generate"):
            raise InvalidRequest([("command", "must be one of prefill, generate, cancel, beat")])
        request = command.prefill.request if kind == "prefill" else command.generate
        if (stream := self._host.admit(session, request)) is None:
            return
        if kind == "generate":
            self._host.spawn(stream, lambda: self._generate(stream, request))
            return
        task = self._host.spawn(stream, lambda: self._run(stream, command.prefill))
        self._tasks[stream] = task
        task.add_done_callback(lambda _: self._tasks.pop(stream))

    def on_beat(self, session: RouterSession) -> None:
        """Nothing to do: nothing here outlives its session, so there is no lease to renew."""

    def cancel(self, stream: Stream) -> None:
        if (task := self._tasks.get(stream)) is not None:
            task.cancel()
        else:  # it decodes here
            self._engine.post(lambda engine: engine.abort(stream.engine_id))

    def drop(self, session: RouterSession) -> None:
        """Nothing to do: the session's streams have been cancelled."""

    # -- one request --------------------------------------------------------------------------------------------

    async def _generate(self, stream: Stream, request: pb.EngineRequest) -> None:
        if not self._take(stream, request) or not await generate(self._engine, stream, request):
            self._host.answer_busy(stream)

    def _take(self, stream: Stream, request: pb.EngineRequest) -> bool:
        """Whether there is room to decode one more answer, beside prompts for other workers. One answer is always
        allowed."""
        config = self._engine.config
        staying = {other: size for other, size in self._staying.items() if other.is_open}
        num_begun, num_prompt = len(request.output_token_ids), len(request.prompt_token_ids)
        most = min(num_prompt + request.sampling_params.max_tokens, config.model.max_model_len)
        self._staying = staying | {stream: _Size(num_prompt + num_begun, most)}
        block_size = config.cache.block_size
        num_blocks = sum(size.num_expected_blocks(other, block_size) for other, size in self._staying.items())
        has_room = 2 * num_blocks <= self._num_blocks and 2 * len(self._staying) <= config.scheduler.max_num_seqs
        if staying and not has_room:
            del self._staying[stream]
        return stream in self._staying

    async def _run(self, stream: Stream, command: pb.PrefillRequest) -> None:
        try:
            await self._serve(stream, command)
        except TransferError as error:
            if stream.is_open:  # a transfer that fails while a cancel is pending can hide the cancel
                code = int(STATUS_OF[type(error)].value[0])
                # The problem is between the workers, not in the request: another pair may succeed.
                stream.post_failure(error_of_code(code, str(error)), can_retry=True)
        self._host.close(stream)

    async def _serve(self, stream: Stream, command: pb.PrefillRequest) -> None:
        arguments = engine_arguments(command.request)
        num_tokens = len(command.request.prompt_token_ids) + len(command.request.output_token_ids)
        check_grant_fits(command.grant, num_tokens, self._engine.config.cache.block_size, self._engine.num_state_blocks)
        push = await self._sender.open(command.grant)
        stream.first_token = asyncio.get_running_loop().create_future()
        self._pushes[stream.engine_id] = push
        is_settled = False
        try:
            await reach("prefill.opened")
            await self._engine.call(lambda engine: add_prefill(engine, stream.engine_id, command.grant, arguments))
            output = await stream.first_token
            if not output.is_finished:
                await reach("prefill.before_commit")
                stats = await push.commit(
                    num_prompt_tokens=num_tokens,
                    first_token_id=output.token_ids[-1],
                    src_block_ids=output.held_block_ids,
                )
                is_settled = True
                self._on_handed_over(stats)
                await reach("prefill.after_commit")
                stream.post(handed_over=pb.HandedOver(stats=stats))
        finally:
            # A task of its own: another cancel may come while this waits, and must not interrupt it.
            self._host.keep(self._let_go(stream, push, is_settled=is_settled))

    async def _let_go(self, stream: Stream, push: Push, *, is_settled: bool) -> None:
        """Free the blocks once no transfer can read them any more."""
        if not is_settled:
            self._engine.post(lambda engine: engine.hold(stream.engine_id))
            await push.abandon()
        del self._pushes[stream.engine_id]
        self._engine.post(lambda engine: engine.abort(stream.engine_id))

    def on_layer_written(self, layer: int, exports: list[BlockExport]) -> None:
        """Push blocks whose KV in `layer` is final."""
        for export in exports:
            push = self._pushes.get(export.request_id)
            if push is not None:
                push.write(layer, export.first_block, export.block_ids)


class _Size(NamedTuple):
    """The size of a request that stays here, in tokens."""

    num_tokens: int
    """When it came."""
    most: int

    def num_expected_blocks(self, stream: Stream, block_size: int) -> int:
        """The blocks that it is expected to need: twice as many tokens as it has now, if it may have that many. Few
        answers use all of their `max_tokens`, which by default are the rest of the context."""
        return -(-min(2 * (self.num_tokens + stream.num_tokens), self.most) // block_size)


def check_grant_fits(grant: Grant, num_tokens: int, block_size: int, num_state_blocks: int = 0) -> None:
    """Refuse a grant that does not fit a prompt of `num_tokens` tokens, before anything is computed.
    `num_state_blocks`: blocks that carry its recurrent state.

    Raises `ValueError`.
    """
    num_blocks = -(-num_tokens // block_size) + num_state_blocks
    if len(grant.block_ids) != num_blocks:
        raise ValueError(f"grant must have {num_blocks} blocks for {num_tokens} tokens, has {len(grant.block_ids)}")
    if grant.num_cached_blocks > num_blocks:
        raise ValueError(f"grant.num_cached_blocks must be at most {num_blocks}, is {grant.num_cached_blocks}")


def add_prefill(engine: LLMEngine, engine_id: str, grant: Grant, arguments: EngineArguments) -> None:
    """Queue the prompt, between two steps. Refuses a grant for another prompt, or for another adapter of the same name,
    before a step can sample a token, which would go to the router at once.

    Raises `IncompatiblePeer` (either worker may be wrong), and what `LLMEngine.add_prefill` raises."""
    digest = engine.add_prefill(engine_id, **arguments, num_receiver_blocks=grant.num_cached_blocks)
    if grant.prompt_digest and grant.prompt_digest != digest:
        engine.abort(engine_id)
        raise IncompatiblePeer(
            f"prompt_digest: worker {grant.worker_id} has another prompt, or another adapter of that name"
        )
