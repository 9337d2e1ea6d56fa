"""The page in a browser: a race, its figures, its replay, a key, errors, a narrow screen. Needs Chromium."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from .harness import Live, live
from .test_limits import slow_steps

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)"),
]
WAIT = 60_000  # milliseconds; a busy machine is no reason to fail


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield running
        running.close()


@contextmanager
def opened(browser: Any, server: Live, **options: Any) -> Iterator[Any]:
    """The page, once it is connected. Errors of scripts, and requests to anywhere else, are failures."""
    context = browser.new_context(**options)
    context.set_default_timeout(WAIT)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: errors.append(request.url) if not request.url.startswith(server.url) else None)
    page.goto(server.url)
    yield page
    context.close()
    assert errors == []


def connected(page: Any) -> None:
    playwright.expect(page.locator("#machine")).to_contain_text("·", timeout=WAIT)


def race(page: Any, tokens: int = 30) -> None:
    page.fill("#prompt", "ab")
    if not page.locator("#max-tokens").is_visible():
        page.click("#settings summary")
    page.fill("#max-tokens", str(tokens))
    page.click("#start")
    page.wait_for_selector("#verdict:not([hidden])")


def shown(page: Any, pane: str) -> str:
    return page.locator(f"#{pane} .output").text_content()


def test_a_race(browser, server):
    with opened(browser, server, viewport={"width": 1280, "height": 900}) as page:
        connected(page)
        assert page.locator("#model option").all_text_contents() == ["tiny", "other-name"]
        race(page)
        assert "token for token (30 tokens)" in page.inner_text("#same")
        assert re.match(r"[\d.]+×", page.inner_text("#factor"))
        answer = server.ok(
            "/v1/chat/completions", messages=[{"role": "user", "content": "ab"}], max_tokens=30, temperature=0
        )
        for pane in ("plain", "spec"):
            assert shown(page, pane) == answer["choices"][0]["message"]["content"]
            assert page.inner_text(f"#{pane} [data-figure=tokens]") == "30"
        assert page.inner_text("#plain [data-figure=passes]") == "30"
        assert page.locator("#plain mark").count() == 0
        assert "30 tokens" in page.text_content("#status")
        page.click("#replay")
        page.wait_for_selector("#stop:disabled")
        assert shown(page, "spec") == shown(page, "plain") == answer["choices"][0]["message"]["content"]


def test_drafts_are_shown_as_they_were(browser, server, spec):
    """Drafts that repeat a token the model repeats: marks, survival and passes agree with the counters."""
    from engine.harness import Oracle, half_right, scripted

    from paceline import SamplingParams

    ids = server.ok("/tokenize", messages=[{"role": "user", "content": "ab"}])["tokens"]
    oracle = Oracle()
    oracle.learn(
        spec.generate([ids], SamplingParams(temperature=0, max_tokens=60, seed=7, ignore_eos=True), speculation=False)[
            0
        ]
    )
    with (
        scripted(spec, half_right(oracle, spec.model.vocab_size, seed=5)),
        opened(browser, server) as page,
    ):
        connected(page)
        page.click("#settings summary")
        page.select_option("#drafts", "5")
        page.fill("#seed", "7")
        before = server.engine.stats().spec_decode.copy()
        race(page, tokens=40)
        page.wait_for_selector(".pass")
        counted = server.engine.stats().spec_decode.since(before)
        assert page.locator(".pass").count() == counted.num_drafts > 3
        assert page.inner_text("#accepted") == str(counted.num_accepted_tokens)
        assert page.inner_text("#drafted") == str(counted.num_draft_tokens)
        assert page.inner_text("#length") == f"{counted.acceptance_length:.2f}"
        shares = [float(text.rstrip(" %")) for text in page.locator("#survival .share").all_text_contents()]
        for share, rate in zip(shares, counted.per_position_acceptance_rates, strict=False):
            assert abs(share - 100 * rate) <= 0.51
        assert page.locator("#spec mark").count() > 0


def test_both_at_once_says_what_it_shows(browser, server):
    with opened(browser, server) as page:
        connected(page)
        page.click("#settings summary")
        page.check("input[value=together]")
        race(page)
        assert "in shared passes" in page.inner_text("#factor-text")
        assert "token for token" in page.inner_text("#same")


def test_stop_ends_the_request(browser, server, spec):
    with slow_steps(spec, 0.02), opened(browser, server) as page:
        connected(page)
        page.click("#settings summary")
        page.fill("#max-tokens", "150")
        page.fill("#prompt", "ab")
        page.press("#prompt", "Control+Enter")
        playwright.expect(page.locator("#plain .output")).to_have_text(re.compile("....", re.DOTALL), timeout=WAIT)
        page.keyboard.press("Escape")
        page.wait_for_selector("#start:enabled")
        server.idle()
        assert page.locator("#error").is_hidden() and page.locator("#verdict").is_hidden()


def test_a_server_with_a_key_is_asked_for(browser, spec):
    with live(spec, api_keys=("secret",)) as server, opened(browser, server) as page:
        page.fill("#key", "wrong")
        page.click("text=Use it")
        page.wait_for_selector("#key-wrong:not([hidden])")
        page.fill("#key", "secret")
        page.keyboard.press("Enter")
        connected(page)
        race(page)
        page.reload()
        connected(page)  # the tab remembers


def test_errors_are_said(browser, server):
    with opened(browser, server) as page:
        connected(page)
        page.click("#settings summary")
        page.fill("#prompt", "xq" * server.service.info["max_model_len"])
        page.click("#start")
        page.wait_for_selector("#error:not([hidden])")
        assert "max_model_len" in page.inner_text("#error")
        assert page.locator("#start").is_enabled()


def test_a_server_without_a_drafter_has_one_run(browser, plain):
    with live(plain) as server, opened(browser, server) as page:
        connected(page)
        assert "without a drafter" in page.inner_text("#spec .output")
        page.fill("#prompt", "ab")
        page.click("#start")
        page.wait_for_selector("#plain[data-state=done]")
        assert page.inner_text("#plain [data-figure=tokens]") != "–"


@pytest.mark.parametrize("width", [320, 390, 768, 1440])
def test_nothing_is_wider_than_the_screen(browser, server, width):
    with opened(browser, server, viewport={"width": width, "height": 800}) as page:
        connected(page)
        race(page)
        passes = "document.getElementById('ribbon').append(...Array.from({length: 300}, () => {"
        page.evaluate(passes + "const e = document.createElement('span'); e.className = 'pass'; return e; }))")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        columns = page.evaluate("getComputedStyle(document.querySelector('.panes')).gridTemplateColumns").split()
        assert len([c for c in columns if c != "0px"]) == (2 if width >= 768 else 1)


CONTRAST = """() => {
  const channel = (v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const light = (c) => {
    const [r, g, b] = c.match(/[0-9.]+/g).map(channel);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
      if (!c.startsWith("rgba(0, 0, 0, 0")) return c; } return "rgb(255,255,255)"; };
  const out = {};
  const texts = "p, h1, h2, dt, dd, label, summary, button, mark, figcaption, strong, .output span, #same";
  for (const e of document.querySelectorAll(texts)) {
    if (!e.offsetParent || e.disabled || !e.textContent.trim()) continue;
    const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) out[e.tagName + " " + e.textContent.trim().slice(0, 30)] = ratio;
  }
  return out;
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read_in_both_themes(browser, server, theme):
    """WCAG AA: a contrast of 4.5 to 1 for all text."""
    with opened(browser, server, color_scheme=theme) as page:
        connected(page)
        race(page)
        page.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
        assert page.evaluate(CONTRAST) == {}
        other = {"light": "dark", "dark": "light"}[theme]
        before = page.evaluate("getComputedStyle(document.body).backgroundColor")
        while other not in page.get_attribute("#theme", "aria-label"):
            page.click("#theme")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
        assert page.evaluate(CONTRAST) == {}


def test_everything_can_be_reached_by_keyboard(browser, server):
    with opened(browser, server) as page:
        connected(page)
        page.click("#settings summary")
        page.evaluate("document.body.focus()")
        seen = []
        for _ in range(40):
            page.keyboard.press("Tab")
            seen.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
        assert {
            "theme",
            "prompt",
            "chip",
            "start",
            "model",
            "max-tokens",
            "temperature",
            "seed",
            "drafts",
            "output",
        } <= set(seen)
