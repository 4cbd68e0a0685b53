"""Answers a whole request, including its prompt, in one engine, in either role.

    generate ──no room──> False: the caller answers Busy
       └──> True: the engine computes the prompt and decodes; its tokens reach the stream through `SessionHost.deliver`

If the stream is cancelled after it has begun, the caller frees its blocks with `LLMEngine.abort`.
"""

from __future__ import annotations

from engine.async_llm_engine import AsyncLLMEngine
from engine.llm_engine import LLMEngine
from protos import tandem_worker_pb2 as pb
from worker_service.messages import engine_arguments
from worker_service.sessions import Stream


async def generate(engine: AsyncLLMEngine, stream: Stream, request: pb.EngineRequest) -> bool:
    """Begin `request` if there is room for it now; returns whether there is. Raises `ValueError` if the engine does not
    accept it."""

    def add(engine: LLMEngine) -> bool:
        return engine.add_request(stream.engine_id, **engine_arguments(request), may_wait=False)

    has_room = await engine.call(add)
    if not stream.is_open:  # cancelled meanwhile, perhaps before the engine had heard of it
        engine.post(lambda engine: engine.abort(stream.engine_id))
    return has_room
