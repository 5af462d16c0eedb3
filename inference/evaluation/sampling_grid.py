"""Ways of drawing codes that are tried on the same prompts."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from inference.evaluation.significance import Claim, compare


class Way(NamedTuple):
    """How codes are drawn; the defaults are off."""

    top_k: int = 0
    top_p: float = 1.0
    temperature: float = 1.0
    guidance: float = 1.0

    def __str__(self) -> str:
        kept = [f"{name.replace('_', '-')} {value:g}" for name, value in self._asdict().items() if value not in (0, 1)]
        return ", ".join(kept) or "all codes"


FREE, PAPER = Way(), Way(256, 0.75)
GRID = (FREE, Way(256), Way(0, 0.75), PAPER, Way(256, 0.75, 0.7), Way(64, 0.5))
GUIDED = (PAPER._replace(guidance=2.0), PAPER._replace(guidance=4.0))
GUIDED_TOP_K = Way(256, guidance=2.0)
GRID_PICTURES = 4
"""Of which the best answers, in the grid."""


def ways_to_try(caption_dropout: float | None) -> tuple[Way, ...]:
    """The grid; guidance only where the model learnt without a share of the captions."""
    return (*GRID, *GUIDED, GUIDED_TOP_K) if caption_dropout else GRID


def claims_of_ways(grid: Mapping[Way, Mapping[str, Sequence[bool]]]) -> list[Claim]:
    """That ways of drawing help: against drawing from all codes, guidance against none, and top-p beside guidance."""
    hits = {way: [hit for found in by_name.values() for hit in found] for way, by_name in grid.items()}
    ways = [(FREE, GRID[1]), (FREE, GRID[2]), (FREE, PAPER), *((PAPER, way) for way in GUIDED)]
    ways.append((GUIDED_TOP_K, GUIDED[0]))
    return [compare(f"{way} does better than {base}", hits[way], hits[base]) for base, way in ways if way in hits]
