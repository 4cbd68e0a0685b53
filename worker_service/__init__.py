"""The common part of prefill and decode services: one engine's process, its registration, its sessions with routers.

Imports engine, kv_transfer, rpc, registry, prefix_hash and protos; never prefill_service or decode_service.
"""
