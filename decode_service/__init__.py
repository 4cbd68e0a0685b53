"""Receives prompts' KV, or computes it, and decodes with continuous batching."""
