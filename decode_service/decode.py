"""How a decode worker handles a request: it reserves memory, receives KV and decodes; or it does everything alone.

    reserve ──no room──> Busy
       └──> GRANTED ──commit, verified──> decoding ──tokens──> finished
               └── cancelled, or its owner silent for a lease: revoked; freed now, or once no sender can write any more
    generate ──no room──> Busy, else prefilling and decoding here ──tokens──> finished

The engine's blocks of a stream are freed in one place, `_free`. Before a commit, the grant decides when they may be
freed; after it, they belong to the engine.
"""

from __future__ import annotations

from engine.async_llm_engine import AsyncLLMEngine, EngineDeadError
from engine.llm_engine import LLMEngine, Reservation
from kv_transfer import Grant, InvalidTransfer, KVReceiver
from protos import tandem_worker_pb2 as pb
from rpc.errors import InvalidRequest, LeaseGone
from rpc.failpoints import reach
from worker_service.generation import generate
from worker_service.messages import engine_arguments
from worker_service.sessions import RouterSession, SessionHost, Stream


class DecodeRole:
    """Used only on the event loop's thread. `receiver` must be set before the first command."""

    def __init__(self, *, host: SessionHost, engine: AsyncLLMEngine) -> None:
        self._host = host
        self._engine = engine
        self._engine_ids: dict[int, str] = {}
        """By grant id, until the grant's blocks are committed or free."""
        self.receiver: KVReceiver

    # -- commands -----------------------------------------------------------------------------------------------

    def on_command(self, session: RouterSession, command: pb.PrefillCommand | pb.DecodeCommand) -> None:
        assert isinstance(command, pb.DecodeCommand)
        match command.WhichOneof("command"):
            case "reserve":
                request, serve = command.reserve, self._reserve
            case "generate":
                request, serve = command.generate, self._generate
            case _:
                raise InvalidRequest([("command", "must be one of reserve, generate, cancel, beat")])
        if (stream := self._host.admit(session, request)) is not None:
            self._host.spawn(stream, lambda: serve(stream, request))

    def on_beat(self, session: RouterSession) -> None:
        self.receiver.renew(session)

    def cancel(self, stream: Stream) -> None:
        if stream.grant_id is None:
            self._free(stream.engine_id)
        else:
            self.receiver.revoke(stream.grant_id)

    def drop(self, session: RouterSession) -> None:
        self.receiver.drop_owner(session)

    # -- one request --------------------------------------------------------------------------------------------

    async def _generate(self, stream: Stream, request: pb.EngineRequest) -> None:
        await reach("decode.generate")
        if not await generate(self._engine, stream, request):
            self._host.answer_busy(stream)

    async def _reserve(self, stream: Stream, request: pb.EngineRequest) -> None:
        def reserve(engine: LLMEngine) -> Reservation | None:
            return engine.reserve(stream.engine_id, **engine_arguments(request))

        reservation = await self._engine.call(reserve)
        await reach("decode.reserved")
        if not stream.is_open:
            return  # cancelled meanwhile: `cancel`'s engine call runs after ours and frees the reservation
        if reservation is None:
            self._host.answer_busy(stream)
            return
        promised = reservation.block_ids, reservation.num_cached_blocks, reservation.prompt_digest
        grant = self.receiver.issue(stream.session, *promised)
        stream.grant_id = grant.grant_id
        self._engine_ids[grant.grant_id] = stream.engine_id
        stream.post(granted=grant)

    # -- reports of the receiver --------------------------------------------------------------------------------

    async def on_commit(self, grant: Grant, first_token_id: int, num_prompt_tokens: int) -> bool:
        """The grant's blocks hold verified KV and now belong to the engine. Returns False if the request is gone.

        Raises `InvalidTransfer` if the request cannot continue from these arguments; its attempt then ends, and the
        blocks are freed."""
        engine_id = self._engine_ids.pop(grant.grant_id)
        stream = self._host.find(engine_id)
        if stream is None:
            self._free(engine_id)
            return False
        stream.grant_id = None  # from now on, a cancel goes to the engine, after the commit
        await reach("decode.before_commit")
        try:
            await self._engine.call(lambda engine: engine.commit(engine_id, first_token_id, num_prompt_tokens))
        except ValueError as error:
            self._free(engine_id)
            if stream.is_open:
                refusal = InvalidRequest((), f"the prefill worker's commit: {error}")
                self._host.refuse(stream, refusal, can_retry=True)
            raise InvalidTransfer(str(error)) from error
        except (KeyError, EngineDeadError):
            return False
        await reach("decode.after_commit")
        return True

    def on_freed(self, grants: list[Grant]) -> None:
        """No sender can write to these grants' blocks any more: free them in the engine."""
        for grant in grants:
            engine_id = self._engine_ids.pop(grant.grant_id)
            self._free(engine_id)
            stream = self._host.find(engine_id)
            if stream is not None:
                self._host.refuse(stream, LeaseGone("the grant's lease has expired"), can_retry=True)

    def _free(self, engine_id: str) -> None:
        self._engine.post(lambda engine: engine.abort(engine_id))
