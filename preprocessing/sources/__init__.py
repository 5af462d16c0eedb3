"""Where pictures with captions come from: one file for each kind of source."""

from preprocessing.sources.choose import open_source
from preprocessing.sources.sample import Sample, Source

__all__ = ["Sample", "Source", "open_source"]
