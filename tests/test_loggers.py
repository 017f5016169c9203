"""Trackers: one run however often it restarts, no point lost, and no error of theirs ends the training."""

from __future__ import annotations

import gzip
import json
import logging
import re
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pimm_ray.errors import TrackerError
from pimm_ray.observe.loggers import TensorBoardTracker, Trackers, WandbTracker
from tests.ranks import die, run_ranks, try_ranks

STEP = "train/global_step"
KEY = "0123456789" * 4


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("MODE", "ENTITY", "PROJECT", "API_KEY", "BASE_URL"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)


class Recorder(logging.Handler):
    """The warnings of this package, in a child process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("pimm_ray").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def attempt(rank: int, make: Any, checkpoint: Path, steps: range, save_at: int, ends: str) -> list[str]:
    """One start of a run: goes on where the checkpoint is, logs each step, and is killed or finishes."""
    heard = Recorder()
    saved = json.loads(checkpoint.read_text()) if checkpoint.exists() else {}

    def run() -> None:
        trackers = Trackers([make()], live=True)
        trackers.start(saved, step=steps.start - 1)
        for step in steps:
            trackers.log({"loss": 1000 * steps.start + step}, step)
            if step == save_at:
                checkpoint.write_text(json.dumps(trackers.state_dict()))
        if ends.startswith("killed"):
            time.sleep(1.0 if ends == "killed later" else 0)
            die()
        trackers.finish()

    # As in a Ray worker, whose loop is not in the main thread.
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return heard.lines


def crash_and_resume(make: Any, checkpoint: Path, ends: str = "killed") -> list[str]:
    """To step 17, killed; on from 10 to 20. The warnings of the second start."""
    [first] = try_ranks(1, attempt, make, checkpoint, range(1, 18), 10, ends, group=False)
    assert first.killed
    return run_ranks(1, attempt, make, checkpoint, range(11, 21), 20, "finishes", group=False)[0]


# ---- Weights & Biases, offline


def offline_runs(folder: Path) -> list[tuple[str, list[tuple[int, int]]]]:
    """Of each start, in order: the run's id and its (step, loss) as written to disk."""
    found = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns):
        rows = []
        for record in wandb_records(file):
            if record.WhichOneof("record_type") == "history":
                row = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
                rows.append((row[STEP], row["loss"]))
        found.append((file.stem.removeprefix("run-"), rows))
    return found


def wandb_records(file: Path) -> Iterator[Any]:
    """In the format of LevelDB's log, after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, held = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        held += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(held)
            yield record
            held = b""


def offline(flush: float = 15.0) -> WandbTracker:
    import wandb

    settings = wandb.Settings(x_transaction_log_flush_interval=flush)
    return WandbTracker(project="p", mode="offline", group="g", job_type="train", name="first", settings=settings)


def points(start: int, *steps: int) -> list[tuple[int, int]]:
    return [(step, 1000 * start + step) for step in steps]


def test_a_killed_run_goes_on_under_its_id_with_all_its_steps(tmp_path):
    warnings = crash_and_resume(lambda: offline(flush=0.1), tmp_path / "state", "killed later")
    (first, before), (second, after) = offline_runs(tmp_path)
    assert first == second and warnings == []
    assert before == points(1, *range(1, 18))
    assert after[-10:] == points(11, *range(11, 21))


def test_steps_before_the_checkpoint_that_died_in_wandbs_buffer_are_logged_again(tmp_path):
    crash_and_resume(offline, tmp_path / "state")
    (_, before), (_, after) = offline_runs(tmp_path)
    assert before == [], "wandb has begun to write at once: what is logged again may go"
    assert after == points(1, *range(1, 11)) + points(11, *range(11, 21))


def test_the_state_is_small_plain_and_says_which_run_it_is(tmp_path):
    run_ranks(1, attempt, offline, tmp_path / "state", range(1, 401), 400, "finishes", group=False)
    text = (tmp_path / "state").read_text()
    state = json.loads(text)["wandb"]
    assert len(text) < 5000 and state.pop("run_id")
    assert [point[STEP] for _, point in state.pop("recent")] == [*range(337, 401)]
    assert state == {"entity": "", "project": "p", "group": "g", "name": "first", "job_type": "train", "step": 400}


def test_a_start_with_wandb_disabled_does_not_lose_the_run(tmp_path):
    checkpoint = tmp_path / "state"
    run_ranks(1, attempt, offline, checkpoint, range(1, 4), 3, "finishes", group=False)
    before = checkpoint.read_text()
    run_ranks(1, attempt, lambda: WandbTracker(mode="disabled"), checkpoint, range(4, 6), 5, "finishes", group=False)
    assert checkpoint.read_text() == before


def test_all_charts_have_our_steps_as_their_x_axis(tmp_path):
    run_ranks(1, attempt, offline, tmp_path / "state", range(1, 3), 2, "finishes", group=False)
    [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    axes = [record.metric for record in wandb_records(file) if record.WhichOneof("record_type") == "metric"]
    assert [(axis.name or axis.glob_name, axis.step_metric) for axis in axes] == [(STEP, ""), ("*", STEP)]


def test_with_history_new_each_start_is_a_run_of_its_own(tmp_path):
    crash_and_resume(lambda: WandbTracker(project="p", mode="offline", history="new"), tmp_path / "state")
    (first, _), (second, _) = offline_runs(tmp_path)
    assert first != second


# ---- Weights & Biases, a server on loopback


class Service(ThreadingHTTPServer):
    """As much of the service as a run needs: it makes runs, resumes them, refuses deleted ones, keeps their rows."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Requests)
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.made: list[dict[str, Any]] = []
        self.deleted: set[str] = set()
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path.endswith("/file_stream"):
            rows = self.rows[path.split("/")[-2]]
            part = body.get("files", {}).get("wandb-history.jsonl")
            for row in map(json.loads, part["content"] if part else ()):
                # As the service: what does not rise is dropped.
                if not rows or row["_step"] > rows[-1]["_step"]:
                    rows.append(row)
            return 200, {}
        asked, given = re.search(r"(?:query|mutation)\s+(\w+)", body.get("query", "")), body.get("variables") or {}
        match asked and asked[1]:
            case "Viewer":
                me = {"id": "1", "entity": "lab", "username": "me", "flags": "{}", "teams": {"edges": []}}
                return 200, {"data": {"viewer": me}}
            case "RunResumeStatus":
                rows = self.rows.get(given["name"])
                if not rows or given["name"] in self.deleted:
                    return 200, {"data": {"model": None}}
                bucket = {
                    "id": "x", "name": given["name"], "historyLineCount": len(rows), "eventsLineCount": 0,
                    "logLineCount": 0, "historyTail": json.dumps([json.dumps(rows[-1])]), "eventsTail": "[]",
                    "summaryMetrics": "{}", "config": "{}", "wandbConfig": '{"t": 1}', "displayName": "nice-1",
                }  # fmt: skip
                return 200, {"data": {"model": {"id": "m", "name": "p", "entity": {"name": "lab"}, "bucket": bucket}}}
            case "UpsertBucket":
                name = given.get("name")
                if name in self.deleted:
                    text = f"run lab/p/{name} was previously created and deleted; try a new run name"
                    return 409, {"errors": [{"message": text}], "data": {"upsertBucket": None}}
                self.made.append(given)
                new = self.rows.setdefault(name, []) == []
                where = {"id": "p", "name": given["project"], "entity": {"id": "e", "name": given["entity"] or "lab"}}
                bucket = {"id": "x", "name": name, "displayName": "nice-1", "sweepName": None, "project": where,
                          "historyLineCount": len(self.rows[name])}  # fmt: skip
                return 200, {"data": {"upsertBucket": {"bucket": bucket, "inserted": new}}}
            case "CreateRunFiles":
                return 200, {"data": {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": []}}}
        return 200, {"data": {}}


class Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Service

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        try:
            code, answer = self.server.answer(self.path, json.loads(body))
        except ValueError:  # telemetry is not JSON
            code, answer = 200, {}
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def service(monkeypatch):
    server = Service()
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    yield server
    server.shutdown()
    server.server_close()


def online() -> WandbTracker:
    import wandb

    settings = wandb.Settings(init_timeout=3, console="off", x_disable_meta=True, x_disable_stats=True)
    return WandbTracker(project="p", settings=settings)


def test_steps_that_are_repeated_are_on_the_server_twice_and_all_others_once(service, tmp_path):
    checkpoint = tmp_path / "state"
    for steps, save_at in ((range(1, 18), 10), (range(11, 21), 20)):
        [warnings] = run_ranks(1, attempt, online, checkpoint, steps, save_at, "finishes", group=False)
        assert warnings == []
    [(run_id, rows)] = service.rows.items()
    assert [row[STEP] for row in rows] == [*range(1, 18), *range(11, 21)]
    text = checkpoint.read_text()
    state = json.loads(text)["wandb"]
    assert (state["run_id"], state["entity"], state["project"], state["step"]) == (run_id, "lab", "p", 27)
    assert KEY not in text


def test_what_the_server_did_not_get_from_a_killed_run_it_gets_at_the_resume(service, tmp_path):
    warnings = crash_and_resume(online, tmp_path / "state")
    [rows] = service.rows.values()
    assert warnings == []
    assert [row[STEP] for row in rows] == [*range(1, 21)]


def test_a_run_that_was_deleted_goes_on_under_a_new_id_with_one_warning(service, tmp_path):
    checkpoint = tmp_path / "state"
    run_ranks(1, attempt, online, checkpoint, range(1, 4), 3, "finishes", group=False)
    [gone] = service.rows
    service.deleted.add(gone)
    [warnings] = run_ranks(1, attempt, online, checkpoint, range(4, 7), 6, "finishes", group=False)
    assert len(warnings) == 1 and f"W&B run {gone} was deleted" in warnings[0]
    [new] = service.rows.keys() - {gone}
    assert [row[STEP] for row in service.rows[new]] == [*range(1, 7)]
    assert json.loads(checkpoint.read_text())["wandb"]["run_id"] == new


def test_a_server_that_does_not_answer_is_a_warning_and_the_next_start_has_the_same_id(service, tmp_path, monkeypatch):
    checkpoint = tmp_path / "state"
    run_ranks(1, attempt, online, checkpoint, range(1, 4), 3, "finishes", group=False)
    before = checkpoint.read_text()
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    [warnings] = run_ranks(1, attempt, online, checkpoint, range(4, 7), 6, "finishes", group=False)
    assert len(warnings) == 1 and "tracker wandb could not start" in warnings[0]
    assert checkpoint.read_text() == before


# ---- what wandb.init is asked for


@pytest.fixture
def asked(monkeypatch) -> list[dict[str, Any]]:
    """Stands in for the package, to see the arguments of each init."""
    calls: list[dict[str, Any]] = []

    def init(**arguments: Any) -> Any:
        calls.append(arguments)
        names = ("entity", "project", "group", "name", "job_type")
        seen = {key: arguments.get(key) for key in names} | {"id": arguments.get("id") or "fresh", "starting_step": 0}
        return types.SimpleNamespace(define_metric=lambda *_, **__: None, disabled=False, **seen)

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    return calls


OLD = {"entity": "lab", "project": "p", "group": "g", "job_type": "train"}


@pytest.mark.parametrize(
    "state",
    [
        {"run_id": "r1", "name": "n", "step": 41, **OLD},
        {"run_id": "r1", "run_name": "n", "next_step": 41, "step_metric": STEP, **OLD},
        {"backend": "wandb", "wandb": {"run_id": "r1", "run_name": "n", "resume_step": 41, **OLD}},
        {"wandb_run_id": "r1", "wandb_run_name": "n", "wandb_resume_step": 41}
        | {f"wandb_{key}": value for key, value in OLD.items()},
    ],
    ids=["ours", "next_step", "nested", "flat"],
)
def test_the_run_is_found_in_a_state_of_any_age(asked, state):
    tracker = WandbTracker()
    tracker.start(state, step=40)
    assert asked == [{"id": "r1", "name": "n", "resume": "allow", **OLD}]
    assert tracker.state_dict() == {"run_id": "r1", "name": "n", "step": 41, "recent": [], **OLD}


@pytest.mark.parametrize("state", [None, {}, {"run_id": 7}, {"run_id": ""}, {"wandb": {"run_id": None}}])
def test_a_state_that_names_no_run_begins_one(asked, state):
    WandbTracker(project="p").start(state, step=0)
    assert asked[0]["project"] == "p" and asked[0].get("id") is None


def test_a_run_whose_place_is_unknown_is_an_error_that_names_the_settings(asked, monkeypatch):
    flat = {"wandb_run_id": "r1"}
    with pytest.raises(TrackerError, match=r"run r1 .* entity= \(or WANDB_ENTITY\) and project= \(or WANDB_PROJECT\)"):
        Trackers([WandbTracker()], live=True).start({"wandb": flat}, step=3)
    with pytest.raises(ValueError, match=r"give WandbTracker entity= \(or WANDB_ENTITY\), or history='new'"):
        WandbTracker(project="p").start(flat, step=3)
    assert asked == []
    monkeypatch.setenv("WANDB_ENTITY", "lab")
    WandbTracker(project="p").start(flat, step=3)
    monkeypatch.delenv("WANDB_ENTITY")
    WandbTracker(mode="offline").start(flat, step=3)
    WandbTracker(history="new").start(flat, step=3)
    WandbTracker(settings=types.SimpleNamespace(mode="offline")).start(flat, step=3)
    monkeypatch.setenv("WANDB_MODE", "offline")
    WandbTracker().start(flat, step=3)
    assert [call.get("id") for call in asked] == ["r1", "r1", None, "r1", "r1"]


def test_the_run_goes_on_where_it_is_but_takes_a_new_name_or_group(asked, caplog):
    state = {"run_id": "r1", "name": "n", **OLD}
    WandbTracker(project="other", name="renamed").start(state, step=3)
    assert asked == [{"id": "r1", "resume": "allow", **OLD, "name": "renamed"}]
    assert "W&B run r1 goes on where it is" in caplog.text and "other" in caplog.text


def test_arguments_that_would_fight_the_checkpoint_are_refused():
    with pytest.raises(TypeError, match=r"resume=.*checkpoint decides"):
        WandbTracker(resume="must")
    with pytest.raises(ValueError, match="'continue' or 'new'"):
        WandbTracker(history="old")


# ---- TensorBoard


def curve(folder: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


def test_steps_that_are_repeated_replace_those_before_the_crash(tmp_path):
    crash_and_resume(lambda: TensorBoardTracker(tmp_path / "tb"), tmp_path / "state")
    assert curve(tmp_path / "tb") == [
        *((step, 1000 + step) for step in range(1, 11)),
        *((step, 11000 + step) for step in range(11, 21)),
    ]
    assert json.loads((tmp_path / "state").read_text()) == {"tensorboard": {"log_dir": str(tmp_path / "tb")}}


def test_a_run_that_is_killed_before_its_first_checkpoint_begins_its_curve_again(tmp_path):
    make, checkpoint = lambda: TensorBoardTracker(tmp_path / "tb"), tmp_path / "none"
    run_ranks(1, attempt, make, checkpoint, range(1, 8), 0, "finishes", group=False)
    run_ranks(1, attempt, make, checkpoint, range(1, 4), 0, "finishes", group=False)
    assert [step for step, _ in curve(tmp_path / "tb")] == [1, 2, 3]


def test_strings_are_logged_too(tmp_path):
    tracker = TensorBoardTracker(str(tmp_path))
    tracker.start(None, step=0)
    tracker.log({"phase": "warm-up", "loss": 2, "lr": 0.5}, 1)
    tracker.finish()
    assert curve(tmp_path) == [(1, 2.0)]
    assert b"warm-up" in next(tmp_path.glob("events.*")).read_bytes()


# ---- any tracker


class Stub:
    """A tracker as a user would write it; `broken` names what raises."""

    def __init__(self, name: str = "stub", broken: tuple[str, ...] = ()):
        self.name, self.broken = name, broken
        self.calls: list[Any] = []

    def _do(self, what: str, *seen: Any) -> None:
        self.calls.append((what, *seen))
        if what in self.broken:
            raise OSError(f"no network for {what}")

    def start(self, state: Any, *, step: int) -> None:
        self._do("start", state, step)

    def log(self, metrics: Any, step: int) -> None:
        self._do("log", dict(metrics), step)

    def state_dict(self) -> dict[str, Any]:
        self._do("state_dict")
        return {"id": 1}

    def finish(self) -> None:
        self._do("finish")


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_errors_while_logging_are_one_warning_and_counted_and_others_go_on(caplog):
    bad, good = Stub("bad", ("log", "state_dict", "finish")), Stub("good")
    trackers = Trackers([bad, good], live=True)
    trackers.start({"bad": {"id": 0}}, step=2)
    for step in range(3, 8):
        trackers.log({"loss": 1.0}, step)
    assert len(warnings_of(caplog)) == 1 and "bad: step 3 was not logged: OSError" in warnings_of(caplog)[0]
    assert trackers.state_dict() == {"bad": {"id": 0}, "good": {"id": 1}}
    trackers.finish()
    assert "tracker bad: 5 steps were not logged" in warnings_of(caplog)[-1]
    logged = [("log", {"loss": 1.0}, step) for step in range(3, 8)]
    assert good.calls == [("start", None, 2), *logged, ("state_dict",), ("finish",)]


def test_a_tracker_that_does_not_start_is_left_alone_and_keeps_its_state(caplog):
    bad = Stub("bad", ("start",))
    trackers = Trackers([bad], live=True)
    trackers.start({"bad": {"id": 0}, "not here this time": {"id": 5}}, step=2)
    trackers.log({"loss": 1.0}, 3)
    trackers.finish()
    assert bad.calls == [("start", {"id": 0}, 2)] and len(warnings_of(caplog)) == 1
    assert trackers.state_dict() == {"bad": {"id": 0}, "not here this time": {"id": 5}}


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_without_the_package_training_goes_on_with_one_warning(package, tmp_path, caplog, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    tracker = WandbTracker(project="p") if package == "wandb" else TensorBoardTracker(tmp_path)
    trackers, state = Trackers([tracker], live=True), {package: {"run_id": "r1", "entity": "e", "project": "p"}}
    trackers.start(state, step=0)
    for step in range(1, 4):
        trackers.log({"loss": 1.0}, step)
    assert trackers.state_dict() == state
    trackers.finish()
    [warning] = warnings_of(caplog)
    assert package in warning and "training goes on" in warning


def test_other_ranks_start_nothing():
    stub = Stub()
    trackers = Trackers([stub], live=False)
    trackers.start({}, step=0)
    trackers.log({"loss": 1.0}, 1)
    trackers.finish()
    assert stub.calls == [] and trackers


def test_two_trackers_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two trackers are named 'wandb'"):
        Trackers([WandbTracker(), WandbTracker()], live=True)


def test_making_a_tracker_imports_neither_package():
    script = (
        "import sys; from pimm_ray.observe.loggers import *; WandbTracker(); TensorBoardTracker('x')\n"
        "assert not {'wandb', 'tensorboard', 'torch.utils.tensorboard'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parent.parent)
