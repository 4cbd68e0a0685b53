"""`python -m tandem` is the `tandem` command."""

from tandem import interrupts

interrupts.leave_at_once()

from tandem.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
