"""Decides what each step computes and tracks which owner has which block. Integers only: nothing here imports torch.

scheduler.py              what a step computes; sequences_by_state.py: waiting, running, held …, and the one way out
sequence.py               a sequence, and its part of a step; stop_rule.py: when its answer ends
block_manager.py          blocks for sequences; block_pool.py: who uses which; block_ledger.py: the counts
prefix_cache.py           which blocks hold which prefix; evictor.py: which of them go first
offloading.py             blocks in host memory
snapshots.py              states of layers without keys, kept with prefixes; state_slots.py: those of running ones
drafting.py               guesses of a step: looked up (speculation.py), a draft model's (model_drafting.py) or a
                          head's (head_drafting.py)
grammar.py, thinking.py   what may come next: grammars as masks, and budgets for thoughts
pace.py                   prompts beside streams, cut to time; stream_interval.py: tokens told together
stats.py                  counters
"""
