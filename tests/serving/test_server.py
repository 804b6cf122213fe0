"""Test the local page of a run: its requests, and the page itself in headless Chromium."""

import base64
import http.client
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select
from selenium.webdriver.support.wait import WebDriverWait

import symrazor as sr
from symrazor.runs.predictions import predict
from symrazor.runs.writing import DOCUMENT, Owner, seal
from symrazor.serving.server import HOST, TOKEN_HEADER, PageServer, serve
from symrazor.serving.session import Session

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
DRIVER = shutil.which("chromedriver") or ""
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no chromium with its chromedriver on this machine"
)
TIMEOUT_SECONDS = 60
DRAWS = np.random.default_rng(0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a run on images, and one on a table."""
    folder = tmp_path_factory.mktemp("runs")
    x, y = sr.data.digits("train")
    pictures = sr.discover(x[:60], y[:60], epochs=1, starts=2)
    rows = [f"{a},{'UR'[k % 2]},{b}" for k, (a, b) in enumerate(DRAWS.normal(size=(60, 2)))]
    (folder / "houses.csv").write_text("area,town,price\n" + "\n".join(rows))
    table = sr.discover(folder / "houses.csv", epochs=1, starts=2)
    return {"image": pictures.save(folder / "a"), "vector": table.save(folder / "b")}


class Client:
    """A client of a server in a thread."""

    def __init__(self, run: Path) -> None:
        self.session = Session(run)
        self.server = PageServer(self.session)
        self.port, self.token = self.server.server_address[1], self.server.token
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def request(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=TIMEOUT_SECONDS)
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {TOKEN_HEADER: self.token, **headers})
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, dict(response.getheaders()), content

    def post(self, path: str, body: Any, status: int = 200) -> Any:
        found, _, content = self.request("POST", path, body)
        assert found == status, content
        return json.loads(content)


@pytest.fixture(scope="module", params=["image", "vector"])
def client(request: pytest.FixtureRequest, runs: dict[str, Path]) -> Iterator[Client]:
    client = Client(runs[request.param])
    yield client
    client.server.shutdown()
    client.server.server_close()


def test_the_page_has_a_strict_policy_and_loads_nothing(client: Client) -> None:
    status, headers, page = client.request("GET", f"/{client.token}")
    assert status == 200 and b"http://" not in page.replace(b"http://www.w3.org", b"")
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert client.request("GET", "/discover.json")[0] == 404
    assert client.request("GET", "/../run.json")[0] == 404


def test_only_the_page_on_this_machine_may_ask(client: Client) -> None:
    assert client.server.server_address[0] == "127.0.0.1"
    body = {"sample": 0, "move": {}}
    assert client.request("GET", f"/{client.token}", Host="attacker.example")[0] == 403
    assert client.request("GET", "/")[0] == client.request("GET", "/guess")[0] == 404
    assert client.request("POST", "/predict", body, Host="attacker.example")[0] == 403
    assert client.request("POST", "/predict", body, **{TOKEN_HEADER: "guess"})[0] == 403
    assert client.request("POST", "/nothing", body)[0] == 404
    assert client.request("POST", "/open", {"x": 1}, **{"Content-Length": str(1 << 40)})[0] == 413
    for length in ("-1", "x", "9" * 5000):  # a negative one would read without a limit
        assert client.request("POST", "/open", **{"Content-Length": length})[0] == 411


def test_wrong_requests_are_explained(client: Client) -> None:
    assert "No sample 99" in client.post("/predict", {"sample": 99, "move": {}}, 400)["error"]
    wrong = {"sample": 0, "move": {"fly": 1}}
    assert "Unknown move 'fly'" in client.post("/predict", wrong, 400)["error"]
    name = next(iter(client.session.controls))
    wrong = {"sample": 0, "move": {name: 1e9}}
    assert f"{name} must be from" in client.post("/predict", wrong, 400)["error"]
    content = base64.b64encode(b"nothing").decode()
    for name in ("a.npz", "../../etc/passwd", "a.png"):
        files = {"files": [{"name": name, "content": content}]}
        message = client.post("/open", files, 400)["error"]
        assert "/tmp" not in message and message
    assert client.post("/open", {"files": []}, 400)["error"] == "No file was dropped."


def test_wrong_runs_and_ports_are_explained(runs: dict[str, Path], tmp_path: Path) -> None:
    with PageServer(Session(runs["vector"])) as server:
        port = server.server_address[1]
        with pytest.raises(ValueError, match=rf"Cannot use port {port}: .* choose another"):
            PageServer(Session(runs["vector"]), port)
    with pytest.raises(ValueError, match="port must be from 0 to"):
        serve(runs["vector"], port=70_000)
    folder = shutil.copytree(runs["vector"], tmp_path / "run")
    document = json.loads((folder / DOCUMENT).read_text())
    for key, value in (("moved", [1]), ("moved", {"examples": [{"inputs": [{}]}]}), ("worst", 7)):
        changed = [{**document["questions"][0], key: value}]
        (folder / DOCUMENT).write_text(json.dumps({**document, "questions": changed}))
        seal(folder, Owner("discover"), [DOCUMENT, "architecture.json", "network.safetensors"])
        with pytest.raises(ValueError, match=f"Cannot read {folder}"):
            Session(folder)


def test_predictions_are_those_of_the_command(runs: dict[str, Path], tmp_path: Path) -> None:
    client = Client(runs["image"])
    x = sr.data.digits("test")[0][:5]
    np.savez(tmp_path / "new.npz", x=x.numpy())
    content = base64.b64encode((tmp_path / "new.npz").read_bytes()).decode()
    answer = client.post("/open", {"files": [{"name": "new.npz", "content": content}]})
    expected = predict(runs["image"], tmp_path / "new.npz")
    values = [[o["value"] for o in row["outputs"]] for row in answer["predictions"]]
    assert torch.allclose(torch.tensor(values).double(), expected.values.double())
    assert [row["label"] for row in answer["predictions"]] == expected.labels
    moved = client.post("/predict", {"sample": 1, "move": {"right": 2}})["predictions"]
    np.savez(tmp_path / "moved.npz", x=torch.stack([x[1], x[1].roll(2, -1)]).numpy())
    expected = predict(runs["image"], tmp_path / "moved.npz")
    values = [[o["value"] for o in row["outputs"]] for row in moved]
    assert torch.allclose(torch.tensor(values).double(), expected.values.double(), atol=1e-6)
    sweep = client.post("/sweep", {"sample": 1, "move": {}, "control": "right"})
    first = sweep["curves"][0]
    k = expected.classes.index(first["name"])
    at = [sweep["at"].index(0), sweep["at"].index(2)]
    assert [first["values"][i] for i in at] == pytest.approx(expected.values[:, k].tolist())
    client.server.shutdown()
    client.server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage".split():
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


def _wait(browser: webdriver.Chrome, script: str) -> None:
    wait = WebDriverWait(browser, TIMEOUT_SECONDS, poll_frequency=0.05)
    wait.until(lambda _: browser.execute_script(f"return {script}"))


def _move(browser: webdriver.Chrome, name: str, value: float) -> None:
    browser.execute_script(
        "const node = document.getElementById(arguments[0]); node.value = arguments[1];"
        "node.dispatchEvent(new Event('input', { bubbles: true }));",
        f"move-{name}",
        str(value),
    )
    _wait(browser, "document.documentElement.dataset.ready === String(asked)")


@needs_browser
def test_the_page_moves_examples_and_takes_files(
    browser: webdriver.Chrome, client: Client, tmp_path: Path
) -> None:
    browser.get_log("browser")
    browser.get(client.server.address)
    _wait(browser, "document.querySelectorAll('#outputs .lane').length")
    sentence = browser.find_element(By.CSS_SELECTOR, "#outputs .verdict")
    assert "does the output follow" in sentence.text
    name = client.session.describe()["controls"][0]["name"]
    _move(browser, name, 2)
    sentence = browser.find_element(By.CSS_SELECTOR, "#outputs .verdict")
    assert sentence.text.startswith(("The output", "The prediction changes"))
    assert browser.execute_script("return document.querySelectorAll('#curve path.line').length") > 0
    Select(browser.find_element(By.ID, "sample")).select_by_index(1)
    browser.execute_script("document.getElementById('reset').click()")
    _wait(browser, "document.documentElement.dataset.ready === String(asked)")
    if client.session.kind == "image":
        np.savez(tmp_path / "new.npz", x=sr.data.digits("test")[0][:3].numpy())
        file = tmp_path / "new.npz"
    else:
        file = tmp_path / "new.csv"
        file.write_text("town,area\nU,1\nR,2\n<b>,0.5\n")
    browser.find_element(By.ID, "files").send_keys(str(file))
    _wait(browser, "document.querySelectorAll('#table tbody tr').length === 3")
    message = browser.find_element(By.ID, "message").text
    assert message.startswith("3 samples.")
    assert ("('<b>')" in message) == (client.session.kind == "vector")
    for width in (360, 1280):
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.get_log("browser") == []
    (tmp_path / "wrong.npz").write_bytes(b"nothing")
    browser.find_element(By.ID, "files").send_keys(str(tmp_path / "wrong.npz"))
    _wait(browser, "document.getElementById('message').className.includes('bad')")
    assert "wrong.npz" in browser.find_element(By.ID, "message").text
