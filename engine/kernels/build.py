"""Compiles source/ into the cache directory, once for each machine, compiler, torch and source.

    a compiler is there ── cpu_library ──> compiled for this very machine, into the cache directory
    none is             ── cpu_library ──> the best of prebuilt/KIND that this machine can run (container images)

Not with torch.utils.cpp_extension: for one unit that needs neither Python's headers nor setuptools nor ninja, one call
of the compiler is less to install and to explain. Two processes that want the same library wait for one build
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
"""Beside a prebuilt library: the digest of what it was compiled from."""
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
"""Kinds of machines that libraries are prebuilt for, the fastest first: the compiler's flags, and those of
/proc/cpuinfo without which such a library would kill the process."""
COMPILERS = ("c++", "g++", "clang++")
BUILD_TIMEOUT_S = 300.0
FLAGS = (
    "-std=c++20", "-O3", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fno-plt",
    "-fvisibility=hidden",
)  # fmt: skip


class KernelsUnavailable(Exception):  # noqa: N818 - named for what is the case
    """The kernels cannot be compiled or loaded here. The message says why, and what would help."""


@functools.cache
def load_cpu_kernels() -> None:
    """Make torch.ops.tandem_cpu available in this process; compiles it if that has not been done on this machine.

    Takes some ten seconds the first time, with a line on stderr. Raises `KernelsUnavailable`.
    """
    library = cpu_library(kernels_dir())
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise KernelsUnavailable(f"{library} cannot be loaded: {error}") from error
    torch.ops.tandem_cpu.keep_freed_memory()


def cpu_arithmetic() -> str:
    """How the kernels add up here, once they are loaded: by "tiles" (AMX), "pairs" (AVX512-BF16) or "floats16", 8 or 4
    (so many in a vector), and which version of ours that is."""
    name: str = torch.ops.tandem_cpu.arithmetic()
    return name


def cpu_library(directory: Path) -> Path:
    """The compiled library, in a folder of `directory`; built anew if it is not what was built. Without a compiler a
    prebuilt one. Raises `KernelsUnavailable`."""
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
    """The fastest of the prebuilt libraries that is whole, of our source and torch, and that this machine can run."""
    features = _cpu_features().split()
    for kind, (_, needed) in KINDS.items():
        folder = PREBUILT / kind
        if folder.is_dir() and needed <= set(features):
            if _is_whole(folder) and _is_ours(folder):
                return folder / LIBRARY
            report(f"{folder} is damaged, or of another version: not used")
    return None


def prebuild() -> list[Path]:
    """Compile for each of `KINDS`; what is there is replaced. Raises `KernelsUnavailable`."""
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
    """CXX (with its flags, if it has some), or the first C++ compiler on the path. Raises `KernelsUnavailable`."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    for name in wanted[:1] or COMPILERS:
        if path := shutil.which(name):
            return [path, *wanted[1:]]
    raise KernelsUnavailable(f"there is no C++ compiler ({' '.join(wanted) or ', '.join(COMPILERS)}): install g++")


def compile_command(compiler: list[str], machine: Sequence[str] = ()) -> list[str]:
    """Everything but the output. `machine`: flags that say for which, by default this one. CXXFLAGS come last:
    "-march=x86-64-v3", say, to compute as older machines do."""
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
    """Whether the library is as it was built: loading a file that was cut off kills the process."""
    try:
        return (folder / CHECKSUM).read_text() == _checksum(folder)
    except OSError:
        return False


def _is_ours(folder: Path) -> bool:
    """Whether a prebuilt library is of our source and torch: another torch's would not load, or crash."""
    try:
        return (folder / BUILT_FROM).read_text() == _built_from()
    except OSError:
        return False


def _digest(command: list[str]) -> str:
    """Of all that the library depends on. The cache directory may be shared by machines of different kinds."""
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=False).stdout
    parts = [*_sources(), " ".join(command), version, torch.__version__, _cpu_features()]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


def _sources() -> list[str]:
    return [path.read_text() for path in sorted(SOURCE.parent.iterdir()) if path.suffix in (".h", ".cpp")]


def _built_from() -> str:
    """What a prebuilt library must have in common with us; the machine's kind is its folder's name."""
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
