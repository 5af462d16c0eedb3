"""Statistics of a folder of shards: code usage, caption lengths, and a random sample of rows."""

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dalle_lean.images.vqgan import codebook_use
from dalle_lean.progress import OnProgress, unwatched
from dalle_lean.words import counted
from preprocessing.shards.files import Rows, join, read_blocks
from preprocessing.shards.manifest import DatasetInfo, read_dataset_info


@dataclass
class ShardStatistics:
    """Statistics over all rows of a folder."""

    info: DatasetInfo
    code_counts: NDArray[np.int64]  # [K]: how often each code is used
    caption_lengths: Counter[int] = field(default_factory=Counter)  # in characters
    sample: Rows = field(default_factory=Rows.none)  # rows drawn at random
    file_bytes: int = 0  # of all shards together

    def caption_length(self, share: float) -> int:
        """The length in characters that this share of the captions, 0..1, does not exceed."""
        wanted, seen, length = math.ceil(share * self.caption_lengths.total()), 0, 0
        for length in sorted(self.caption_lengths):
            seen += self.caption_lengths[length]
            if seen >= wanted:
                break
        return length

    def shown(self) -> str:
        """How many pictures the sample has, of how many: "32 of 37 pictures, drawn at random". A crop or a mirror image
        is one."""
        sample, rows = len(self.sample), self.info.num_rows
        pictures = counted(rows, "picture")
        return f"{sample:,} of {pictures}, drawn at random" if sample < rows else pictures

    def facts(self) -> list[tuple[str, str]]:
        """Name and value of each statistic, for people."""
        counts, use = self.info.counts, codebook_use(torch.from_numpy(self.code_counts))
        kept, seen = counts.kept, max(counts.seen, 1)
        lengths = [self.caption_length(share) for share in (0, 0.1, 0.5, 0.9, 1)]
        return [
            ("pictures kept", f"{kept:,} of {counts.seen:,} ({kept / seen:.1%})"),
            *([("further views", f"{counts.further_views:,}")] if counts.further_views else []),
            *((f"rejected: {reason}", f"{count:,} ({count / seen:.1%})") for reason, count in counts.rejected.items()),
            ("shards", f"{len(self.info.shards):,}, {self.file_bytes / self.info.num_rows:.1f} bytes a picture"),
            ("codes a picture", f"{self.info.image_side} x {self.info.image_side} of {self.info.codebook_size:,}"),
            ("codebook used", f"{use.share:.1%}, perplexity {use.perplexity:,.1f}"),
            ("caption lengths", "shortest {}, 10 % {}, half {}, 90 % {}, longest {} characters".format(*lengths)),
        ]


def collect_statistics(
    folder: str | Path, *, count: int, seed: int, on_progress: OnProgress = unwatched
) -> ShardStatistics:
    """Read every row of a folder of shards, and keep a random sample of `count` rows, drawn with `seed`. Progress
    counts rows. Raises UserError for a damaged shard."""
    folder = Path(folder)
    info = read_dataset_info(folder)
    statistics = ShardStatistics(info, np.zeros(info.codebook_size, np.int64))
    drawn = np.random.default_rng(seed).choice(info.num_rows, min(count, info.num_rows), replace=False, shuffle=False)
    drawn.sort()
    parts, done = [Rows.none()], 0
    for shard in info.shards:
        statistics.file_bytes += (folder / shard.file).stat().st_size
        for rows in read_blocks(folder / shard.file, info.num_codes, info.codebook_size):
            statistics.code_counts += np.bincount(rows.codes.ravel(), minlength=info.codebook_size)
            statistics.caption_lengths.update(map(len, rows.captions))
            start, end = drawn.searchsorted((done, done + len(rows)))
            if start < end:
                parts.append(rows.take(drawn[start:end] - done))
            done += len(rows)
            on_progress(done, info.num_rows, shard.file)
    statistics.sample = join(parts)
    return statistics
