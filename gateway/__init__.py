"""OpenAI's and Anthropic's HTTP APIs in front of a router. Stateless: each request is one RPC, or one per prompt."""
