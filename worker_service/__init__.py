"""What prefill and decode services share: one engine's process, its registration, its sessions with routers.

Imports engine, kv_transfer, rpc, registry, prefix_hash and protos; never prefill_service or decode_service.
"""
