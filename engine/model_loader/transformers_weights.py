"""A causal language model of transformers' with its weights: from safetensors files, or made up from a seed."""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers

from engine.config import EngineConfig
from engine.kv_cache import TORCH_DTYPES
from engine.models.transformers_model import PAGED
from engine.models.transformers_probe import causal_lm_config


def load_causal_lm(config: EngineConfig) -> Any:
    """On the device, in the engine's dtype, with our attention. Raises `ValueError` where files and config.json do not
    fit: transformers itself would make up what is missing."""
    model, device = config.model, config.device.device
    hf_config = causal_lm_config(model.hf_config)
    arguments = {
        "attn_implementation": PAGED,
        "dtype": TORCH_DTYPES[model.dtype],
        "trust_remote_code": False,
    }
    if config.load.load_format == "dummy":
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(config.load.seed)
            causal_lm = transformers.AutoModelForCausalLM.from_config(hf_config, **arguments)
    else:
        if not sys.stderr.isatty():
            transformers.logging.disable_progress_bar()
        causal_lm, loaded = transformers.AutoModelForCausalLM.from_pretrained(
            model.path,
            config=hf_config,
            use_safetensors=True,
            local_files_only=True,
            device_map=device,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # found out below, and said in our words
            **arguments,
        )
        _check_all_fits(str(model.path), loaded)
    return causal_lm.eval().requires_grad_(False)


def _check_all_fits(folder: str, loaded: dict[str, Any]) -> None:
    """`loaded`: what transformers says of a loading."""
    for key, says in (
        ("missing_keys", "lack tensors"),
        ("unexpected_keys", "hold tensors that the architecture does not use"),
        ("mismatched_keys", "do not fit config.json in the shapes of"),
        ("conversion_errors", "could not be brought into the architecture's form"),
        ("error_msgs", "could not be read"),
    ):
        found = loaded.get(key)
        if found:
            some = ", ".join(sorted(str(each[0] if isinstance(each, tuple) else each) for each in found)[:5])
            raise ValueError(f"the weights in {folder} {says}: {some}")
