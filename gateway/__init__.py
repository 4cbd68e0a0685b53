"""OpenAI's HTTP API, and Anthropic's, in front of a router. Stateless: every request is one RPC, or one for each of its
prompts."""
