"""Which GPUs the workers of a local cluster get. The driver's library is one of ours, which only counts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.gpus import ALLOCATOR_SETTINGS, NVML, VISIBLE, has_cuda_ipc, in_words, share_out, visible_gpus

ROOT = Path(__file__).resolve().parents[2]
FOUR = ("prefill-1", "prefill-2", "decode-1", "decode-2")


@pytest.mark.parametrize(
    ("num_gpus", "workers", "num_ranks", "expected"),
    [
        (1, FOUR, 1, [("0", 4)] * 4),
        (2, FOUR, 1, [("0", 2), ("1", 2)] * 2),
        (3, FOUR, 1, [("0", 2), ("1", 1), ("2", 1), ("0", 2)]),
        (8, FOUR, 1, [(str(number), 1) for number in range(4)]),
        (8, FOUR, 2, [(f"{number},{number + 1}", 1) for number in (0, 2, 4, 6)]),
        (5, FOUR[1:3], 2, [("0,1", 1), ("2,3", 1)]),
        (3, FOUR[1:3], 2, [("0,1", 2)] * 2),
    ],
)
def test_each_has_its_own_as_long_as_there_are_enough(
    num_gpus: int, workers: tuple[str, ...], num_ranks: int, expected: list[tuple[str, int]]
) -> None:
    names = [str(number) for number in range(num_gpus)]
    shares = share_out(names, workers, num_ranks)
    assert list(shares) == list(workers)
    assert [(",".join(gpus.own), gpus.num_sharing) for gpus in shares.values()] == expected
    for gpus in shares.values():
        assert gpus.visible.startswith(",".join(gpus.own))
        assert sorted(gpus.visible.split(",")) == names


@pytest.mark.parametrize(("num_gpus", "num_ranks"), [(0, 1), (1, 2)])
def test_without_enough_for_one_worker_nothing_is_shared_out(num_gpus: int, num_ranks: int) -> None:
    assert share_out(["0"] * num_gpus, FOUR, num_ranks) == {}


def test_in_words() -> None:
    shares = share_out(["0", "1", "GPU-5", "7"], ("prefill-1", "decode-1"), 2)
    assert in_words(shares) == "prefill-1 on GPU 0 and 1, decode-1 on GPU GPU-5 and 7"


@pytest.mark.parametrize(
    ("given", "expected"),
    [("2, GPU-5f ,0", ("2", "GPU-5f", "0")), ("0,-1,1", ("0",)), ("", ()), ("-1", ()), ("1,,2", ("1",))],
)
def test_only_those_that_we_see_ourselves(
    monkeypatch: pytest.MonkeyPatch, given: str, expected: tuple[str, ...]
) -> None:
    monkeypatch.setenv(VISIBLE, given)
    assert visible_gpus() == expected


@pytest.mark.parametrize(
    ("given", "num_gpus", "expected"),
    [
        ("0,1,2,3", 2, ("0", "1")), ("1,5,0", 2, ("1",)), ("2", 2, ()), ("GPU-5f,1", 2, ("GPU-5f", "1")),
        ("0,1", 0, ("0", "1")),
    ],
)  # fmt: skip
def test_numbers_that_no_gpu_has_are_not_shared_out(
    monkeypatch: pytest.MonkeyPatch, given: str, num_gpus: int, expected: tuple[str, ...]
) -> None:
    """A worker that got such a number would see no GPU, and compute on the CPU. 0: the driver does not tell."""
    monkeypatch.setenv(VISIBLE, given)
    monkeypatch.setattr("tandem.gpus._num_gpus", lambda: num_gpus)
    assert visible_gpus() == expected


COUNTING = """
int nvmlInit_v2(void) {{ return {init}; }}
int nvmlDeviceGetCount_v2(unsigned int *number) {{ *number = 3; return {count}; }}
int nvmlShutdown(void) {{ return 0; }}
"""


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        (COUNTING.format(init=0, count=0), "('0', '1', '2')"),
        (COUNTING.format(init=9, count=0), "()"),
        (COUNTING.format(init=0, count=15), "()"),
        ("int nothing;", "()"),
        ("", "()"),
    ],
    ids=["three", "no driver", "none to be counted", "another library", "no library"],
)
def test_otherwise_the_driver_counts_them(tmp_path: Path, library: str, expected: str) -> None:
    if library:
        (tmp_path / "nvml.c").write_text(library)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / NVML, tmp_path / "nvml.c"], check=True)
    env = {name: value for name, value in os.environ.items() if name != VISIBLE}
    env |= {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    asked = "import sys; from tandem.gpus import visible_gpus; print(visible_gpus()); assert 'torch' not in sys.modules"
    told = subprocess.run([sys.executable, "-c", asked], env=env, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == expected


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        (("triton", "cuda/bindings"), True),
        (("triton", "cuda"), False),
        (("triton",), False),
        (("cuda/bindings",), False),
    ],
)
def test_what_writing_into_a_peers_gpu_memory_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: tuple[str, ...], expected: bool
) -> None:
    for package in installed:
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "__init__.py").touch()
    monkeypatch.setattr("engine.kernels.gpu.why_no_c_compiler", lambda: "")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in [name for name in sys.modules if name.partition(".")[0] in ("cuda", "triton")]:
        monkeypatch.delitem(sys.modules, name)
    assert has_cuda_ipc() is expected


@pytest.fixture
def with_cuda_ipc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that has all that it takes. Returns its file of the kernel's version."""
    monkeypatch.setattr("tandem.gpus.find_spec", lambda _: object())
    monkeypatch.setattr("engine.kernels.gpu.find_spec", lambda _: object())
    monkeypatch.setattr("engine.kernels.gpu.why_no_c_compiler", lambda: "")
    for name in ALLOCATOR_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    version = tmp_path / "version"
    version.write_text("Linux version 6.8.0-45-generic (buildd@lcy02) (gcc 13.2.0)")
    monkeypatch.setattr("tandem.gpus.KERNEL_VERSION", version)
    assert has_cuda_ipc()
    return version


@pytest.mark.parametrize("name", ALLOCATOR_SETTINGS)
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("expandable_segments:True", False),
        ("max_split_size_mb:512, expandable_segments : True", False),
        ("backend:cudaMallocAsync", False),
        ("expandable_segments:False,backend:native", True),
        ("garbage_collection_threshold:0.8", True),
        ("", True),
    ],
)
@pytest.mark.usefixtures("with_cuda_ipc")
def test_memory_that_cuda_does_not_export_is_not_counted_on(
    monkeypatch: pytest.MonkeyPatch, name: str, settings: str, expected: bool
) -> None:
    """A worker refuses `--transport ipc` with these allocators."""
    monkeypatch.setenv(name, settings)
    assert has_cuda_ipc() is expected


def test_windows_subsystem_for_linux_has_no_cuda_ipc(with_cuda_ipc: Path) -> None:
    with_cuda_ipc.write_text("Linux version 6.6.87.2-microsoft-standard-WSL2 (root@439a258ad544)")
    assert not has_cuda_ipc()
    with_cuda_ipc.unlink()
    assert has_cuda_ipc()


@pytest.mark.usefixtures("with_cuda_ipc")
def test_the_kernel_that_copies_needs_a_c_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.kernels.gpu.why_no_c_compiler", lambda: "there is none")
    assert not has_cuda_ipc()
