"""One piece of the training on a lent machine: `OUT=folder python3.12 piece.py vqgan|decoder|clip`.

Runs beside the kit's archives with nothing but Python and torch. What comes back lies in $OUT as PIECE.tar.00, ...; the
next piece finds it in the kit's folder results/. Each piece draws the pictures anew, so neither shards nor the states
of optimizers travel.

How many steps fit is measured first, by a trial on a few pictures. For tests, environment variables replace what they
name: KIT_STEPS the trial, KIT_DATA the drawing by a folder with train and heldout, KIT_DEVICE, KIT_WORK;
KIT_OPTIONS are added to the command that trains.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

KIT = Path(__file__).resolve().parent
PART_BYTES = 15_000_000
MAX_PARTS = 8

MINUTES = {"vqgan": 4.0, "decoder": 4.5, "clip": 2.5}
"""Of training proper, in each piece; what comes before it takes about two more."""
CUT_MINUTES = 8.5
"""After the piece's beginning; a training that is not finished then stops where it is."""
TRIAL_PICTURES = 2048
TRIAL_MINUTES = 0.75

VQGAN = ["--picture-side", "128", "--batch-size", "64", "--save-dtype", "bfloat16", "--precision", "bf16"]
CLIP = ["--batch-size", "512", "--save-dtype", "bfloat16", "--precision", "bf16"]
BATCH = {"vqgan": 64, "decoder": 256, "clip": 512}
TRIAL_STEPS = {"vqgan": 200, "decoder": 200, "clip": 100}


def preparing(data: Path, run: Path) -> list[list[str]]:
    """The commands before the decoder's training."""
    return [
        ["preprocess", f"{data / part}", f"{run / 'shards' / part}", "--vqgan", f"{run / 'vqgan'}"]
        for part in ("train", "heldout")
    ]


def training(piece: str, data: Path, run: Path, out: Path, steps: int, trial: bool = False) -> list[str]:
    """The command that trains, into the folder `out`; a trial's learns from few pictures what a step takes."""
    sizes = ["--steps", str(steps)]
    if piece == "vqgan":
        # All steps of a trial have the discriminator, so that it tells rather too long a time.
        start = ["--discriminator-start", "0" if trial else "0.75"]
        return [
            "train-vqgan",
            f"{data / 'train'}",
            f"{out}",
            "--heldout",
            f"{data / 'heldout'}",
            *VQGAN,
            *start,
            *sizes,
        ]
    vqgan = ["--vqgan", f"{run / 'vqgan'}"]
    if piece == "decoder":
        shards = run / "shards"
        kept = ["--heldout", f"{shards / 'heldout'}", "--config", "emoji128-gpu"]
        return ["train", f"{shards / 'train'}", f"{out}", *kept, *vqgan, *sizes]
    return ["train-clip", f"{data / 'train'}", f"{out}", "--heldout", f"{data / 'heldout'}", *vqgan, *CLIP, *sizes]


def finishing(piece: str, run: Path) -> list[list[str]]:
    """The commands after the training: what comes back is in bfloat16."""
    if piece == "decoder":
        return [["pack", f"{run / 'decoder' / 'model'}", f"{run / 'decoder' / 'small'}", "--dtype", "bfloat16"]]
    return []


def coming_back(piece: str, folder: Path) -> dict[str, Path]:
    """What of a run's folder comes back, by its name in the archive."""
    parts = {
        "vqgan": {
            "config.json": "config.json",
            "model.safetensors": "model.safetensors",
            "pictures": "reconstructions",
        },
        "decoder": {"model": "small", "pictures": "samples"},
        "clip": {"clip": "clip"},
    }[piece]
    found = {name: folder / place for name, place in parts.items()}
    pictures = found.pop("pictures", None)
    if pictures is not None and (sheets := sorted(pictures.glob("*.png"), key=lambda path: path.stat().st_mtime)):
        found["last.png"] = sheets[-1]
    return {f"{piece}/{name}": path for name, path in {**found, "metrics.jsonl": folder / "metrics.jsonl"}.items()}


def fitting_steps(metrics: Path, batch_size: int, minutes: float) -> int:
    """Steps for so many minutes at the pace of a trial: that of its last line, when all is warm; at least one."""
    rates = []
    for line in metrics.read_text(encoding="utf-8").splitlines():
        numbers = json.loads(line)
        rates += [numbers[name] for name in ("pictures_per_s", "samples_per_s") if name in numbers]
    if not rates:
        raise ValueError(f"{metrics} tells no pace; the trial was too short for this machine")
    return max(1, round(60 * minutes * rates[-1] / batch_size))


def write_parts(archive: Path, out: Path, part_bytes: int = PART_BYTES) -> list[Path]:
    """Cut a file into NAME.00, NAME.01, ... in `out`; ValueError where they are more than may come back."""
    size = archive.stat().st_size
    if (count := -(-size // part_bytes)) > MAX_PARTS:
        raise ValueError(f"{archive.name} has {size / 1e6:.0f} MB, more than {MAX_PARTS * part_bytes / 1e6:.0f}")
    parts = []
    with archive.open("rb") as file:
        for number in range(count):
            parts.append(out / f"{archive.name}.{number:02d}")
            parts[-1].write_bytes(file.read(part_bytes))
    return parts


def join_parts(folder: Path, run: Path) -> None:
    """Unpack what earlier pieces left in `folder` as archives in parts."""
    for first in sorted(folder.glob("*.tar.00")):
        whole = run / first.stem
        with whole.open("wb") as file:
            for part in sorted(folder.glob(f"{first.stem}.*")):
                file.write(part.read_bytes())
        with tarfile.open(whole) as tar:
            tar.extractall(run, filter="data")


class Machine:
    """The kit unpacked, and commands of the program in it."""

    def __init__(self, work: Path):
        self.started_s = time.monotonic()
        self.work, self.run = work, work / "run"
        self.device = os.environ.get("KIT_DEVICE", "auto")
        self.run.mkdir(parents=True, exist_ok=True)
        for name in ("source", "packages", "drawings"):
            with tarfile.open(KIT / f"{name}.tar.xz") as tar:
                tar.extractall(work / name, filter="data")
        join_parts(KIT / "results", self.run)
        self.tell("unpacked")

    def tell(self, line: str) -> None:
        """A line with the seconds since the beginning."""
        print(f"[{time.monotonic() - self.started_s:4.0f} s] {line}", flush=True)

    def minutes_left(self) -> float:
        """Until a training must stop."""
        return CUT_MINUTES - (time.monotonic() - self.started_s) / 60

    def python(self, *arguments: str) -> None:
        """Run Python with the kit's packages and sources; CalledProcessError where it fails."""
        path = os.pathsep.join(str(self.work / name) for name in ("source", "packages"))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONNOUSERSITE": "1"}
        subprocess.run([sys.executable, *arguments], env=environment, check=True)

    def program(self, command: list[str]) -> None:
        """Run a command of `dalle-lean`."""
        self.tell(" ".join(command))
        if command[0].startswith("train"):
            command = [*command, *os.environ.get("KIT_OPTIONS", "").split()]
        if command[0] != "pack":
            command = [*command, "--device", self.device]
        self.python("-c", "from dalle_lean.cli import main; main()", *command)

    def data(self) -> Path:
        """The folder of pictures, drawn here."""
        if "KIT_DATA" in os.environ:
            return Path(os.environ["KIT_DATA"])
        data = self.work / "data"
        self.python("-m", "preprocessing.emoji", str(data), "--packages", str(self.work / "drawings"))
        self.tell("drawn")
        return data

    def few(self, data: Path) -> Path:
        """The first pictures of `data`, for a trial."""
        few = self.work / "few"
        for part in ("train", "heldout"):
            lines = (data / part / "metadata.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
            for line in lines[:TRIAL_PICTURES]:
                picture = few / part / json.loads(line)["file_name"]
                picture.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(data / part / json.loads(line)["file_name"], picture)
            (few / part / "metadata.jsonl").write_text("".join(lines[:TRIAL_PICTURES]), encoding="utf-8")
        return few

    def steps(self, piece: str, data: Path) -> int:
        """How many fit into the piece's minutes."""
        if "KIT_STEPS" in os.environ:
            return int(os.environ["KIT_STEPS"])
        trial = self.work / "trial"
        command = training(piece, self.few(data), self.run, trial, TRIAL_STEPS[piece], trial=True)
        self.program([*command, "--max-minutes", str(TRIAL_MINUTES)])
        return fitting_steps(trial / "metrics.jsonl", BATCH[piece], MINUTES[piece])


def main() -> None:
    """Train one piece and leave what comes back in $OUT."""
    if sys.argv[1:2] not in ([name] for name in MINUTES) or "OUT" not in os.environ:
        sys.exit(f"usage: OUT=FOLDER python3.12 piece.py {'|'.join(MINUTES)}")
    if sys.version_info[:2] != (3, 12):
        sys.exit(f"the kit's packages are for Python 3.12, and this is {sys.version.split()[0]}")
    piece, out = sys.argv[1], Path(os.environ["OUT"])
    out.mkdir(parents=True, exist_ok=True)
    if piece != "vqgan" and not (KIT / "results" / "vqgan.tar.00").exists():
        sys.exit(f"{KIT / 'results'} has no vqgan.tar.00: run the piece vqgan first, and put there what came back")
    machine = Machine(Path(os.environ.get("KIT_WORK", KIT / "work")))
    data = machine.data()
    if piece == "decoder":
        for command in preparing(data, machine.run):
            machine.program(command)
    steps = machine.steps(piece, data)
    folder = machine.run / piece
    command = training(piece, data, machine.run, folder, steps)
    machine.program([*command, "--max-minutes", f"{machine.minutes_left():.2f}"])
    for command in finishing(piece, machine.run):
        machine.program(command)
    archive = machine.work / f"{piece}.tar"
    with tarfile.open(archive, "w") as tar:
        for name, path in coming_back(piece, folder).items():
            tar.add(path, arcname=name)
    for part in write_parts(archive, out):
        machine.tell(f"{part}: {part.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
