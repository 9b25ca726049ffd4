"""Reports in a browser: long words, forced colours, and right-to-left scripts."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser

from app.jobs.reports.html import figure, table, tag
from app.jobs.reports.page_style import style_for

HEBREW = "\u05e9\u05dc\u05d5\u05dd!"


@pytest.mark.parametrize("width", [320, 1200])
def test_a_long_word_of_a_caption_needs_no_scrolling_sideways(browser: Browser, width: int) -> None:
    tab = browser.new_page(viewport={"width": width, "height": 600})
    tab.set_content(f"<style>{style_for([2])}</style>{table(('a', 'b'), [('1', '2')], 'x' * 400)}")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.close()


def test_a_legend_keeps_its_colours_with_forced_colours(browser: Browser) -> None:
    plot = figure(lambda width: tag("svg", tag("rect", class_="first fill")), "", ["one"])
    tab = browser.new_page(forced_colors="active")
    tab.set_content(f"<style>{style_for([])}</style>{plot}")
    mark = tab.locator(".mark").evaluate("one => getComputedStyle(one).backgroundColor")
    assert mark == tab.locator("rect").first.evaluate("one => getComputedStyle(one).fill")
    tab.close()


def test_a_right_to_left_title_is_truncated_at_its_left(browser: Browser) -> None:
    tab = browser.new_page()
    tab.set_content(f"<style>{style_for([2])}</style>{table(('a', 'b'), [('1', HEBREW)])}")
    left_of = """cell => {
        const range = document.createRange();
        return [0, cell.firstChild.length - 1].map(place => {
            range.setStart(cell.firstChild, place); range.setEnd(cell.firstChild, place + 1);
            return range.getBoundingClientRect().left;
        });
    }"""
    first, last = tab.locator("td").evaluate(left_of)
    assert last < first
    tab.close()
