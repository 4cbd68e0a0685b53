"""Checks an `LLM`'s KV blocks after it has answered."""

from __future__ import annotations

from tandem import LLM


def at_rest(llm: LLM) -> bool:
    """Whether every block is free or cached, and the audit finds no problem."""
    blocks, problems = llm.llm_engine.audit()
    return problems == [] and blocks.num_free + blocks.num_cached == blocks.num_blocks
