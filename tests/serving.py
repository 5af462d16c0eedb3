"""HTTP servers that answer while a test runs."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer

POLL_S = 0.01  # a server looks so often whether it is to end


@contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[str]:
    """The address of a server, which ends with the block."""
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
