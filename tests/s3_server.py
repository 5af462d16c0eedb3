"""`python tests/s3_server.py LOG HOLD DOWN`: moto's S3 on a free port of loopback, which is the first line of LOG.

Each write is a line of LOG before it happens. While HOLD is there, writes to keys that end with its content wait. While
DOWN is there, no request is served.
"""

import sys
import time
from pathlib import Path

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

log, hold, down = map(Path, sys.argv[1:])
moto = DomainDispatcherApplication(create_backend_app)


def is_held(key):
    try:
        return key.endswith(hold.read_text())
    except FileNotFoundError:
        return False


def app(environ, start_response):
    if down.exists():
        start_response("503 Service Unavailable", [])
        return [b""]
    if environ["REQUEST_METHOD"] in ("PUT", "DELETE", "POST"):
        with log.open("a") as file:
            print(environ["REQUEST_METHOD"], environ["PATH_INFO"], file=file)
        while is_held(environ["PATH_INFO"]):
            time.sleep(0.05)
    return moto(environ, start_response)


server = make_server("127.0.0.1", 0, app, threaded=True)
log.write_text(f"{server.port}\n")
server.serve_forever()
