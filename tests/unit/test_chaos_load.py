"""The requests that a soak makes up."""

from __future__ import annotations

import pytest

from protos.tandem_inference_pb2 import GetModelInfoResponse
from tandem.chaos.asked import Way
from tandem.chaos.load import BURST_PROMPT_TOKENS, LONG_ANSWER, Load


@pytest.mark.parametrize(("max_model_len", "has_long"), [(1100, False), (2048, True)])
async def test_every_request_fits_into_the_context(max_model_len: int, has_long: bool) -> None:
    """One that does not is refused, which a soak takes for a fault of the cluster."""
    load = Load("127.0.0.1:1", "", 3, GetModelInfoResponse(max_model_len=max_model_len, vocab_size=1000))
    made = [load._invent(max_prompt_tokens=BURST_PROMPT_TOKENS) for _ in range(2000)]
    await load.close()
    assert all(asked.way is not Way.CHATS for asked in made)
    assert max(len(asked.prompt) + asked.sampling["max_tokens"] for asked in made) <= max_model_len
    assert any(asked.sampling["max_tokens"] >= LONG_ANSWER[0] for asked in made) == has_long
