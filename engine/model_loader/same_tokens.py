"""Whether two models' tokenizers give the same texts the same ids, as a draft model's must. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.model_loader.folder import read_json

LEAST_SHARE = 0.9
"""Of the smaller vocabulary. Models of one family may differ in their special tokens."""


def check_same_tokens(folder: Path, draft_folder: Path) -> None:
    """Raise `ValueError` if the draft model would read other texts than the model. Says nothing if one of the folders
    has no tokenizer.json, or one of a kind that lists no tokens."""
    own, drafts = _ids_of_tokens(folder), _ids_of_tokens(draft_folder)
    if not own or not drafts:
        return
    other = [token for token, token_id in drafts.items() if own.get(token) != token_id]
    if len(drafts) - len(other) < LEAST_SHARE * min(len(own), len(drafts)):
        example = next((token for token in other if token in own), other[0])
        raise ValueError(
            f"its tokenizer is not the model's, so that no guess would be right: {example!r} is token "
            f"{drafts[example]} there, and {own.get(example, 'none')} here; take a smaller model of the same family"
        )


def _ids_of_tokens(folder: Path) -> dict[str, int]:
    if not (folder / "tokenizer.json").is_file():
        return {}
    model: Any = read_json(folder / "tokenizer.json").get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list):  # Unigram: pieces with their scores, in the order of ids
        texts = [piece[0] if isinstance(piece, list) and piece else None for piece in vocab]
        return {text: i for i, text in enumerate(texts) if isinstance(text, str)}
    return vocab if isinstance(vocab, dict) else {}
