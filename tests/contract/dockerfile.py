"""Parses deploy/Dockerfile into its stages and their base images."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@dataclass
class Stage:
    name: str
    base: str
    lines: list[tuple[str, str]] = field(default_factory=list)
    """Instruction, and what follows it."""

    def all(self, instruction: str) -> list[str]:
        return [rest for found, rest in self.lines if found == instruction]


def read_stages() -> tuple[dict[str, str], dict[str, Stage]]:
    """The global ARGs with their defaults, and the stages by name, in order."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    args: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for line in filter(None, map(str.strip, text.splitlines())):
        instruction, rest = line.split(maxsplit=1)
        if instruction == "FROM":
            base, name = re.fullmatch(r"(\S+) AS (\S+)", rest).groups()  # type: ignore[union-attr]
            stage = stages[name] = Stage(name, base)
        elif stage is None:
            assert instruction == "ARG"
            args.update([rest.split("=", 1)])
        else:
            stage.lines.append((instruction, rest))
    return args, stages


ARGS, STAGES = read_stages()


def ancestors(name: str) -> list[Stage]:
    """Return a stage, the stage that it is built from, and so on."""
    stage = STAGES[name]
    return [stage, *(ancestors(stage.base) if stage.base in STAGES else [])]
