"""What the site makes of a console: its button copies the commands, and nothing that is printed."""

from __future__ import annotations

import html
import re

from scripts.site_hooks import on_page_content

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
