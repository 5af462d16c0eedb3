"""The folder that travels to a lent machine: sources, packages and drawings, within a limit of bytes.

The machine has Linux x86-64, Python 3.12 and what `pip install torch` brings, which is neither numpy nor pillow.
"""

import fnmatch
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

LIMIT_BYTES = 64_000_000
"""What may travel in all."""
RESULTS_BYTES = 7_000_000
"""Of these, kept for the results of earlier pieces: a tokenizer in bfloat16."""

PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")
ROOMS = ("dalle_lean", "preprocessing", "training")
PACKAGES = (
    *("numpy", "safetensors", "tokenizers", "pillow", "resvg-py", "pyarrow", "taming-transformers"),
    *(
        "typer",
        "annotated-doc",
        "pydantic",
        "pydantic-core",
        "annotated-types",
        "typing-inspection",
        "typing-extensions",
        "shellingham",
        "rich",
        "markdown-it-py",
        "mdurl",
        "pygments",
    ),
    *("open-clip-torch", "torchvision", "timm", "huggingface-hub", "ftfy", "wcwidth", "regex", "tqdm", "pyyaml"),
    *("tensorboard", "protobuf", "absl-py", "packaging"),
)
"""What the pieces import, and torch does not bring."""

UNUSED = (
    *("*/tests/*", "*/__pycache__/*", "bin/*", "*.pyi", "*.pyx", "*.pxd", "*.pxi", "*.h", "*.hpp", "*.cc", "*.a"),
    # pyarrow: all kinds of storage but files, and services; Parquet needs none of them.
    *("pyarrow/libarrow_flight*", "pyarrow/libarrow_s3*", "pyarrow/libarrow_python_flight*"),
    *("pyarrow/_flight*", "pyarrow/_s3fs*", "pyarrow/_gcsfs*", "pyarrow/_azurefs*", "pyarrow/_hdfs*"),
    *("pyarrow/libarrow_python.so", "pyarrow/libarrow_python.so.*.*.*", "pyarrow/_pyarrow_cpp_tests*"),
    *("pyarrow/include/*", "pyarrow/src/*"),
    "tensorboard/webfiles.zip",
    *("PIL/_avif*", "pillow.libs/libavif*"),
    # torchvision's compiled operators fit one version of torch alone; open_clip's transforms call none of them.
    *("torchvision/*.so", "torchvision/*.so.*", "torchvision.libs/*"),
)
"""Patterns of files that no piece opens."""
EMPTIED = ("torchvision/_meta_registrations.py",)
"""Files that only register what was left out."""


def write_kit(
    out: Path,
    *,
    sources: Path,
    site: Path,
    drawings: Path,
    limit_bytes: int = LIMIT_BYTES - RESULTS_BYTES,
    preset: int = 6,
) -> dict[str, int]:
    """Write piece.py and three archives into the new folder `out`; returns the bytes of each file.

    Args:
        sources: the repository.
        site: packages as pip installs them; see `install`.
        drawings: packages of emoji as `preprocessing.emoji` reads them.
        limit_bytes: ValueError above it, which names what is largest; then nothing is left.
        preset: of xz, 0..9; higher is smaller and slower.
    """
    if out.exists():
        raise ValueError(f"{out} is there already; remove it, or name another folder")
    out.mkdir(parents=True)
    try:
        archive(out / "source.tar.xz", sources, room_files(sources), preset)
        archive(out / "packages.tar.xz", site, (path for path in files_of(site) if is_used(path)), preset)
        archive(out / "drawings.tar.xz", drawings, files_of(drawings), preset)
        shutil.copyfile(Path(__file__).with_name("piece.py"), out / "piece.py")
        sizes = {path.name: path.stat().st_size for path in sorted(out.iterdir())}
        refuse_large(sizes, limit_bytes)
    except BaseException:
        shutil.rmtree(out)
        raise
    return sizes


def refuse_large(sizes: dict[str, int], limit_bytes: int) -> None:
    """ValueError where files of these sizes are more than `limit_bytes` together."""
    if (total := sum(sizes.values())) > limit_bytes:
        largest = sorted(sizes.items(), key=lambda item: -item[1])[:3]
        listed = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in largest)
        raise ValueError(f"the kit has {total / 1e6:.1f} MB, more than {limit_bytes / 1e6:.1f}; the largest: {listed}")


def install(site: Path, constraints: Path, run: Callable[..., object] = subprocess.run) -> None:
    """The lent machine's packages into the folder `site`, at the pins of `constraints`; ValueError where pip fails."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    options = ["--target", str(site), "--no-deps", "--only-binary", ":all:", "--python-version", PYTHON, "--quiet"]
    command = [sys.executable, "-m", "pip", "install", *options, *platforms, "-c", str(constraints), *PACKAGES]
    try:
        run(command, check=True)
    except subprocess.CalledProcessError as error:
        raise ValueError(f"pip ends with code {error.returncode}; what it says stands above") from None


def is_used(name: str) -> bool:
    """Whether a file of the packages travels."""
    return not any(fnmatch.fnmatchcase(name, pattern) for pattern in UNUSED)


def files_of(folder: Path) -> list[str]:
    """All files below a folder, by their names from there, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def room_files(root: Path) -> list[str]:
    """Sources and recipes of the rooms that the pieces run."""
    found = [path for room in ROOMS for path in (root / room).rglob("*") if path.suffix in (".py", ".toml", ".json")]
    return sorted(path.relative_to(root).as_posix() for path in found)


def archive(path: Path, folder: Path, names: Iterable[str], preset: int) -> None:
    """The files `names` of `folder` as a tar with xz, without dates and owners.

    Most bytes are machine code, which the filter for x86 makes a fifth smaller; text does not suffer from it.
    """

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = ""
        return entry

    with (
        tempfile.NamedTemporaryFile() as empty,
        lzma.open(path, "wb", filters=[{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": preset}]) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for name in names:
            tar.add(empty.name if name in EMPTIED else folder / name, arcname=name, recursive=False, filter=plain)
