"""Notices that the job will be stopped: SIGTERM outside Ray, and what is done before a deadline."""

import functools
import itertools
import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from pimm_ray import CheckpointManager, SavePolicy, find_checkpoint, preemption, verify_checkpoint
from pimm_ray.runtime.base import LocalRuntime, Notice
from pimm_ray.runtime.sigterm import Sigterm
from tests.jobs import Job, assert_continues, attempt, by_epochs, identical, twin
from tests.ranks import die, run_ranks, try_ranks

LONG = Job(samples=320, epochs=2)  # 40 steps an epoch on two ranks


@pytest.fixture(autouse=True)
def _as_in_a_new_process():
    """A Ray that an earlier test had in this process leaves a handler of its own, which exits at once."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def killed_soon(run):
    """As a cluster does it: SIGTERM, and SIGKILL 10 s later."""
    killer = threading.Timer(10, die)
    killer.daemon = True
    killer.start()
    terminate()


def ends_noted(loop):
    """The loop, which leaves a note of how it ended and after which step of this rank."""

    @functools.wraps(loop)
    def noted(run, folder):
        try:
            loop(run)
        except SystemExit as end:
            runtime = run.manager._runtime
            facts = {"code": end.code, "steps": len(run.record.steps), "notes": run.record.notes}
            Path(folder, f"rank-{runtime.rank}").write_text(json.dumps(facts))
            raise

    return noted


@ends_noted
def terminated_in_mid_epoch(run):
    for _ in run.manager.epochs(run.job.epochs):
        for batch in run.manager.batches():
            run.learn(batch)
            time.sleep(0.01)
            if run.manager._runtime.rank == 1 and len(run.record.steps) == 7:
                killed_soon(run)


@ends_noted
def terminated_in_evaluation(run):
    for _ in run.manager.epochs(run.job.epochs):
        for batch in run.manager.batches():
            run.learn(batch)
        for number in range(2000):
            if run.manager._runtime.rank == 1 and number == 3:
                killed_soon(run)
            time.sleep(0.01)
            run.manager.poll()


def terminated(folder, loop):
    """What each of two ranks noted at its end; the job is then run again, and its records come, too."""
    job = replace(LONG, loop=functools.partial(loop, folder=str(folder)), poll_every=0.1)
    outcomes = try_ranks(2, attempt, str(folder / "run"), job, None, None, 1)
    assert [outcome.kind for outcome in outcomes] == ["SystemExit"] * 2, [outcome.error for outcome in outcomes]
    ends = [json.loads((folder / f"rank-{rank}").read_text()) for rank in range(2)]
    return ends, run_ranks(2, attempt, str(folder / "run"), LONG, None, None, 9999)


def test_b35_after_a_sigterm_to_one_rank_all_ranks_save_at_one_step_and_the_next_attempt_starts_there(tmp_path):
    ends, records = terminated(tmp_path, terminated_in_mid_epoch)
    step = ends[0]["steps"]
    assert ends == [{"code": 143, "steps": step, "notes": []}] * 2
    assert 7 < step < 40, "within one poll of 0.1 s, at 0.01 s a step and more"
    assert_continues(twin(LONG, 2), records, at=step)


def test_b35_a_long_evaluation_answers_a_sigterm_too(tmp_path):
    ends, records = terminated(tmp_path, terminated_in_evaluation)
    assert ends == [{"code": 143, "steps": 40, "notes": []}] * 2
    assert_continues(twin(LONG, 2), records, at=40)
    assert [record.steps[0].epoch for record in records] == [1, 1]


def counting(run):
    asked, look = [0], LocalRuntime.notice
    LocalRuntime.notice = lambda self: (asked.__setitem__(0, asked[0] + 1), look(self))[1]
    by_epochs(run)
    run.record.notes.append(asked[0])


def test_looking_for_notices_changes_nothing_and_costs_no_step(tmp_path):
    job = replace(LONG, loop=counting, poll_every=1e-6)
    records = run_ranks(2, attempt, str(tmp_path), job, None, None, 1)
    assert all(record.notes[0] > 30 for record in records)
    for expected, found in zip(twin(LONG, 2), records, strict=True):
        assert found.steps == expected.steps and identical(found.weights, expected.weights)


# One process.


def make(folder, **save):
    manager = CheckpointManager(
        model=nn.Linear(2, 1), loader=list(range(100)), save=SavePolicy(timeout_seconds=20, **save), storage=folder
    )
    manager.resume()
    return manager


def steps(manager, terminate_at=None, limit=100):
    """How many steps it made, and with which code it ended."""
    made = 0
    try:
        for _ in manager.epochs(1):
            for _ in manager.batches():
                made += 1
                if made == terminate_at:
                    terminate()
                manager.step()
    except SystemExit as end:
        return made, end.code
    return made, None


def alone(program, *args):
    """In a process of its own, without torch.distributed: its outcome."""
    return try_ranks(1, program, *args, group=False)[0]


def test_a_single_process_saves_at_the_very_next_step(tmp_path):
    outcome = alone(lambda rank: steps(make(tmp_path), terminate_at=5))
    assert outcome.value == (6, 143)
    newest = find_checkpoint(tmp_path)
    assert (newest.step, newest.reason) == (6, "preemption") and verify_checkpoint(newest.path) == []


def test_what_is_saved_already_is_not_saved_again(tmp_path):
    assert alone(lambda rank: steps(make(tmp_path, every_steps=1), terminate_at=5)).value == (6, 143)
    newest = find_checkpoint(tmp_path)
    assert (newest.step, newest.reason) == (6, "every_steps")


def test_with_on_preemption_off_sigterm_ends_the_process_as_ever(tmp_path):
    assert alone(lambda rank: steps(make(tmp_path, on_preemption=False), terminate_at=5)).killed
    assert find_checkpoint(tmp_path) is None


def own_handler(folder):
    seen = []
    mine = lambda *_: seen.append("mine")  # noqa: E731
    signal.signal(signal.SIGTERM, mine)
    made = steps(make(folder), terminate_at=5)
    restored = signal.getsignal(signal.SIGTERM) is mine
    terminate()
    return made, restored, seen


def test_a_handler_of_the_users_runs_too_and_is_back_in_its_place_afterwards(tmp_path):
    assert alone(lambda rank: own_handler(tmp_path)).value == ((6, 143), True, ["mine", "mine"])


def finished(folder):
    before = signal.getsignal(signal.SIGTERM)
    manager = make(folder)
    during = signal.getsignal(signal.SIGTERM)
    made = steps(manager)
    manager.finish()
    return made, during != before, signal.getsignal(signal.SIGTERM) == before


def test_the_end_of_the_run_restores_the_handler(tmp_path):
    assert alone(lambda rank: finished(tmp_path)).value == ((100, None), True, True)


def terminated_before_finish(folder):
    manager = make(folder)
    steps(manager)
    terminate()
    try:
        manager.finish()
    except SystemExit as end:
        return end.code, find_checkpoint(folder).step


def test_a_sigterm_after_the_last_step_ends_the_process_when_all_is_saved(tmp_path):
    assert alone(lambda rank: terminated_before_finish(tmp_path)).value == (143, 100)


def test_sigterm_stays_ignored_where_the_user_ignores_it(tmp_path):
    def ignoring(rank):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return steps(make(tmp_path), terminate_at=5)

    assert alone(ignoring).value == (100, None)


def test_outside_the_main_thread_nothing_is_installed(tmp_path):
    before, made = signal.getsignal(signal.SIGTERM), []
    thread = threading.Thread(target=lambda: made.append(steps(make(tmp_path))))
    thread.start()
    thread.join()
    assert made == [(100, None)] and signal.getsignal(signal.SIGTERM) == before


def forked_with(sigterm):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"here")
        time.sleep(10)
        os._exit(0)
    os.read(reading, 4)
    os.kill(child, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sigterm.seen


def test_a_forked_process_of_the_users_still_ends_at_sigterm():
    def program(rank):
        sigterm = Sigterm()
        sigterm.install()
        return forked_with(sigterm)

    assert alone(program).value == (-signal.SIGTERM, False)


def chain(close_first):
    """Two managers in one process, the first one's time over or not."""
    first, second = Sigterm(), Sigterm()
    first.install()
    second.install()
    if close_first:
        first.restore()
    terminate()
    seen = first.seen, second.seen
    second.restore()
    first.restore()
    return seen, signal.getsignal(signal.SIGTERM) == (first._handle if close_first else signal.SIG_DFL)


def test_two_in_one_process_both_hear_and_neither_ends_it():
    assert alone(lambda rank: chain(close_first=False)).value == ((True, True), True)
    assert alone(lambda rank: chain(close_first=True)).value == ((True, True), True)


def test_a_handler_whose_time_is_over_lets_sigterm_through():
    def program(rank):
        chain(close_first=True)
        terminate()

    assert alone(program).killed


def accumulating(folder):
    manager = make(folder, poll_every_seconds=0.001)
    seen = []
    for _ in manager.epochs(1):
        for number, _ in enumerate(manager.batches()):
            if number == 2:
                terminate()
            for _ in range(3):
                manager.poll()
            seen.append(number)
            if number % 2:
                try:
                    manager.step()
                except SystemExit:
                    return seen, manager.state.global_step


def test_inside_a_window_a_poll_leaves_the_answer_to_the_step(tmp_path):
    assert alone(lambda rank: accumulating(tmp_path)).value == ([0, 1, 2, 3], 2)
    assert find_checkpoint(tmp_path).step == 2


def asked_in_the_last_window(folder):
    manager = make(folder)
    for _ in manager.epochs(1):
        for number, _ in enumerate(manager.batches()):
            if number == 98:
                terminate()
            if number == 99:
                manager.save(metrics={"score": 0.5})
            manager.step()


def test_a_save_that_was_asked_for_and_waits_for_the_end_of_the_epoch_gives_its_metrics(tmp_path):
    assert alone(lambda rank: asked_in_the_last_window(tmp_path)).kind == "SystemExit"
    newest = find_checkpoint(tmp_path)
    assert (newest.step, newest.reason, newest.metrics) == (100, "preemption", {"score": 0.5})


@pytest.mark.parametrize("seconds", [0, -1, None, float("nan"), True])
def test_a_poll_interval_that_is_no_time_is_refused(seconds):
    with pytest.raises(ValueError, match="poll_every_seconds"):
        SavePolicy(poll_every_seconds=seconds)


# Before a deadline, as Ray's notices have one.


class Watched:
    """A run that gets a notice after step 3: when it saved, and the steps at which it waited.

    Args:
        deadlines: of one notice after the other, in seconds from when it comes; each comes while the job waits.
        known: whether a save has been timed before; then each counts as this long, on a busy machine too.
    """

    def __init__(self, folder, monkeypatch, *deadlines, save_seconds=0.02, known=True):
        monkeypatch.setattr(preemption, "PATIENCE_SECONDS", 0.3)
        monkeypatch.setattr(preemption, "SLACK_SECONDS", 0.4)
        manager = self.manager = CheckpointManager(
            model=nn.Linear(2, 1), loader=list(range(10_000)), storage=folder,
            save=SavePolicy(poll_every_seconds=0.2, at_end=False, timeout_seconds=20),
        )  # fmt: skip
        self.deadlines, self.notice = list(deadlines), None
        monkeypatch.setattr(LocalRuntime, "notice", lambda _: self.notice)
        monkeypatch.setattr(LocalRuntime, "pending", lambda _: self.notice is not None)
        monkeypatch.setattr(LocalRuntime, "settle", lambda _: self.settle())
        manager.resume()
        write, self.saves, self.waited = manager._saver._write, [], []

        def slow(*args):
            time.sleep(save_seconds)
            self.saves.append((manager.state.global_step, time.time()))
            return write(*args)

        monkeypatch.setattr(manager._saver, "_write", slow)
        if known:
            monkeypatch.setattr(preemption.Preemption, "_save_seconds", save_seconds)
            manager._saver.took.append(save_seconds)

    def come(self):
        self.deadline = time.time() + self.deadlines.pop(0)
        self.notice = Notice(what=f"nodes={len(self.deadlines)}", deadline=self.deadline)

    def settle(self):
        """Before a wait, all that was reported is made sure of."""
        self.waited.append(self.manager.state.global_step)
        if self.deadlines:
            self.come()

    def run(self):
        for _ in self.manager.epochs(1):
            for _ in self.manager.batches():
                time.sleep(0.01)
                self.manager.step()
                step = self.manager.state.global_step
                if step == 3:
                    self.come()
                if not self.deadlines and self.waited and step > self.waited[-1] + 30 and time.time() > self.deadline:
                    break  # it has gone on
        return self

    @property
    def steps_saved(self):
        return [step for step, _ in self.saves]

    @property
    def gaps(self):
        times = [at for _, at in self.saves]
        return [b - a for a, b in itertools.pairwise(times)]


def test_before_a_deadline_it_saves_at_once_and_again_and_last_so_that_two_more_would_fit_then_waits(
    tmp_path, monkeypatch, caplog
):
    run = Watched(tmp_path, monkeypatch, 2.0).run()
    assert run.steps_saved[0] == 5 and len(run.saves) >= 3
    assert run.waited == [run.steps_saved[-1]], "nothing that was done is unsaved, and nothing is done after that"
    assert run.deadline - 1.5 < run.saves[-1][1] < run.deadline - 2 * 0.02
    assert all(gap > 0.19 for gap in run.gaps[:-1]), "on the cadence"
    for said in (
        "preemption: notice nodes=0 deadline=in ",
        f"preemption: waiting for the restart, saved up to step={run.waited[0]} and on record; deadline in ",
        "preemption: not restarted 0.3 s after the deadline: training goes on",
    ):
        assert caplog.text.count(said) == 1


def test_a_save_that_took_so_long_that_no_other_fits_was_the_last_one(tmp_path, monkeypatch, caplog):
    run = Watched(tmp_path, monkeypatch, 1.6, save_seconds=0.7, known=False).run()
    assert run.steps_saved == run.waited == [5]
    assert "(a save takes: not known)" in caplog.text and "no save fits" not in caplog.text


def test_when_no_save_fits_it_says_so_and_makes_sure_of_what_is_reported(tmp_path, monkeypatch, caplog):
    run = Watched(tmp_path, monkeypatch, 0.5, save_seconds=9.0).run()
    assert run.saves == [] and run.waited == [5]
    assert "preemption: no save fits" in caplog.text and "(a save takes: 9.0 s)" in caplog.text


def test_a_job_that_was_not_restarted_answers_the_next_notice(tmp_path, monkeypatch, caplog):
    run = Watched(tmp_path, monkeypatch, 0.8, 2.0).run()
    assert len(run.waited) == 2 and run.waited[1] == run.steps_saved[-1] > run.waited[0]
    assert "notice nodes=1" in caplog.text and "notice nodes=0" in caplog.text


def test_after_a_notice_saves_take_a_fifth_of_the_time_at_most(tmp_path, monkeypatch):
    run = Watched(tmp_path, monkeypatch, 2.8, save_seconds=0.2).run()
    assert run.gaps[0] > 0.99
