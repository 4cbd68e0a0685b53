"""Computes what the scheduler decided: executor, worker (model and KV pool), and launches on the device."""
