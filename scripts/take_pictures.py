"""Take the picture of README.md from a finished demo: the top of its page in Chromium.

biphase demo && python scripts/take_pictures.py biphase-demo
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

TARGET = Path(__file__).resolve().parents[1] / "docs" / "pictures"
SIZE = "1100,1050"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main(demo: Path) -> None:
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"a page is drawn by one of {', '.join(BROWSERS)}: none is here")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.png"
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={SIZE}")
        address = (demo / "report" / "index.html").resolve().as_uri()
        command = [browser, *options, f"--user-data-dir={folder}/profile", f"--screenshot={page}", address]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        picture = Image.open(page).convert("RGB")
        # Few colours take a fraction of the bytes; this method keeps the rare ones, such as a dot of a legend.
        picture.quantize(128, method=Image.Quantize.MAXCOVERAGE).save(TARGET / page.name, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "biphase-demo"))
