"""`python tests/s3_server.py LOG HOLD`: moto's S3 on a free port of loopback, which is the first line of LOG.

Each write is a line of LOG before it happens. While the file HOLD is there, writes of shards after the second one wait.
"""

import sys
import time
from pathlib import Path

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

log, hold = Path(sys.argv[1]), Path(sys.argv[2])
moto = DomainDispatcherApplication(create_backend_app)
shards = 0


def app(environ, start_response):
    global shards
    if environ["REQUEST_METHOD"] in ("PUT", "DELETE", "POST"):
        with log.open("a") as file:
            print(environ["REQUEST_METHOD"], environ["PATH_INFO"], file=file)
        shards += environ["PATH_INFO"].endswith(".parquet")
        while hold.exists() and shards > 2:
            time.sleep(0.05)
    return moto(environ, start_response)


server = make_server("127.0.0.1", 0, app, threaded=True)
log.write_text(f"{server.port}\n")
server.serve_forever()
