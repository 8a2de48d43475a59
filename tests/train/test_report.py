"""The report of a run: what it says, and that a browser really draws it and asks nobody for anything."""

import json
import math
import os
import select
import shutil
import signal
import subprocess
import time
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from macrobatch.errors import UsageError
from macrobatch.train.charts import Scale, moving_average, thinned_points
from macrobatch.train.record import numbers_in
from macrobatch.train.report import write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
SECONDS = 60  # that a browser may take to answer


def a_run(folder, steps=120, **changes):
    """A folder as a run leaves it."""
    folder.mkdir(exist_ok=True)
    time_parts = {"data": 0.01, "forward": 0.1, "backward": 0.2, "communication": 0.0, "update": 0.02, "other": 0.01}
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            row = {
                "step": step,
                "loss": 4 + 4 * math.exp(-step / 30) + 0.1 * math.sin(step * 7),
                "items": 990,
                "grad_norm": 1 + 40 / step,
                "lr": 1e-3 * (1 - step / (steps + 1)),
                "seconds": 0.34,
                "tokens_per_second": 3000 + step % 7,
                "micro_batches": 3,
                "tokens": 1000,
                "padded_tokens": 1100,
                "padded_in_order": 2000,
                "memory_bytes": 500 * 2**20 + step,
                "time": time_parts,
            }
            file.write(json.dumps(row | changes) + "\n")
    validations = [json.dumps({"step": step, "loss": 5.0 - step / steps}) for step in range(40, steps + 1, 40)]
    (folder / "validation.jsonl").write_text("\n".join(validations))
    settings = {"lr": 0.001, "model": {"layers": 4}, "data": ["/a/very/long/path" * 20]}
    run = {"settings": settings, "derived": {"parameters": "2,345"}, "versions": {"torch": "2.13"}}
    (folder / "run.json").write_text(json.dumps(run))
    return folder


class Text(HTMLParser):
    """The text of a page, and whether all its elements are closed in their order."""

    VOID = ("meta", "link", "input")

    def __init__(self, page):
        super().__init__()
        self.open, self.text = [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.text.append(data)


def text_of(folder):
    return " ".join(" ".join(Text(write_report(folder).read_text()).text).split())


# ------------------------------------------------------------------------------------------------------ what it says


def test_the_report_says_what_happened(tmp_path):
    text = text_of(a_run(tmp_path / "my run"))
    assert "my run 120 optimizer steps · 120k tokens · 0:41 minutes of training" in text
    assert "validation loss 4.000 best 4.000 at step 120" in text
    assert "padding saved 90.0% 9.1% left, 50.0% in the usual order" in text
    assert "peak memory 500 MiB" in text
    assert "backward 24.0 s 58.8%" in text
    assert "model.layers 4" in text
    assert "torch 2.13" in text
    for chart in ("Loss", "Gradient norm", "Throughput", "Padding", "Learning rate", "Memory"):
        assert chart in text


def test_terms_have_a_chart_where_there_are_several(tmp_path):
    assert "Terms" not in text_of(a_run(tmp_path / "one"))
    text = text_of(a_run(tmp_path / "several", losses={"policy": 1.25, "kl": None, "value": 0.5}))
    assert "Terms" in text
    assert "policy" in text
    assert "value" in text


def test_terms_are_events_of_their_own():
    row = {"step": 3, "loss": 1.75, "losses": {"policy": 1.25, "kl": math.nan, "value": 0.5}}
    assert numbers_in(row) == [("train/loss", 1.75), ("losses/policy", 1.25), ("losses/value", 0.5)]


def test_a_run_that_was_killed_has_a_report(tmp_path):
    folder = a_run(tmp_path / "run")
    (folder / "run.json").write_text('{"settings": ')
    (folder / "validation.jsonl").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 121, "lo')
    assert "120 optimizer steps" in text_of(folder)


def test_numbers_that_are_missing_are_left_out(tmp_path):
    folder = a_run(tmp_path / "run", grad_norm=None, memory_bytes=None, tokens=None, time=None)
    text = text_of(folder)
    assert "Gradient norm" not in text
    assert "peak memory" not in text
    assert "padding" not in text
    assert "Where the time went" not in text
    assert "Loss" in text


def test_a_run_of_one_step_has_a_report(tmp_path):
    assert "1 optimizer step 1,000 tokens" in text_of(a_run(tmp_path / "run", steps=1)).replace("· ", "")


def with_facts(folder, **facts):
    """A run whose run.json says that too."""
    known = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(known | facts))
    return folder


@pytest.mark.parametrize(
    ("status", "steps", "said"),
    [
        (0, 120, "finished"),
        (0, 300, "stopped early, after 120 of 300 steps"),
        (143, 300, "interrupted by SIGTERM after 120 of 300 steps"),
        (None, 300, "interrupted after 120 of 300 steps"),
    ],
)
def test_it_says_how_the_run_ended(tmp_path, status, steps, said):
    assert said in text_of(with_facts(a_run(tmp_path / "run"), status=status, identity={"steps": steps}))


def test_it_says_what_one_wants_to_know_later(tmp_path):
    facts = {"date": "2031-02-03 04:05", "command": "macrobatch train --lr 7", "sample": "once <b>upon"}
    settings = {"lr": 7.0, "seed": 0, "steps": 120}
    text = text_of(with_facts(a_run(tmp_path / "run"), **facts, settings=settings))
    for said in ("begun 2031-02-03 04:05", "$ macrobatch train --lr 7", "once <b>upon", "perplexity 54.60"):
        assert said in text
    changed = text.partition("Settings that differ from the default")[2].partition("All settings")[0]
    assert "lr 7.0" in changed
    assert "steps 120" in changed
    assert "seed" not in changed


def test_memory_does_not_fall_where_a_run_was_resumed(tmp_path):
    folder = a_run(tmp_path / "run", steps=4)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row, size in zip(rows, (500, 600, 300, 400), strict=True):
        row["memory_bytes"] = size * 2**20
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = write_report(folder).read_text().partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(data)[-1]["lines"][0]["points"] == [[1, 500], [2, 600], [3, 600], [4, 600]]


@pytest.mark.parametrize(
    ("out", "said"), [("gone/x.html", "no folder"), ("", "is a folder"), ("notes.txt", "not overwritten")]
)
def test_where_a_report_cannot_go(tmp_path, out, said):
    folder = a_run(tmp_path / "run")
    (tmp_path / "notes.txt").write_text("mine")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError, match=said):
        write_report(folder, out=tmp_path / out)
    with pytest.raises(UsageError, match="there is no folder"):
        write_report(tmp_path / "nowhere")
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_numbers_of_ones_own(tmp_path):
    """Have a chart and a tile in a report, and a row where runs are compared, of which another may not have them."""
    own, plain = a_run(tmp_path / "own"), a_run(tmp_path / "plain")
    rows = [{"step": step, "loss": 5.0, "perplexity": 148.4, "<i>accuracy": step / 256} for step in (0, 64)]
    (own / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(own).read_text()
    assert "&lt;i&gt;accuracy</span><b>0.25</b><small>of the validation at step 64" in page
    assert "<i>accuracy" not in page
    both = write_report(own, plain).read_text()
    assert "<th>&lt;i&gt;accuracy</th><td>0.25</td><td>-</td>" in both


def test_several_runs_in_one_report(tmp_path):
    one, other = a_run(tmp_path / "one"), a_run(tmp_path / "<other>", steps=60)
    with_facts(other, settings={"lr": 0.002, "model": {"layers": 4}, "data": ["/a/very/long/path" * 20]})
    path = write_report(one, other)
    assert path == tmp_path / "report.html"
    text = " ".join(" ".join(Text(path.read_text()).text).split())
    assert "one · <other>" in text
    assert "steps 120 60" in text
    assert "--lr 0.001 0.002" in text
    assert "model.layers" not in text  # it is the same
    assert "<other>" not in path.read_text()
    assert write_report(one, other, out=tmp_path / "x.html") == tmp_path / "x.html"


def test_settings_do_not_hide_the_numbers_of_the_same_name(tmp_path):
    runs = [
        with_facts(a_run(tmp_path / str(n), steps=n), settings={"steps": set_}) for n, set_ in ((80, None), (60, 60))
    ]
    text = " ".join(" ".join(Text(write_report(*runs).read_text()).text).split())
    assert "80 60 steps 80 60 " in text  # after the names of the runs
    assert "--steps default 60" in text


def test_settings_without_effect_are_no_difference(tmp_path):
    """A vocabulary that was not trained has no size that anybody chose."""
    sizes = {"one": 300, "other": 4096, "third": 4096}
    runs = [with_facts(a_run(tmp_path / name), settings={"vocabulary_size": size}) for name, size in sizes.items()]
    for run in runs[1:]:
        with_facts(run, unused=["vocabulary_size"])
        assert "vocabulary_size" not in text_of(run).partition("All settings")[0]
    assert "vocabulary-size" not in " ".join(Text(write_report(*runs).read_text()).text)


def test_a_folder_without_steps_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no steps of a run"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_settings_cannot_become_a_part_of_the_page(tmp_path):
    folder = a_run(tmp_path / "<b>run")
    attack = "</td><script>throw 1</script>&amp;"
    (folder / "run.json").write_text(json.dumps({"settings": {attack: attack}}))
    page = write_report(folder).read_text()
    assert "<script>throw" not in page
    assert "<b>run" not in page
    assert attack in " ".join(Text(page).text)


def test_the_same_run_has_the_same_report(tmp_path):
    folder = a_run(tmp_path / "run")
    assert write_report(folder).read_bytes() == write_report(folder).read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == [
        "metrics.jsonl",
        "report.html",
        "run.json",
        "validation.jsonl",
    ]


def test_a_long_run_has_a_small_report(tmp_path):
    assert write_report(a_run(tmp_path / "run", steps=20_000)).stat().st_size < 500_000


# ------------------------------------------------------------------------------------------------------ charts

NUMBERS = st.floats(-1e6, 1e6, allow_subnormal=False)


@given(st.lists(NUMBERS, min_size=30, max_size=200), st.integers(4, 30))
def test_thinning_keeps_peaks_and_ends(numbers, most):
    points = list(enumerate(numbers))
    kept = thinned_points(points, most)
    assert kept == sorted(set(kept) & set(points))
    assert {points[0], points[-1]} <= set(kept)
    assert len(kept) <= most + 4
    heights = [height for _, height in kept]
    assert (min(heights), max(heights)) == (min(numbers), max(numbers))


@given(st.lists(NUMBERS, min_size=60, max_size=300))
def test_smoothing_stays_between_the_extremes(numbers):
    points = moving_average(list(enumerate(numbers)))
    assert [step for step, _ in points] == list(range(len(numbers)))
    slack = 1e-6 * max(map(abs, numbers)) + 1e-9
    assert all(min(numbers) - slack <= value <= max(numbers) + slack for _, value in points)


def test_the_last_number_alone_does_not_bend_a_smooth_line():
    """At the beginning it does: there a loss falls steeply."""
    numbers = [5.0] * 120
    numbers[0], numbers[-1] = 9.0, 1.0
    heights = [value for _, value in moving_average(list(enumerate(numbers)))]
    assert heights[0] == 9
    assert 3.5 < heights[-1] < 5


@given(NUMBERS, st.floats(1e-6, 1e6))
def test_ticks_are_on_the_axis_and_told_apart(low, width):
    scale = Scale(low, low + width)
    if scale.share(scale.high) != 1 or width < 1e-5 * abs(low):
        return  # beyond what a float can tell
    ticks = scale.ticks()
    assert 3 <= len(ticks) <= 11
    assert all(-1e-6 <= scale.share(tick) <= 1 + 1e-6 for tick in ticks)


def test_a_narrow_logarithmic_scale_has_ticks_too():
    scale = Scale(6.9, 8.85, log=True)
    assert [scale.label(tick) for tick in scale.ticks()] == [
        "7.0",
        "7.2",
        "7.4",
        "7.6",
        "7.8",
        "8.0",
        "8.2",
        "8.4",
        "8.6",
        "8.8",
    ]


@pytest.mark.parametrize("scale", [Scale(0, 1), Scale(4.02, 8.3), Scale(0, 0.00105), Scale(0, 44_000), Scale(1, 301)])
def test_labels_tell_ticks_apart(scale):
    labels = [scale.label(tick) for tick in scale.ticks()]
    assert len(set(labels)) == len(labels) >= 3
    assert max(map(len, labels)) <= 6


# ------------------------------------------------------------------------------------------------------ a browser


class Browser:
    """A real one without a window, spoken to through a pipe in the DevTools protocol."""

    def __init__(self, folder):
        to_browser, self._commands = os.pipe()
        self._answers, from_browser = os.pipe()
        options = [
            "--headless",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--remote-debugging-pipe",
        ]
        options += ["--disable-background-networking", f"--user-data-dir={folder}"]
        if os.geteuid() == 0:
            options.append("--no-sandbox")
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "bash", CHROMIUM, *options],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._received, self._number, self._session, self.events = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._message()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _message(self):
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._answers], [], [], max(deadline - time.monotonic(), 0))
            assert ready, "the browser does not answer"
            more = os.read(self._answers, 2**20)
            assert more, "the browser has gone"
            self._received += more
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def open(self, url):
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._message())

    def value(self, script):
        """What a line of JavaScript comes to on the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def size(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def scheme(self, name):
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def point_at(self, x, y):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def requests(self):
        sent = (event for event in self.events if event.get("method") == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in sent]

    def complaints(self):
        """Whatever the browser noted in its console."""
        methods = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [event["params"] for event in self.events if event.get("method") in methods]

    def close(self):
        try:
            self._session = None
            self.call("Browser.close")
            self._process.wait(10)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            os.killpg(self._process.pid, signal.SIGKILL)  # its own session: nobody else is in it
            self._process.wait()
        os.close(self._commands)
        os.close(self._answers)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("no browser")
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture
def page(browser, tmp_path):
    browser.size(1200, 900)
    report = write_report(a_run(tmp_path / "run"))
    browser.open(report.as_uri())
    return report


LINES = """[...document.querySelectorAll(".chart .line")].filter((line) => line.getClientRects().length).map((line) => {
    const box = line.getBoundingClientRect(), chart = line.closest(".plot").getBoundingClientRect();
    return {
        width: box.width, height: box.height, length: line.getTotalLength(), stroke: getComputedStyle(line).stroke,
        points: line.getAttribute("d").split("L").length,
        inside: box.left >= chart.left - 1 && box.right <= chart.right + 1
             && box.top >= chart.top - 1 && box.bottom <= chart.bottom + 1,
    };
})"""


def test_the_charts_are_really_drawn(browser, page):
    lines = browser.value(LINES)
    assert len(lines) == 3 + 1 + 1 + 2 + 1 + 1  # loss has three, padding two
    for line in lines:
        assert line["width"] > 200
        assert line["points"] >= 3
        assert line["length"] > 100
        assert line["inside"]
        assert line["stroke"] not in ("none", "rgba(0, 0, 0, 0)")
    assert lines[0]["height"] > 100
    assert browser.value('document.querySelectorAll(".up span").length') >= 6 * 3


def test_a_single_validation_can_be_seen(browser, tmp_path):
    folder = a_run(tmp_path / "run")
    (folder / "validation.jsonl").write_text('{"step": 120, "loss": 5.0}\n')
    browser.size(1200, 900)
    browser.open(write_report(folder).as_uri())
    dots = browser.value(
        """[...document.querySelectorAll(".first .dots.validation")].map((dot) => [
            getComputedStyle(dot).strokeWidth, getComputedStyle(dot).strokeLinecap, dot.getAttribute("d"),
        ])"""
    )
    assert len(dots) == 1
    assert dots[0][:2] == ["6px", "round"]
    assert dots[0][2].startswith("M1000.0 ")


def test_the_scale_can_be_switched(browser, page):
    frames = '[...document.querySelector(".chart").querySelectorAll(".frame")]'
    heights = f"JSON.stringify({frames}.map((frame) => frame.offsetHeight))"
    first, second = json.loads(browser.value(heights))
    assert first > 100
    assert second == 0
    browser.value('document.querySelector(".switch input").click()')
    assert json.loads(browser.value(heights)) == [0, first]
    assert all(line["inside"] and line["width"] > 100 for line in browser.value(LINES))


def test_no_request_and_no_complaint(browser, page):
    assert browser.requests() == [page.as_uri()]
    assert browser.complaints() == []


def test_the_check_would_see_a_request_and_a_complaint(browser, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<img src='http://127.0.0.1:9/picture.png'><script>throw new Error('seen')</script>")
    browser.open(page.as_uri())
    assert "http://127.0.0.1:9/picture.png" in browser.requests()
    assert "seen" in json.dumps(browser.complaints())


def test_the_page_forbids_requests_itself(browser, page):
    planted = page.with_name("planted.html")
    planted.write_text(page.read_text().replace("<main>", "<main><img src='http://127.0.0.1:9/picture.png'>"))
    browser.open(planted.as_uri())
    assert "Content Security Policy" in json.dumps(browser.complaints())
    failed = [event["params"] for event in browser.events if event.get("method") == "Network.loadingFailed"]
    assert [failure["blockedReason"] for failure in failed] == ["csp"]


def test_the_pointer_reads_the_numbers(browser, page):
    assert browser.value('document.querySelector(".readout").hidden')
    box = browser.value('JSON.parse(JSON.stringify(document.querySelector(".plot").getBoundingClientRect()))')
    browser.point_at(box["right"] - 1, box["top"] + 50)
    assert browser.value('document.querySelector(".readout").hidden') is False
    text = browser.value('document.querySelector(".readout").textContent')
    loss = json.loads((page.parent / "metrics.jsonl").read_text().splitlines()[-1])["loss"]
    step, train, *_, validation = text.splitlines()
    assert (step, validation) == ("step 120", "validation  4")
    assert float(train.removeprefix("train  ")) == pytest.approx(loss, abs=1e-4)
    browser.point_at(2, 2)
    assert browser.value('document.querySelector(".readout").hidden')


@pytest.mark.parametrize("width", [320, 400, 800, 2000])
def test_nothing_sticks_out_on_any_screen(browser, page, width):
    browser.size(width, 800)
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert all(line["inside"] and line["width"] > 100 for line in browser.value(LINES))


def test_light_and_dark(browser, page):
    colours = {}
    for scheme in ("light", "dark"):
        browser.scheme(scheme)
        colours[scheme] = browser.value("getComputedStyle(document.body).backgroundColor")
    assert colours["light"] != colours["dark"]
    assert browser.value("getComputedStyle(document.body).color") != colours["dark"]
