"""Faults on purpose, for a cluster of this machine: a proxy that misbehaves, a plan of faults, a load whose answers are
all checked. `tandem chaos` and tests/chaos are made of it; nothing that serves imports it."""
