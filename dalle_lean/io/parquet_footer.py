"""The end of a Parquet file, looked at before Arrow takes the memory that it asks for."""

import io
from typing import Any

MAGIC = b"PAR1"
READ_BYTES = 2**16
MOST_FOOTER_BYTES = 2**26


def check_footer(file: Any) -> None:
    """ValueError unless a binary file, open for reading, ends as Parquet does, with a footer of a size that can be.

    Source: the format's description, https://parquet.apache.org/docs/file-format: the footer, 4 bytes with its length,
    the magic number.
    """
    size = file.seek(0, io.SEEK_END)
    # As much as Arrow reads first: a server that gives no parts of files gives small ones whole.
    file.seek(max(0, size - READ_BYTES))
    end = file.read(READ_BYTES)[-8:]
    file.seek(0)
    footer_bytes = int.from_bytes(end[:4], "little")
    if end[4:] != MAGIC:
        raise ValueError("it does not end as a Parquet file does")
    if footer_bytes > min(size - 12, MOST_FOOTER_BYTES):
        raise ValueError(f"its footer cannot have {footer_bytes:,} bytes")
