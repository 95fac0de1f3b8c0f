"""The pages of plans and runs in a real browser: what can be chosen shows something; nothing is fetched."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forecast_samples import with_forecast
from model_configs import model_config
from plan_graphs import ppo, request
from playwright import sync_api as playwright
from playwright.sync_api import Browser, Page, Playwright, sync_playwright
from run_files import DONE, reward_rows, write_full_run, write_run

from hflow.launch.results.compare import compare
from hflow.launch.results.runs import read_report
from hflow.launch.results.watch import RunPage, serve_page
from hflow.planner.compile import compile_plan
from hflow.planner.plan.forecast import Limit, Remedy
from hflow.report.html.plan import render_page
from hflow.report.html.run import render_compare_page, render_run_page
from hflow.runtime.records.activity import Activity, OngoingWork, write_activity
from hflow.runtime.records.trace import Trace
from hflow.runtime.saving.run_directory import RunDirectory
from hflow.shapes.model_shape import ModelShape
from hflow.workers.interface import Span

ROOT = Path(__file__).parents[2]

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
SHAPE = ModelShape("qwen2", 4, 128, 256, 8, 4, 16, 512, is_tied=True, has_qkv_bias=True)


def find_browser(playwright: Playwright) -> str:
    """A browser's program; without one the test is skipped, or fails where CI=true."""
    found = next(filter(None, map(shutil.which, NAMES)), None) or playwright.chromium.executable_path
    if not Path(found).exists():
        reason = f"no browser: install {' or '.join(NAMES)}, or run `playwright install chromium`"
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=find_browser(playwright), args=list(ARGS))
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PPO with training, reference and engines apart, so that all kinds of edges and ways occur."""
    models = {
        "actor": model_config("d2t2p1", "d2t2", "train", "gen"),
        "critic": model_config("d4", group="train"),
        "ref": model_config("d4", group="ref"),
    }
    groups = {"train": (0, 1, 2, 3), "gen": (8, 9, 10, 11), "ref": (4, 5, 6, 7)}
    asked = request(
        "h100-2x8",
        batch=256,
        models=models,
        shapes=dict.fromkeys(models, SHAPE),
        groups=groups,
        max_staleness=1,
    )
    made = tmp_path_factory.mktemp("page") / "plan.html"
    plan = with_forecast(compile_plan(ppo(), asked))
    remedy = Remedy((("schedule.max_staleness", 2),), 0.25)
    limits = (Limit("ref is idle for 90 % of a step", (remedy,), ("ref",)),)
    plan = replace(plan, forecast=replace(plan.forecast, limits=limits))
    made.write_text(render_page(plan), encoding="utf-8")
    return made


@contextmanager
def opened(browser: Browser, file: Path, **options: Any) -> Iterator[Page]:
    """The opened page. At the end: no error on its console, and nothing fetched but the file itself."""
    errors: list[str] = []
    fetched: list[str] = []
    page = browser.new_page(
        **{"viewport": {"width": 1440, "height": 900}, "color_scheme": "light", **options}
    )
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda asked: fetched.append(asked.url))
    page.goto(file.as_uri())
    yield page
    page.close()
    assert errors == []
    assert [url for url in fetched if not url.startswith("data:")] == [file.as_uri()]


@pytest.fixture
def page(browser: Browser, file: Path) -> Iterator[Page]:
    with opened(browser, file) as page:
        yield page


@pytest.fixture(scope="module")
def report_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with refusals, a restart, and samples of two versions."""
    folder = tmp_path_factory.mktemp("report")
    made = folder / "report.html"
    made.write_text(render_run_page(read_report(str(write_full_run(folder / "run")))), encoding="utf-8")
    return made


def end_of(page: Page, edge: str) -> tuple[float, float]:
    """A point on an edge's line shortly before its arrow, where no other edge runs; in the window."""
    x, y = page.locator(edge).evaluate(
        """edge => {
            const path = edge.querySelector("path:not(.reach)");
            edge.scrollIntoView({block: "center", behavior: "instant"});
            const before = path.getPointAtLength(path.getTotalLength() - 9);
            const at = before.matrixTransform(path.getScreenCTM());
            return [at.x, at.y];
        }"""
    )
    return x, y


def colour(page: Page) -> str:
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_the_theme_is_the_system_s_until_it_is_chosen(page: Page, tmp_path: Path) -> None:
    light = colour(page)
    page.get_by_role("button", name="Use the dark theme").click()
    dark = colour(page)
    assert light != dark
    page.get_by_role("button", name="Use the light theme").click()
    assert colour(page) == light
    page.emulate_media(color_scheme="dark")
    assert colour(page) == light
    shot = page.screenshot(path=tmp_path / "plan.png", full_page=True)
    assert shot.startswith(b"\x89PNG")
    assert (tmp_path / "plan.png").stat().st_size > 100_000


def test_a_node_shows_what_it_reads_and_where_it_runs(page: Page) -> None:
    panel = page.locator("#panel")
    page.locator('.node[data-ref="node:gae"]').hover()
    assert not panel.is_visible(), "pointing marks, choosing opens"
    page.locator('.node[data-ref="node:actor_train"] .card-name').click()
    page.mouse.move(2, 2)
    text = panel.inner_text()
    assert "actor@train, d2t2p1 on devices 0-3" in text
    assert "prox_logprobs" in text
    assert "backward" in text
    assert "15 s" in text
    faded = page.locator('.node[data-ref="node:score"]').evaluate("node => getComputedStyle(node).opacity")
    assert float(faded) < 0.5
    page.keyboard.press("Escape")
    assert not panel.is_visible()
    page.locator('.pick[data-ref="replica:actor@gen"]').click()
    assert "generates with the weights of actor" in panel.inner_text()
    panel.get_by_role("button", name="Close the details").click()
    assert not panel.is_visible()


def test_the_graph_can_be_used_by_keyboard(page: Page) -> None:
    node = page.locator('.node[data-ref="node:critic_train"]')
    node.focus()
    page.keyboard.press("Enter")
    assert node.get_attribute("aria-pressed") == "true"
    link = page.locator('#panel button[data-ref^="edge:"]').first
    link.focus()
    page.keyboard.press("Enter")
    assert "→" in page.locator("#panel h3").inner_text()


def test_an_edge_shows_its_bytes_and_its_routes(page: Page) -> None:
    edge = '.edge.kind-data[data-src="gae"][data-dst="actor_train"]'
    page.mouse.click(*end_of(page, edge))
    page.mouse.move(2, 2)
    text = page.locator("#panel").inner_text()
    assert "by any split" in text
    assert "scatter" in text
    page.get_by_role("button", name="Show on the devices").click()
    assert page.locator("#arcs path").count() > 0
    assert page.locator(".device.sends").count() > 0


def test_weights_go_from_training_to_engines(page: Page) -> None:
    edge = '.edge.kind-weights[data-src="actor_train"][data-dst="actor_gen"]'
    page.mouse.click(*end_of(page, edge))
    page.mouse.move(2, 2)
    text = page.locator("#panel").inner_text()
    assert "model.embed_tokens.weight" in text
    assert "at most 2 steps before" in text
    receivers = page.locator(".device.receives").evaluate_all("all => all.map(one => one.dataset.ref)")
    assert receivers == [f"device:{i}" for i in (8, 9, 10, 11)]
    senders = page.locator(".device.sends").evaluate_all("all => all.map(one => one.dataset.ref)")
    assert senders == [f"device:{i}" for i in (0, 1, 2, 3)]
    page.keyboard.press("Escape")
    page.locator("#devices .chip").last.click()
    page.locator('.device[data-ref="device:9"]').hover()
    assert "device 9" in page.locator("#readout").inner_text()
    assert page.locator(".device.receives").count() == 1


def test_kinds_of_edges_can_be_hidden(page: Page) -> None:
    order = page.locator(".edge.kind-order").first
    assert not order.is_visible()
    page.locator('[data-edges="order"].toggle').click()
    assert order.is_visible()
    page.locator('[data-edges="data"].toggle').click()
    assert not page.locator(".edge.kind-data").first.is_visible()


def test_a_replica_lights_up_its_devices_and_heads(page: Page) -> None:
    page.locator('.pick[data-ref="replica:actor@train"]').hover()
    lit = page.locator(".device.is-in").evaluate_all("all => all.map(one => one.dataset.ref)")
    assert lit == [f"device:{i}" for i in range(4)]
    heads = page.locator(".device.is-head").evaluate_all("all => all.map(one => one.dataset.ref)")
    assert heads == ["device:0", "device:2"], "contract: DP2 TP2 has its heads on 0 and 2"
    assert "d1 t0 p0" in page.locator('.device[data-ref="device:2"]').inner_text()
    page.locator('.device[data-ref="device:3"]').hover()
    text = page.locator("#readout").inner_text()
    assert "d1 t1 p0" in text
    assert "in critic_train" in text or "in actor_train" in text
    page.locator('.device[data-ref="device:0"]').focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.ref") == "device:1"


def test_the_schedule_and_its_words(page: Page) -> None:
    bar = page.locator(".bar.critical").first
    bar.hover()
    assert "on the critical cycle" in page.locator("#tip").inner_text()
    page.get_by_role("button", name="What is critical cycle?").first.focus()
    assert "sets the period" in page.locator("#tip").inner_text()


def test_a_phase_opens_its_values(page: Page) -> None:
    phase = page.locator(".phase.peak").first
    assert not phase.locator(".items").is_visible()
    phase.locator("summary").click()
    items = phase.locator(".items").inner_text()
    assert "activations" in items
    assert "GiB" in items


def test_the_routing_table_is_found_by_key(page: Page) -> None:
    page.locator("#routing summary").click()
    page.locator("#routing-find").fill("actor@train, 1, 1, 0")
    rows = page.locator("#routing-rows li")
    assert rows.count() == 1
    assert rows.inner_text().split() == ["(actor@train,", "1,", "1,", "0)", "→", "3"]


@pytest.mark.parametrize(
    ("width", "scheme"), [(1440, "dark"), (390, "light"), pytest.param(900, "light", marks=pytest.mark.long)]
)
def test_details_open_beside_what_was_chosen(browser: Browser, file: Path, width: int, scheme: str) -> None:
    """Whole in the window, at its right or bottom edge, and not on top of what was chosen."""
    options = {"viewport": {"width": width, "height": 860}, "color_scheme": scheme}
    with opened(browser, file, **options) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        chosen = ('.node[data-ref="node:critic_train"]', '.bar[data-ref="node:actor_train"]', ".link-node")
        for name in chosen:
            one = page.locator(name).first
            one.scroll_into_view_if_needed()
            before = one.bounding_box()
            one.click()
            panel, after = page.locator("#panel").bounding_box(), one.bounding_box()
            assert panel is not None
            assert before is not None
            assert after is not None
            assert panel["x"] >= 0
            assert panel["x"] + panel["width"] <= width
            assert panel["y"] >= 0
            assert panel["y"] + panel["height"] <= 860
            is_beside = (
                after["x"] + after["width"] <= panel["x"] or after["y"] + after["height"] <= panel["y"]
            )
            assert is_beside, name
            if width == 1440:
                assert after["y"] == pytest.approx(before["y"], abs=3), "it stays where it was in the window"
            assert page.evaluate("panel.scrollWidth <= panel.clientWidth")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            page.keyboard.press("Escape")


def test_wide_parts_say_so_on_a_phone(browser: Browser, file: Path) -> None:
    sign = "part => getComputedStyle(part, '::before').content"
    for width, is_wide in ((1440, False), (390, True)):
        with opened(browser, file, viewport={"width": width, "height": 844}) as page:
            page.wait_for_timeout(50)
            for name in (".canvas", ".gantt-box"):
                assert ("scroll sideways" in page.locator(name).first.evaluate(sign)) is is_wide


def test_models_have_shades_and_idle_devices_advice(page: Page) -> None:
    weights = page.locator(".phase.peak .track i.m1")
    tips = weights.evaluate_all("all => all.map(one => one.dataset.tip)")
    colours = weights.evaluate_all("all => all.map(one => getComputedStyle(one).backgroundColor)")
    colour_of = {
        tip.partition("@")[0]: colour for tip, colour in zip(tips, colours, strict=True) if "@" in tip
    }
    assert set(colour_of) == {"actor", "critic", "ref"}
    assert len(set(colour_of.values())) == 3
    advice = page.locator(".lane-advice")
    assert advice.inner_text() == (
        "ref is idle for 90 % of a step. With schedule.max_staleness=2 a step takes 25 % less."
    )
    assert "Weights of lag 1 are the newest" in page.locator("#graph").inner_text()


def test_without_a_browser_ci_fails_and_others_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        class chromium:
            executable_path = "nowhere/chrome"

    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("CI", "")
    with pytest.raises(pytest.skip.Exception, match="install chromium"):
        find_browser(Nothing)  # type: ignore[arg-type]
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="install chromium"):
        find_browser(Nothing)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("width", "scheme"), [(1440, "light"), (400, "light"), pytest.param(1440, "dark", marks=pytest.mark.long)]
)
def test_the_page_of_a_run_fits_and_reads_its_curves(
    browser: Browser, report_file: Path, width: int, scheme: str
) -> None:
    options = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
    with opened(browser, report_file, **options) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        edges = page.locator("nav a").evaluate_all("all => all.map(one => one.getBoundingClientRect().right)")
        assert max(edges) <= width, "every section can be reached"
        assert "Done after 20 steps" in page.locator(".verdict").inner_text()
        reward = page.locator('.curve[data-metric="actor_gen/reward"]')
        assert reward.locator("output").inner_text() == "0.6"
        plot = reward.locator(".plot svg")
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
        assert reward.locator("output").inner_text() == "0.3 at step 3"
        page.mouse.move(2, 2)
        assert reward.locator("output").inner_text() == "0.6"
        widths = page.locator(".gantt .bar").evaluate_all("all => all.map(one => one.offsetWidth)")
        assert min(widths) > 0


def test_samples_of_a_run_are_coloured_and_found(browser: Browser, report_file: Path) -> None:
    with opened(browser, report_file) as page:
        shade = page.locator(".sample .shade")
        colours = "all => all.map(one => getComputedStyle(one).backgroundColor)"
        page.locator("[data-colour=version]").click()
        by_version = shade.evaluate_all(colours)
        assert by_version[0] == by_version[1] != by_version[2], "samples of two versions"
        assert page.locator("#scale-low").inner_text() == "version 0"
        assert page.locator("#scale-high").inner_text() == "1"
        page.locator("[data-colour=advantage]").click()
        assert len(set(shade.evaluate_all(colours))) == 4
        first = page.locator(".sample").first.locator(".tok")
        assert len(set(first.evaluate_all(colours))) == 1, "tokens have no advantage of their own"
        page.locator('[data-colour="log-prob"]').click()
        assert len(set(first.evaluate_all(colours))) == 3
        assert page.locator(".sample").first.locator(".turn.trained .said").inner_text() == "42<eos>"
        page.locator("#samples-find").fill("gen/9 17+25")
        assert page.locator(".sample:visible").count() == 1
        assert page.locator("#samples-count").inner_text() == "1 of 4 shown"
        page.locator("#others summary").click()
        page.locator("#others-find").fill("accepted")
        assert page.locator("#others .curve:visible").count() == 1
        page.locator("#others-find").fill("nothing")
        assert page.locator("#others .curve:visible").count() == 0
        assert "the checkpoint of step 1" in page.locator("#losses").inner_text()


@pytest.mark.parametrize(("width", "scheme"), [(1440, "dark"), (390, "light")])
def test_compared_runs_are_read_in_one_plot(
    browser: Browser, tmp_path: Path, width: int, scheme: str
) -> None:
    runs = [
        str(write_run(tmp_path / "a", reward_rows(0.1, 0.2, 0.3), DONE)),
        str(write_run(tmp_path / "b", reward_rows(0.4, 0.6), DONE, name="other", batch=2)),
    ]
    file = tmp_path / "compare.html"
    file.write_text(render_compare_page(compare(runs)), encoding="utf-8")
    options = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
    with opened(browser, file, **options) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        reward = page.locator('.curve[data-metric="gen/reward"]')
        strokes = "all => all.map(one => getComputedStyle(one).stroke)"
        assert len(set(reward.locator("path:not(.point)").evaluate_all(strokes))) == 2
        readings = reward.locator(".reading")
        assert readings.all_inner_texts() == ["A 0.3", "B 0.6"]
        plot = reward.locator(".plot svg")
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] - 2, box["y"] + 40)
        assert readings.all_inner_texts() == ["A 0.3 at step 3", "B 0.6 at step 2"]
        assert "batch" in page.locator("#config").inner_text()


@pytest.mark.first(1)
@pytest.mark.parametrize("width", [1400, 390])
def test_the_page_of_a_run_follows_it_and_keeps_what_the_reader_chose(
    browser: Browser, tmp_path: Path, width: int
) -> None:
    run = RunDirectory(write_full_run(tmp_path / "run"))
    now, trace = time.time(), Trace()
    for step in range(6):
        trace.add(0, Span("actor_train", "device", now + step - 6.5, now + step - 6, {"step": step}))
    trace.write(run.trace)
    errors: list[str] = []
    with run.locked(), serve_page(RunPage(str(run.path)), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = browser.new_page(viewport={"width": width, "height": 844})
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"http://127.0.0.1:{server.server_address[1]}/")
        assert "Still going, 6 of 20 steps" in page.locator(".verdict").inner_text()
        page.locator("#others summary").click()
        page.locator("#others-find").fill("accepted")
        page.locator("[data-colour=version]").click()
        page.locator("#samples-find").fill("gen/9")
        rows = [{"step": 7, "actor_gen/reward": 0.75, "rollout/accepted": 28.0}]
        with run.metrics.open("a") as file:
            file.writelines(f"{json.dumps(row)}\n" for row in rows)
        work = (OngoingWork("actor_train", "device", (0,), now, 7),)
        write_activity(run.activity, Activity(now, None, work, {"gen": (3, 8)}))
        playwright.expect(page.locator(".verdict")).to_contain_text("7 of 20 steps", timeout=60_000)
        playwright.expect(page.locator("#now")).to_contain_text("actor_train, step 7")
        reading = page.locator('#curves .curve[data-metric="actor_gen/reward"] output')
        playwright.expect(reading).to_have_text("0.75")
        assert page.locator("#others .curve:visible").count() == 1, "what was open and searched stays"
        assert page.locator("[data-colour=version]").get_attribute("aria-pressed") == "true"
        assert page.locator(".sample:visible").count() == 1
        assert page.evaluate("document.activeElement.id") == "samples-find"
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        run.plan.write_text("no json")
        playwright.expect(page.locator("#watch-state")).to_contain_text("plan.json is not", timeout=60_000)
        page.close()
        server.shutdown()
    assert [error for error in errors if "503" not in error] == []
