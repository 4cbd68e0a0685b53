"""Converts between the engine's objects and protobuf messages: sampling parameters, ledgers, loads. Checks input."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from engine.config import EngineConfig
from engine.input_processor import FurtherArguments
from engine.llm_engine import EngineLoad
from engine.lora.modules import LoRAModule
from engine.outputs import FinishReason, Logprob, RequestOutput, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.scheduling.block_ledger import BlockLedger, HostLedger
from engine.scheduling.thinking import ThinkingBudget
from protos import tandem_inference_pb2 as inference_pb
from protos import tandem_worker_pb2 as pb

_FINISH_REASONS = {
    None: inference_pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: inference_pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: inference_pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: inference_pb.FINISH_REASON_ERROR,
}


class EngineArguments(FurtherArguments):
    """The arguments of all ways into an engine, after the request's id."""

    prompt_token_ids: Sequence[int]
    sampling_params: SamplingParams


def engine_arguments(request: pb.EngineRequest) -> EngineArguments:
    """Raises `ValueError` naming the field and its bound."""
    return {
        "prompt_token_ids": request.prompt_token_ids,
        "sampling_params": sampling_params_of(request),
        "output_token_ids": request.output_token_ids,
        "cache_salt": request.cache_salt,
        "lora_name": request.lora_name,
        "lora_digest": request.lora_digest,
    }


def sampling_params_of(request: pb.EngineRequest) -> SamplingParams:
    """Raises `ValueError` naming the field and its bound."""
    params = request.sampling_params
    for name in ("max_tokens", "temperature", "top_p", "repetition_penalty", "seed"):
        if not params.HasField(name):
            raise ValueError(f"{name} must be set by the router")
    return SamplingParams(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        stop_token_ids=frozenset(params.stop_token_ids),
        allowed_token_ids=frozenset(params.allowed_token_ids),
        bad_words_token_ids=tuple(tuple(word.token_ids) for word in request.bad_words),
        ignore_eos=params.ignore_eos,
        seed=params.seed,
        logit_bias=MappingProxyType(dict(params.logit_bias)),
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        grammar=request.grammar or None,
        thinking_budget=thinking_budget_from(request.thinking_budget) if request.HasField("thinking_budget") else None,
    )


def thinking_budget_from(budget: pb.ThinkingBudget) -> ThinkingBudget:
    return ThinkingBudget(
        num_tokens=budget.num_tokens,
        end_token_id=budget.end_token_id,
        begin_token_ids=tuple(budget.begin_token_ids),
        has_begun=budget.has_begun,
        may_repeat=budget.may_repeat,
        other_end_token_ids=frozenset(budget.other_end_token_ids),
        space_token_ids=frozenset(budget.space_token_ids),
    )


def ledger_message(ledger: BlockLedger) -> pb.BlockLedger:
    return pb.BlockLedger(
        num_blocks=ledger.num_blocks,
        num_free=ledger.num_free,
        num_cached=ledger.num_cached,
        num_sequence=ledger.num_sequence,
        num_grant=ledger.num_grant,
        num_held=ledger.num_held,
    )


def host_ledger_message(ledger: HostLedger) -> pb.HostLedger | None:
    """None if nothing is offloaded."""
    if not ledger.num_blocks:
        return None
    return pb.HostLedger(
        num_blocks=ledger.num_blocks,
        num_free=ledger.num_free,
        num_kept=ledger.num_kept,
        num_saving=ledger.num_saving,
    )


def load_message(load: EngineLoad, *, is_draining: bool = False) -> pb.WorkerLoad:
    """The load message after a step, or before the first. Its `is_stalled` is False, since the engine reports."""
    return pb.WorkerLoad(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_waiting_tokens=load.num_waiting_tokens,
        num_free_seqs=load.num_free_seqs,
        blocks=ledger_message(load.blocks),
        host_blocks=host_ledger_message(load.host_blocks),
        is_draining=is_draining,
    )


def tokens_message(output: RequestOutput) -> pb.Tokens:
    return pb.Tokens(
        index=output.offset,
        token_ids=output.token_ids,
        finish_reason=_FINISH_REASONS[output.finish_reason],
        num_cached_tokens=output.num_cached_tokens,
        waited_ms=1e3 * output.waited_s,
        logprobs=map(_logprobs_message, output.logprobs or ()),
        prompt_logprobs=map(_logprobs_message, output.prompt_logprobs or ()),
    )


def _logprobs_message(logprobs: TokenLogprobs) -> inference_pb.TokenLogprobs:
    return inference_pb.TokenLogprobs(
        sampled=_logprob_message(logprobs.sampled), top=map(_logprob_message, logprobs.top)
    )


def _logprob_message(logprob: Logprob) -> inference_pb.Logprob:
    return inference_pb.Logprob(token_id=logprob.token_id, logprob=logprob.logprob, rank=logprob.rank)


def model_message(config: EngineConfig, adapters: Sequence[LoRAModule]) -> inference_pb.GetModelInfoResponse:
    """`adapters`: those that requests may ask for now."""
    return inference_pb.GetModelInfoResponse(
        model=config.model.served_model_name,
        max_model_len=config.model.max_model_len,
        vocab_size=config.model.vocab_size,
        block_size=config.cache.block_size,
        dtype=config.model.dtype,
        eos_token_ids=sorted(config.model.eos_token_ids),
        lora_names=[module.name for module in adapters],
    )
