"""Files from elsewhere, fetched in as many attempts as it takes."""

import http.server
import threading

import pytest

from benchmarks import download


class _Server(http.server.BaseHTTPRequestHandler):
    """Serves one file, whole or from a byte on; cuts the first answer short."""

    content = bytes(range(256)) * 2_000
    answers: list[int] = []

    def do_GET(self):
        start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        self.answers.append(start)
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(self.content) - start))
        self.end_headers()
        end = len(self.content) // 2 if len(self.answers) == 1 else None
        self.wfile.write(self.content[start:end])

    def log_message(self, *args):
        pass


def test_a_download_that_was_cut_off_goes_on_where_it_ended(tmp_path):
    with http.server.HTTPServer(("127.0.0.1", 0), _Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url, path = f"http://127.0.0.1:{server.server_port}/file", tmp_path / "file"
        with pytest.raises(ConnectionError, match="goes on where it ended"):
            download.fetch(url, path)
        assert not path.exists()
        download.fetch(url, path)
        whole = path.rename(tmp_path / "file.part")  # cut off before it got its name
        download.fetch(url, path)
        server.shutdown()
        thread.join()
    assert path.read_bytes() == _Server.content and not whole.exists()
    assert _Server.answers == [
        0,
        len(_Server.content) // 2 - 1,
        len(_Server.content) - 1,
    ]


def test_without_a_network_the_message_says_what_to_do(tmp_path):
    with pytest.raises(ConnectionError, match="put the file at"):
        download.fetch("http://127.0.0.1:1/file", tmp_path / "file")
