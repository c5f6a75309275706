"""The page in a real browser: from a curve to a token, live, from disk, and with what a hostile model may write."""

import os
import re
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

from oxrl.view.page import export_page
from oxrl.view.runs import Runs
from oxrl.view.server import serving
from tests.view.folders import (
    PIXEL,
    SCRIPT,
    answer,
    append,
    metrics,
    step_answers,
    with_tool,
    write_run,
    write_step,
)
from tests.waiting import HANG, wait_until

pytestmark = pytest.mark.engine
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e .[dev]")

ROOT = Path(__file__).parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DESKTOP = {"width": 1200, "height": 850}
PHONE = {"width": 390, "height": 800}
STEP = "#/run/0/step/20"
GROUP = f"{STEP}/group/121"
ANSWER = f"{GROUP}/answer/6"
PROMPT = "#/run/0/prompt/row-2"


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser is installed: none of {', '.join(BROWSERS)}; apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        # Chromium's own sandbox does not work for root, as which containers run tests; the pages are ours.
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "grpo-a")


@contextmanager
def shown(browser, *folders, address="", **options):
    """A page over runs, as it is in a browser; it fails if the page logs an error."""
    with serving(Runs(folders)) as server, opened(browser, server.url + address, **options) as page:
        yield page


@contextmanager
def opened(browser, url, **options):
    context = browser.new_context(**{"viewport": DESKTOP, **options})
    context.set_default_timeout(HANG * 1000)
    page = context.new_page()
    problems = []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(url)
    page.wait_for_selector("main[data-shown]")
    yield page
    context.close()
    assert not [problem for problem in problems if "status of 404" not in problem]


def visit(page, address):
    """Go to a view and wait until it is there."""
    page.evaluate("delete document.querySelector('main').dataset.shown")
    page.evaluate("address => { location.hash = address }", address)
    page.wait_for_selector("main[data-shown]")


def until(page, expression):
    """Wait until it is true. Playwright's own wait evaluates a text, which the policy of the page forbids."""
    wait_until(lambda: page.evaluate(expression), expression)


def text_of(page, selector):
    return page.locator(selector).first.text_content()  # innerText is empty until `content-visibility` has rendered it


def test_from_a_curve_to_a_token(browser, run):
    with shown(browser, run) as page:
        chart = page.locator("figure[data-metric=reward] svg.chart")
        box = chart.bounding_box()
        chart.hover(position={"x": box["width"] / 2, "y": 80})
        step = int(re.search(r"\d+", page.evaluate("[...charts][0].step + ''"))[0])
        chart.click(position={"x": box["width"] / 2, "y": 80})
        page.wait_for_selector("main[data-shown=step]")
        assert 15 < step < 26 and text_of(page, "h1") == f"Step {step}"
        page.click("a.prompt >> nth=2")
        page.wait_for_selector("main[data-shown=group]")
        page.click(".card a")
        page.wait_for_selector("main[data-shown=answer]")
        page.click(".tokens .token >> nth=5")
        assert "log-prob, policy" in text_of(page, "#card") and "5 of" in text_of(page, "#card")
        assert re.search(r"[?&]t=5\b", page.url)
        page.reload()
        page.wait_for_selector(".token.selected")
        assert "5 of" in text_of(page, "#card"), "the address of a token opens it again"


def test_tokens_are_coloured_by_a_switch_and_differ_without_colour(browser, run):
    with shown(browser, run, address=ANSWER) as page:
        names = page.locator("[data-colour]").all_text_contents()
        assert names == ["log-prob", "gap", "advantage", "ratio", "version", "mask"]
        kinds = {}
        for name in names:
            page.click(f"[role=radio]:text-is('{name}')")
            kinds[name] = set(page.locator(".tokens .token").evaluate_all("all => all.map(each => each.className)"))
        assert "token minus-4" in kinds["advantage"] and kinds["mask"] == {"token masked", "token kind-1"}
        assert {"token kind-0", "token kind-1"} <= kinds["version"]
        page.click("[role=radio]:text-is('gap')")
        style = "all => all.map(getComputedStyle).map(of => of.textDecorationStyle + of.textDecorationThickness)"
        lines = {
            kind: set(page.locator(f".samples .{kind}").evaluate_all(style)) for kind in ("minus-4", "plus-4", "plus-2")
        }
        assert len(set(map(str, lines.values()))) == 3, "each level has an underline of its own"
        page.keyboard.press("n")
        assert page.locator(".tokens .token[data-value]").count() > 10


def test_filters_by_text_reward_and_what_went_wrong(browser, run):
    with shown(browser, run, address=STEP) as page:

        def count():
            return text_of(page, ".count")

        assert count() == "48 answers"
        page.check("input[name=truncated]")
        assert count() == "3 of 48 answers" and page.locator(".group-row[data-group]").count() == 3
        page.uncheck("input[name=truncated]")
        page.check("input[name=tool]")
        assert count() == "1 of 48 answers"
        page.uncheck("input[name=tool]")
        page.check("input[name=ungraded]")
        assert count() == "1 of 48 answers"
        page.uncheck("input[name=ungraded]")
        page.keyboard.press("/")
        page.keyboard.type("I would RATHER")
        until(page, "document.querySelector('.count').innerText === '1 of 48 answers'")
        page.fill("input[name=q]", "")
        page.fill("input[name=min]", "0.5")
        until(page, "/^\\d+ of 48/.test(document.querySelector('.count').innerText)")
        page.select_option("select[name=list]", "answers")
        rewards = page.locator(".answer-row .chip.reward").all_text_contents()
        assert rewards and set(rewards) == {"reward 1"}
        page.reload()
        page.wait_for_selector(".answer-row")
        assert page.input_value("input[name=min]") == "0.5", "the filter is part of the address"


def test_groups_are_sorted_by_spread(browser, run):
    with shown(browser, run, address=STEP) as page:
        page.select_option("select[name=sort]", "spread")
        spreads = page.evaluate(
            "[...document.querySelectorAll('.numbers')].map(each => Number(each.innerText.match(/± ([\\d.]+)/)[1]))"
        )
        assert len(spreads) == 6 and spreads == sorted(spreads, reverse=True)


def test_two_runs_are_compared(browser, run, tmp_path):
    other = write_run(tmp_path / "grpo-b", shift=-0.2, lr=1e-5, recorded=0)
    with shown(browser, run, other) as page:
        curves = "figure[data-metric=reward] .line"
        assert page.locator(curves).count() == 4, "reward and its evaluation, of two runs"
        dashes = page.locator(curves).evaluate_all("all => all.map(each => each.getAttribute('stroke-dasharray'))")
        assert len(set(dashes)) == 3, "runs differ without colour"
        cells = page.locator(".differences tr").nth(1).locator("td, th").all_text_contents()
        assert cells == ["train.lr", "3e-05", "1e-05"]
        page.uncheck("input[aria-label='show grpo-b']")
        assert page.locator(curves).count() == 2


def test_the_seconds_of_a_run_on_rows_are_those_of_training(browser, tmp_path):
    run = write_run(tmp_path / "sft", steps=0, recorded=0)
    append(run / "metrics.jsonl", {"step": 1, "step_seconds": 1.5, "check_seconds": 0.5, "record_seconds": 0.25})
    write_step(run, 1, [answer(0, 0, "yes", 1.0)], seconds={"step": 1.5})
    with shown(browser, run, address="#/run/0/step/1") as page:
        parts = page.locator(".seconds .part").all_text_contents()
        assert sorted(parts) == ["check 0.5 s", "record 0.25 s", "train 1 s"]


def row(group, side, values, **others):
    """A row of a preference run, as a record has it."""
    tokens = {"ids": [1, 2, *range(3, 3 + len(values))], "pieces": ["2+2?", " ", *map(str, values)]}
    tokens |= {"mask": [0, 0, *[1] * len(values)], "policy_logprob": [None, None, *values]}
    head = {"kind": "row", "group": group, "index": int(side == "rejected"), "sample_id": f"row-{group}/{side}"}
    return {**head, "left_out": None, "media": [], **others, "tokens": tokens}


def test_rows_are_ordered_by_log_prob_and_named_by_their_side(browser, tmp_path):
    run = write_run(tmp_path / "dpo", steps=0, recorded=0)
    sides = [row(0, "chosen", [-1.0, -2.0]), row(0, "rejected", [-4.0]), row(1, "chosen", [-3.0])]
    groups = [{"group": group, "sample_id": f"row-{group}/chosen", "recorded": True} for group in (0, 1)]
    write_step(run, 1, sides, online=False, algorithm="dpo", groups=groups)
    with shown(browser, run, address="#/run/0/step/1") as page:
        labels = page.locator("svg.dots a").evaluate_all("all => all.map(each => each.getAttribute('aria-label'))")
        assert labels == [
            "chosen: mean log-prob -1.5, chosen",
            "rejected: mean log-prob -4, rejected",
            "chosen: mean log-prob -3, chosen",
        ]
        assert page.locator(".numbers b").all_text_contents() == ["-2.75", "-3"]
        assert "reward" not in text_of(page, "main") and page.locator("input[name=truncated]").count() == 0
        page.fill("input[name=max]", "-2")
        until(page, "document.querySelector('.count').innerText === '2 of 3 rows'")
        visit(page, "#/run/0/step/1/group/0")
        assert page.locator(".card header a").all_text_contents() == ["chosen", "rejected"]
        visit(page, "#/run/0/step/1/group/0/answer/1")
        assert text_of(page, "h1") == "Rejected" and "log-prob -4" in text_of(page, ".head")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("#/run/0/step/last", "there is no step last: a step is a number"),
        ("#/run/length", "there is no run length"),
        ("#/run/7", "there is no run 7"),
    ],
)
def test_an_address_that_is_mistyped_is_named(browser, run, address, message):
    with shown(browser, run, address=address) as page:
        assert text_of(page, "[role=alert]") == message


def test_findings_are_marks_that_lead_to_their_step(browser, run):
    with shown(browser, run) as page:
        assert "rank correlation" in page.locator("figure[data-metric=length] .finding title").first.text_content()
        assert "2 checks passed" in text_of(page, ".findings")
        page.click(".finding-row a")
        page.wait_for_selector("main[data-shown=step]")
        assert text_of(page, "h1") == "Step 24" and "reward_by_length" in text_of(page, ".findings")


def test_a_chart_is_used_with_the_keyboard(browser, run):
    with shown(browser, run) as page:
        page.focus("figure[data-metric=reward] svg.chart")
        for key in ("ArrowLeft", "ArrowLeft", "ArrowRight", "ArrowLeft", "Enter"):
            page.keyboard.press(key)
        page.wait_for_selector("main[data-shown=step]")
        assert text_of(page, "h1") == "Step 39"


def test_a_run_grows_while_it_is_watched_and_only_new_bytes_are_read(browser, tmp_path):
    run = write_run(tmp_path / "live", steps=5)
    with shown(browser, run) as page:
        asked, received = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("response", lambda response: received.append((response.url, int(response.headers["content-length"]))))
        points = "charts.values().next().value.series[0].points.length"
        assert page.evaluate(points) == 5
        line = '{"step": 6, "reward": 0.9}\n'
        with (run / "metrics.jsonl").open("a") as file:
            file.write(line[:12])  # torn: the page waits for the rest
            file.flush()
            for _ in range(2):
                page.wait_for_event("requestfinished", lambda request: "lines/metrics" in request.url)
            assert page.evaluate(points) == 5
            file.write(line[12:])
        write_step(run, 6, step_answers(6))
        until(page, f"{points} === 6")
        page.wait_for_selector("text=open step 6")
        assert all("from=0" not in url for url in asked if "lines/metrics" in url)
        assert max(size for url, size in received if "lines/metrics" in url) == len(line)
        page.wait_for_selector("text=● live")


def test_a_resumed_run_that_drops_lines_is_read_again(browser, tmp_path):
    run = write_run(tmp_path / "resumed", steps=8, recorded=0)
    with shown(browser, run) as page:
        append(tmp_path / "draft", *(metrics(step) for step in range(1, 7)))
        (tmp_path / "draft").replace(run / "metrics.jsonl")
        until(page, "charts.values().next().value.series[0].points.length === 6")


def test_the_page_says_when_the_server_has_ended(browser, run):
    with serving(Runs([run])) as server:
        context = browser.new_context()
        page = context.new_page()
        page.goto(server.url)
        page.wait_for_selector("main[data-shown]")
    page.wait_for_selector("text=no server", timeout=HANG * 1000)
    assert page.locator("figure").count() > 3
    context.close()


def test_an_exported_page_opens_from_disk_and_asks_for_nothing(browser, run, tmp_path):
    written = export_page(Runs([run]), tmp_path / "page.html")
    asked = []
    with opened(browser, written.path.as_uri()) as page:
        page.on("request", lambda request: asked.append(request.url))
        assert page.locator("figure").count() > 3 and "exported" in text_of(page, "#bar")
        for address, expected in (
            (STEP, "Step 20"),
            (GROUP, "Group 121"),
            (ANSWER, "Answer 6"),
            (PROMPT, "One prompt"),
        ):
            visit(page, address)
            assert text_of(page, "h1").startswith(expected)
        visit(page, f"{ANSWER}?t=4")
        assert "4 of 28" in text_of(page, "#card")
        assert asked == []


EVERYWHERE = dict.fromkeys(("error", "left_out", "reference_answer", "status"), SCRIPT)
SVG = {"kind": SCRIPT, "mime_type": "image/svg+xml", "data": SCRIPT}
HOSTILE = [
    answer(0, 0, f"{SCRIPT} says {SCRIPT}", 1.0, SCRIPT, **EVERYWHERE, parts={SCRIPT: 1.0}, media=[SVG]),
    with_tool(0, 1, 0.0, SCRIPT, failed=True) | {"error": SCRIPT},
]
HOSTILE[1]["messages"][2]["tool_calls"][0]["function"]["name"] = SCRIPT
HOSTILE[1]["messages"][3]["name"] = SCRIPT
HOSTILE[1]["messages"][3]["role"] = SCRIPT


@pytest.mark.parametrize("from_disk", [False, True])
def test_markup_that_a_model_wrote_is_text_in_every_view(browser, tmp_path, from_disk):
    run = write_run(tmp_path / "<img src=x onerror=alert(1)>", steps=1, recorded=0)
    write_step(run, 1, HOSTILE, algorithm=SCRIPT, seconds={SCRIPT: 1.0})
    append(run / "metrics.jsonl", {"step": 2, SCRIPT: 1.0, "reward": 0.5})
    append(run / "checks.jsonl", {"step": 1, "check": SCRIPT, "state": "failed", "message": SCRIPT, "remedy": SCRIPT})
    (run / "config.yaml").write_text(f"train: {{alg_name: '{SCRIPT}'}}\n")
    runs = Runs([run])
    url = export_page(runs, tmp_path / "page.html").path.as_uri()
    with serving(runs) as server, opened(browser, url if from_disk else server.url) as page:
        page.evaluate("delete document.querySelector('main').dataset.shown")
        answers = [f"#/run/0/step/1/group/0/answer/{index}?t=4" for index in (0, 1)]
        prompt = page.evaluate("text => href({run: 0, prompt: text})", SCRIPT)
        for address in (
            "#/",
            "#/run/0/step/1",
            "#/run/0/step/1?list=answers",
            "#/run/0/step/1/group/0",
            *answers,
            prompt,
        ):
            visit(page, address)
            page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
            assert "<script>window.broken" in text_of(page, "main"), address
            assert page.locator("main script, main img, main b:text-is('bold')").count() == 0
        assert page.evaluate("window.broken") is None


def test_a_script_in_the_page_that_is_not_its_own_does_not_run(browser, run):
    with serving(Runs([run])) as server:
        page = browser.new_context().new_page()
        page.goto(server.url)
        page.wait_for_selector("main[data-shown]")
        page.evaluate(
            "() => { const script = document.createElement('script'); script.textContent = 'window.broken = 1';"
            "document.body.append(script); const div = document.createElement('div');"
            "div.innerHTML = '<img src=x onerror=\"window.broken = 2\">'; document.body.append(div); }"
        )
        page.evaluate("fetch('http://127.0.0.1:9/').catch(() => {})")
        assert page.evaluate("window.broken") is None
        page.context.close()


def test_an_answer_of_100_000_tokens(browser, tmp_path):
    run = write_run(tmp_path / "long", steps=1, recorded=0)
    text = " ".join(f"word{at}" if at % 97 else f"line{at}\n" for at in range(100_000))
    write_step(run, 1, [answer(0, 0, text, 1.0), answer(0, 1, "short", 0.0)])
    with shown(browser, run, address="#/run/0/step/1/group/0/answer/0") as page:
        page.wait_for_selector(".token")
        assert "100,003, 100,000 trained" in text_of(page, ".token-panel h2")
        assert page.locator(".token").count() < 12_000, "only what is near the window is built"
        page.fill("input[aria-label='go to token']", "100002")
        page.keyboard.press("Enter")
        page.wait_for_selector(".token.selected")
        assert "100002 of 100003" in text_of(page, "#card") and "word99999" in text_of(page, "#card")
        page.click("[role=radio]:text-is('advantage')")
        assert page.locator(".token.selected.plus-4").count() == 1
        assert page.locator(".token").count() < 24_000


def test_a_thousand_answers_in_a_step(browser, tmp_path):
    run = write_run(tmp_path / "wide", steps=1, recorded=0)
    write_step(run, 1, step_answers(1, groups=125))
    with shown(browser, run, address="#/run/0/step/1") as page:
        assert page.locator("svg.dots a").count() == 1000
        page.select_option("select[name=list]", "answers")
        assert page.locator(".answer-row").count() == 1000
        page.check("input[name=truncated]")
        assert page.locator(".answer-row").count() == 62
        page.keyboard.press("Escape")
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press("k")
        assert page.evaluate("document.activeElement === [...document.querySelectorAll('.answer-row')].at(-1)")


def test_keys(browser, run):
    with shown(browser, run, address=STEP) as page:
        page.keyboard.press("j")
        page.keyboard.press("j")
        page.keyboard.press("k")
        assert page.evaluate("document.activeElement === document.querySelectorAll('[data-item]')[0]")
        page.keyboard.press("Enter")
        page.wait_for_selector("main[data-shown=group]")
        page.keyboard.press("u")
        page.wait_for_selector("main[data-shown=step]")
        page.keyboard.press("]")
        page.wait_for_selector("h1:text-is('Step 21')")
        page.keyboard.press("?")
        assert page.locator("dialog[open] kbd").count() > 8
        page.keyboard.press("Escape")
        before = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.keyboard.press("d")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
        visit(page, ANSWER)
        page.keyboard.press("c")
        assert text_of(page, "[aria-checked=true]") == "gap"
        page.keyboard.press("j")
        page.wait_for_selector("h1:text-is('Answer 7')")


def test_tools_are_folded_images_shown_and_the_common_beginning_is_grey(browser, tmp_path):
    run = write_run(tmp_path / "tools", steps=1, recorded=0)
    image = {"kind": "image", "mime_type": "image/png", "base64": PIXEL}
    texts = ["The prices are 31 and 12: it is 12.", "The prices are 31 and 12: it is 31.", "The prices differ."]
    answers = [answer(0, index, text, float(index == 0), media=[image]) for index, text in enumerate(texts)]
    write_step(run, 1, [*answers, with_tool(1, 0, 1.0, "row-2", failed=True)])
    with shown(browser, run, address="#/run/0/step/1/group/0") as page:
        assert page.locator(".common").all_text_contents()[0] == "The prices are 31 and 12: it is "
        until(page, "document.querySelector('.media img').naturalWidth === 4")
        assert text_of(page, ".reference") == "reference answer 12"
        assert page.locator(".card").first.locator(".chip.part").all_text_contents() == ["correct 1", "format 0.1"]
        visit(page, "#/run/0/step/1/group/1/answer/0")
        folded = page.locator(".reply details.message").evaluate_all("all => all.map(each => each.open)")
        assert folded == [False, False, True] and "✕ error" in text_of(page, ".reply .tool summary")


def test_images_are_in_the_messages_that_they_belong_to(browser, tmp_path):
    run = write_run(tmp_path / "images", steps=1, recorded=0)
    part = {"type": "image"}
    messages = [
        {"role": "user", "content": [part, {"type": "text", "text": "Go."}]},
        {"role": "assistant", "content": "left"},
        {"role": "user", "content": [{"type": "text", "text": "Now?"}, part]},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": [part]},
    ]
    about = {"kind": "image", "mime_type": "image/png"}
    unknown = {"kind": "", "mime_type": "", "data": None}
    held = [about | {"base64": PIXEL}, about | {"data": "far.png", "error": "No such file"}, unknown]
    named = [about | {"answer": 0, "number": 0}, about | {"answer": 0, "number": 0}, unknown]
    tokens = {"ids": [1, 2, 3, 4], "pieces": list("abcd"), "mask": [0, 1, 0, 1], "rows": [2, 2]}
    others = {"messages": messages, "tokens": tokens}
    write_step(run, 1, [answer(0, at, "", 1.0, media=media, **others) for at, media in enumerate((held, named))])
    with shown(browser, run, address="#/run/0/step/1/group/0/answer/1") as page:
        assert page.locator(".prompt-box .media img").count() == 1
        page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
        until(page, "document.querySelectorAll('.reply .media img').length === 1")
        assert page.locator("img").evaluate_all("all => all.map(each => each.naturalWidth)") == [4, 4]
        assert page.locator(".token[data-row]").evaluate_all("all => all.map(each => each.dataset.row)") == ["1", "2"]
        visit(page, "#/run/0/step/1/group/0/answer/0")
        page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
        assert text_of(page, ".reply .media .note") == "image (image/png): far.png: No such file"


def test_a_run_without_a_record_opens(browser, tmp_path):
    run = write_run(tmp_path / "old", steps=3, recorded=0)
    turn = {"prompt_ids": [1], "token_ids": [5, 6], "logprobs": [-0.5, -1.0], "versions": [2, 2]}
    sample = {
        "id": "row#0/1",
        "prompt": "2+2?",
        "response": "four",
        "answer": "4",
        "reward": 1.0,
        "status": "completed",
    }
    append(run / "rollouts.jsonl", {"step": 3, "digest": "", "samples": [sample | {"turns": [turn]}]})
    with shown(browser, run) as page:
        page.click("text=open step 3")
        page.wait_for_selector("text=from rollouts.jsonl")
        visit(page, "#/run/0/step/3/group/0/answer/1")
        assert "four" in text_of(page, ".reply") and page.locator(".token").count() == 2 + 3
        visit(page, "#/run/0/step/2")
        assert "nothing is recorded of step 2" in text_of(page, "[role=alert]")


VIEWS = {
    "run": "#/", "step": STEP, "group": GROUP, "answer": f"{ANSWER}?colour=gap&t=15", "prompt": PROMPT,
}  # fmt: skip


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_a_telephone(browser, run, scheme):
    with shown(browser, run, viewport=PHONE, color_scheme=scheme) as page:
        for address in VIEWS.values():
            visit(page, address)
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], address


def test_pictures_of_each_view(browser, run, tmp_path):
    """`OXRL_PICTURES=docs/assets pytest tests/view -k pictures` makes those of docs/view.md."""
    folder = Path(os.environ.get("OXRL_PICTURES") or tmp_path)
    other = write_run(tmp_path / "grpo-b", shift=-0.15, lr=1e-5)
    with shown(browser, run, other, viewport={"width": 1100, "height": 680}) as page:
        for name, address in VIEWS.items():
            visit(page, address)
            page.evaluate("name => { if (name === 'answer') switchTheme(); }", name)
            page.screenshot(path=folder / f"view-{name}.png")
    wanted = set(re.findall(r"\(assets/(view-\w+\.png)", (ROOT / "docs" / "view.md").read_text()))
    assert wanted == {f"view-{name}.png" for name in VIEWS}
    assert all((ROOT / "docs" / "assets" / name).stat().st_size < 150_000 for name in wanted)
    wait_until(lambda: all((folder / name).stat().st_size > 10_000 for name in wanted), "pictures")
