"""The prompt at the beginning of a completion that must repeat it (OpenAI's `echo`): the prompt's text, and the
logprobs of its tokens.

    the router's first message to a prompt ── has its prompt_logprobs
        ──> put before each choice's first text and logprobs; all later offsets are moved behind it

Keeps text and logprobs of each prompt for its other choices, whose messages come after the first choice's first one.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from protos.tandem_inference_pb2 import FinishReason, GenerateResponse, TokenLogprobs
from tandem.requests import Prompt


@dataclass(frozen=True, slots=True)
class _Echoed:
    """One prompt."""

    text: str
    logprobs: list[TokenLogprobs]


class Echo:
    """Echoes the prompts of one HTTP request. `n` choices per prompt; those of the first prompt come first."""

    def __init__(self, prompts: Sequence[Prompt], n: int, num_top: int | None, *, is_known: bool) -> None:
        """`num_top`: alternatives for each token. None: only the text is requested, no logprobs. `is_known`: all
        prompts are texts, used as they are."""
        self._prompts = prompts
        self._n = n
        self._num_top = num_top
        self._echoed: dict[int, _Echoed] = {}
        self._is_known = is_known
        if num_top is None and is_known:
            self._echoed = {i: _Echoed(prompt, []) for i, prompt in enumerate(prompts) if isinstance(prompt, str)}
        self._begun: set[int] = set()

    def before(
        self,
        choice: int,
        text: str,
        logprobs: Sequence[TokenLogprobs],
        prompt_logprobs: Sequence[TokenLogprobs],
    ) -> tuple[str, list[TokenLogprobs]]:
        """The next `text` and `logprobs` of a choice, with offsets moved behind its prompt; the first time, with the
        prompt in front. `prompt_logprobs`: those in the same message."""
        number = choice // self._n
        if prompt_logprobs and number not in self._echoed:
            self._echoed[number] = self._echo(self._prompts[number], prompt_logprobs)
        echoed = self._echoed.get(number)
        if echoed is None:  # the answer ended before anything was computed
            return text, list(logprobs)
        told = [_moved(each, len(echoed.text)) for each in logprobs]
        if choice in self._begun:
            return text, told
        self._begun.add(choice)
        return echoed.text + text, echoed.logprobs + told

    def _echo(self, prompt: Prompt, prompt_logprobs: Sequence[TokenLogprobs]) -> _Echoed:
        # An incomplete character at the end is left out: the answer begins with it.
        data = b"".join(each.sampled.token for each in prompt_logprobs)
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(data)
        num_hidden = 0
        if self._is_known and isinstance(prompt, str):
            # The tokens may begin with text that the prompt does not have: a bos token, or a space of the tokenizer.
            num_hidden = max(0, len(text) - len(prompt)) if text.endswith(prompt) else 0
            text = prompt
        if self._num_top is None:
            return _Echoed(text, [])
        told = [_moved(each, -num_hidden) for each in prompt_logprobs]
        for each in told:
            del each.top[self._num_top :]
        return _Echoed(text, told)


def _moved(logprobs: TokenLogprobs, num_chars: int) -> TokenLogprobs:
    moved = TokenLogprobs()
    moved.CopyFrom(logprobs)
    moved.text_offset = max(0, logprobs.text_offset + num_chars)
    return moved


def without_answer(message: GenerateResponse) -> GenerateResponse:
    """Remove the one token of an answer from `message`, as if none had been requested: only the parts about the prompt
    are left."""
    message.offset = 0
    del message.token_ids[:]
    del message.logprobs[:]
    message.text = ""
    if message.finish_reason == FinishReason.FINISH_REASON_STOP:
        message.finish_reason = FinishReason.FINISH_REASON_LENGTH
    if message.HasField("usage"):
        message.usage.completion_tokens = 0
    return message
