"""Checks a Parquet footer before Arrow allocates the memory that it asks for."""

import io
from typing import Any

MAGIC = b"PAR1"
READ_BYTES = 2**16
MOST_FOOTER_BYTES = 2**26


def check_footer(file: Any) -> None:
    """ValueError unless a binary file, open for reading, ends like Parquet, with a footer of a possible size.

    Source: https://parquet.apache.org/docs/file-format. A file ends with the footer, 4 bytes with its length, and the
    magic number.
    """
    size = file.seek(0, io.SEEK_END)
    # As much as Arrow reads first, so that servers without byte ranges can still serve small files whole.
    file.seek(max(0, size - READ_BYTES))
    end = file.read(READ_BYTES)[-8:]
    file.seek(0)
    footer_bytes = int.from_bytes(end[:4], "little")
    if end[4:] != MAGIC:
        raise ValueError("it does not end as a Parquet file does")
    if footer_bytes > min(size - 12, MOST_FOOTER_BYTES):
        raise ValueError(f"its footer cannot have {footer_bytes:,} bytes")
