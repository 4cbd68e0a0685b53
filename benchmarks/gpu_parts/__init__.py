"""The parts of `benchmarks/gpu.py`: what it checks and measures.

    rows.py       a number beside its limit and its aim, and the table of them
    runner.py     parts in turn, each in a process of its own, within a budget
    shapes.py     models and sizes: bytes and operations, counted
    timing.py     seconds of work on a device
    floors.py     what the device can do
    kernels.py    the kernels' own tests
    model.py      the whole model against transformers in float64
    attention.py  attention alone, and its launch configurations
    digests.py    digests of blocks alone
    steps.py      an engine's steps, and how long the device idles in them
    drafts.py     the same engine's steps with guesses at the next tokens
    push.py       KV between two processes on one card
    servers.py    one prefill and one decode worker on one card, against one that does both

A part is a function from a `Setting` to rows, handed out as they are measured.
"""
