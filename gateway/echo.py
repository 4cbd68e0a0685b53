"""What a completion begins with where it is asked to repeat its prompt (OpenAI's `echo`): the prompt's text, and how
likely its tokens were.

    the router's first message to a prompt ── takes its prompt_logprobs
        ──> each choice's first text and logprobs have it in front, all later offsets are behind it

Owns what is known of each prompt, for its other choices: their messages come later than the first of the first.
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
    """Of one HTTP request. `n` choices to each prompt; those to the first come first."""

    def __init__(self, prompts: Sequence[Prompt], n: int, num_top: int | None, *, is_known: bool) -> None:
        """`num_top`: alternatives to each token. None: no logprobs are asked for, only text. `is_known`: all prompts
        are texts, used as they are."""
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
        """The next `text` and `logprobs` of a choice, as they are after its prompt, and the first time with it.
        `prompt_logprobs`: what came with them."""
        number = choice // self._n
        if prompt_logprobs and number not in self._echoed:
            self._echoed[number] = self._echo(self._prompts[number], prompt_logprobs)
        echoed = self._echoed.get(number)
        if echoed is None:  # it has ended before anything was computed
            return text, list(logprobs)
        told = [_moved(each, len(echoed.text)) for each in logprobs]
        if choice in self._begun:
            return text, told
        self._begun.add(choice)
        return echoed.text + text, echoed.logprobs + told

    def _echo(self, prompt: Prompt, prompt_logprobs: Sequence[TokenLogprobs]) -> _Echoed:
        # Without a character that its end cuts off, which the answer begins with.
        data = b"".join(each.sampled.token for each in prompt_logprobs)
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(data)
        num_hidden = 0
        if self._is_known and isinstance(prompt, str):
            # Before it may be what no text says: a token for its beginning, a space of the tokenizer's own.
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
    """A message of an answer of one token, as if none had been asked for: what is left is about the prompt."""
    message.offset = 0
    del message.token_ids[:]
    del message.logprobs[:]
    message.text = ""
    if message.finish_reason == FinishReason.FINISH_REASON_STOP:
        message.finish_reason = FinishReason.FINISH_REASON_LENGTH
    if message.HasField("usage"):
        message.usage.completion_tokens = 0
    return message
