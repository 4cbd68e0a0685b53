"""OpenAI's HTTP API in front of a router. Stateless: every request is one RPC, or one for each of its prompts."""
