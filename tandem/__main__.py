"""`python -m tandem` is the `tandem` command."""

import gc

from tandem import interrupts

interrupts.leave_at_once()
gc.disable()  # imports make no garbage, so collecting would only take time

from tandem.cli import main

gc.enable()

__all__ = ["main"]

if __name__ == "__main__":
    main()
