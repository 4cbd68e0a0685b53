"""Prepares a validated request: makes the `AskedAnswer`s that life cycles run. Asks no worker, queues nothing.

ValidatedRequest ──> tokens ──> length checked ──> form compiled ──> PreparedRequest ──> AskedAnswer, one for each
                     (a thread, if long)           (another process)                     that is not complete
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial

from router.asked_answer import AskedAnswer, names_at_workers, params_of_sequence
from router.model_info import ModelInfo
from router.served_kind import Kind
from router.served_model import Texts
from router.text.bad_words import bad_words_token_ids
from router.text.detokenizer import IncrementalDetokenizer, StopStrings
from router.text.reasoning import AnswerReader, reasoning_of
from router.text.structured_outputs import texts_in
from router.text.tool_calls import CallIds
from router.validation.grammar_checker import GrammarChecker
from router.validation.prompt import TokenizedPrompt, tokenize_prompt
from router.validation.request import ValidatedRequest, check_prompt_length, compile_grammar
from router.validation.resumption import Resumption, kind_name, resumption_of
from router.validation.sampling import resolve_sampling
from router.validation.thinking import thinking_budget_of
from router.worker_pool import WorkerPool
from rpc.errors import NoWorker


async def prepare(
    validated: ValidatedRequest, model: ModelInfo, texts: Texts, grammars: GrammarChecker, pool: WorkerPool
) -> PreparedRequest:
    """Prepare a request. Raises `InvalidRequest` for what only its tokens or its grammar show to be wrong, and
    `NoWorker` if no worker could serve it."""
    prompt = await tokenize_prompt(
        validated.prompt,
        texts.tokenizer,
        texts.chat_template,
        max_model_len=model.max_model_len,
        num_kept=validated.num_kept_tokens(model),
    )
    check_prompt_length(validated, len(prompt.token_ids), model)
    pool.require_decode_worker()
    tokens = await _tokens_in(validated, texts)
    client = validated.fairness_id
    form = await compile_grammar(validated.sampling_params, grammars, validated.asked_tools, tokens, client=client)
    return PreparedRequest(validated, model, texts, prompt, form, tokens)


async def _tokens_in(validated: ValidatedRequest, texts: Texts) -> dict[str, int]:
    """Ids of the added tokens whose words occur in the request's structural tag. Runs in a thread: a tokenizer may have
    thousands of them to look for, in a text of any client."""
    asked = validated.sampling_params.structured_outputs
    if asked.WhichOneof("kind") != "structural_tag":
        return {}
    return await asyncio.to_thread(lambda: texts.tokenizer.added_in(texts_in(asked)))


class PreparedRequest:
    """What the answers to one prompt have in common, and the maker of each `AskedAnswer`."""

    def __init__(
        self,
        validated: ValidatedRequest,
        model: ModelInfo,
        texts: Texts,
        prompt: TokenizedPrompt,
        form: str = "",
        tokens: Iterable[str] = (),
    ) -> None:
        """`form`: the compiled grammar of the answers, or of their tool calls. Empty: none. `tokens`: words in it that
        are tokens of the model."""
        self._validated = validated
        self._names = names_at_workers(validated.request_id, validated.num_sequences)
        self._open = validated.open_sequences
        self._max_model_len = model.max_model_len
        self._tokenizer = texts.tokenizer
        self._prompt_token_ids = prompt.token_ids
        self._reasoning = reasoning_of(
            model.reasoning_parser if validated.is_chat else "",
            prompt.thought_opened_by,
            has_form=bool(form),
            is_within=prompt.is_within_thought,
        )
        self._tokens = tuple(tokens)
        self.grammar = self._around(form)
        self._params = resolve_sampling(validated.sampling_params, model, len(prompt.token_ids))
        self._stop_token_ids = {*self._params.stop_token_ids, *(() if self._params.ignore_eos else model.eos_token_ids)}
        self._stops = StopStrings(self._params.stop)  # may have thousands of states: all answers share it
        self._call_ids = CallIds(prompt.token_ids, is_short=validated.asked_tools.has_short_ids)
        self._thinking_budget = thinking_budget_of(validated.sampling_params, self._reasoning, texts.tokenizer)
        self._bad_words = bad_words_token_ids(self._params.bad_words, texts.tokenizer.encode_plain)

    async def answer(
        self, index: int, pool: WorkerPool, *, arrived_s: float, deadline_s: float | None = None
    ) -> AskedAnswer:
        """The answer with number `index`. Raises `InvalidRequest` or `NoWorker` if a begun answer cannot be
        continued."""
        params = params_of_sequence(self._params, index)
        detokenizer, reader = self.detokenizer(), self.reader(params.seed)
        return AskedAnswer(
            request_id=self._validated.request_id,
            name=self._names[index],
            sequence=index,
            num_answers=len(self._open) if index == self._open[0] else 1,
            prompt_token_ids=self._prompt_token_ids,
            sampling_params=params,
            grammar=self.grammar,
            bad_words=self._bad_words,
            thinking_budget=self._thinking_budget,
            cache_salt=self._validated.cache_salt,
            lora_name=self._validated.lora_name,
            fairness_id=self._validated.fairness_id,
            with_prompt_token_ids=self._validated.with_prompt_token_ids and index == 0,
            detokenizer=detokenizer,
            reader=reader,
            resumption=await self._resumption(index, pool, detokenizer, reader),
            eos_token_id=None if params.ignore_eos else self._tokenizer.eos_token_id,
            arrived_s=arrived_s,
            deadline_s=deadline_s,
        )

    def detokenizer(self) -> IncrementalDetokenizer:
        """A detokenizer for one answer."""
        shown = (*self._validated.asked_tools.words, *self._reasoning.words, *self._tokens)
        return IncrementalDetokenizer(
            self._tokenizer,
            prompt_token_ids=self._prompt_token_ids,
            stop=self._stops,
            stop_token_ids=self._stop_token_ids,
            include_stop_str_in_output=self._params.include_stop_str_in_output,
            skip_special_tokens=self._params.skip_special_tokens,
            shown_token_ids=self._tokenizer.hidden_ids(shown),
            min_tokens=self._params.min_tokens,
        )

    def reader(self, seed: int) -> AnswerReader | None:
        """A reader for the answer with that seed. None: all text of the answer is content."""
        id_of = partial(self._call_ids.of, seed)
        return self._reasoning.reader(self._validated.asked_tools.reader(id_of, has_form=bool(self.grammar)))

    def _around(self, form: str) -> str:
        """The grammar of a whole answer, thoughts included, whose content or tool calls follow `form`. Empty: no form.
        For tool calls the grammar is made anew here: they were checked as text, without the ids of tokens."""
        asked, added_ids = self._validated.asked_tools, self._tokenizer.added_ids
        if asked.holds:
            form = asked.grammar(added_ids(asked.words)).text
        return self._reasoning.grammar(form, tokens=added_ids(self._reasoning.words), is_calls=asked.holds)

    def _kind_of_others(self, pool: WorkerPool) -> Kind | None:
        """The kind on which other answers to this request have begun, partly or completely: this answer must be
        computed on the same kind. None: none has begun."""
        named = (begun.worker_kind for begun in self._validated.begun.values() if begun.worker_kind)
        return _kind_of(next(named, ""), self._validated.lora_name, pool)

    async def _resumption(
        self, index: int, pool: WorkerPool, detokenizer: IncrementalDetokenizer, reader: AnswerReader | None
    ) -> Resumption:
        begun = self._validated.begun.get(index)
        if begun is None or not begun.token_ids:
            return Resumption(kind=self._kind_of_others(pool))
        return await asyncio.to_thread(  # takes milliseconds for every hundred tokens
            resumption_of,
            begun,
            _kind_of(begun.worker_kind, self._validated.lora_name, pool),
            detokenizer,
            reader,
            max_tokens=min(self._params.max_tokens, self._max_model_len - len(self._prompt_token_ids)),
            stop_token_ids=self._stop_token_ids,
        )


def _kind_of(worker_kind: str, lora_name: str, pool: WorkerPool) -> Kind | None:
    """The kind of workers that clients know as `worker_kind`. None: the name is empty. Raises `NoWorker` if no known
    worker has this kind."""
    if not worker_kind:
        return None
    for handle in pool.handles:
        for kind in handle.facts.kinds_for(lora_name):
            if kind_name(kind) == worker_kind:
                return kind
    raise NoWorker("no worker of the kind that began this answer is available", retry_after_s=1.0)
