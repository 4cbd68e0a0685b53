"""Models: which architectures are known, and who builds them."""

from __future__ import annotations

from typing import Any

from engine.models.decoder_config import ARCHITECTURES, DecoderConfig

__all__ = ["ARCHITECTURES", "DecoderConfig", "load_decoder_config"]


def load_decoder_config(hf_config: dict[str, Any]) -> DecoderConfig:
    """The canonical form of a Hugging Face config.json.

    Raises `ValueError` that lists the known architectures, or names the field that is missing or unsupported.
    """
    names = hf_config.get("architectures") or []
    known = [name for name in names if name in ARCHITECTURES]
    if not known:
        raise ValueError(
            f"config.json: architecture {', '.join(names) or '(none given)'} is not supported; "
            f"known are {', '.join(sorted(ARCHITECTURES))}"
        )
    return DecoderConfig.from_hf(known[0], hf_config)
