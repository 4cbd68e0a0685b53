"""Decides what each step computes and tracks which owner has which block. Integers only: nothing here imports torch."""
