"""Answering a request in one engine, prompt and all, as either role does.

    generate ──no room──> False: the caller says Busy
       └──> True: the engine computes the prompt and decodes; its tokens reach the stream through `SessionHost.deliver`

If the stream is cancelled once it has begun, its blocks are the caller's to free, with `LLMEngine.abort`.
"""

from __future__ import annotations

from engine.async_llm_engine import AsyncLLMEngine
from engine.llm_engine import LLMEngine
from protos import tandem_worker_pb2 as pb
from worker_service.messages import engine_arguments
from worker_service.sessions import Stream


async def generate(engine: AsyncLLMEngine, stream: Stream, request: pb.EngineRequest) -> bool:
    """Begin `request` if there is room for it at once. Raises `ValueError` for what the engine does not take."""

    def add(engine: LLMEngine) -> bool:
        return engine.add_request(stream.engine_id, **engine_arguments(request), may_wait=False)

    has_room = await engine.call(add)
    if not stream.is_open:  # cancelled meanwhile, perhaps before the engine had heard of it
        engine.post(lambda engine: engine.abort(stream.engine_id))
    return has_room
