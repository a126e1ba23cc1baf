"""Open every page of the built site from disk, in headless Chromium: what is cut off, and does the search find words?

make docs && python scripts/measure_docs.py [FOLDER]

Prints each block of code, table and page that is wider than its place, at 1400 and at 390 pixels, and the pages that
the search finds for WORDS. Ends with code 1 where a command is cut off or a word leads nowhere. FOLDER gets a picture
of each page at both widths.
"""

import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SITE = Path(__file__).resolve().parents[1] / "site"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = (1400, 390)
WORDS = (
    *("confusion matrix", "class imbalance", "class weights", "early stopping", "deploy", "production", "serve"),
    *("ONNX", "quantization", "GGUF", "rerank", "hybrid search", "LaTeX", "BibTeX", "energy", "Slurm", "resume"),
    *("GPU memory", "out of memory"),
)
MEASURE = """<!doctype html><body><script>
(async () => {
  const cut = [];
  for (const width of WIDTHS) for (const page of PAGES) {
    const frame = document.createElement("iframe");
    Object.assign(frame, { width, height: 900, src: page });
    const loaded = new Promise((done) => (frame.onload = done));
    document.body.append(frame);
    await loaded;
    const inside = frame.contentDocument;
    for (const block of inside.querySelectorAll(".md-content pre > code, .md-typeset__scrollwrap, html")) {
      const over = block.scrollWidth - block.clientWidth;
      const kind = block.closest(".highlight")?.className.match(/language-(\\w+)/)?.[1];
      const name = kind ?? (block.tagName === "HTML" ? "page" : "table");
      if (over > 1) cut.push([width, page, name, over, block.innerText.trim().slice(0, 60)]);
    }
    frame.remove();
  }
  document.body.textContent = "CUT" + JSON.stringify(cut) + "END";
})();
</script>"""


def main(folder: Path | None) -> None:
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"pages are opened by one of {', '.join(BROWSERS)}: none is here")
    pages = sorted(path for path in SITE.rglob("*.html") if path.name != "404.html")
    with tempfile.TemporaryDirectory() as scratch:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={scratch}/profile"]
        command += ["--allow-file-access-from-files", "--hide-scrollbars"]
        harness = Path(scratch) / "harness.html"
        addresses = json.dumps([page.as_uri() for page in pages])
        harness.write_text(MEASURE.replace("WIDTHS", str(list(WIDTHS))).replace("PAGES", addresses))
        dump = dump_page([*command, "--window-size=1500,1000"], harness.as_uri())
        cut = json.loads(html.unescape(dump.partition("CUT")[2].partition("END")[0]))
        for width, page, kind, over, text in cut:
            print(f"{width} px: {page.partition('/site/')[2]}: {kind} by {over} px: {text!r}")
        lost = [word for word in WORDS if not find_pages(command, word)]
        if folder:
            take_pictures(command, pages, folder)
    print(f"{len(pages)} pages; words that lead nowhere: {', '.join(lost) or 'none'}")
    sys.exit(bool(lost) or any(kind in ("bash", "python", "yaml", "page") for _, _, kind, _, _ in cut))


def dump_page(command: list[str], address: str) -> str:
    options = [*command, "--virtual-time-budget=60000", "--dump-dom", address]
    return subprocess.run(options, check=True, capture_output=True, timeout=300, text=True).stdout


def find_pages(command: list[str], word: str) -> list[str]:
    """Search from disk, and return the pages that hold all words, the best first."""
    address = f"{(SITE / 'reference' / 'machine.html').as_uri()}?q={word.replace(' ', '+')}"
    links = re.findall(r'<a href="([^"]*)" class="md-search-result__link"', dump_page(command, address))
    pages = list(dict.fromkeys(re.sub(r"[?#].*", "", link).partition("/site/")[2] for link in links))
    print(f"{word}: {', '.join(pages[:4])}")
    return pages


def take_pictures(command: list[str], pages: list[Path], folder: Path) -> None:
    """Take one picture of each page at each width; a frame gives the width, as a window has a least one."""
    folder.mkdir(parents=True, exist_ok=True)
    for page in pages:
        for width in WIDTHS:
            frame = folder / "frame.html"
            frame.write_text(f'<body style="margin:0"><iframe src="{page.as_uri()}" width="{width}" height="4000">')
            name = f"{str(page.relative_to(SITE).with_suffix('')).replace('/', '-')}-{width}.png"
            options = [f"--window-size={width},4000", f"--screenshot={folder / name}", frame.as_uri()]
            subprocess.run([*command, *options], check=True, capture_output=True, timeout=120)
    frame.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
