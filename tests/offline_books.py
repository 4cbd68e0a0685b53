"""An `LLM`'s memory once it has answered."""

from __future__ import annotations

from tandem import LLM


def at_rest(llm: LLM) -> bool:
    """Every block is free or cached, and the books balance."""
    blocks, problems = llm.llm_engine.audit()
    return problems == [] and blocks.num_free + blocks.num_cached == blocks.num_blocks
