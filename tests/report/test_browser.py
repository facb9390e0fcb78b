"""The page in headless Chromium, where one is installed: no request leaves it, and nothing is wider than the screen."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from autotune.report.content import gather
from autotune.report.page import render
from autotune.report.sources import find_sources
from tests.report.conftest import MadeStudy

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
# The page lies in a frame as wide as a screen, because Chromium's own window is never narrower than 500 pixels; what it
# measures of itself is written into the outer page, which is dumped.
OUTER = """<!DOCTYPE html><meta charset="utf-8"><iframe id="f" src="report.html" style="width:{width}px;height:900px;border:0"></iframe>
<pre id="out"></pre><script>
document.getElementById("f").onload = () => {{
  const page = document.getElementById("f").contentDocument, root = page.documentElement;
  const inScroll = e => e.closest(".scroll") !== null;
  const wide = [...page.body.querySelectorAll("*")].filter(e => !inScroll(e) && (e.closest("svg") === null || e.tagName === "svg") && e.getBoundingClientRect().right > root.clientWidth + 1);
  document.getElementById("out").textContent = JSON.stringify({{
    width: root.clientWidth, scroll: root.scrollWidth, wide: wide.slice(0, 5).map(e => e.outerHTML.slice(0, 120)),
    sections: page.querySelectorAll("section").length, plots: page.querySelectorAll("svg.plot").length,
    images: [...page.images].map(i => i.naturalWidth), trees: page.querySelectorAll("svg.tree").length,
    requests: page.defaultView.performance.getEntriesByType("resource").map(e => e.name).filter(n => !n.startsWith("data:")),
    background: page.defaultView.getComputedStyle(page.body).backgroundColor,
  }});
}};
</script>"""


@pytest.fixture(scope="module")
def folder(made: MadeStudy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    (folder / "report.html").write_text(render(gather(find_sources(made.profile_path))))
    return folder


def seen(folder: Path, width: int, *options: str) -> tuple[dict[str, object], list[str]]:
    """What the page measures of itself on a screen so wide, and the addresses that Chromium asked for."""
    (folder / "outer.html").write_text(OUTER.format(width=width))
    log = folder / "net.json"
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--allow-file-access-from-files",
        f"--user-data-dir={folder / 'user'}",
        f"--log-net-log={log}",
        "--virtual-time-budget=20000",
        "--dump-dom",
        *options,
        (folder / "outer.html").as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    found = re.search(r'<pre id="out">(.*?)</pre>', done.stdout, re.S)
    assert found and found[1], done.stderr[-2000:]
    asked = re.findall(r'"url":"((?:https?|wss?|ftp)://[^"]+)"', log.read_text(errors="replace"))
    return json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")), asked


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_the_screen_and_asks_for_nothing(folder: Path, width: int) -> None:
    found, asked = seen(folder, width)
    assert found["scroll"] == found["width"] and found["wide"] == [], found["wide"]
    assert found["sections"] == 11 and int(str(found["plots"])) >= 9 and found["trees"] == 2
    assert found["images"] == [32], "the prompt's image, drawn"
    assert found["requests"] == []
    ours = [address for address in asked if not re.search(r"://[^/]*(google|gstatic|gvt1|chromium)", address)]
    assert ours == [], "Chromium's own calls home do not count"


@pytest.mark.slow
def test_it_is_dark_where_the_reader_wishes(folder: Path) -> None:
    light, _ = seen(folder, 1280)
    dark, _ = seen(folder, 1280, "--force-dark-mode", "--blink-settings=preferredColorScheme=0")
    assert light["background"] == "rgb(255, 255, 255)" and dark["background"] == "rgb(16, 20, 24)"
