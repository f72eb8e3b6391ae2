"""04 and 05 in a real JupyterLab: all cells run, widgets move, figures change, no error shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import SCREENSHOTS
from jupyter import Lab, Seen, open_and_run

WIDGET = ".jp-OutputArea-output .widget-vbox"


def finished(seen: Seen) -> None:
    assert seen.errors() == []
    assert all(one.strip().strip("[]:").isdigit() for one in seen.counts()), seen.counts()


def change(seen: Seen, act: Any) -> list[str]:
    """Figures of the widget after `act()`, which must have changed."""
    before = seen.images(WIDGET)
    act()
    for _ in range(60):
        seen.page.wait_for_timeout(500)
        after = seen.images(WIDGET)
        if after and after != before:
            return after
    raise AssertionError("the figure did not change")


def set_theme(page: Any, name: str) -> None:
    page.click(".lm-MenuBar-itemLabel:text-is('Settings')")
    page.hover(".lm-Menu-itemLabel:text-is('Theme')")
    page.click(f".lm-Menu-itemLabel:text-is('JupyterLab {name}')")
    page.wait_for_selector(f"body[data-jp-theme-light='{str(name == 'Light').lower()}']", state="attached")


def test_inspect_fc(page: Any, lab: Lab, quick_run: Path) -> None:
    seen = open_and_run(page, lab, "04_inspect_fc.ipynb", seconds=300)
    seen.screenshot(SCREENSHOTS / "04_light.png")
    finished(seen)
    # A person looks: the newest run is taken, nothing is built anew.
    assert f"run {quick_run.name} (the newest" in page.inner_text(".jp-Notebook")
    assert len(seen.images()) >= 4 and len(seen.images(WIDGET)) == 1

    buttons = page.locator(f"{WIDGET} .widget-toggle-button")
    assert buttons.count() == 4, buttons.all_inner_texts()  # all, and the three points
    shown = {change(seen, lambda: buttons.nth(1).click())[0]}
    shown.add(change(seen, lambda: buttons.nth(3).click())[0])
    boxes = page.locator(f"{WIDGET} .widget-checkbox input")
    shown.add(change(seen, lambda: boxes.nth(0).click())[0])  # log scale
    if boxes.nth(1).is_enabled():  # compare with the start, on and off
        shown.add(change(seen, lambda: boxes.nth(1).click())[0])
        change(seen, lambda: boxes.nth(1).click())
    menu = page.locator(f"{WIDGET} .widget-dropdown select")
    names = menu.locator("option").all_inner_texts()
    shown.add(change(seen, lambda: menu.select_option(names[-1]))[0])  # a tensor without points
    assert len(shown) >= 4 and buttons.count() == 1
    page.locator(WIDGET).first.screenshot(path=str(SCREENSHOTS / "04_widget.png"))
    finished(seen)

    set_theme(page, "Dark")
    seen.screenshot(SCREENSHOTS / "04_dark.png")
    set_theme(page, "Light")  # the server keeps the choice


def test_measure_acceptance(page: Any, lab: Lab, quick_run: Path) -> None:
    seen = open_and_run(page, lab, "05_measure_acceptance.ipynb", seconds=540)
    seen.screenshot(SCREENSHOTS / "05_light.png")
    finished(seen)
    assert len(seen.images()) >= 2
    assert f"run {quick_run.name} (the newest" in page.inner_text(".jp-Notebook")
    assert "Result. On own the accept length is" in page.inner_text(".jp-Notebook")

    def step() -> str:
        return page.locator(f"{WIDGET} .widget-html").first.inner_text()

    assert "verify step 1 of" in step()
    page.click(f"{WIDGET} button:has-text('on')")
    page.wait_for_function("words => document.body.innerText.includes(words)", arg="verify step 2 of")
    assert "verify step 2 of" in step()
    page.locator(f"{WIDGET} .widget-slider [role=slider], {WIDGET} .noUi-handle").first.press("End")
    page.wait_for_timeout(2000)
    shown = step()
    place, count = shown.split("verify step ")[1].split(":")[0].split(" of ")
    assert place == count, shown
    menu = page.locator(f"{WIDGET} .widget-dropdown select")
    menu.select_option(menu.locator("option").all_inner_texts()[-1])  # another reply starts at its first step
    page.wait_for_timeout(2000)
    assert "verify step 1 of" in step() and step().splitlines()[0] != shown.splitlines()[0]
    page.locator(WIDGET).first.screenshot(path=str(SCREENSHOTS / "05_widget.png"))
    finished(seen)
    set_theme(page, "Dark")
    seen.screenshot(SCREENSHOTS / "05_dark.png")
    set_theme(page, "Light")


def test_an_error_in_a_cell_is_seen(page: Any, lab: Lab) -> None:
    """The same eyes on a notebook that fails: without this, "no error shows" could be blindness."""
    import nbformat

    broken = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    broken.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(broken, lab.folder / "broken.ipynb")
    seen = open_and_run(page, lab, "broken.ipynb", seconds=60)
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        finished(seen)
