"""The page in headless Chromium, if installed: it makes no requests, and nothing is wider than the screen."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from autotune.report.page import render
from autotune.report.sources import Sources

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.nightly, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]
# The page is in a frame of the screen's width, because Chromium's own window is at least 500 pixels wide; the outer
# page, which is dumped, receives the measurements.
OUTER = """<!DOCTYPE html><meta charset="utf-8"><iframe id="f" src="report.html" style="width:{width}px;height:900px;border:0"></iframe>
<pre id="out"></pre><script>
document.getElementById("f").onload = () => {{
  const page = document.getElementById("f").contentDocument, root = page.documentElement;
  const inScroll = e => e.closest(".scroll") !== null;
  const wide = [...page.body.querySelectorAll("*")].filter(e => !inScroll(e) && (e.closest("svg") === null || e.tagName === "svg") && e.getBoundingClientRect().right > root.clientWidth + 1);
  document.getElementById("out").textContent = JSON.stringify({{
    width: root.clientWidth, scroll: root.scrollWidth, wide: wide.slice(0, 5).map(e => e.outerHTML.slice(0, 120)),
    sections: page.querySelectorAll("section").length,
    images: [...page.images].map(i => i.naturalWidth), trees: page.querySelectorAll("ul.tree").length,
    requests: page.defaultView.performance.getEntriesByType("resource").map(e => e.name).filter(n => !n.startsWith("data:")),
    background: page.defaultView.getComputedStyle(page.body).backgroundColor,
  }});
}};
</script>"""


@pytest.fixture(scope="module")
def folder(sources: Sources, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    (folder / "report.html").write_text(render(sources))
    return folder


def measure(folder: Path, width: int, *options: str) -> tuple[dict[str, object], list[str]]:
    """The page's measurements at a width, and the addresses that Chromium requested."""
    (folder / "outer.html").write_text(OUTER.format(width=width))
    log = folder / "net.json"
    flags = "--headless --no-sandbox --disable-gpu --disable-background-networking --disable-component-update"
    flags += " --allow-file-access-from-files --virtual-time-budget=20000 --dump-dom"
    files = f"--user-data-dir={folder / 'user'}", f"--log-net-log={log}"
    command = [str(CHROMIUM), *flags.split(), *files, *options, (folder / "outer.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    found = re.search(r'<pre id="out">(.*?)</pre>', done.stdout, re.S)
    assert found and found[1], done.stderr[-2000:]
    asked = re.findall(r'"url":"((?:https?|wss?|ftp)://[^"]+)"', log.read_text(errors="replace"))
    return json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")), asked


def test_page_fits_the_screen_and_makes_no_requests(folder: Path) -> None:
    for width in (390, 1280):
        found, requested = measure(folder, width)
        assert found["scroll"] == found["width"] and found["wide"] == [], (width, found["wide"])
        assert (found["sections"], found["trees"]) == (10, 1)
        assert found["images"] == [32], "the prompt's image is decoded"
        assert found["requests"] == []
        ours = [url for url in requested if not re.search(r"://[^/]*(google|gstatic|gvt1|chromium)", url)]
        assert ours == [], "only Chromium's own services were contacted"


def test_page_has_a_dark_mode(folder: Path) -> None:
    light, _ = measure(folder, 1280)
    dark, _ = measure(folder, 1280, "--force-dark-mode", "--blink-settings=preferredColorScheme=0")
    assert light["background"] == "rgb(255, 255, 255)" and dark["background"] == "rgb(16, 20, 24)"
