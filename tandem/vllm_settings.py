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


_FETCHED = Otherwise("fetch it, and give its folder as model")
SETTINGS: Mapping[str, Otherwise] = {
    "allowed_local_media_path": Otherwise("prompts are text", ("",)),
    "allowed_media_domains": Otherwise("prompts are text"),
    "attention_config": Otherwise("attention_backend"),
    "chat_template": Otherwise("give LLM.chat a chat_template"),
    "compilation_config": Otherwise("nothing is compiled by torch; enforce_eager leaves CUDA graphs out"),
    "config_format": Otherwise("config.json of the model's folder is read", ("auto", "hf")),
    "convert": Otherwise("models generate text", ("auto", "none")),
    "cpu_offload_gb": Otherwise("weights are on the device; quantization halves them", (0, 0.0)),
    "data_parallel_size": Otherwise("tandem up --decode starts several workers", (1,)),
    "disable_custom_all_reduce": Otherwise("ranks add up in an order of their own", ANY),
    "disable_log_stats": Otherwise("LLM.llm_engine.stats has them", ANY),
    "disable_chunked_mm_input": Otherwise("prompts are text", ANY),
    "distributed_executor_backend": Otherwise("ranks are processes of this machine", ("mp", "uni")),
    "download_dir": Otherwise("models are kept in ~/.cache/tandem"),
    "enable_chunked_prefill": Otherwise("prompts are always cut: prefill_chunk_tokens, max_itl_ms", (True,)),
    "enable_lora": Otherwise("lora_modules, or max_loras and lora_dir for those that come and go", ANY),
    "enable_sleep_mode": Otherwise("there is none", (False,)),
    "guided_decoding_backend": Otherwise("grammars are llguidance's", ("auto", "guidance")),
    "hf_overrides": Otherwise("write it into config.json of the model's folder", ({},)),
    "hf_token": Otherwise("the environment variable HF_TOKEN"),
    "kv_cache_memory_bytes": Otherwise("kv_cache_gib"),
    "kv_transfer_config": Otherwise("tandem up: prefill and decode in processes of their own, --transport"),
    "limit_mm_per_prompt": Otherwise("prompts are text", ({},)),
    "logits_processors": Otherwise(
        "logit_bias, allowed_token_ids, bad_words and structured_outputs of a request", ([],)
    ),
    "max_cpu_loras": Otherwise("all adapters are in the device's memory", ANY),
    "max_logprobs": Otherwise("there are at most 20", (20,)),
    "num_gpu_blocks_override": Otherwise("num_kv_blocks"),
    "mm_processor_kwargs": Otherwise("prompts are text", ({},)),
    "pipeline_parallel_size": Otherwise("tensor_parallel_size", (1,)),
    "pooler_config": Otherwise("models generate text"),
    "profiler_config": Otherwise("tandem profile watches the steps of a worker"),
    "revision": _FETCHED,
    "runner": Otherwise("models generate text", ("auto", "generate")),
    "skip_tokenizer_init": Otherwise("the tokenizer is needed", (False,)),
    "spec_method": Otherwise("speculative_config"),
    "spec_model": Otherwise("speculative_config"),
    "spec_tokens": Otherwise("speculative_config"),
    "speculative_model": Otherwise("speculative_config"),
    "structured_outputs_config": Otherwise("grammars are llguidance's", ({},)),
    "swap_space": Otherwise("kv_offloading_size", ANY),
    "task": Otherwise("models generate text", ("auto", "generate")),
    "tokenizer": Otherwise("the one in the model's folder is used"),
    "tokenizer_mode": Otherwise("tokenizer.json of the model's folder is read", ("auto", "hf")),
    "tokenizer_revision": _FETCHED,
    "trust_remote_code": Otherwise("no code of a checkpoint is ever run", ANY),
}
FLAGS: Mapping[str, str] = {
    "api-server-count": "--gateways, and --routers for what is behind them",
    "asc": "--gateways, and --routers for what is behind them",
    "chat-template-content-format": "contents are given to templates as texts",
    "disable-log-requests": "--log-level warning",
    "disable-log-stats": "metrics are shown where --metrics-port says",
    "enable-auto-tool-choice": "it always is, where the chat template knows tools",
    "enable-log-requests": "each request has a line at its end; --log-level debug",
    "enable-reasoning": "it is, where the chat template knows thoughts; --reasoning-parser",
    "hf-overrides": "write it into config.json of the model's folder",
    "host": "--listen HOST:PORT, whose host HTTP has, too",
    "logits-processors": "logit_bias, allowed_token_ids, bad_words and structured_outputs of a request",
    "port": "--http-port",
    "root-path": "a proxy may take it off",
    "t": "--tensor-parallel-size",
    "tp": "--tensor-parallel-size",
    "uvicorn-log-level": "--log-level",
}
"""Further flags of vLLM, with what to use instead."""


def without_neutral(settings: Mapping[str, Any], caller: str = "LLM") -> dict[str, Any]:
    """`settings` without those of `SETTINGS` that ask for nothing special. Raises `TypeError`, naming the `caller`'s
    class, for the first other one of `SETTINGS`."""
    left: dict[str, Any] = {}
    for name, value in settings.items():
        otherwise = SETTINGS.get(name)
        if otherwise is None:
            left[name] = value
        elif value is not None and not _asks_for_nothing(value, otherwise.neutral):
            raise TypeError(f"{caller} has no {name}; instead: {otherwise.instead}")
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
