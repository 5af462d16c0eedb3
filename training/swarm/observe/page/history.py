"""The history of a run, in a file of bounded size."""

import statistics
import time
from pathlib import Path

from dalle_lean.io.files import read_json, write_json
from training.swarm.observe.overview import Overview

MOST_POINTS = 1024
COLUMNS = ("time", "step", "loss", "heldout_loss", "peers", "samples_per_s")
"""Columns of a point: `time` in seconds since 1970; unknown values are None."""

Point = list[float | None]


class History:
    """Points of the run in the file `path`, each the median of `looks` observations.

    At MOST_POINTS, neighbouring points are merged and `looks` doubles, so the points cover the whole run evenly.
    """

    def __init__(self, path: Path):
        self.path = path
        saved = read_json(path) if path.exists() else {"run_id": None, "looks": 1, "points": []}
        self.run_id: str | None = saved["run_id"]
        self.looks: int = saved["looks"]
        self.points: list[Point] = saved["points"]
        self.host_step = int(saved.get("host_step", (self.points or [[0, 0]])[-1][1] or 0))
        """The latest step that the run's donors were seen at."""
        self.open: list[Point] = []  # observations of the next point

    def add(self, overview: Overview, run_id: str, now: float | None = None) -> None:
        """Add an observation. Another run id means a rollback, which removes the points after its step."""
        if run_id != self.run_id:
            self.points, self.open, self.run_id = [p for p in self.points if (p[1] or 0) < overview.step], [], run_id
            self.host_step = 0
        if overview.host_step is not None:
            self.host_step = overview.host_step
        seen = {**vars(overview), "time": time.time() if now is None else now}
        self.open.append([seen[name] for name in COLUMNS])
        if len(self.open) >= self.looks:
            self.points.append(median_point(self.open))
            self.open = []
        if len(self.points) >= MOST_POINTS:
            self.points = [median_point(self.points[i : i + 2]) for i in range(0, len(self.points), 2)]
            self.looks *= 2

    def save(self) -> None:
        saved = {"run_id": self.run_id, "looks": self.looks, "points": self.points, "host_step": self.host_step}
        write_json(self.path, saved)

    def columns(self) -> dict[str, list[float | None]]:
        """The points and the latest observation, by column name."""
        points = [*self.points, *self.open[-1:]]
        return {name: [point[place] for point in points] for place, name in enumerate(COLUMNS)}


def median_point(points: list[Point]) -> Point:
    """The median of each column's known values."""
    known = ([value for value in column if value is not None] for column in zip(*points, strict=True))
    return [statistics.median_low(column) if column else None for column in known]
