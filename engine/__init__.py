"""One worker's LLM engine: token ids in, token ids out. No network, no Redis, no gRPC."""
