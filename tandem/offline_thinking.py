"""The thinking budget of an answer to an offline caller's chat: the same as a router's for the same request."""

from __future__ import annotations

from collections.abc import Sequence

from engine.scheduling.thinking import ThinkingBudget
from protos import tandem_inference_pb2 as pb
from router.text.reasoning import opened_by, reasoning_of
from router.text.tokenizer import Tokenizer
from router.text.tool_formats import AUTO
from router.validation.thinking import thinking_budget_of
from router.validation.tools import check_messages
from rpc.errors import InvalidRequest
from tandem.offline_chat import ChatRendering, Message
from tandem.sampling_params import SamplingParams
from tandem.tools import chat_message
from worker_service.messages import thinking_budget_from


def thinking_budget_of_chat(
    params: SamplingParams, rendering: ChatRendering, conversation: Sequence[Message], text: str, tokenizer: Tokenizer
) -> ThinkingBudget | None:
    """The thinking budget; None: there is no bound, or the model does not think. `text`: the rendered conversation.
    Raises `ValueError` if the model's thoughts cannot be bounded."""
    if not params.bounds_thinking:
        return None
    model, continued = rendering.info.with_chat(rendering.template, AUTO), ""
    if rendering.continue_final_message:
        continued = check_messages([chat_message(conversation[-1])], model, [])[0].content
    has_form = params.structured_outputs is not None
    reasoning = reasoning_of(model.reasoning_parser, opened_by(text, continued), has_form=has_form)
    asked = pb.SamplingParams(thinking_token_budget=params.thinking_token_budget)
    try:
        budget = thinking_budget_of(asked, reasoning, tokenizer)
    except InvalidRequest as error:
        raise ValueError(str(error).removeprefix("sampling_params.")) from error
    return None if budget is None else thinking_budget_from(budget)
