"""A study's folder, while it grows → a page in a browser of this machine: how far it is, curves, the report so far.

The page is the report's own, with a section on top. It is made again when something in the folder has changed and
somebody looks, and never takes more than a twentieth of the time. It loads nothing from elsewhere.
"""

import threading
import time
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from biphase.console import duration, err
from biphase.errors import InputError
from biphase.report.figures import Picture, save_figure, share_out_curves
from biphase.report.page import inline_pictures
from biphase.study.folder import StudyFolder, read_state
from biphase.study.plan import Plan
from biphase.study.report import read_losses, report_study
from biphase.study.run import status

PORT = 8765
"""Where the page is, if nobody else is there; else at any port that is free."""


class LivePage:
    """The page as it was last made, in a folder with all that it links to."""

    def __init__(self, plan: Plan, place: StudyFolder, folder: Path) -> None:
        self.plan, self.place, self.folder = plan, place, folder
        self.lock = threading.Lock()
        self.stamps: list[tuple[str, int, int]] = []
        self.version = 0
        self.rests_until = 0.0

    def refresh(self) -> None:
        """Make the page again if the study's folder has changed since."""
        with self.lock:
            stamps = stamp_study(self.place)
            if (stamps == self.stamps and self.version) or time.monotonic() < self.rests_until:
                return
            started = time.monotonic()
            html = self.render(str(self.version + 1))
            self.folder.mkdir(exist_ok=True)
            (self.folder / "live.html").write_text(html, encoding="utf-8")
            self.stamps, self.version = stamps, self.version + 1
            self.rests_until = time.monotonic() + 20 * (time.monotonic() - started)

    def render(self, version: str) -> str:
        study = self.plan.study
        state = read_state(self.plan, self.place)
        progress = status(self.plan, self.place, state)
        section = self.fill("watch_status", **progress, duration=duration, version=version)
        try:
            page, _ = report_study(self.plan, self.place, self.folder / "report", ())
            html = page.read_text(encoding="utf-8")
        except InputError as error:
            html = self.fill(
                "watch",
                title=study.title or f"The study {study.name}",
                question=study.question,
                css=Markup((resources.files("biphase.report") / "page.css").read_text("utf-8")),
                reason=error,
                **self.draw_curves(read_losses(self.plan, self.place, state)),
            )
        html = html.replace("script-src 'unsafe-inline'", "script-src 'unsafe-inline'; connect-src 'self'", 1)
        return html.replace("<main>", f"<main>{section}", 1)

    def fill(self, name: str, **parts: object) -> str:
        template = (resources.files("biphase.study") / f"{name}.html.j2").read_text("utf-8")
        return Environment(autoescape=True, trim_blocks=True).from_string(template).render(**parts)

    def draw_curves(self, losses: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
        curves = list(share_out_curves(losses))
        files = [save_figure(Picture("losses", curves), self.folder / "figures")] if curves else []
        return inline_pictures(files, None)


def stamp_study(place: StudyFolder) -> list[tuple[str, int, int]]:
    """What changes when a run logs, a unit is done or fails: size and time of files, times of the folders of cells."""
    paths = [*place.path.glob("*"), *place.path.glob("*/*"), *place.runs.glob("*/metrics.jsonl")]
    found = []
    for path in sorted(paths):
        try:
            stat = path.stat()
        except FileNotFoundError:  # it is just being replaced
            continue
        found.append((str(path), stat.st_mtime_ns, stat.st_size))
    return found


class Handler(SimpleHTTPRequestHandler):
    """The page at `/`, its number at `/version`, and the report's files."""

    def __init__(self, page: LivePage, *arguments: object) -> None:
        self.page = page
        super().__init__(*arguments, directory=str(page.folder / "report"))  # type: ignore[arg-type]

    def do_GET(self) -> None:
        if self.headers.get("Host", "").partition(":")[0] not in ("127.0.0.1", "localhost"):
            self.send_error(403)  # a page elsewhere has given our address a name of its own
            return
        if self.path not in ("/", "/version"):
            super().do_GET()
            return
        try:
            self.page.refresh()
        except (InputError, OSError) as error:
            self.send_error(503, "no page at this moment", f"{error}; try again")
            return
        is_page = self.path == "/"
        content = (self.page.folder / "live.html").read_bytes() if is_page else str(self.page.version).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8" if is_page else "text/plain")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        with suppress(ConnectionError):  # nobody waits any more
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def watch_study(plan: Plan, place: StudyFolder) -> None:
    """Serve the page to this machine alone, until Ctrl-C. Writes nothing into the study's folder.

    Raises `InputError` where there is no such folder.
    """
    if not place.path.is_dir():
        raise InputError(f"{place.path} is not there; start the study, or name its folder")
    with TemporaryDirectory() as folder:
        page = LivePage(plan, place, Path(folder) / "page")
        handler = partial(Handler, page)
        try:
            server = ThreadingHTTPServer(("127.0.0.1", PORT), handler)
        except OSError:
            server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        with server:
            err.print(f"http://127.0.0.1:{server.server_address[1]}/ (Ctrl-C ends it)")
            with suppress(KeyboardInterrupt):
                server.serve_forever()
