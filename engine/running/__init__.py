"""Computes what was decided: from an executor over a worker's model and pool to launches on its device."""
