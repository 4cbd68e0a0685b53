"""Offline generation in this process: no services, no Redis, no network. In vLLM's shape.

    llm = LLM(model="smollm2-135m-instruct")
    for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
        print(output.outputs[0].text)

Owns an engine and steps it on the caller's thread, and the text of each answer. The same engine, tokenizer and
detokenizer serve requests behind a router: the same seed gives the same answer.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from engine.config import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.outputs import FinishReason, TokenLogprobs
from engine.outputs import RequestOutput as StepOutput
from protos import tandem_inference_pb2 as pb
from router.model_info import ModelInfo
from router.sequences import names_at_workers
from router.text.chat_template import GIVEN_NAMES, ChatMessage, ChatTemplate
from router.text.detokenizer import IncrementalDetokenizer
from router.text.tokenizer import Tokenizer
from router.text.tool_formats import AUTO
from router.validation.sampling import Violations
from router.validation.tools import check_messages, tools_of
from tandem.sampling_params import SamplingParams
from tandem.structured_outputs import StructuredOutputsParams
from tandem.tools import add_tools, chat_message

__all__ = [
    "LLM", "CompletionOutput", "LoRARequest", "Logprob", "RequestOutput", "SamplingParams", "StructuredOutputsParams",
]  # fmt: skip

Message = Mapping[str, Any]


@dataclass(frozen=True)
class LoRARequest:
    """The adapter that answers a prompt, by its name in `lora_modules`. The other fields are vLLM's: all adapters are
    there from the start on, and have their numbers then."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


@dataclass(frozen=True, kw_only=True)
class Logprob:
    """How likely the model found a token, before bias, penalties and temperature."""

    logprob: float
    """Natural logarithm of its probability."""
    rank: int
    """Among the whole vocabulary; 1 is the likeliest."""
    decoded_token: str
    """What it stands for by itself; U+FFFD for a part of a character."""


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    """ "stop", "length", or "error": there is no next token, and `error` says why."""
    stop_reason: str | None
    """The stop string that ended it, if one did."""
    logprobs: list[dict[int, Logprob]] | None
    """For each token, by id: the sampled one and as many of the likeliest as were asked for. None: not asked for."""
    cumulative_logprob: float | None
    """The sum over the sampled tokens."""
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """One prompt and its answers."""

    request_id: str
    prompt: str | None
    """None where token ids were given."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    """Of the prompt, found in the prefix cache."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    """For each of the prompt's tokens, as `CompletionOutput.logprobs`; None for the first. None: not asked for."""


class LLM:
    """A model in this process. `engine_args` are the fields of `EngineArgs` by name; `speculative_config` and
    `lora_modules` may also be dicts.

    Raises `ValueError` naming the field and its bound, or saying what the model lacks. Not thread-safe.
    """

    def __init__(self, model: str = EngineArgs.model, **engine_args: Any) -> None:
        for name in ("speculative_config", "lora_modules"):
            if isinstance(engine_args.get(name, ""), dict):
                engine_args[name] = json.dumps(engine_args[name], default=str)
        self.config = create_engine_config(EngineArgs(model=model, **engine_args))
        self.llm_engine = LLMEngine(self.config)
        """What computes; `stats` and `audit` may be asked of it."""
        folder = self.config.model.path
        self._tokenizer = Tokenizer.from_folder(folder)
        self._chat_template = ChatTemplate.from_folder(folder)
        self._info = ModelInfo.from_folder(folder)
        self._defaults = self._info.defaults
        self._request_ids = count()

    def get_default_sampling_params(self) -> SamplingParams:
        """Those of the model's generation_config.json. `max_tokens` is vLLM's 16 unless the model says otherwise."""
        given = {
            "temperature": self._defaults.temperature,
            "top_p": self._defaults.top_p,
            "top_k": self._defaults.top_k,
            "min_p": self._defaults.min_p,
            "repetition_penalty": self._defaults.repetition_penalty,
            "max_tokens": self._defaults.max_new_tokens,
        }
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answers in the order of `prompts`: one text, one list of token ids, or several of either.

        `sampling_params`: one for all, one for each, or None for the model's. `use_tqdm` shows progress on stderr.
        `lora_request`: the adapter for all, or one or none for each.
        Raises `ValueError` for a prompt or parameter that cannot be served; nothing is generated then.
        """
        return self._generate(self._as_prompts(prompts), sampling_params, use_tqdm, lora_request)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """As `generate`, for one conversation or several, put through the model's chat template, or the one given as
        text. `tools`: what it tells the model of, in OpenAI's shape; calls of them are in the answers' text, and so is
        what the model thinks. `chat_template_kwargs`: variables for the template."""
        template = self._chat_template
        if chat_template is not None:
            template = ChatTemplate(chat_template, variables=self._tokenizer.special_tokens)
        if template is None:
            raise ValueError(f"model {self.config.model.served_model_name!r} has no chat template: use generate")
        shown = self._tools(tools or (), template)
        variables = dict(chat_template_kwargs or {})
        if given := GIVEN_NAMES & variables.keys():
            raise ValueError(f"chat_template_kwargs: may not say what {', '.join(sorted(given))} is")
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts: list[tuple[str | None, list[int]]] = []
        for conversation in conversations:
            text = template.render(self._messages(conversation, template), shown, variables)
            prompts.append((text, self._tokenizer.encode(text, add_special_tokens=False)))
        return self._generate(prompts, sampling_params, use_tqdm, lora_request)

    # -- inside -------------------------------------------------------------------------------------------------

    def _tools(self, tools: Any, template: ChatTemplate) -> list[dict[str, Any]]:
        """As the template shows them, to the same model the same as a router's."""
        chat, violations = pb.Chat(), Violations()
        add_tools(chat, tools, None, None)
        checked = tools_of(chat, violations)
        if not violations and checked and (problem := template.problem_with_tools()) is not None:
            violations.append(("tools", f"the chat template {problem}; give another one (chat_template)"))
        _raise(violations)
        return [tool.to_template() for tool in checked]

    def _messages(self, conversation: Sequence[Message], template: ChatTemplate) -> tuple[ChatMessage, ...]:
        violations = Violations()
        info = self._info.with_chat(template, AUTO)
        messages = check_messages([chat_message(message) for message in conversation], info, violations)
        _raise(violations)
        return messages

    def _as_prompts(self, prompts: Any) -> list[tuple[str | None, list[int]]]:
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        return [
            (prompt, self._tokenizer.encode(prompt)) if isinstance(prompt, str) else (None, list(prompt))
            for prompt in prompts
        ]

    def _generate(
        self,
        prompts: list[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
    ) -> list[RequestOutput]:
        params = self._params_of_each(sampling_params, len(prompts))
        lora_names = self._lora_names_of_each(lora_request, len(prompts))
        requests: list[_Request] = []
        answers: dict[str, _Answer] = {}
        try:
            for (text, token_ids), prompt_params, lora_name in zip(prompts, params, lora_names, strict=True):
                name = str(next(self._request_ids))
                request = _Request(name, text, token_ids, prompt_params, lora_name, self._tokenizer)
                self._add(request.answers[0])
                requests.append(request)
                answers |= {answer.name: answer for answer in request.answers}
            self._step_until_done(answers, use_tqdm)
        finally:
            for name, answer in answers.items():
                if not answer.is_finished:
                    self.llm_engine.abort(name)
        return [request.output() for request in requests]

    def _add(self, answer: _Answer) -> None:
        self.llm_engine.add_request(
            answer.name, answer.prompt_token_ids, answer.engine_params, lora_name=answer.lora_name
        )

    def _params_of_each(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> Sequence[SamplingParams]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * num_prompts
        if len(sampling_params) != num_prompts:
            raise ValueError(f"sampling_params has {len(sampling_params)} entries for {num_prompts} prompts")
        return sampling_params

    def _lora_names_of_each(
        self, lora_request: LoRARequest | Sequence[LoRARequest | None] | None, num_prompts: int
    ) -> list[str]:
        if lora_request is None or isinstance(lora_request, LoRARequest | str):
            lora_request = [lora_request] * num_prompts
        if len(lora_request) != num_prompts:
            raise ValueError(f"lora_request has {len(lora_request)} entries for {num_prompts} prompts")
        there = {module.name: module.path for module in self.config.lora_modules}
        for request in lora_request:
            if request is None:
                continue
            if not isinstance(request, LoRARequest):
                raise ValueError(f"lora_request must be a LoRARequest, as LoRARequest('name'), is {request!r:.60}")
            path = there.get(request.lora_name)
            if path is not None and request.lora_path and Path(request.lora_path).expanduser().resolve() != path:
                raise ValueError(f"lora_request: {request.lora_name!r} was loaded from {path}, not {request.lora_path}")
            if path is None:
                raise ValueError(
                    f"lora_request names {request.lora_name!r}, lora_modules has {', '.join(there) or 'none'}; "
                    "give LLM the folders of all adapters: lora_modules={name: folder}"
                )
        return ["" if request is None else request.lora_name for request in lora_request]

    def _step_until_done(self, answers: Mapping[str, _Answer], use_tqdm: bool) -> None:
        with ExitStack() as stack:
            progress = stack.enter_context(_progress()) if use_tqdm else None
            task = progress.add_task("answers", total=len(answers), num_tokens=0) if progress else None
            while self.llm_engine.has_unfinished_requests():
                outputs = self.llm_engine.step()
                assert not self.llm_engine.is_idle, "requests wait and none can run: the pool holds any single one"
                self._take(outputs, answers)
                if progress is not None and task is not None:
                    num_done = sum(answer.is_finished for answer in answers.values())
                    num_tokens = sum(len(answer.token_ids) for answer in answers.values())
                    progress.update(task, completed=num_done, num_tokens=num_tokens)

    def _take(self, outputs: Iterable[StepOutput], answers: Mapping[str, _Answer]) -> None:
        for output in outputs:
            answer = answers[output.request_id]
            is_first_news = not answer.token_ids
            answer.take(output)
            if is_first_news:  # its prompt is in the prefix cache now: not computed again for the others
                for other in answer.others:
                    self._add(other)
            if answer.is_finished and not output.is_finished:  # a stop string, which the engine knows nothing of
                self.llm_engine.abort(output.request_id)


class _Request:
    """One prompt and its answers in the making."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        lora_name: str,
        tokenizer: Tokenizer,
    ) -> None:
        self._request_id = request_id
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        drawn_seed = secrets.randbits(63)
        names = names_at_workers(request_id, params.n)
        self.answers = [
            _Answer(name, index, prompt_token_ids, params, drawn_seed, lora_name, tokenizer)
            for index, name in enumerate(names)
        ]
        self.answers[0].others = self.answers[1:]

    def output(self) -> RequestOutput:
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[answer.output() for answer in self.answers],
            finished=True,
            num_cached_tokens=self.answers[0].num_cached_tokens,
            prompt_logprobs=self.answers[0].prompt_logprobs,
        )


class _Answer:
    """One answer in the making."""

    def __init__(
        self,
        name: str,
        index: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        drawn_seed: int,
        lora_name: str,
        tokenizer: Tokenizer,
    ) -> None:
        """`name`: the engine's for it."""
        self.lora_name = lora_name
        self.name = name
        self.prompt_token_ids = prompt_token_ids
        self.engine_params = params.for_engine(drawn_seed, index)
        if index:  # the first one tells them
            self.engine_params = replace(self.engine_params, prompt_logprobs=None)
        self.others: list[_Answer] = []
        """Those that wait until this one has its first token."""
        self.is_finished = False
        self.token_ids: list[int] = []
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._index = index
        self._includes_stop = params.include_stop_str_in_output
        self._texts: list[str] = []
        self._finish_reason = ""
        self._stop_reason: str | None = None
        self._error = ""
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            prompt_token_ids=prompt_token_ids,
            stop=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )

    def take(self, output: StepOutput) -> None:
        """A step's new tokens."""
        assert output.offset == len(self.token_ids), "the engine's tokens are contiguous"
        if not self.token_ids:
            self.num_cached_tokens = output.num_cached_tokens
            if output.prompt_logprobs is not None:
                self.prompt_logprobs = [None, *map(self._by_token_id, output.prompt_logprobs)]
        is_silent = output.finish_reason is FinishReason.STOP and not self._includes_stop
        delta = self._detokenizer.push(output.token_ids[:-1] if is_silent else output.token_ids)
        self._texts.append(delta.text)
        num_tokens = len(output.token_ids) if delta.stop is None else delta.num_tokens
        self.token_ids += output.token_ids[:num_tokens]
        if self._logprobs is not None:
            self._logprobs += (output.logprobs or [])[:num_tokens]
        if delta.stop is not None:
            self._finish("stop", delta.stop)
            return
        if output.finish_reason is not None:
            self._error = output.error
            self._finish(output.finish_reason.value, None)

    def _finish(self, reason: str, stop: str | None) -> None:
        self._texts.append(self._detokenizer.finish())
        self._finish_reason, self._stop_reason = reason, stop
        self.is_finished = True

    def output(self) -> CompletionOutput:
        assert self.is_finished
        return CompletionOutput(
            index=self._index,
            text="".join(self._texts),
            token_ids=self.token_ids,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            logprobs=None if self._logprobs is None else [self._by_token_id(each) for each in self._logprobs],
            cumulative_logprob=None if self._logprobs is None else sum(each.sampled.logprob for each in self._logprobs),
            error=self._error,
        )

    def _by_token_id(self, logprobs: TokenLogprobs) -> dict[int, Logprob]:
        return {
            each.token_id: Logprob(
                logprob=each.logprob,
                rank=each.rank,
                decoded_token=self._detokenizer.token_bytes(each.token_id).decode(errors="replace"),
            )
            for each in (logprobs.sampled, *logprobs.top)
        }


def _raise(violations: Violations) -> None:
    if violations:
        raise ValueError("; ".join(f"{field.removeprefix('chat.')}: {said}" for field, said in violations))


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        TextColumn("{task.fields[num_tokens]} tokens"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
