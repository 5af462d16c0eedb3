"""Makes tests/data/img2dataset with img2dataset 1.47.0, which needs an environment of its own: six of the test's
pictures and an address with none, over HTTP on loopback, as tars and as Parquet.
"""

import http.server
import json
import threading
from functools import partial
from pathlib import Path

import pandas as pd
from img2dataset import download

DATA = Path(__file__).parent

if __name__ == "__main__":
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=DATA / "emoji")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 8177), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    lines = (DATA / "emoji" / "metadata.jsonl").read_text().splitlines()[:6]
    rows = [*map(json.loads, lines), {"file_name": "gone.png", "text": "a missing one"}]
    listed = {
        "url": [f"http://127.0.0.1:8177/{row['file_name']}" for row in rows],
        "text": [row["text"] for row in rows],
        "NSFW": ["UNLIKELY"] * 5 + ["NSFW", "UNLIKELY"],
    }
    pd.DataFrame(listed).to_parquet("list.parquet")
    for output_format in ("webdataset", "parquet"):
        download(
            url_list="list.parquet",
            input_format="parquet",
            url_col="url",
            caption_col="text",
            save_additional_columns=["NSFW"],
            output_folder=str(DATA / "img2dataset" / output_format),
            output_format=output_format,
            image_size=64,
            resize_mode="keep_ratio",
            processes_count=1,
            thread_count=2,
            retries=0,
        )
