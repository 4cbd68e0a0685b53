"""Compiles source/ into the cache directory, once for each machine, compiler, torch and source.

    with a compiler     ── cpu_library ──> compiled for this machine, into the cache directory
    without             ── cpu_library ──> the best of prebuilt/KIND that this machine can run (container images)

It does not use torch.utils.cpp_extension: the single source file needs no Python headers, so one call of the compiler
is simpler than setuptools and ninja. Processes that want the same library wait for one build
(`engine.cache_dir.build_once`).
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.cache_dir import build_once, kernels_dir, report

SOURCE = Path(__file__).with_name("source") / "tandem_cpu.cpp"
LIBRARY = "tandem_cpu.so"
CHECKSUM = "tandem_cpu.so.blake2b"
PREBUILT = Path(__file__).with_name("prebuilt")
BUILT_FROM = "built-from"
"""File beside a prebuilt library: the digest of what it was compiled from."""
V3 = frozenset(["abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"])
V4 = V3 | frozenset(["avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"])
BF16 = V4 | {"avx512_bf16"}
KINDS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "x86-64-v4-amx": (
        ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        BF16 | {"amx_tile", "amx_bf16"},
    ),
    "x86-64-v4-bf16": (("-march=x86-64-v4", "-mavx512bf16"), BF16),
    "x86-64-v4": (("-march=x86-64-v4",), V4),
    "x86-64-v3": (("-march=x86-64-v3",), V3),
}
"""Kinds of machines that libraries are prebuilt for, the fastest first: compiler flags, and the flags of /proc/cpuinfo
without which the library would crash the process."""
COMPILERS = ("c++", "g++", "clang++")
BUILD_TIMEOUT_S = 300.0
FLAGS = (
    "-std=c++20", "-O3", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fno-plt",
    "-fvisibility=hidden",
)  # fmt: skip


class KernelsUnavailable(Exception):  # noqa: N818 - named for what is the case
    """The kernels cannot be compiled or loaded here. The message says why, and what helps."""


@functools.cache
def load_cpu_kernels() -> None:
    """Load torch.ops.tandem_cpu into this process; compiles it first if this machine has not done so before.

    Compiling takes some ten seconds and is reported on stderr. Raises `KernelsUnavailable`.
    """
    library = cpu_library(kernels_dir())
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise KernelsUnavailable(f"{library} cannot be loaded: {error}") from error
    torch.ops.tandem_cpu.keep_freed_memory()


def cpu_arithmetic() -> str:
    """How the loaded kernels add up on this machine: "tiles" (AMX), "pairs" (AVX512-BF16), "floats16" or 4 (floats per
    vector), or "bytes and floats8" (AVX2), with the version of our arithmetic."""
    name: str = torch.ops.tandem_cpu.arithmetic()
    return name


def cpu_library(directory: Path) -> Path:
    """Return the compiled library, in a folder of `directory`; builds it if it is missing or damaged. Without a
    compiler, returns a prebuilt one. Raises `KernelsUnavailable`."""
    try:
        compiler = find_compiler()
    except KernelsUnavailable:
        if (prebuilt := prebuilt_library()) is None:
            raise
        return prebuilt
    command = compile_command(compiler)
    name = f"cpu-{_digest(command)}"
    try:
        folder = build_once(directory, name, lambda folder: _build(command, folder))
        if not _is_whole(folder):
            report(f"{folder} is damaged; compiling its contents anew")
            shutil.rmtree(folder)
            folder = build_once(directory, name, lambda folder: _build(command, folder))
    except OSError as error:
        raise KernelsUnavailable(f"they cannot be kept in {directory}: {error}") from error
    return folder / LIBRARY


def prebuilt_library() -> Path | None:
    """The fastest undamaged prebuilt library of our source and torch that this machine can run, or None."""
    features = _cpu_features().split()
    for kind, (_, needed) in KINDS.items():
        folder = PREBUILT / kind
        if folder.is_dir() and needed <= set(features):
            if _is_whole(folder) and _is_ours(folder):
                return folder / LIBRARY
            report(f"{folder} is damaged, or of another version: not used")
    return None


def prebuild() -> list[Path]:
    """Compile for each of `KINDS`, replacing existing libraries. Raises `KernelsUnavailable`."""
    if platform.machine() not in ("x86_64", "AMD64"):
        raise KernelsUnavailable(f"libraries are prebuilt for kinds of x86-64 only; this is {platform.machine()}")
    folders = []
    for kind, (flags, _) in KINDS.items():
        folder = PREBUILT / kind
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _build(compile_command(find_compiler(), flags), folder, f"for {kind}")
        (folder / BUILT_FROM).write_text(_built_from())
        folders.append(folder)
    return folders


def find_compiler() -> list[str]:
    """Return CXX (with its flags, if any), or the first C++ compiler on the path. Raises `KernelsUnavailable`."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    for name in wanted[:1] or COMPILERS:
        if path := shutil.which(name):
            return [path, *wanted[1:]]
    raise KernelsUnavailable(f"there is no C++ compiler ({' '.join(wanted) or ', '.join(COMPILERS)}): install g++")


def compile_command(compiler: list[str], machine: Sequence[str] = ()) -> list[str]:
    """The compile command without the output option. `machine`: flags of the target machine; default: this one.
    CXXFLAGS come last: for example, "-march=x86-64-v3" computes as older machines do."""
    root = Path(torch.__path__[0])
    native = "-mcpu=native" if platform.machine().lower() in ("aarch64", "arm64") else "-march=native"
    return [
        *compiler, *FLAGS, *(machine or [native]), *shlex.split(os.environ.get("CXXFLAGS", "")),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}",
        str(SOURCE),
        f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip


def _checksum(folder: Path) -> str:
    return hashlib.blake2b((folder / LIBRARY).read_bytes(), digest_size=16).hexdigest()


def _is_whole(folder: Path) -> bool:
    """Whether the library is undamaged: loading a truncated file would crash the process."""
    try:
        return (folder / CHECKSUM).read_text() == _checksum(folder)
    except OSError:
        return False


def _is_ours(folder: Path) -> bool:
    """Whether a prebuilt library matches our source and torch: one for another torch would not load, or would crash."""
    try:
        return (folder / BUILT_FROM).read_text() == _built_from()
    except OSError:
        return False


def _digest(command: list[str]) -> str:
    """Digest of everything that the library depends on. Machines of different kinds may share the cache directory."""
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=False).stdout
    parts = [*_sources(), " ".join(command), version, torch.__version__, _cpu_features()]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


def _sources() -> list[str]:
    return [path.read_text() for path in sorted(SOURCE.parent.iterdir()) if path.suffix in (".h", ".cpp")]


def _built_from() -> str:
    """Digest of what a prebuilt library must share with us, except the machine's kind, which is its folder's name."""
    return hashlib.blake2b("\n".join([*_sources(), torch.__version__]).encode(), digest_size=8).hexdigest()


def _cpu_features() -> str:
    """What -march=native depends on."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return platform.processor()
    lines = cpuinfo.read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _build(command: list[str], folder: Path, what_for: str = "for this machine") -> None:
    report(f"compiling the CPU kernels {what_for} (about ten seconds, once)")
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / LIBRARY
        try:
            done = subprocess.run(
                [*command, "-o", str(output)], capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise KernelsUnavailable(f"{command[0]} did not compile them: {error}") from error
        if done.returncode != 0:
            said = done.stderr.strip()[:500] or f"it ended with {done.returncode}"
            first = next((line for line in done.stderr.splitlines() if "error" in line.lower()), said)
            raise KernelsUnavailable(f"{command[0]} cannot compile them: {first}")
        if not output.is_file():
            raise KernelsUnavailable(f"{command[0]} says that it has compiled them, but has written nothing")
        shutil.copy(output, folder / LIBRARY)
        (folder / CHECKSUM).write_text(_checksum(folder))
    report(f"compiled the CPU kernels in {time.monotonic() - start_s:.0f} s")
