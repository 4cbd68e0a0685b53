"""Routes of vLLM's server that are not here, and what does the same, or why nothing does. Owns nothing else."""

from __future__ import annotations

from collections.abc import Mapping

_GENERATES = "only models that generate text are served"
_TEXT = "only text is supported"
_LORA = "adapters come and go with the folders of --lora-dir"
_SLEEP = "there is no sleep mode"
_PROFILE = "use `tandem profile WORKER`"
_WEIGHTS = "to serve other weights, start workers with them"
_BATCHES = "use `tandem run-batch`, which sends a file's requests"
INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "/v1/embeddings",
            "/v2/embed",
            "/pooling",
            "/classify",
            "/score",
            "/v1/score",
            "/rerank",
            "/v1/rerank",
            "/v2/rerank",
        ),
        _GENERATES,
    ),
    **dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/realtime"), _TEXT),
    **dict.fromkeys(("/v1/images/generations", "/v1/images/edits", "/v1/videos"), _TEXT),
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), _LORA),
    **dict.fromkeys(("/sleep", "/wake_up", "/is_sleeping"), _SLEEP),
    **dict.fromkeys(("/start_profile", "/stop_profile"), _PROFILE),
    **dict.fromkeys(("/update_weights", "/init_weight_transfer_engine", "/collective_rpc"), _WEIGHTS),
    **dict.fromkeys(("/v1/batches", "/v1/files", "/v1/chat/completions/batch"), _BATCHES),
    "/invocations": "use /v1/chat/completions or /v1/completions",
    "/inference/v1/generate": "give token ids as the prompt of /v1/completions, with return_token_ids",
    "/generate": "use /v1/completions",
    "/pause": "use `tandem drain WORKER`",
    "/resume": "workers that were drained start anew",
    "/reset_prefix_cache": "give requests another cache_salt: they find nothing of what is cached under others",
    "/reset_mm_cache": _TEXT,
    "/server_info": "use `tandem status`, or GET /v1/models and GET /version",
    "/tokenizer_info": "the tokenizer is in the model's folder; POST /tokenize uses it",
    "/scale_elastic_ep": "start and stop workers: routers find them by themselves",
    "/is_scaling_elastic_ep": "use `tandem status`",
}
