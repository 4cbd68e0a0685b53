"""`python -m tandem` is the `tandem` command."""

import gc

from tandem import interrupts

interrupts.leave_at_once()
gc.disable()  # until a command has what it needs (tandem.cli): of what imports make, nothing is garbage

from tandem.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
