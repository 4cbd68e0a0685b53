"""Traits by which a router recognizes its own model among others with equally many tokens: both the router and a worker
read them from their model's folder, and quantising, converting or renaming the model does not change them.

Names and paths are unsuitable, since they may differ for the same model. So is a digest of all tokens: a GGUF file
names unused tokens in its own way, and a later tokenizer.json has additional ones. A router has no weights: workers
distinguish a model from a fine-tuned version (`compat_digest`), not this module.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from protos import tandem_worker_pb2 as pb

NUM_TOKENS = 16
"""Number of compared tokens, evenly spread. Two different tokenizers share hardly any of them."""
MAX_TOKEN_CHARS = 32
"""Characters of each token that are compared."""


def read_model_traits(folder: Path) -> pb.ModelTraits:
    """Read the traits of the model in `folder`. Missing or unreadable ones are left out: others report that if
    needed."""
    config = _read(folder / "config.json")
    config = {**config, **_dict(config.get("text_config"))}  # multimodal models nest their text part
    traits = pb.ModelTraits(
        num_layers=_number(config.get("num_hidden_layers", config.get("n_layer"))),
        hidden_size=_number(config.get("hidden_size", config.get("n_embd"))),
    )
    if tokens := _tokens(_read(folder / "tokenizer.json")):
        vocab_size = _number(config.get("vocab_size"))
        looked_at = {(2 * number + 1) * vocab_size // (2 * NUM_TOKENS) for number in range(NUM_TOKENS)}
        traits.tokens.update({i: tokens[i][:MAX_TOKEN_CHARS] for i in looked_at if i in tokens})
    return traits


def traits_difference(theirs: pb.ModelTraits, ours: pb.ModelTraits) -> str:
    """Why a worker's model is not ours; empty if it is, as far as both traits tell."""
    sizes = [(traits.num_layers, traits.hidden_size) for traits in (theirs, ours)]
    if all(map(all, sizes)) and sizes[0] != sizes[1]:
        return "its model has {} layers of {}, ours {} of {}".format(*sizes[0], *sizes[1])
    shared = sorted(theirs.tokens.keys() & ours.tokens.keys())
    others = [i for i in shared if theirs.tokens[i] != ours.tokens[i]]
    if 2 * len(others) > len(shared):
        return f"its tokens are others: {others[0]} is {theirs.tokens[others[0]]!r}, ours {ours.tokens[others[0]]!r}"
    return ""


def _tokens(tokenizer: dict[str, Any]) -> dict[int, str]:
    """Tokens by id, as written in the file."""
    vocab = _dict(tokenizer.get("model")).get("vocab")
    if isinstance(vocab, list):  # of pairs: token and score
        found = {number: pair[0] for number, pair in enumerate(vocab) if isinstance(pair, list) and pair}
    else:
        found = {number: token for token, number in _dict(vocab).items()}
    return {number: token for number, token in found.items() if isinstance(number, int) and isinstance(token, str)}


def _read(path: Path) -> dict[str, Any]:
    try:
        return _dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return {}


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: object) -> int:
    """The value if it is an integer that fits the message, else 0."""
    return value if isinstance(value, int) and 0 <= value < 1 << 32 else 0
