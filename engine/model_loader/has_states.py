"""`python -m engine.model_loader.has_states FOLDER LOAD_FORMAT MODEL_IMPL`: prints how many layers of a model keep a
state in place of keys and values. A process of its own, for those that need no torch otherwise."""

from __future__ import annotations

import sys
from pathlib import Path

from engine.model_loader.language_part import read_config
from engine.models import load_model_shape


def main() -> int:
    folder, load_format, model_impl = sys.argv[1:]
    try:
        shape = load_model_shape(read_config(Path(folder), load_format), model_impl)
    except ValueError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    print(len(shape.recurrent_layers))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
