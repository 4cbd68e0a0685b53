"""The wire contract: each `.proto` beside the modules generated from it. Imports nothing of ours.

Regenerate with `make protos`; `tests/contract/test_protos.py` fails when a generated file is stale.
"""
