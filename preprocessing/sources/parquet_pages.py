"""The lengths that a Parquet column's pages claim, checked before they are believed.

A reader allocates what a page says it holds, up to 2 GiB; one damaged or hostile number must not fill the memory. Pages
and their headers: https://github.com/apache/parquet-format, in Thrift's compact protocol.
"""

from preprocessing.sources.files import File, is_remote

MAX_HEADER_BYTES = 2**14
ALWAYS_ALLOWED_BYTES = 2**26
"""So much a page may claim whatever the footer says of its column."""
TRUE, FALSE, BYTE, DOUBLE, BINARY, STRUCT = 1, 2, 3, 7, 8, 12
VARINTS = (4, 5, 6)
MAX_DEPTH = 8
DICTIONARY_PAGE = 2


def check_pages(file: File, start: int, stop: int, column_bytes: int) -> int:
    """Walk through a column's pages from byte `start` to `stop`; ValueError for one that claims too much.

    Returns the uncompressed bytes of the dictionary page, 0 where there is none: no value of the column's is longer
    than that, but each of its rows may be as long.
    `column_bytes` is what the footer says that all pages hold together, uncompressed. Of a remote file only the first
    page is looked at: what lies between headers would be transferred for nothing.
    """
    limit = max(column_bytes, ALWAYS_ALLOWED_BYTES)
    dictionary_bytes = 0
    while start < stop:
        file.seek(start)
        header = PageHeader(file.read(min(MAX_HEADER_BYTES, stop - start)))
        end = start + header.bytes + header.compressed_bytes
        if not 0 <= header.uncompressed_bytes <= limit or not start < end <= stop:
            raise ValueError(f"a page of {header.uncompressed_bytes} bytes in a column of {column_bytes}")
        if header.is_dictionary:
            dictionary_bytes = max(dictionary_bytes, header.uncompressed_bytes)
        if is_remote(file.path):
            break
        start = end
    return dictionary_bytes


class PageHeader:
    """Fields 1 to 3 of a page's header and the header's own length in bytes; ValueError where it is damaged."""

    def __init__(self, content: bytes):
        self.content = content
        self.bytes = 0
        numbers: dict[int, int] = {}
        field = 0
        while kind := self.byte():
            field = field + (kind >> 4) if kind >> 4 else self.integer()
            if kind & 15 in VARINTS:
                numbers[field] = self.integer()
            else:
                self.skip(kind & 15, 1)
        if not {1, 2, 3} <= numbers.keys():
            raise ValueError("a page's header without its kind or lengths")
        self.is_dictionary = numbers[1] == DICTIONARY_PAGE
        self.uncompressed_bytes, self.compressed_bytes = numbers[2], numbers[3]

    def byte(self) -> int:
        if self.bytes >= len(self.content):
            raise ValueError("a page's header without an end")
        self.bytes += 1
        return self.content[self.bytes - 1]

    def varint(self) -> int:
        value, shift = 0, 0
        while shift < 64:
            byte = self.byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
        raise ValueError("a page's header with an endless number")

    def integer(self) -> int:
        value = self.varint()
        return value >> 1 ^ -(value & 1)

    def skip(self, kind: int, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise ValueError("a page's header too deep")
        if kind in (TRUE, FALSE):
            return
        if kind in VARINTS:
            self.varint()
        elif kind == BYTE:
            self.bytes += 1
        elif kind == DOUBLE:
            self.bytes += 8
        elif kind == BINARY:
            length = self.varint()
            self.bytes += length
        elif kind == STRUCT:
            while inner := self.byte():
                if not inner >> 4:
                    self.integer()
                self.skip(inner & 15, depth + 1)
        else:  # page headers have no lists, sets or maps
            raise ValueError(f"a page's header with a field of kind {kind}")
