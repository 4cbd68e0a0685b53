"""Offline generation in this process: no services, no Redis, no network. The API is vLLM's `LLM`.

    llm = LLM(model="smollm2-135m-instruct")
    for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
        print(output.outputs[0].text)

Owns an engine, which it steps on the caller's thread, and the text of each answer. A cluster serves requests with the
same engine, tokenizer and detokenizer, so the same seed gives the same answer there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.outputs import RequestOutput as StepOutput
from engine.running.executor import RankLost
from router.model_info import ModelInfo
from router.text.chat_template import ChatTemplate
from tandem.beam_search import BeamSearches, BeamSearchOutput, check_beam_search
from tandem.between_steps import BetweenSteps
from tandem.checks import check_text
from tandem.lora_request import LoRARequest, named_requests
from tandem.metrics import Metric, metrics_of
from tandem.offline_answer import CompletionOutput, Logprob, OfflineAnswer, OfflineRequest, RequestOutput
from tandem.offline_chat import ChatRendering, Message, named_conversations, template_variables, tools_for
from tandem.offline_inputs import AdapterOfEach, OfflineInputs, ParamsOfEach
from tandem.offline_loras import OfflineLoRAs
from tandem.offline_thinking import thinking_budget_of_chat
from tandem.prompts import Prompt, ReadPrompt, TextPrompt, TokensPrompt, named_prompts
from tandem.sampling_params import BeamSearchParams, SamplingParams
from tandem.structured_outputs import StructuredOutputsParams
from tandem.vllm_settings import no_such_method

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "LLM", "BeamSearchOutput", "BeamSearchParams", "CompletionOutput", "LoRARequest", "Logprob", "RequestOutput",
    "SamplingParams", "StructuredOutputsParams", "TextPrompt", "TokensPrompt",
]  # fmt: skip


NO_MORE = "this LLM cannot generate any more: delete it and create a new one"


class LLM:
    """A model in this process. `engine_args` are the fields of `EngineArgs` by name; `speculative_config` and
    `lora_modules` may also be dicts. A field that is None counts as absent. vLLM's other settings are accepted if their
    value asks for nothing special (`tandem.vllm_settings`).

    Raises `ValueError` naming the field and its bound, or saying what the model lacks, and `TypeError` for a name that
    is not a field. Serves one caller at a time: raises `RuntimeError` in a thread that calls it while another thread is
    served.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = EngineArgs.model,
        *,
        generation_config: str | None = None,
        override_generation_config: Mapping[str, Any] | str | None = None,
        **engine_args: Any,
    ) -> None:
        """`generation_config`, `override_generation_config`: as the flags of `tandem up`; the second may be a dict."""
        self._inputs = OfflineInputs("LLM", model, generation_config, override_generation_config, engine_args)
        self.config = self._inputs.config
        self.llm_engine = LLMEngine(self.config)
        """The engine. Callers may use its `stats` and `audit`."""
        self._loras = OfflineLoRAs(self.llm_engine)
        self._info = ModelInfo.from_folder(self.config.model.path)
        self._request_ids = count()
        self._is_used = threading.Lock()
        self._lost = ""
        """Why this LLM cannot generate any more. A text, since an error would keep this LLM, and its device memory,
        alive."""
        self._lost_as: type[RuntimeError] = RuntimeError

    if not TYPE_CHECKING:  # else any name would seem to be an attribute

        def __getattr__(self, name: str) -> NoReturn:
            raise no_such_method("LLM", name)

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of the model's generation_config.json, or of `generation_config` and
        `override_generation_config`. `max_tokens` is vLLM's 16 unless they say otherwise."""
        return self._inputs.default_sampling_params()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """transformers' tokenizer of the model's folder, as in vLLM: `encode`, `decode`, `apply_chat_template`,
        `eos_token_id`. This LLM itself uses its own tokenizer, which gives the same tokens and texts. Raises
        `ValueError` if the tokenizer is code in the checkpoint."""
        return self._inputs.callers_tokenizer()

    def get_metrics(self) -> list[Metric]:
        """What the engine has counted since it began (tandem/metrics.py)."""
        return metrics_of(self.llm_engine.stats, self.config.model.served_model_name)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: ParamsOfEach = None,
        *,
        use_tqdm: bool = True,
        lora_request: AdapterOfEach = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers in the order of `prompts`: one text, one list of token ids, one dict of either, or several of these.

        `sampling_params`: one for all prompts, one for each, or None for the model's defaults. `use_tqdm` shows
        progress on stderr. `lora_request`: the adapter for all prompts, or one or None for each; if there is room
        (`max_loras`), an adapter that names its folder is loaded. `tokenization_kwargs`: how texts become tokens, and
        how many (`tandem.prompts.Tokenization`).

        Raises `ValueError` for a prompt or parameter that cannot be served; then nothing is generated. Raises
        `RankLost`, in this and all later calls, if another process of `tensor_parallel_size` has ended. Ctrl-C ends the
        call when the engine's step is done. A second Ctrl-C within the step does not wait for that; after it, and after
        an error in the middle of a step, all later calls raise `RuntimeError`.
        """
        asked = self._inputs.tokenization(tokenization_kwargs)
        named = named_prompts(prompts)
        params = self._inputs.params_of_each(sampling_params, len(named))
        read = [
            self._inputs.read(name, prompt, each, asked) for (name, prompt), each in zip(named, params, strict=True)
        ]
        return self._generate(read, params, use_tqdm, lora_request)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: ParamsOfEach = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        lora_request: AdapterOfEach = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """As `generate`, for one conversation or several, rendered with the model's chat template, or with the one
        given as text. `tools`: the tools to tell the model about, in OpenAI's format; calls of them are in the answers'
        text, and so is the model's reasoning. `chat_template_kwargs`: variables for the template.
        `continue_final_message`: answers continue the last message's content; otherwise they begin a new message, with
        `add_generation_prompt` None or True, as the template has it."""
        template = self._own_chat_template if chat_template is None else self._given_chat_template(chat_template)
        if template is None:
            raise ValueError(f"model {self.config.model.served_model_name!r} has no chat template: use generate")
        rendering = ChatRendering(
            info=self._info,
            template=template,
            tools=tools_for(template, tools or ()),
            variables=template_variables(chat_template_kwargs),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        asked = self._inputs.tokenization(tokenization_kwargs)
        conversations = named_conversations(messages)
        params = self._inputs.params_of_each(sampling_params, len(conversations))
        prompts: list[ReadPrompt] = []
        for (name, conversation), each in zip(conversations, params, strict=True):
            text = rendering.text_of(name, conversation)
            num_kept = self._inputs.num_kept(each, asked)
            token_ids = self._inputs.tokenizer.encode(text, bool(asked.add_special_tokens), num_kept)
            budget = thinking_budget_of_chat(each, rendering, conversation, text, self._inputs.tokenizer)
            prompts.append(ReadPrompt(name=name, text=text, token_ids=token_ids, thinking_budget=budget))
        return self._generate(prompts, params, use_tqdm, lora_request)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: AdapterOfEach = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest answers to each of `prompts`, in their order, found by beam search (`tandem.beam_search`).
        Prompts, adapters, errors and Ctrl-C are as with `generate`. `concurrency_limit`: for how many prompts to search
        at once; None: all. If a prompt leaves less room than `max_tokens`, its answers fill the room. Raises
        `RuntimeError`, naming the prompt, if the model's numbers are not numbers."""
        check_beam_search(params, concurrency_limit)
        of_step, asked = params.of_step(), self._inputs.tokenization(None)
        read = [self._inputs.read(name, prompt, of_step, asked) for name, prompt in named_prompts(prompts)]
        searches = BeamSearches(read, self._lora_names(lora_request, len(read)), params, self.config.model)
        with self._serving(lora_request) as interrupts, ExitStack() as stack:
            progress = stack.enter_context(_progress()) if use_tqdm else None

            def ask(prompts: list[ReadPrompt], lora_names: list[str]) -> list[RequestOutput]:
                return self._answers(prompts, [of_step] * len(prompts), lora_names, False, interrupts)

            searches.run(ask, concurrency_limit, progress)
        return searches.outputs(self._inputs.tokenizer)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes, so that prompts are computed again. What `kv_offloading_size` keeps on the host
        stays, as in vLLM. Returns whether no cached block is left in the pool."""
        with self._alone(), self._while_it_can():
            is_empty = self.llm_engine.forget_prefixes()
            self.llm_engine.take_cache_events()  # these are for routers: there is no prefix index here
        return is_empty

    # -- inside -------------------------------------------------------------------------------------------------

    @cached_property
    def _own_chat_template(self) -> ChatTemplate | None:
        """The model's chat template. Read for the first chat only, since it may be broken and never be needed."""
        return ChatTemplate.from_folder(self.config.model.path)

    def _given_chat_template(self, source: str) -> ChatTemplate:
        check_text("chat_template", source)
        return ChatTemplate(source, variables=self._inputs.tokenizer.special_tokens)

    def _generate(
        self,
        prompts: list[ReadPrompt],
        params: Sequence[SamplingParams],
        use_tqdm: bool,
        lora_request: AdapterOfEach,
    ) -> list[RequestOutput]:
        lora_names = self._lora_names(lora_request, len(prompts))
        with self._serving(lora_request) as interrupts:
            return self._answers(prompts, params, lora_names, use_tqdm, interrupts)

    def _lora_names(self, lora_request: AdapterOfEach, num_prompts: int) -> list[str]:
        return self._inputs.lora_name_of_each(lora_request, num_prompts, self._loras.folders)

    @contextmanager
    def _serving(self, lora_request: AdapterOfEach) -> Iterator[BetweenSteps]:
        """Serve one caller, with the adapters loaded. Ctrl-C takes effect before or after this block, or at
        `interrupts.check`."""
        with BetweenSteps() as interrupts, self._alone(), self._while_it_can():
            if self.config.lora_room.num:
                self._loras.load(named_requests(lora_request))
            yield interrupts

    def _answers(
        self,
        prompts: Sequence[ReadPrompt],
        params: Sequence[SamplingParams],
        lora_names: Sequence[str],
        use_tqdm: bool,
        interrupts: BetweenSteps,
    ) -> list[RequestOutput]:
        """Generate the answers. Call this only within `_serving`."""
        requests: list[OfflineRequest] = []
        answers: dict[str, OfflineAnswer] = {}
        try:
            for prompt, prompt_params, lora_name in zip(prompts, params, lora_names, strict=True):
                request = OfflineRequest(
                    str(next(self._request_ids)), prompt, prompt_params, lora_name, self._inputs.tokenizer
                )
                self._add_first(request)
                requests.append(request)
                answers |= {answer.name: answer for answer in request.answers}
                interrupts.check()
            self._step_until_done(answers, use_tqdm, interrupts)
        finally:
            for name, answer in answers.items():
                if not (answer.is_finished or self._lost):
                    self.llm_engine.abort(name)
        assert all(request.is_finished for request in requests)
        return [request.output() for request in requests]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse a second thread: two threads that step one engine would take each other's answers."""
        if not self._is_used.acquire(blocking=False):
            raise RuntimeError(
                "this LLM is generating in another thread, and serves one at a time: give all prompts in one call, or "
                "hold a lock around the calls"
            )
        try:
            yield
        finally:
            self._is_used.release()

    @contextmanager
    def _while_it_can(self) -> Iterator[None]:
        """Raise the error for which this LLM cannot generate any more, if there is one. If a rank is lost, close the
        engine, since nothing can be computed without all ranks."""
        if self._lost:
            raise self._lost_as(self._lost)
        try:
            yield
        except RankLost as error:
            self._lost, self._lost_as = f"{error}; {NO_MORE}", RankLost
            self.llm_engine.close()
            raise RankLost(self._lost) from error

    def _add_first(self, request: OfflineRequest) -> None:
        try:
            request.answers[0].add_to(self.llm_engine)
        except ValueError as error:
            raise ValueError(f"{request.prompt.name}: {error}") from error

    def _step_until_done(self, answers: Mapping[str, OfflineAnswer], use_tqdm: bool, interrupts: BetweenSteps) -> None:
        with ExitStack() as stack:
            progress = stack.enter_context(_progress()) if use_tqdm else None
            task = progress.add_task("answers", total=len(answers), num_tokens=0) if progress else None
            while self.llm_engine.has_unfinished_requests():
                outputs = self._step(interrupts)
                self._take(outputs, answers)
                interrupts.check()
                if progress is not None and task is not None:
                    num_done = sum(answer.is_finished for answer in answers.values())
                    num_tokens = sum(len(answer.token_ids) for answer in answers.values())
                    progress.update(task, completed=num_done, num_tokens=num_tokens)

    def _step(self, interrupts: BetweenSteps) -> list[StepOutput]:
        """One step of the engine. A step that ends in the middle leaves the engine unusable."""
        try:
            with interrupts.breaking():
                outputs = self.llm_engine.step()
        except BaseException as error:
            self._lost = f"a step of this LLM ended with {type(error).__name__}; {NO_MORE}"
            raise
        self.llm_engine.take_cache_events()  # these are for routers: there is no prefix index here
        assert not self.llm_engine.is_idle, "requests wait and none can run: the pool holds any single one"
        return outputs

    def _take(self, outputs: Iterable[StepOutput], answers: Mapping[str, OfflineAnswer]) -> None:
        for output in outputs:
            answers[output.request_id].advance(
                output, add=lambda other: other.add_to(self.llm_engine), abort=self.llm_engine.abort
            )


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
