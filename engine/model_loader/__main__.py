"""`python -m engine.model_loader [MODEL]`: fetch and convert a model, print its folder. For images and init jobs."""

from __future__ import annotations

import argparse
import sys

from engine.engine_args import EngineArgs
from engine.model_loader import resolve_model


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.model_loader", description=__doc__)
    parser.add_argument("model", nargs="?", default=EngineArgs.model, metavar="MODEL", help="default: %(default)s")
    try:
        folder = resolve_model(parser.parse_args().model)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    print(folder)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
