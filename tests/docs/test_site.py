"""What the site adds to the theme: what is copied of a console, and search from the disk."""

from __future__ import annotations

import html
import re
from pathlib import Path

from scripts.site_hooks import on_page_content
from tests.faces.browser import find_browser
from tests.truth import ROOT

PAGE = """<p>Before <code>$ no</code></p>
<div class="language-console highlight"><pre><span></span><code><span class="gp">$ </span>a<span
class="w"> </span>&lt;x&gt;<span class="w"> </span><span class="se">\\</span>
    --more
<span class="go">printed, $ 5</span>
<span class="gp">$ </span>second
</code></pre></div>
<div class="language-python highlight"><pre><code>$ = 1</code></pre></div>
"""


def test_a_console_gives_its_commands_to_the_button() -> None:
    made = on_page_content(PAGE)
    copied = re.findall(r'data-copy="(.*?)"', made, re.DOTALL)
    assert [html.unescape(text) for text in copied] == ["a <x> \\\n    --more\nsecond"]


def test_nothing_else_is_changed() -> None:
    assert re.sub(r' data-copy=".*?"', "", on_page_content(PAGE), flags=re.DOTALL) == PAGE


def test_a_role_becomes_the_name_it_ends_in() -> None:
    role = ":func:<code>~reshard.api.convert</code>"
    assert on_page_content(role) == "<code>convert</code>"


SEARCHING = """<!doctype html><html><head><script src="{stand_in}"></script></head><body><script>
const worker = new Worker("worker.js");
worker.addEventListener("message", (event) => document.body.append(`heard ${{event.data}}`));
worker.postMessage(20);
</script></body></html>"""
WORKER = """addEventListener("message", async (event) => {
  await importScripts("one.js", "two.js");
  postMessage(`${event.data} + ${one} + ${two}`);
});"""


def test_a_page_from_the_disk_has_a_worker(tmp_path: Path) -> None:
    """As the theme's search needs one: messages to and fro, and scripts that it loads."""
    page = tmp_path / "page.html"
    stand_in = (ROOT / "docs" / "assets" / "iframe-worker.js").as_uri()
    page.write_text(SEARCHING.format(stand_in=stand_in), encoding="utf-8")
    (tmp_path / "worker.js").write_text(WORKER, encoding="utf-8")
    (tmp_path / "one.js").write_text("self.one = 1;", encoding="utf-8")
    (tmp_path / "two.js").write_text("self.two = self.one + 1;", encoding="utf-8")
    assert "heard 20 + 1 + 2" in find_browser(tmp_path).document(page)
