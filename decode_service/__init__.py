"""Receives or computes prompts' KV, and decodes with continuous batching."""
