"""Photograph the first screen of a report, for the README.

    python tests/browser/screenshot.py demo/results/report.html docs/images/report.png

The browser is that of bin/get-chromium; playwright is part of the development environment.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[2]
MOST_BYTES = 300_000


def main() -> int:
    parser = argparse.ArgumentParser(description="Photograph the first screen of a report.")
    parser.add_argument("report", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=1400, help="390 for a phone")
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()
    found = subprocess.run([ROOT / "bin" / "get-chromium"], capture_output=True, text=True, check=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=found.stdout.strip(), args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(
            viewport={"width": options.width, "height": options.height},
            color_scheme="dark" if options.dark else "light",
        )
        page.goto(options.report.resolve().as_uri())
        options.out.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=options.out)
        browser.close()
    size = options.out.stat().st_size
    print(f"{options.out}: {size // 1000} kB")
    return int(size > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
