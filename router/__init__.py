"""The front door: validates and tokenises a request, queues it, chooses workers, runs it, and streams its text.

Imports protos, rpc, registry and prefix_hash only; never torch, never a model's weights. A router needs nothing of a
model but its folder's tokenizer, chat template and generation_config.
"""
