"""Computes prompts and ships their KV, while computing it, to the decode workers that asked for it."""
