"""OpenAI's Responses API, stateless: POST /v1/responses. The files:

request (with input) ──> Run ── messages ──> output ──> answer ──> rendering: JSON, or server-sent events
"""
