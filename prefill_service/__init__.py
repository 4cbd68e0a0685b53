"""Computes prompts, and pushes their KV while it is being computed to the decode workers that reserved memory for
it."""
