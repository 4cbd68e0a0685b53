"""Decides what each step computes, and who owns which block. Integers only: nothing here imports torch."""
