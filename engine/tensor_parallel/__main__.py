"""`python -m engine.tensor_parallel FDS RANK MEETING_FILE`: one rank other than 0 (rank.py)."""

from __future__ import annotations

import gc

gc.disable()  # imports create no garbage, and looking for it takes a third of the start

import sys
from pathlib import Path

from engine.tensor_parallel.rank import run_rank

gc.freeze()  # what they created stays alive
gc.enable()

if __name__ == "__main__":
    sys.exit(run_rank([*map(int, sys.argv[1].split(","))], int(sys.argv[2]), Path(sys.argv[3])))
