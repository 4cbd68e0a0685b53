"""vLLM's settings that do not exist here: which of their values are accepted because they ask for nothing special, and
what to use instead of others. For `LLM` by these names, for `tandem up` as flags. Owns nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

ANY: Any = object()


class Otherwise(NamedTuple):
    instead: str
    """What does the same here, or why nothing does."""
    neutral: Any = ()
    """Values that ask for nothing special; None is one for all settings. ANY: no value changes an answer."""


_FETCHED = Otherwise("fetch the revision and give its folder as model")
SETTINGS: Mapping[str, Otherwise] = {
    "allowed_local_media_path": Otherwise("only text prompts are supported", ("",)),
    "allowed_media_domains": Otherwise("only text prompts are supported"),
    "attention_config": Otherwise("use attention_backend instead"),
    "chat_template": Otherwise("give a chat_template to LLM.chat instead"),
    "compilation_config": Otherwise("torch.compile is not used; enforce_eager turns CUDA graphs off"),
    "config_format": Otherwise("only config.json of the model's folder is read", ("auto", "hf")),
    "convert": Otherwise("only models that generate text are supported", ("auto", "none")),
    "cpu_offload_gb": Otherwise("weights are always on the device; use quantization to shrink them", (0, 0.0)),
    "data_parallel_size": Otherwise("use tandem up --decode to start several workers", (1,)),
    "disable_custom_all_reduce": Otherwise("ranks always use their own all-reduce", ANY),
    "disable_log_stats": Otherwise("read LLM.llm_engine.stats instead", ANY),
    "disable_chunked_mm_input": Otherwise("only text prompts are supported", ANY),
    "distributed_executor_backend": Otherwise("ranks are always processes on this machine", ("mp", "uni")),
    "download_dir": Otherwise("models are kept in ~/.cache/tandem"),
    "enable_chunked_prefill": Otherwise("chunked prefill is always on: prefill_chunk_tokens, max_itl_ms", (True,)),
    "enable_lora": Otherwise("use lora_modules, or max_loras and lora_dir to load adapters at run time", ANY),
    "enable_sleep_mode": Otherwise("there is no sleep mode", (False,)),
    "guided_decoding_backend": Otherwise("the backend for grammars is always llguidance", ("auto", "guidance")),
    "hf_overrides": Otherwise("edit config.json in the model's folder instead", ({},)),
    "hf_token": Otherwise("set the environment variable HF_TOKEN instead"),
    "kv_cache_memory_bytes": Otherwise("use kv_cache_gib instead"),
    "kv_transfer_config": Otherwise("use tandem up, which runs prefill and decode apart; see its --transport"),
    "limit_mm_per_prompt": Otherwise("only text prompts are supported", ({},)),
    "logits_processors": Otherwise(
        "use logit_bias, allowed_token_ids, bad_words or structured_outputs of a request", ([],)
    ),
    "max_cpu_loras": Otherwise("adapters are always in the device's memory", ANY),
    "max_logprobs": Otherwise("the maximum is always 20", (20,)),
    "num_gpu_blocks_override": Otherwise("use num_kv_blocks instead"),
    "mm_processor_kwargs": Otherwise("only text prompts are supported", ({},)),
    "pipeline_parallel_size": Otherwise("use tensor_parallel_size instead", (1,)),
    "pooler_config": Otherwise("only models that generate text are supported"),
    "profiler_config": Otherwise("use tandem profile to profile a worker"),
    "revision": _FETCHED,
    "runner": Otherwise("only models that generate text are supported", ("auto", "generate")),
    "skip_tokenizer_init": Otherwise("the tokenizer is always needed", (False,)),
    "spec_method": Otherwise("use speculative_config instead"),
    "spec_model": Otherwise("use speculative_config instead"),
    "spec_tokens": Otherwise("use speculative_config instead"),
    "speculative_model": Otherwise("use speculative_config instead"),
    "structured_outputs_config": Otherwise("the backend for grammars is always llguidance", ({},)),
    "swap_space": Otherwise("use kv_offloading_size instead", ANY),
    "task": Otherwise("only models that generate text are supported", ("auto", "generate")),
    "tokenizer": Otherwise("the tokenizer in the model's folder is always used"),
    "tokenizer_mode": Otherwise("tokenizer.json in the model's folder is always used", ("auto", "hf")),
    "tokenizer_revision": _FETCHED,
    "trust_remote_code": Otherwise("code of a checkpoint is never run", ANY),
}
_TLS = "start the processes separately, as docs/deploy.md says: each of them has the TLS flags"
FLAGS: Mapping[str, str] = {
    "api-server-count": "use --gateways, and --routers for the routers behind them",
    "asc": "use --gateways, and --routers for the routers behind them",
    "chat-template-content-format": "the template shows by itself whether it takes contents as strings or as parts",
    "disable-log-requests": "use --log-level warning",
    "disable-log-stats": "metrics are served at --metrics-port",
    "disable-uvicorn-access-log": "there is no access log; use --log-level warning to log less",
    "enable-auto-tool-choice": "it is always on, if the chat template supports tools",
    "enable-expert-parallel": "use --tensor-parallel-size, which also splits experts",
    "enable-log-requests": "one line per request is always logged; --log-level debug logs more",
    "enable-prompt-tokens-details": "usage always has cached_tokens",
    "enable-reasoning": "it is always on, if the chat template supports reasoning; see --reasoning-parser",
    "enable-server-load-tracking": "it is always on: GET /load",
    "hf-overrides": "edit config.json in the model's folder instead",
    "host": "use --listen HOST:PORT, whose host is also used for HTTP",
    "logits-processors": "use logit_bias, allowed_token_ids, bad_words or structured_outputs of a request",
    "port": "use --http-port",
    "root-path": "let the proxy strip the path prefix",
    "ssl-ca-certs": _TLS,
    "ssl-certfile": _TLS,
    "ssl-keyfile": _TLS,
    "t": "use --tensor-parallel-size",
    "tp": "use --tensor-parallel-size",
    "uvicorn-log-level": "use --log-level",
}
"""Further flags of vLLM, with what to use instead."""


_GENERATES = "only models that generate text are supported"
_SLEEP = "there is no sleep mode; delete the LLM to free its memory"
METHODS: Mapping[str, str] = {
    **dict.fromkeys(("embed", "encode", "classify", "score", "reward"), _GENERATES),
    **dict.fromkeys(("sleep", "wake_up"), _SLEEP),
    **dict.fromkeys(("start_profile", "stop_profile"), "use tandem profile to profile a worker"),
    **dict.fromkeys(("collective_rpc", "apply_model"), "the model is not for code from outside"),
    **dict.fromkeys(("init_weight_transfer_engine", "update_weights"), "create another LLM with the new weights"),
    **dict.fromkeys(("add_lora", "remove_lora", "list_loras", "pin_lora"), "generate loads its lora_request"),
    **dict.fromkeys(("pause_generation", "resume_generation", "is_paused"), "let the program's own tasks wait"),
    "enqueue": "use AsyncLLM, whose generate takes requests at any time",
    "wait_for_completion": "use AsyncLLM, whose generate takes requests at any time",
    "render_chat": "use get_tokenizer().apply_chat_template",
    "preprocess_chat": "use get_tokenizer().apply_chat_template",
    "set_tokenizer": "the tokenizer in the model's folder is always used",
}
"""Methods of vLLM's `LLM` and `AsyncLLM` that do not exist here, with what to do instead, or why there is nothing."""


def no_such_method(caller: str, name: str) -> AttributeError:
    """The error for an attribute that `caller`, a class, does not have."""
    hint = f": {METHODS[name]}" if name in METHODS else ""
    return AttributeError(f"{caller!r} object has no attribute {name!r}{hint}")


def with_room_for_loras(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As in vLLM, `enable_lora` leaves room for one adapter, which requests bring along, if `max_loras` says nothing
    else. With `lora_modules` there is one already."""
    says_more = settings.get("max_loras") is not None or settings.get("lora_modules")
    room = {"max_loras": 1} if settings.get("enable_lora") is True and not says_more else {}
    return {**settings, **room}


def without_neutral(settings: Mapping[str, Any], caller: str = "LLM") -> dict[str, Any]:
    """`settings` without those of `SETTINGS` that ask for nothing special. Raises `TypeError`, naming the `caller`'s
    class, for the first other one of `SETTINGS`."""
    left: dict[str, Any] = {}
    for name, value in settings.items():
        otherwise = SETTINGS.get(name)
        if otherwise is None:
            left[name] = value
        elif value is not None and not _asks_for_nothing(value, otherwise.neutral):
            raise TypeError(f"{caller} has no {name}: {otherwise.instead}")
    return left


def _asks_for_nothing(value: Any, neutral: Any) -> bool:
    return neutral is ANY or any(value == one and type(value) is type(one) for one in neutral)


def instead_of_flag(flag: str) -> str:
    """What to use instead of vLLM's `flag`. Empty: the flag is unknown."""
    name = flag.lstrip("-").replace("_", "-").removeprefix("no-")
    if name in FLAGS:
        return FLAGS[name]
    otherwise = SETTINGS.get(name.replace("-", "_"))
    if otherwise is None:
        return ""
    return re.sub(r"\b[a-z]+(?:_[a-z]+)+\b", lambda found: "--" + found[0].replace("_", "-"), otherwise.instead)
