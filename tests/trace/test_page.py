"""The page in a real browser, where there is one: what it shows, that nothing is cut off, and that it asks for nothing."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from test_bundle_compare import at, recording, written

from isoexec.verify.trace.page import page
from isoexec.verify.trace.report import open_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
PROBE = """<script>
const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.width, r.height]; };
const all = s => [...document.querySelectorAll(s)];
document.body.dataset.found = JSON.stringify({
  verdict: document.getElementById('verdict').innerText, colour: getComputedStyle(document.getElementById('verdict')).color,
  card: document.getElementById('first') ? document.getElementById('first').innerText : null,
  heat: all('#heat rect.same, #heat rect.other').map(r => [r.classList[0], r.querySelector('title').textContent, ...box(r)]),
  marker: document.getElementById('first-token') ? box(document.getElementById('first-token')) : null,
  bars: all('#distribution rect title').map(t => t.textContent), wide: document.documentElement.scrollWidth,
  fill: getComputedStyle(document.querySelector('#heat rect.other, #heat rect.same')).fill,
  resources: performance.getEntriesByType('resource').length,
});
</script>"""


@pytest.fixture(scope="module")
def browser():
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed (Debian: apt-get install chromium)")
    return found


def shown(browser, tmp_path, html: str) -> dict:
    """What a browser of 1280 x 900 says about the page."""
    file = tmp_path / "page.html"
    file.write_text(html.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,900", f"--user-data-dir={tmp_path / 'profile'}",
               "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom", file.as_uri()]  # fmt: skip
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    [found] = re.findall(r'data-found="([^"]*)"', dom)
    return json.loads(found.replace("&quot;", '"').replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@pytest.fixture
def divergent(tmp_path):
    changed = recording("trainer", "trainer_score", at(1, "matmul.linear", 1, 3, "out"))
    return page(open_report([written(tmp_path / "a.zip", trainer=changed)]))


def test_a_divergence_as_a_person_sees_it(browser, tmp_path, divergent):
    found = shown(browser, tmp_path, divergent)
    assert found["verdict"] == "DIVERGENT"
    assert "layer 1, matmul.linear, sequence 1, position 3 of 6" in found["card"] and "the cause is here" in found["card"]
    red = [r for r in found["heat"] if r[0] == "other"]
    assert [title for _, title, *_ in red] == ["layer 1, sequence 1, positions 3 to 3: differs"]
    assert sum(r[0] == "same" for r in found["heat"]) == 4 * 2 + 1  # a run for each layer and sequence, one of them in two parts
    x, y, width, height = red[0][2:]
    left, top, w, h = found["marker"]
    assert left < x + width / 2 < left + w and top <= y and y + height <= top + h, "the marker is around the token"
    assert width > 1 and height > 4 and found["wide"] <= 1280
    assert found["bars"] and found["resources"] == 0
    assert found["fill"].startswith("rgb") and found["colour"] != "rgb(0, 0, 0)"


def test_an_identical_run(browser, tmp_path):
    found = shown(browser, tmp_path, page(open_report([written(tmp_path / "a.zip")])))
    assert found["verdict"] == "IDENTICAL" and found["card"] is None and found["marker"] is None
    assert {r[0] for r in found["heat"]} == {"same"}
    assert [b for b in found["bars"] if not b.endswith(" 0 tokens")] == ["0: 4 tokens"]


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.tags = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.found += [value for name, value in attributes if name in ("src", "href", "action", "data", "srcset")]


def test_the_page_is_self_contained(divergent):
    links = Links()
    links.feed(divergent)
    assert not links.found and not {"script", "link", "iframe", "img", "object"} & set(links.tags)
    assert "url(" not in divergent and "@import" not in divergent and "http" not in divergent
