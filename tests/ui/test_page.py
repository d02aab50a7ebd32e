"""The page in a real browser: it draws, its sliders simulate, its address holds its state, and everybody can use it."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from report.browser import broken_rules, needs_axe
from serve.endpoint import on_a_socket

from benchmarks.browser import CHROMIUM, Page, chromium
from ui.words import SMALL
from windtunnel.ui.routes import application

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
READY = "(document.documentElement?.dataset?.stage ?? '').match(/ends|trouble/)?.[0]"
NONE: Mapping[str, object] = MappingProxyType({})
WORDS = SMALL | {"goodput": "ttft:300 tpot:50"}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with on_a_socket(application(WORDS)) as found:
        yield found


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with chromium() as found:
        yield found


def opened(page: Page, address: str, words: Mapping[str, object] = NONE, width: int = 1280, dark: bool = False) -> None:
    page.open("about:blank")
    page.open(f"{address}/?{urlencode(words, doseq=True)}" if words else f"{address}/", width, dark=dark)
    page.until(READY)


def text(page: Page, selector: str) -> str:
    return str(page.run(f"document.querySelector({selector!r}).textContent"))


def moved(page: Page, word: str, turn: int) -> None:
    """Move a slider with the keyboard, and wait for the figures."""
    before = page.run("document.documentElement.dataset.stage")
    page.run(f"document.querySelector('[data-word={word}]').focus()")
    page.press("ArrowRight" if turn > 0 else "ArrowLeft", 39 if turn > 0 else 37)
    page.until(f"document.documentElement.dataset.stage !== {before!r} && {READY}")


def test_figures_are_drawn_and_nothing_comes_from_elsewhere(page: Page, address: str) -> None:
    page.loaded.clear()
    page.problems.clear()
    opened(page, address)
    assert "Qwen/Qwen3-0.6B on 1 × H100 SXM" in text(page, "h1")
    assert page.run("document.querySelectorAll('.vital').length") == 6
    assert page.run("document.querySelectorAll('#curve polyline').length") == 1
    assert "60 requests of random" in text(page, "#status")
    assert page.problems == []
    assert {urlsplit(each).netloc for each in page.loaded if each.startswith("http")} == {urlsplit(address).netloc}


def test_what_prompts_found_is_told_by_kind(page: Page, address: str) -> None:
    """Turns of sessions behind a beginning that all share: each finds its history and its answers."""
    opened(page, address, WORDS | {"random_turns": 3, "random_prefix_len": 64, "num_prompts": 30})
    assert "of prompt tokens cached: " in text(page, "#memory") and "% its answers" in text(page, "#memory")
    assert "tokens computed per prompt" in text(page, "#memory")
    assert sum(page.loaded.values()) < 2_000_000


def test_a_slider_simulates_and_the_address_holds_it(page: Page, address: str) -> None:
    opened(page, address)
    first = text(page, "#vitals")
    moved(page, "request_rate", 1)
    assert text(page, "#vitals") != first
    page.until("location.search.includes('request_rate=42.2')")
    shown, there = text(page, "#percentiles"), page.run("location.href")
    opened(page, there.rpartition("/")[0], parse_qs(urlsplit(there).query))
    assert text(page, "#percentiles") == shown


def test_pins_stand_beside_each_other_and_in_the_address(page: Page, address: str) -> None:
    opened(page, address)
    page.run("document.getElementById('pin').click()")
    moved(page, "max_num_seqs", 1)
    page.run("document.getElementById('pin').click()")
    assert page.run("document.querySelectorAll('#pin-table tbody tr').length") == 3  # and what is shown now
    assert "max_num_seqs 8" in text(page, "#pin-table")
    page.until("new URLSearchParams(location.search).getAll('pin').length === 2")
    table, there = text(page, "#pin-table"), page.run("location.href")
    opened(page, there.rpartition("/")[0], parse_qs(urlsplit(there).query))
    page.until(f"document.getElementById('pin-table').textContent === {table!r}")


def test_the_timeline_says_what_is_under_the_cursor(page: Page, address: str) -> None:
    opened(page, address, {"view": "timeline"} | WORDS)
    page.until("/running|step of/.test(document.querySelector('.moment')?.textContent)")
    page.run("document.querySelector('[aria-label^=Slowest]').click()")
    page.until("document.querySelector('.moment').textContent.startsWith('request ')")
    page.until("location.search.includes('from=')")
    page.run("(s => { s.value = 10; s.dispatchEvent(new Event('input')); })(document.querySelector('.scrub'))")
    page.until("document.querySelector('.moment').textContent.startsWith('at ')")
    assert page.run(
        "document.querySelector('#timeline canvas').getContext('2d').getImageData(60, 5, 200, 90).data.some(v => v > 0)"
    )


def test_the_knee_and_the_export(page: Page, address: str) -> None:
    opened(page, address, {"view": "explore"} | WORDS)
    page.run("document.getElementById('knee-go').click()")
    page.until("document.querySelectorAll('#explore polyline').length === 3")
    page.run("document.getElementById('export').click()")
    page.until("document.querySelector('dialog[open] pre')")
    assert text(page, "dialog pre").startswith("windtunnel run Qwen/Qwen3-0.6B")
    assert "vllm serve" in text(page, "dialog")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"model": "Qwen/Qwen3-33B"}, "did you mean"),
        ({"modle": "x"}, "did you mean"),
        (WORDS | {"trace": "azure-conv"}, "leave out"),
    ],
)
def test_an_address_that_makes_no_sense_is_one_line(
    page: Page, address: str, words: dict[str, object], said: str
) -> None:
    opened(page, address, words)
    assert said in text(page, "#trouble")
    assert page.run("document.getElementById('trouble').hidden") is False
    assert page.run("document.querySelectorAll('.trouble:not([hidden])').length") == 1


@pytest.mark.parametrize("view", ["live", "timeline", "explore"])
def test_a_phone_shows_it_without_scrolling_sideways(page: Page, address: str, view: str) -> None:
    opened(page, address, {"view": view} | WORDS, 390)
    assert page.run("document.documentElement.scrollWidth") <= 390


@needs_axe
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, False), (1280, True)])
@pytest.mark.parametrize("view", ["live", "timeline", "explore"])
def test_axe_finds_nothing_serious(page: Page, address: str, view: str, width: int, dark: bool) -> None:
    opened(page, address, {"view": view} | WORDS, width, dark)
    page.run("document.getElementById('pin').click()")
    assert [each for each in broken_rules(page) if each[0] in ("serious", "critical")] == []
