"""A download that goes on where it was cut off."""

import pathlib
import urllib.error
import urllib.request

import rich.progress

_CHUNK = 1 << 16


def fetch(url: str, path: pathlib.Path) -> None:
    """Downloads a file, or the rest of it.

    Raises:
      ConnectionError: without a network; what there is by then is kept.
    """
    part = path.with_name(path.name + ".part")
    # The last byte again: a server refuses what begins after the end of a whole part.
    start = max(part.stat().st_size - 1, 0) if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            # A server that knows no ranges sends all of it.
            start = start if response.status == 206 else 0
            left = response.headers.get("Content-Length")
            total = None if left is None else start + int(left)
            with (
                rich.progress.Progress() as progress,
                part.open("r+b" if start else "wb") as file,
            ):
                file.seek(start)
                task = progress.add_task(path.name, total=total, completed=start)
                while chunk := response.read(_CHUNK):
                    file.write(chunk)
                    progress.advance(task, len(chunk))
        if total is not None and part.stat().st_size < total:
            raise OSError(f"cut off after {part.stat().st_size:,} of {total:,} bytes")
    except (OSError, urllib.error.URLError) as error:
        raise ConnectionError(
            f"Could not fetch {url}: {error}. With a network, run this again: it goes"
            f" on where it ended. Without one, put the file at {path} yourself."
        ) from error
    part.rename(path)
