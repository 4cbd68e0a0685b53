"""`python -m engine.kernels`: compile the CPU kernels ahead of time for all kinds of machines, for container images
without a compiler. The libraries are written beside this file; the engine loads the fastest that its machine can run.
"""

from __future__ import annotations

import sys

from engine.kernels.build import KernelsUnavailable, prebuild


def main() -> int:
    try:
        for folder in prebuild():
            print(folder)  # noqa: T201
    except KernelsUnavailable as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
