# Over 400 lines: one page in one browser, whose start is slow.
"""Test the page in headless Chromium, driven as a reader would use it."""

import base64
import csv
import io
import json
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import page_document
import pytest

from symrazor.report.page import write_page

pytest.importorskip("selenium")
from selenium import webdriver
from selenium.webdriver import ActionChains
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.actions.pointer_input import PointerInput
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
DRIVER = shutil.which("chromedriver") or ""
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no chromium with its chromedriver on this machine"
)

Driver = webdriver.Chrome
TIMEOUT_SECONDS = 60
"""Time to wait for the page on a busy machine."""
OPEN_DETAILS = "document.querySelectorAll('details').forEach(d => d.open = true)"
SETTLED = """
const done = arguments[0];
const settled = () =>
  "ready" in document.documentElement.dataset &&
  [...document.querySelectorAll("figure > div")].every(
    box => box.children.length || !box.checkVisibility());
const check = () =>
  requestAnimationFrame(() => (settled() ? requestAnimationFrame(() => done()) : check()));
check();
"""
TABLE = ("caption", "thead", "tbody")
RESOURCES = "performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:'))"


@pytest.fixture(scope="module")
def browser() -> Iterator[Driver]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    flags = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --lang=en"
    for flag in flags.split():
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_script_timeout(TIMEOUT_SECONDS)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(page_document.document(), tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture
def page(browser: Driver, file: Path) -> Iterator[Driver]:
    """Show the page at desktop width in light colours; check that it logs no errors."""
    show(browser, file)
    yield browser
    assert browser.get_log("browser") == []


def show(browser: Driver, file: Path, width: int = 1200, colours: str = "light") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    wishes = {"prefers-color-scheme": colours, "prefers-reduced-motion": "reduce"}
    features = [{"name": name, "value": value} for name, value in wishes.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get_log("browser")
    browser.get(file.as_uri())
    browser.execute_script("localStorage.clear()")
    browser.get(file.as_uri())
    settle(browser)
    browser.execute_script(OPEN_DETAILS)
    settle(browser)


def settle(browser: Driver) -> None:
    """Wait until the page has drawn its charts: it draws them one frame after it adds them."""
    browser.execute_async_script(SETTLED)


def wait_for(browser: Driver, condition: Callable[[], object]) -> None:
    WebDriverWait(browser, TIMEOUT_SECONDS, poll_frequency=0.05).until(lambda _: condition())


def ask(browser: Driver, script: str, *values: object) -> Any:
    return browser.execute_script(f"return {script}", *values)


def test_loads_without_errors_or_network_requests(page: Driver) -> None:
    requests = [
        json.loads(entry["message"])["message"]["params"].get("request", {}).get("url", "")
        for entry in page.get_log("performance")
        if "Network.requestWillBeSent" in entry["message"]
    ]
    assert [url for url in requests if url and not url.startswith(("file:", "data:"))] == []
    assert ask(page, f"{RESOURCES}.length") == 0
    assert ask(page, "window.hacked") is None
    assert page_document.XSS in page.find_element(By.CSS_SELECTOR, "#q1 .verdict").text


def test_policy_blocks_foreign_content(browser: Driver, file: Path) -> None:
    show(browser, file)
    browser.execute_script(
        "window.stopped = []; window.hacked = 0;"
        "document.addEventListener('securitypolicyviolation', "
        "e => stopped.push(e.violatedDirective));"
        "document.body.append(Object.assign(document.createElement('script'), "
        "{ textContent: 'window.hacked = 3' }));"
        "document.body.append(Object.assign(new Image(), { src: 'http://localhost:9/x.png' }));"
        "document.body.append(Object.assign(document.createElement('link'), "
        "{ rel: 'stylesheet', href: 'http://localhost:9/x.css' }));"
        "document.body.insertAdjacentHTML('beforeend', '<b style=color:red>b</b>');"
        "fetch('http://localhost:9/').catch(() => {});"
    )
    wanted = {"script-src-elem", "img-src", "style-src-elem", "style-src-attr", "connect-src"}
    wait_for(browser, lambda: wanted <= set(ask(browser, "stopped")))
    assert ask(browser, "window.hacked") == 0


def test_landmarks_and_headings_in_order(page: Driver) -> None:
    for tag in ("header", "nav", "main", "footer", "h1"):
        assert len(page.find_elements(By.TAG_NAME, tag)) == 1
    levels = ask(page, "[...document.querySelectorAll('h1,h2,h3,h4,h5')].map(e => +e.tagName[1])")
    assert levels[0] == 1 and all(b <= a + 1 for a, b in pairwise(levels))
    unnamed = (
        "[...document.querySelectorAll('img, svg[role], [role=group], button, table')]"
        ".filter(e => !(e.getAttribute('aria-label') || e.getAttribute('alt') "
        "|| e.textContent.trim()))"
    )
    assert ask(page, f"{unnamed}.length") == 0
    tables = "[...document.querySelectorAll('table')]"
    assert ask(page, f"{tables}.every(t => t.caption && t.querySelector('th[scope=col]'))")
    ids = ask(page, "[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))


def test_every_part_of_the_document_is_drawn(page: Driver) -> None:
    titles = ask(page, "[...document.querySelectorAll('h3')].map(e => e.textContent)")
    first = [
        "Evidence of the candidates",
        "Symmetry of each layer",
        "Learned invariances",
        "Fit and complexity",
        "Prior precision over training",
        "Effective parameters over training",
        "Learned filters",
        "Anchors",
        "Transformed examples",
        "Examples",
        "Calibration",
        "Cost",
    ]
    assert titles == [*first, "Layers", "Conserved quantities", "Networks", "Paths"]
    assert ask(page, "[...document.images].every(i => i.complete && i.naturalWidth > 0)")
    assert len(page.find_elements(By.CSS_SELECTOR, ".orbit .images img")) == 10
    bars = page.find_elements(By.CSS_SELECTOR, "#q0 li:nth-child(2) .split span")
    widths = [bar.size["width"] for bar in bars]
    assert widths[0] / sum(widths) == pytest.approx(0.7, abs=0.02)


def test_layers_by_mouse_and_by_keyboard(page: Driver) -> None:
    rows = page.find_elements(By.CSS_SELECTOR, "#q0 .row")
    panel = page.find_element(By.CSS_SELECTOR, "#q0 .panel")
    assert panel.text.startswith("Layer 1")  # the layer with the largest share of free paths
    ActionChains(page).move_to_element(rows[0]).perform()
    wait_for(page, lambda: panel.text.startswith("Layer 0"))
    assert "translation error 1" in panel.text
    ActionChains(page).move_to_element(page.find_element(By.TAG_NAME, "h1")).perform()
    wait_for(page, lambda: panel.text.startswith("Layer 1"))
    rows[2].click()
    wait_for(page, lambda: panel.text.startswith("Layer head"))
    assert rows[2].get_attribute("aria-pressed") == "true"
    rows[2].send_keys(Keys.SHIFT, Keys.TAB)
    wait_for(page, lambda: panel.text.startswith("Layer 1"))
    assert page.switch_to.active_element == rows[1]
    assert "effective\n41" in panel.text and "precision of bias\n8" in panel.text
    outline = ask(page, "getComputedStyle(arguments[0]).outlineStyle", rows[1])
    assert outline == "solid"


def test_layers_by_touch(browser: Driver, file: Path) -> None:
    show(browser, file, width=360)
    row = browser.find_elements(By.CSS_SELECTOR, "#q0 .row")[0]
    browser.execute_script("arguments[0].scrollIntoView({ block: 'center' })", row)
    finger = ActionChains(browser, devices=[PointerInput("touch", "finger")])
    finger.w3c_actions.pointer_action.move_to(row).pointer_down().pointer_up()
    finger.perform()
    panel = browser.find_element(By.CSS_SELECTOR, "#q0 .panel")
    wait_for(browser, lambda: panel.text.startswith("Layer 0"))
    assert row.size["height"] >= 36


def test_charts_are_read_by_arrow_keys_and_by_pointer(page: Driver) -> None:
    chart = page.find_element(By.CSS_SELECTOR, "#q0 svg[role=slider]")
    readout = page.find_element(By.CSS_SELECTOR, "#q0 .readout")
    page.execute_script("arguments[0].focus()", chart)
    for key, epoch in ((Keys.HOME, 5), (Keys.ARROW_RIGHT, 10), (Keys.END, 20), (Keys.LEFT, 15)):
        ActionChains(page).send_keys(key).perform()
        wait_for(page, lambda epoch=epoch: chart.get_attribute("aria-valuenow") == str(epoch))
        value = -100 - 1000 / epoch
        text = f"Epoch {epoch}: relaxed \N{MINUS SIGN}{abs(value):.0f}"
        assert (
            readout.text.startswith(text) and chart.get_attribute("aria-valuetext") == readout.text
        )
    ActionChains(page).move_to_element_with_offset(
        chart, -chart.size["width"] // 2 + 60, 0
    ).perform()
    wait_for(page, lambda: readout.text.startswith("Epoch 5:"))


def test_details_are_folded_and_stay_open_across_tabs(browser: Driver, file: Path) -> None:
    show(browser, file)
    browser.refresh()
    settle(browser)
    is_open = "[...document.querySelectorAll('details.fold')].map(d => d.open)"
    assert len(ask(browser, is_open)) >= 6 and not any(ask(browser, is_open))
    summary = browser.find_element(By.CSS_SELECTOR, "#q0 [role=tabpanel] .fold > summary")
    summary.click()
    settle(browser)
    browser.find_elements(By.CSS_SELECTOR, "#q0 [role=tab]")[1].click()
    settle(browser)
    redrawn = browser.find_element(By.CSS_SELECTOR, "#q0 [role=tabpanel] .fold")
    assert redrawn.get_attribute("open") is not None
    chart = redrawn.find_element(By.CSS_SELECTOR, "svg")
    assert chart.size["width"] > 100


def test_tabs_by_click_and_by_arrow_keys(page: Driver) -> None:
    tabs = page.find_elements(By.CSS_SELECTOR, "#q0 [role=tab]")
    panel = page.find_element(By.CSS_SELECTOR, "#q0 [role=tabpanel]")
    assert [tab.get_attribute("aria-selected") for tab in tabs] == ["true", "false"]
    tabs[1].click()
    wait_for(page, lambda: len(panel.find_elements(By.CSS_SELECTOR, ".row")) == 2)
    tabs[1].send_keys(Keys.ARROW_RIGHT)
    wait_for(page, lambda: len(panel.find_elements(By.CSS_SELECTOR, ".row")) == 3)
    assert page.switch_to.active_element == tabs[0]
    assert panel.get_attribute("aria-labelledby") == tabs[0].get_attribute("id")


@pytest.mark.parametrize("number", [0, 1])
def test_the_longer_training_has_a_tab_and_curves(
    browser: Driver, tmp_path: Path, number: int
) -> None:
    """It is selected first if the verdict is about its network, and it is not compared."""
    document = page_document.document()
    (question,) = document["questions"] = document["questions"][:1]
    of = question["candidates"][number]
    question["final"] = {**of, "history": page_document.history(60)}
    show(browser, write_page(document, tmp_path / "longer.html"))
    tabs = browser.find_elements(By.CSS_SELECTOR, "#q0 [role=tab]")
    assert tabs[-1].text == f"{of['name']}, longer"
    chosen = [tab.get_attribute("aria-selected") for tab in tabs]
    assert chosen == (["false", "false", "true"] if number == 0 else ["true", "false", "false"])
    tabs[-1].click()
    settle(browser)
    panel = browser.find_element(By.CSS_SELECTOR, "#q0 [role=tabpanel]")
    label = "[aria-label^='Evidence and fit over training']"
    chart = panel.find_element(By.CSS_SELECTOR, label)
    chart.send_keys(Keys.END)
    wait_for(browser, lambda: chart.get_attribute("aria-valuetext").startswith("Epoch 60:"))
    compared = "#q0 [aria-label='Candidates by evidence'] tbody tr"
    assert len(browser.find_elements(By.CSS_SELECTOR, compared)) == 2
    rows = browser.find_elements(By.CSS_SELECTOR, "#numbers table")[0]
    assert "longer" in rows.text
    assert browser.get_log("browser") == []


def test_parts_without_data_are_left_out(browser: Driver, tmp_path: Path) -> None:
    bare = {"questions": [{"question": "?", "candidates": [{"name": "a", "reading": {}}]}]}
    late = page_document.document()
    late["questions"] = late["questions"][:1]
    history = late["questions"][0]["candidates"][0]["history"]
    del history[4]["log_likelihood"]  # a curve with a gap
    for name, document in (("bare", bare), ("late", late)):
        show(browser, write_page(document, tmp_path / f"{name}.html"))
        assert browser.get_log("browser") == []
    show(browser, tmp_path / "bare.html")
    assert browser.find_elements(By.CSS_SELECTOR, "#q0 h3, #load, #numbers figure") == []


def test_tables_sort_by_click_and_by_keyboard(page: Driver) -> None:
    table = page.find_elements(By.CSS_SELECTOR, "#numbers table")[1]
    heads = table.find_elements(By.CSS_SELECTOR, "thead th")
    names = [head.text for head in heads]
    column = names.index("Effective")

    def values() -> list[float]:
        cells = table.find_elements(By.CSS_SELECTOR, f"tbody tr > :nth-child({column + 1})")
        return [float(cell.text) for cell in cells]

    unsorted = values()
    button = heads[column].find_element(By.TAG_NAME, "button")
    button.click()
    wait_for(page, lambda: values() == sorted(unsorted) != unsorted)
    assert heads[column].get_attribute("aria-sort") == "ascending"
    button.send_keys(Keys.ENTER)
    wait_for(page, lambda: values() == sorted(unsorted, reverse=True))
    assert [h.get_attribute("aria-sort") for h in heads].count("descending") == 1
    heads[names.index("Group")].find_element(By.TAG_NAME, "button").send_keys(Keys.SPACE)
    wait_for(page, lambda: heads[names.index("Group")].get_attribute("aria-sort") == "ascending")
    groups = [
        row.text
        for row in table.find_elements(
            By.CSS_SELECTOR, f"tbody tr > :nth-child({names.index('Group') + 1})"
        )
    ]
    assert groups == sorted(groups, key=lambda text: not text)  # empty ones last


def test_tables_are_copied_as_csv(page: Driver) -> None:
    permissions = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    page.execute_cdp_cmd("Browser.grantPermissions", permissions)
    buttons = page.find_elements(By.CSS_SELECTOR, "#numbers .tools button")
    buttons[0].click()
    status = page.find_element(By.CSS_SELECTOR, "#numbers .tools [role=status]")
    wait_for(page, lambda: status.text == "Copied 3 rows")
    copied = page.execute_async_script("navigator.clipboard.readText().then(arguments[0])")
    rows = list(csv.DictReader(io.StringIO(copied, newline="")))
    assert [row["Network"] for row in rows] == ["relaxed", "plain", page_document.XSS]
    assert [float(row["Log evidence"]) for row in rows] == [-120.5, -133.0, -120.5]
    assert [float(row["Complexity"]) for row in rows] == [100.25, 113.0, 100.25]
    assert rows[0]["Accuracy"] == "0.97" and copied.count("\r\n") == 4


def test_text_that_looks_like_a_formula_is_copied_as_text(page: Driver) -> None:
    cells = ["=1+1", "-2", -2, 'a,"b"', None, 1e-9]
    result = ask(page, "arguments[0].map(v => cell(v))", cells)
    assert result == ["'=1+1", "'-2", "-2", '"a,""b"""', "", "1e-9"]


CONTRAST = (Path(__file__).parents[1] / "support" / "contrast.js").read_text()


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 360])
def test_all_text_has_contrast_and_fits(
    browser: Driver, file: Path, colours: str, width: int
) -> None:
    show(browser, file, width, colours)
    seen, poor = browser.execute_script(CONTRAST)
    assert seen > 200 and poor == []
    assert ask(browser, "document.documentElement.scrollWidth") <= width
    over = (
        "[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, svg') && "
        "e.getBoundingClientRect().right > innerWidth + 1).map(e => e.className || e.tagName)"
    )
    assert ask(browser, over) == []
    for table in browser.find_elements(By.TAG_NAME, "table"):
        caption, head, body = (table.find_element(By.TAG_NAME, t).rect for t in TABLE)
        assert caption["y"] + caption["height"] <= head["y"] + 1
        assert head["x"] == body["x"] and head["width"] == body["width"]
    assert browser.get_log("browser") == []


def test_colours_follow_the_reader(browser: Driver, file: Path) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    show(browser, file, colours="dark")
    dark = ask(browser, paper)
    show(browser, file, colours="light")
    light = ask(browser, paper)
    button = browser.find_element(By.ID, "theme")
    assert dark != light and button.get_attribute("aria-label") == "Switch to dark colours"
    button.click()
    wait_for(browser, lambda: ask(browser, paper) == dark and button.text == "Light")
    browser.refresh()
    settle(browser)
    assert ask(browser, paper) == dark  # remembered
    browser.find_element(By.ID, "theme").send_keys(Keys.ENTER)
    wait_for(browser, lambda: ask(browser, paper) == light)


def test_everything_is_reachable_by_keyboard(page: Driver) -> None:
    page.execute_script("document.activeElement.blur(); scrollTo(0, 0)")
    reached = []
    for _ in range(120):
        ActionChains(page).send_keys(Keys.TAB).perform()
        tag = ask(page, "document.activeElement.outerHTML.slice(0, 300)")
        if tag.startswith("<body"):
            break
        reached.append(tag)
    every = "a[href], button, summary, svg[tabindex], .scroll, pre, [role=tabpanel]"
    hidden = "[role=tab][aria-selected=false]"
    wanted = ask(
        page,
        f"[...document.querySelectorAll('{every}')].filter(e => !e.matches('{hidden}')).length",
    )
    assert "skip" in reached[0] and len(reached) >= wanted


def test_prints(page: Driver) -> None:
    printed = page.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert base64.b64decode(printed["data"]).startswith(b"%PDF")


def test_the_verdict_is_readable_without_javascript(browser: Driver, file: Path) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(file.as_uri())
        text = browser.find_element(By.TAG_NAME, "body").text
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert "Position matters: layer 1 uses it" in text and "need JavaScript" in text


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of a question with an answer, of long names and many classes."""
    draws = np.random.default_rng(0)
    candidate = {
        "name": "a network with a rather long name",
        "log_evidence": -1234567.0,
        "spread": 1234.5,
        "left_out": {"n": 10, "log_likelihood": -3.0},
        "reading": {"evidence": {"log_evidence": -1234567.0}, "test": {"accuracy": 0.987}},
    }
    names = [f"class number {k}" for k in range(12)]
    inputs = draws.random((7, 1, 8, 8))
    example = {
        "inputs": inputs.tolist(),
        "values": [0.1, 0.5, 0.9, 1.0, 0.9, 0.5, 0.1],
        "predicted": [names[1], *[names[0]] * 6],
        "label": names[0],
        "output": names[0],
    }
    question = {
        "name": "q",
        "question": "Which structure do the data support?",
        "headline": "Translation-invariant: position does not matter.",
        "verdict": "Translation-invariant: position does not matter. Probability 97 %. Margins.",
        "summary": {"certainty": "Probability 97 %.", "recommendation": "Use `--minutes 5`."},
        "claims": [
            {
                "holds": True,
                "probability": 0.97,
                "rival": "relaxed",
                "starts": 3,
                "evidence": {"mean": -12.0, "standard_error": 3.0},
            }
        ],
        "chosen": candidate["name"],
        "classes": names,
        "confusion": draws.integers(0, 99999, (12, 12)).tolist(),
        "shown_on": "held-out data",
        "worst": {
            "inputs": inputs.tolist(),
            "labels": names[:7],
            "predicted": names[1:8],
            "probability": [0.01] * 7,
        },
        "moved": {
            "steps": [-3, -2, -1, 0, 1, 2, 3],
            "unit": "pixels to the right",
            "examples": [example],
        },
        "not_tested": ["Rotations: not tested (`--groups p4`)."],
        "candidates": [candidate, {**candidate, "name": "another one"}],
    }
    document = {"kind": "image", "task": "classification", "questions": [question]}
    return write_page(document, tmp_path_factory.mktemp("answered") / "report.html")


def test_the_answer_comes_first_with_three_numbers(browser: Driver, answered: Path) -> None:
    show(browser, answered)
    section = browser.find_element(By.CSS_SELECTOR, ".question")
    words = section.text
    places = [
        words.index(part)
        for part in (
            *(
                "Translation-invariant",
                "Probability 97 %",
                "Use --minutes 5",
                "Your examples, moved",
            ),
            *("Which classes are confused", "Worst examples", "The networks that were compared"),
            "What was not tested",
        )
    ]
    assert places == sorted(places)
    assert len(section.find_elements(By.CSS_SELECTOR, ".key > div")) == 3
    bars = section.find_elements(By.CSS_SELECTOR, ".strip .meter")
    widths = [bar.size["width"] for bar in bars]
    assert len(bars) == 7 and widths[3] == max(widths) > 5 * widths[0] > 0
    assert "“class number 1”" in section.find_element(By.CSS_SELECTOR, ".strip em").text
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_of_an_answer_is_clipped(browser: Driver, answered: Path, width: int) -> None:
    show(browser, answered, width)
    overflow = browser.execute_script(
        "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    assert overflow <= 0
    clipped = browser.execute_script(
        "return [...document.querySelectorAll('.candidates, .strip, .facts')]"
        ".filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.className)"
    )
    assert clipped == []
    assert browser.get_log("browser") == []
