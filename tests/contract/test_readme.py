"""What README.md names exists, and what it shows runs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from protos import tandem_inference_pb2 as pb
from protos import tandem_worker_pb2 as worker_pb
from tandem.cli import COMMANDS, command, main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
PROSE = FENCED.sub("", README)


def blocks(language: str) -> list[str]:
    """The fenced code blocks of one language; those without a language ("") are shell commands or drawings."""
    return [source for found, source in FENCED.findall(README) if found == language]


def shell_lines() -> list[str]:
    return [line.split("  #")[0].strip() for block in blocks("") for line in block.splitlines()]


def typed(pattern: str) -> list[str]:
    """The matches of `pattern` in shell commands and in inline code."""
    inline = re.findall(r"`([^`\n]+)`", PROSE)
    return [found[0] for text in [*shell_lines(), *inline] if (found := re.findall(pattern, text))]


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(typed(r"^make ([a-z-]+)"))
    assert {"demo", "test"} <= named
    assert named <= targets


def test_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_tandem_commands_and_their_flags_exist() -> None:
    lines = [line for line in [*shell_lines(), *typed(r"(^tandem .*)")] if re.search(r"(^|[/(])tandem [a-z]", line)]
    assert len(lines) >= 5
    for line in lines:
        for name, rest in re.findall(r"(?:^|[/(])tandem ([a-z-]+)([^)#]*)", line):
            known = {option for parameter in command(name).params for option in parameter.opts}
            assert set(re.findall(r"--[a-z][a-z-]*", rest)) <= known, line


def test_flags_named_in_prose_are_those_of_up() -> None:
    known = {option for each in map(command, COMMANDS) for parameter in each.params for option in parameter.opts}
    named = {
        flag for text in re.findall(r"`([^`\n]+)`", PROSE) for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)
    }
    named -= {"--help"} | {flag for text in typed(r"(^.venv/bin/pip .*)") for flag in re.findall(r"--[a-z-]+", text)}
    assert named
    assert named <= known


@pytest.mark.parametrize(
    "module", ["router", pytest.param("prefill_service", marks=pytest.mark.slow), "decode_service"]
)
def test_service_commands_take_their_flags(module: str) -> None:
    (line,) = [line for line in shell_lines() if line.startswith(f"python -m {module} ")]
    help_text = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    for flag in re.findall(r"--[a-z][a-z-]*", line):
        assert re.search(rf"{flag}\b", help_text), f"{module} has no {flag}"


def test_help_names_the_environment_variables() -> None:
    assert "TANDEM_MODEL" in CliRunner().invoke(main, ["up", "--help"]).output


def test_the_other_language_names_what_the_wire_has() -> None:
    (source,) = blocks("javascript")
    assert (ROOT / re.findall(r'loadSync\("([^"]+)"', source)[0]).is_file()
    service = pb.DESCRIPTOR.services_by_name["Inference"]
    assert re.findall(r"client\.(\w+)\(", source)[0] in service.methods_by_name
    request = pb.GenerateRequest.DESCRIPTOR.fields_by_name
    assert re.findall(r"(?<=Generate\(\{ )\w+", source)[0] in request
    params = re.findall(r"sampling_params: \{([^}]*)\}", source)[0]
    assert set(re.findall(r"(\w+):", params)) <= set(pb.SamplingParams.DESCRIPTOR.fields_by_name)
    assert re.findall(r"chunk\.(\w+)", source)[0] in pb.GenerateResponse.DESCRIPTOR.fields_by_name


def test_every_promise_is_stated_once() -> None:
    rows = re.findall(r"^\| (P\d) \|.*\| (?:kept|in part): ", README, flags=re.MULTILINE)
    assert rows == [f"P{i}" for i in range(1, 10)]


def test_the_picture_names_the_roles() -> None:
    picture = next(block for block in blocks("") if "┌" in block)
    for role in worker_pb.Role.keys()[1:]:
        assert f"{role.removeprefix('ROLE_').lower()} worker" in picture


def test_the_offline_example_runs() -> None:
    source = next(block for block in blocks("python") if "LLM(" in block)
    ast.parse(source)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_what_is_compiled_at_installation_is_there() -> None:
    """The Makefile imports these modules by name; if one were missing, `make` could not install anything."""
    makefile = (ROOT / "Makefile").read_text()
    command = makefile[makefile.index("COMPILE =") : makefile.index("QUIET :=")]
    modules = re.findall(r"\b(?:engine|gateway|router|tandem|worker_service)(?:\.\w+)+", command)
    assert len(modules) >= 5
    for module in modules:
        assert find_spec(module) is not None, module
