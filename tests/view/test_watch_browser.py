"""The page in a real browser: curves are there and grow, nothing goes wrong, and what others wrote is shown as text."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanogpt_cli.view.watch import page
from tests.view.made import grow, make_run
from tests.view.test_watch import serving

pytestmark = pytest.mark.browser
HOSTILE = "<img src=x onerror=alert(1)><b>&lt;"
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
QUIET = ("gpu", "quic", "background-networking", "component-update", "sync")
POINTS = "return document.getElementById(arguments[0]).data.map((trace) => trace.x.length)"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One headless Chromium for all tests, with a profile of its own."""
    webdriver = pytest.importorskip("selenium.webdriver")
    program, driver = next(filter(None, map(shutil.which, PROGRAMS)), None), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("no chromium with its chromedriver here")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    words = ("headless", "no-sandbox", "no-first-run", f"user-data-dir={tmp_path_factory.mktemp('chromium')}")
    for word in (*words, *(f"disable-{name}" for name in QUIET), "window-size=1280,1400"):
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield started
    started.quit()


@pytest.fixture
def browser(chromium: Any) -> Iterator[Any]:
    """The browser at its usual size and colours; every message on its console fails the test."""
    yield chromium
    messages = chromium.get_log("browser")
    chromium.get("about:blank")
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {})
    assert messages == []


def until(browser: Any, script: str, *given: Any, good: Callable[[Any], Any] = bool) -> Any:
    """What `script` returns as soon as it is `good`."""
    from selenium.webdriver.support.ui import WebDriverWait

    def look(_: Any) -> Any:
        found = browser.execute_script(script, *given)
        return (found,) if good(found) else None

    (found,) = WebDriverWait(browser, 30, ignored_exceptions=[Exception]).until(look)
    return found


def test_curves_are_there_and_grow_with_the_run(tmp_path: Path, browser: Any) -> None:
    run = make_run(tmp_path / "x", count=20)
    with serving(tmp_path) as port:
        browser.get(f"http://127.0.0.1:{port}/")
        assert until(browser, POINTS, "loss") == [20, 20, 2]
        for chart in ("lr", "grad_norm", "tokens_per_s", "mfu"):
            assert until(browser, POINTS, chart) == [20]
        grow(run, 21, 30)
        until(browser, POINTS, "loss", good=lambda found: found == [30, 30, 3])
        make_run(tmp_path / "y", count=20)
        until(browser, "return document.querySelectorAll('nav label').length", good=lambda found: found == 2)
        assert len(browser.execute_script(POINTS, "loss")) == 3, "a new run is listed, and drawn when it is chosen"
        browser.find_elements("css selector", "nav input")[1].click()
        until(browser, POINTS, "loss", good=lambda found: len(found) == 6)


def test_the_axis_the_scale_and_the_smoothing_obey_the_keyboard(tmp_path: Path, browser: Any) -> None:
    make_run(tmp_path / "x", count=20)
    with serving(tmp_path) as port:
        browser.get(f"http://127.0.0.1:{port}/")
        until(browser, POINTS, "loss")
        ends = "return document.getElementById('loss').data.map((trace) => trace.x.at(-1))"
        for last in (20 * 768, 20 * 0.5 / 60, 20 * 768 * 1e6):  # tokens, minutes, FLOPs
            browser.find_element("id", "axis").send_keys("\ue015")
            assert until(browser, ends) == pytest.approx([last] * 3)
        browser.find_element("id", "log").send_keys(" ")
        assert until(browser, "return document.getElementById('loss').layout.yaxis.type") == "log"
        for _ in range(100):
            browser.find_element("id", "smoothing").send_keys("\ue012")
        assert len(until(browser, POINTS, "loss")) == 3
        smoothed = "return document.getElementById('loss').data.slice(0, 2).map((trace) => JSON.stringify(trace.y))"
        raw, smooth = until(browser, smoothed)
        assert raw == smooth


def test_runs_of_different_tokenizers_are_drawn_in_bits_per_byte(tmp_path: Path, browser: Any) -> None:
    make_run(tmp_path / "a", count=20)
    make_run(tmp_path / "b", count=20, bytes_per_token=4.0, tokenizer={"kind": "gpt2", "size": 50257, "eot": 50256})
    with serving(tmp_path) as port:
        browser.get(f"http://127.0.0.1:{port}/")
        ends = (
            "return document.getElementById('loss').data.filter((t) => t.name.endsWith('val')).map((t) => t.y.at(-1))"
        )
        a, b = until(browser, ends)
        assert a == pytest.approx(4 * b)
        assert "bits per byte" in browser.find_element("id", "unit").text
        assert "bits per byte" in browser.find_element("id", "loss").text
        browser.find_elements("css selector", "nav input")[1].click()
        assert until(browser, ends) == pytest.approx([1.5 + 2.7 / 20 + 0.1]), "one alone is in nats a token"
        assert browser.find_element("id", "unit").text == ""


def test_what_others_wrote_is_shown_as_text(tmp_path: Path, browser: Any) -> None:
    run = make_run(tmp_path / HOSTILE.replace("/", ""), count=0)
    grow(run, 1, 20, sample=f"</pre>{HOSTILE}<script>alert(2)</script>\u202e")
    run.log_file.write_text(f"note: {HOSTILE}\n")
    with serving(tmp_path) as port:
        browser.get(f"http://127.0.0.1:{port}/")
        until(browser, POINTS, "loss")
        browser.execute_script("for (const one of document.querySelectorAll('details')) one.open = true")
        shown = browser.find_element("tag name", "main").text
        assert shown.count(HOSTILE) >= 5, "in the list, over samples, checkpoints and notes, and in them"
        assert "<script>alert(2)</script>" in shown
        browser.execute_script(
            "Plotly.Fx.hover('loss', [{ curveNumber: 1, pointNumber: 5 }, { curveNumber: 2, pointNumber: 0 }])"
        )
        assert HOSTILE[:30] in until(browser, "return document.querySelector('#loss .hoverlayer').textContent")
        assert browser.find_elements("css selector", "img, main script, main b img") == []


@pytest.mark.parametrize("width", [390, 800, 1280])
def test_nothing_hangs_over_the_edge(tmp_path: Path, browser: Any, width: int) -> None:
    make_run(tmp_path / ("a-very-long-name-" * 8), count=20)
    make_run(tmp_path / "short", count=20, environment={"command": "nanogpt train " + "--x=1" * 200})
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    with serving(tmp_path) as port:
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get(f"http://127.0.0.1:{port}/")
        until(browser, POINTS, "loss")
        browser.execute_script("for (const one of document.querySelectorAll('details')) one.open = true")
        assert until(browser, "return document.documentElement.scrollWidth") <= width


def test_a_saved_page_needs_no_server(tmp_path: Path, browser: Any) -> None:
    run = make_run(tmp_path / "x", count=20)
    grow(run, 21, 30, sample="</script><script>alert(1)</script>")
    saved = tmp_path / "page.html"
    saved.write_bytes(page([run]))
    browser.get(saved.as_uri())
    assert until(browser, POINTS, "loss") == [30, 30, 3]
    assert "</script><script>alert(1)</script> 30" in browser.find_element("id", "samples").text
    drawn = "return document.getElementById('loss').layout.font.color === getComputedStyle(document.body).color"
    backgrounds = set()
    for scheme in ("light", "dark"):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        until(browser, f"return matchMedia('(prefers-color-scheme: {scheme})').matches")
        until(browser, drawn)
        backgrounds.add(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2
