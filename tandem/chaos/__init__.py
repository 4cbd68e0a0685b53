"""Deliberate faults for a cluster on this machine: a faulty proxy, a plan of faults, and a load whose answers are all
checked. `tandem chaos` and tests/chaos use it; nothing that serves requests imports it."""
