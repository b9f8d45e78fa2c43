"""Figures and `report.html`: made from the tape alone, self-contained, everything escaped."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dd_lightning.protocol.tape import read_tape
from dd_lightning.report import read, style
from dd_lightning.report.answer import Told, answer, format_seconds, question
from dd_lightning.report.comparison import compare_bytes, data_parallel_bytes, format_bytes
from dd_lightning.report.figures import NAMES
from dd_lightning.report.html import Report, render_html
from dd_lightning.report.read import report_run, runs_in
from dd_lightning.report.series import AWAY, HANDING_IN, PAUSED, STEPPING, Series, Stretch
from dd_lightning.report.style import DARK, LINES, PALE, PAPER
from dd_lightning.report.summary import RunReader, summarize
from dd_lightning.report.where_lost import token_parts
from tests.fleet_tapes import fleet_tape
from tests.tapes import Tape, assert_valid, small_tape

pytestmark = pytest.mark.unit

NASTY = "<b>\"'&"


def write_tape(folder: Path, events: list[dict]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "tape.jsonl").write_text(lines)
    return folder


class Page(HTMLParser):
    """Collects what a browser would fetch, the tags, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "data")]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reported run whose texts try to break the page."""
    events = fleet_tape(2, 24, names=["0", NASTY], config={"task": {"name": NASTY}, "note": NASTY})
    tape = Tape(events)
    tape.add("warning", 5.0, text=NASTY)
    folder = write_tape(tmp_path_factory.mktemp("run"), tape.events)
    report_run(folder)
    return folder


def test_report_writes_the_promised_files(run_dir: Path) -> None:
    figures = sorted(path.name for path in (run_dir / "figures").iterdir())
    assert figures == sorted(f"{name}.{kind}" for name in NAMES for kind in ("png", "svg"))
    pictures = (run_dir / "figures").glob("*.png")
    assert all(picture.read_bytes()[:4] == b"\x89PNG" for picture in pictures)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert_valid(summary)
    assert summary == summarize(read_tape(run_dir / "tape.jsonl"))


def test_page_needs_nothing_from_outside(run_dir: Path) -> None:
    page = Page((run_dir / "report.html").read_text())
    assert len(page.links) == len(NAMES)
    assert all(link.startswith("data:image/svg+xml;base64,") for link in page.links)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    style_sheet = (run_dir / "report.html").read_text().split("</style>")[0]
    assert "url(" not in style_sheet and "@import" not in style_sheet
    assert "prefers-color-scheme: dark" in style_sheet


def test_page_escapes_every_text_of_the_run(run_dir: Path) -> None:
    page = (run_dir / "report.html").read_text()
    assert NASTY not in page and "<b>&quot;" not in page
    # title and heading (the task), the row, the warning; JSON spells the quotation mark \"
    assert Page(page).text.count(NASTY) >= 4
    assert Page(page).text.count(json.dumps(NASTY)) >= 3


def test_figures_follow_the_reader_s_colours(run_dir: Path) -> None:
    for path in (run_dir / "figures").glob("*.svg"):
        drawing = ElementTree.parse(path)
        text = path.read_text()
        _, _, dark = text.partition("@media(prefers-color-scheme:dark)")
        assert dark and all(f"--{one[1:]}:{other}" in dark for one, other in DARK.items())
        assert NASTY not in text and "<text" not in text  # letters are paths
        fixed = set(re.findall(r"(?:fill|stroke): *(#[0-9a-f]{6})", text))
        assert not fixed, f"{path.name} has colours that stay the same on a dark page: {fixed}"
        assert drawing.getroot().tag.endswith("svg")


def test_dark_colours_are_legible_and_apart() -> None:
    paper = luminance(DARK[PAPER])
    for light, dark in DARK.items():
        if light not in (PAPER, PALE):
            assert (luminance(dark) + 0.05) / (paper + 0.05) > 4.5, light
    assert len({colour for colour, _ in LINES}) == len({DARK[colour] for colour, _ in LINES})


def luminance(colour: str) -> float:
    """Relative, as of WCAG."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
    return sum(weight * one for weight, one in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_the_question_of_the_run_is_answered_at_the_top() -> None:
    told = Told(summarize(small_tape()), parameters=400, longest_round_s=0.25)
    said = answer(told)
    assert said.startswith("2 learners brought the validation loss from 5.500 to 3.250 in 15.0 s. ")
    assert "79.4% of the time allocated to them was computing" in said
    assert "no round took longer than 0.25 s" in said and "fault" not in said
    # (80 + 50) steps * 2 * 1/2 * 400 * 4 = 208 000 bytes, against 12 000 + 6 200
    assert "17.8 KiB crossed the wire" in said and "sent 203 KiB (11.4 times as much)" in said
    page = render_html(Report(told))
    assert page.index("without waiting for each other") < page.index("brought the validation loss")
    assert page.index("brought the validation loss") < page.index('class="tiles"')


def test_faults_are_asked_for_and_what_they_cost_is_said() -> None:
    told = Told(summarize(small_tape()), 400, fired={"kill": 3, "kill_syncer": 1})
    assert question(told) == "Did the run hold up under 4 faults, and what did they cost?"
    assert "With 4 faults (3 kill, 1 kill syncer) " in answer(told)
    assert "% of the tokens were lost, whatever the cause; somebody trained " in answer(told)


@pytest.mark.parametrize(
    ("network", "said"),
    [
        ({"regions": ["us_east", "eu_west", "tokyo"]}, "3 learners in us east, eu west and tokyo "),
        ({"regions": ["us_east", "eu_west"], "learner_regions": ["eu_west"]}, "3 learners brought"),
        ({"regions": ["local"]}, "3 learners brought"),
    ],
)
def test_the_answer_says_where_learners_are(network: dict, said: str) -> None:
    summary = summarize(small_tape()) | {"learners": 3}
    assert answer(Told(summary, 400, {"network": network, "learners": 3})).startswith(said)


def test_a_data_parallel_run_is_asked_other_things() -> None:
    told = Told(summarize(small_tape()), 400, {"algorithm": {"preset": "data_parallel"}})
    assert question(told).startswith("What did data-parallel training come to")
    assert "went from member to member" in answer(told)


def test_data_parallel_bytes_is_the_ring_all_reduce_formula() -> None:
    assert data_parallel_bytes([10, 10, 10, 10], 1000) == 4 * 10 * 2 * 3 * 1000 * 4 // 4
    assert data_parallel_bytes([10], 1000) == 0
    assert data_parallel_bytes([], 1000) == 0
    summary = summarize([])
    assert compare_bytes(summary, 10)["ratio"] is None


def test_formats() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 5 * 2**30)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "5 GiB",
    ]
    said = [format_seconds(seconds) for seconds in (0.0831, 42.06, 308, 7500)]
    assert said == ["0.083 s", "42.1 s", "5 min 08 s", "2 h 05 min"]


def test_an_empty_run_has_a_page_too(tmp_path: Path) -> None:
    tape = Tape()
    tape.start(2, [10])
    page = report_run(write_tape(tmp_path, tape.events), status="interrupted").read_text()
    assert "No learner joined" in page and "Interrupted:" in page
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "interrupted"


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes a second or two; these tests look at the rest."""
    monkeypatch.setattr(read, "write_figures", lambda *given: [])


@pytest.mark.usefixtures("no_figures")
def test_report_keeps_the_status_the_launcher_knew(tmp_path: Path) -> None:
    """A tape that was cut says nothing of how the run ended; the first summary does."""
    events = [event for event in small_tape() if event["event"] != "run_end"]
    report_run(write_tape(tmp_path, events), status="interrupted")
    report_run(tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "interrupted"


@pytest.mark.usefixtures("no_figures")
def test_evaluations_beside_the_tape_count_until_they_are_on_it(tmp_path: Path) -> None:
    events = [event for event in small_tape() if event["event"] != "evaluation"]
    write_tape(tmp_path, events)
    lines = ['{"file": "a", "loss": 2.5, "final": true}\n', '{"file": "torn']
    (tmp_path / "evaluations.jsonl").write_text("".join(lines))
    report_run(tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["loss"]["validation"] == 2.5
    write_tape(tmp_path, small_tape())
    report_run(tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["loss"]["validation"] == 3.25


def test_no_tape_and_unknown_status_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no tape\.jsonl"):
        report_run(tmp_path)
    with pytest.raises(ValueError, match="status is 'over'"):
        report_run(write_tape(tmp_path, small_tape()), status="over")


def test_runs_in_a_multirun(tmp_path: Path) -> None:
    runs = [write_tape(tmp_path / name, small_tape()) for name in ("0", "1")]
    assert runs_in(tmp_path) == runs
    assert runs_in(runs[0]) == [runs[0]]
    with pytest.raises(ValueError, match="or of a multirun"):
        runs_in(runs[0] / "syncer")


def test_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"dd-lightning\[kit\]"):
        style.import_figure()


def read_series(events: list[dict]) -> Series:
    series = Series()
    for event in events:
        series.feed(event)
    return series


def test_lanes_follow_states_deaths_and_returns() -> None:
    lanes = read_series(small_tape()).lanes()
    assert lanes["0"][0] == Stretch(2.0, 10.0, STEPPING)
    assert lanes["1"][:3] == [
        Stretch(3.0, 6.0, STEPPING),
        Stretch(6.0, 8.0, AWAY),
        Stretch(8.0, 12.0, STEPPING),
    ]


def test_a_pause_does_not_begin_at_the_first_step() -> None:
    tape = Tape()
    tape.join(0.5, "0")
    tape.state(1.1, "0", "training", step=1, first_step_started_s=1.0)
    tape.state(5.0, "0", "paused", step=30, first_step_started_s=1.0)
    tape.state(7.0, "0", "training", step=31, first_step_started_s=1.0)
    tape.state(9.0, "0", "finishing", step=60, first_step_started_s=1.0)
    assert read_series(tape.events).lanes()["0"] == [
        Stretch(1.0, 5.0, STEPPING),
        Stretch(5.0, 7.0, PAUSED),
        Stretch(7.0, 9.0, STEPPING),
        Stretch(9.0, 9.0, HANDING_IN),
    ]


def test_byte_rates_hold_every_byte() -> None:
    summary = summarize(small_tape())
    begins, up, down = read_series(small_tape()).byte_rates(bins=7, least_s=0.5)
    width = begins[1]
    assert sum(up) * width == pytest.approx(summary["bytes"]["up"])
    assert sum(down) * width == pytest.approx(summary["bytes"]["down"])


def test_parts_of_a_learner_add_up_to_all_its_tokens() -> None:
    reader = RunReader()
    for event in fleet_tape(3, 40):
        reader.feed(event)
    for name, learner in reader.summary()["per_learner"].items():
        parts = token_parts(name, learner, reader.tokens)
        assert sum(parts.values()) == pytest.approx(100.0)
        assert parts["other"] == pytest.approx(0.0, abs=1e-9)


def test_warnings_are_counted_and_cut() -> None:
    report = Report(Told(summarize([]), 1), {f"w{index}": 1 + index for index in range(60)})
    page = render_html(report)
    assert "w1 (2 times)" in page and "10 more are on the tape" in page
