"""Anthropic's Messages API, stateless: POST /v1/messages and /v1/messages/count_tokens. The files:

request (with input) ──> Run ── messages ──> answer ──> rendering: JSON, or server-sent events; else errors
"""
