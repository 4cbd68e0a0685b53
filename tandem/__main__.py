"""`python -m tandem` is the `tandem` command."""

import gc

from tandem import interrupts

interrupts.leave_at_once()
gc.disable()  # of the objects that imports make, none is garbage

from tandem.cli import main

gc.enable()

__all__ = ["main"]

if __name__ == "__main__":
    main()
