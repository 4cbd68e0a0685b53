"""Each `tandem up` that a document shows is accepted as it stands: read by the command, checked as before a start."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

import tandem.cli.up as up_module
from tandem.cli import main
from tandem.cluster_args import ClusterArgs

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
SHOWN = re.compile(r"(?:^|(?<=`))(?:\.venv/bin/)?tandem up( [^`\n]*)?(?=`|$)", re.MULTILINE)
HELP = up_module.up.epilog or ""


def shown() -> list[str]:
    """The commands, without comments, and without those that leave something open (`…`, or a flag's value)."""
    texts = [path.read_text() for path in DOCUMENTS if path.name != "configuration.md"]
    texts.append("\n".join(line.strip() for line in HELP.splitlines()))
    found = (match[1] or "" for text in texts for match in SHOWN.finditer(text.replace("\\\n", " ")))
    commands = {" ".join(shlex.split(each, comments=True)): shlex.split(each, comments=True) for each in found}
    return [shlex.join(words) for words in commands.values() if "…" not in words and words != ["--metrics-port"]]


def test_there_are_many() -> None:
    assert len(shown()) >= 15
    assert any("0.0.0.0" in each for each in shown()), "the one that lets others connect"


@pytest.mark.parametrize("command", shown())
def test_it_is_accepted(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "adapters").mkdir(parents=True)
    accepted: list[ClusterArgs] = []

    async def note(args: ClusterArgs) -> list[str]:
        accepted.append(args)
        return []

    monkeypatch.setattr(up_module, "_serve", note)
    monkeypatch.chdir(ROOT)
    words = [word.replace("/models/", f"{tmp_path}/models/") for word in shlex.split(command)]
    result = CliRunner().invoke(main, ["up", *words])
    assert result.exit_code == 0, result.output
    assert accepted
