"""A hub with one small model, small/model, on a port of this machine, for examples/quickstart.sh: hub.py FOLDER PORT_FILE

The few endpoints that `nvfp4 pull` asks: the list of files, and ranges of each file. The port is written to PORT_FILE."""

import http.server
import json
import pathlib
import re
import sys

COMMIT = "0123456789abcdef0123456789abcdef01234567"
folder, port_file = map(pathlib.Path, sys.argv[1:])


class Hub(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status, body, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path.startswith("/api/models/small/model"):
            names = [{"rfilename": path.name} for path in folder.iterdir()]
            return self.answer(200, json.dumps({"siblings": names, "sha": COMMIT}).encode())
        asked = re.fullmatch(f"/small/model/resolve/{COMMIT}/([\\w.]+)", self.path)
        if not asked or not (folder / asked[1]).is_file():
            return self.answer(404, b"")
        content = (folder / asked[1]).read_bytes()
        first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"]).groups()
        first, last = int(first), min(int(last or len(content)), len(content) - 1)
        self.answer(
            206,
            content[first : last + 1],
            ETag=f'"{asked[1]}"',
            X_Repo_Commit=COMMIT,
            Content_Range=f"bytes {first}-{last}/{len(content)}",
        )

    def log_message(self, *_):
        pass


with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
    port_file.write_text(str(server.server_port))
    server.serve_forever()
