"""Take pictures of the site that build_site.py built: python scripts/screenshots.py [FOLDER]. Needs Chromium."""

import functools
import http.server
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

SITE = Path(__file__).parents[1] / "build" / "site"
PAGES = ("", "quickstart/", "pretraining/", "flags_t5/", "backends/", "api/trainers/")
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
SCHEMES = {"dark": 0, "light": 1}  # Chromium's preferredColorScheme
# Without these, headless Chromium calls its vendor's hosts.
QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Log no request."""


def main() -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None or not SITE.is_dir():
        sys.exit("screenshots need Chromium (apt-get install chromium) and a site (make docs)")
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else SITE.parent / "screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    handler = functools.partial(Quiet, directory=str(SITE))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for page in PAGES:
        for width, size in WIDTHS.items():
            for scheme, number in SCHEMES.items():
                picture = folder / f"{page.strip('/').replace('/', '_') or 'index'}-{width}-{scheme}.png"
                with tempfile.TemporaryDirectory() as profile:
                    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}")
                    shown = (f"--blink-settings=preferredColorScheme={number}", f"--window-size={size[0]},{size[1]}")
                    url = f"http://127.0.0.1:{server.server_port}/{page}"
                    command = [browser, *options, *QUIET, *shown, f"--screenshot={picture}", url]
                    subprocess.run(command, check=True, capture_output=True, timeout=60)
    print(f"{len(PAGES) * len(WIDTHS) * len(SCHEMES)} pictures in {folder}")


if __name__ == "__main__":
    main()
