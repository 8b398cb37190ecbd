"""Lanes keep order, overlap, wait for one another, and never hang."""

import threading
import time
import traceback

import pytest
import torch

from ferryman.observe.trace import Trace
from ferryman.runtime.lanes import Lanes
from ferryman.runtime.marks import LaneError
from support.devices import torch_virtual

DELAY = 0.06  # longer than any work here takes, so that a missing wait shows


@pytest.fixture
def lanes(device):
    with Lanes(device) as lanes:
        yield lanes


def sleep(seconds):
    return lambda: time.sleep(seconds)


def test_a_lane_runs_its_work_in_order(lanes):
    done = []
    for lane in (lanes.host("host"), lanes.device("h2d")):
        marks = [lane.submit(lambda i=i, lane=lane: done.append((lane.name, i))) for i in range(100)]
        marks[-1].wait()
    assert done == [("host", i) for i in range(100)] + [("h2d", i) for i in range(100)]


def test_submitting_does_not_block_whatever_the_work_waits_for(lanes):
    gate = threading.Event()
    host, h2d, other = lanes.host("host"), lanes.device("h2d"), lanes.host("other")
    gated = host.submit(gate.wait)
    device_after_host = h2d.submit(lambda: None, after=[gated])
    host_after_device = other.submit(lambda: None, after=[device_after_host])
    assert not gated.passed()
    assert not device_after_host.passed()
    assert not host_after_device.passed()
    gate.set()
    host_after_device.wait()
    assert gated.passed()
    assert device_after_host.passed()


def test_small_copies_on_the_host_wake_no_thread():
    with Lanes("cpu") as lanes:
        at_once, waiting, large, delayed = (lanes.device(name) for name in ("at once", "waiting", "large", "delayed"))

        def copy(lane, elements, after=()):
            target = torch.zeros(elements)
            return target, lane.copy([(target, torch.ones(elements))], after=after, label="copy")

        target, mark = copy(at_once, 4)
        assert mark.passed()
        assert target.sum() == 4
        assert at_once._thread is None

        gate = threading.Event()
        target, mark = copy(waiting, 4, after=[lanes.host("gate").submit(gate.wait)])
        assert not mark.passed()
        gate.set()
        mark.wait()
        assert target.sum() == 4

        delayed.prelude = sleep(DELAY)
        assert not copy(delayed, 4)[1].passed()
        copy(large, 1 << 16)[1].wait()
        assert large._thread is not None


def test_host_lanes_overlap(lanes):
    meet = threading.Barrier(2, timeout=30)  # passes only if both are there at the same time
    marks = [lanes.host(name).submit(meet.wait) for name in ("host", "disk")]
    for mark in marks:
        mark.wait()


def test_marks_order_every_pair_of_kinds(lanes):
    seen = []
    names = {"host a": lanes.host, "device a": lanes.device, "host b": lanes.host, "device b": lanes.device}
    made = {name: make(name) for name, make in names.items()}
    for first in made:
        for second in made:
            if first == second:
                continue
            seen.clear()
            mark = made[first].submit(lambda: (time.sleep(0.01), seen.append("first")))
            made[second].submit(lambda: seen.append("second"), after=[mark]).wait()
            assert seen == ["first", "second"], (first, second)


@pytest.mark.parametrize("seed", range(8))
def test_random_graphs_keep_their_order(lanes, seed):
    """Every piece of work comes after all that it was told to, over lanes of both kinds."""
    generator = torch.Generator().manual_seed(seed)
    made = [lanes.host("host"), lanes.host("disk"), lanes.device("h2d"), lanes.device("d2h")]
    order, lock, marks, after_of = [], threading.Lock(), [], []

    def note(i):
        def work():
            if i % 7 == 0:
                time.sleep(0.001)
            with lock:
                order.append(i)

        return work

    for i in range(120):
        count = int(torch.randint(0, 3, (), generator=generator)) if marks else 0
        after = [int(torch.randint(0, i, (), generator=generator)) for _ in range(count)]
        lane = made[int(torch.randint(0, len(made), (), generator=generator))]
        after_of.append(after)
        marks.append(lane.submit(note(i), after=[marks[j] for j in after]))
    lanes.wait()
    place = {i: at for at, i in enumerate(order)}
    assert len(place) == 120
    assert all(place[j] < place[i] for i, after in enumerate(after_of) for j in after)


def test_copies_and_host_work_meet_without_a_race(virtual):
    """Values travel host -> device -> host through lanes, under delays and the strict detector."""
    torch_virtual.set_link(virtual, delay=DELAY)
    n = 1000
    source, landing = torch.zeros(n, pin_memory=True), torch.zeros(n, pin_memory=True)
    slot = torch.zeros(n, device=virtual)
    torch_virtual.synchronize()
    with Lanes(virtual) as lanes:
        host, h2d, compute, d2h = lanes.host("host"), lanes.device("h2d"), lanes.device("compute"), lanes.device("d2h")
        read = None
        for i in range(4):
            filled = host.submit(lambda i=i: source.fill_(i), after=[read] if read else [], writes=[source])
            fetched = h2d.submit(lambda: slot.copy_(source, non_blocking=True), after=[filled])
            doubled = compute.submit(lambda: slot.mul_(2), after=[fetched])
            landed = d2h.submit(lambda: landing.copy_(slot, non_blocking=True), after=[doubled])
            result = []
            read = host.submit(lambda result=result: result.append(landing.clone()), after=[landed], reads=[landing])
            read.wait()
            assert torch.equal(result[0], torch.full((n,), 2.0 * i))


@pytest.mark.parametrize("missing", ["fetched", "doubled", "landed"])
def test_a_missing_wait_is_found(missing, virtual):
    """The negative control of the test above: without one of its waits the detector speaks, whatever the timing."""
    source, landing = torch.zeros(8, pin_memory=True), torch.zeros(8, pin_memory=True)
    slot = torch.zeros(8, device=virtual)
    torch_virtual.synchronize()

    def unless(name, mark):
        return [] if name == missing else [mark]

    lanes = Lanes(virtual)
    host, h2d, compute, d2h = lanes.host("host"), lanes.device("h2d"), lanes.device("compute"), lanes.device("d2h")
    filled = host.submit(lambda: source.fill_(1), writes=[source])
    fetched = h2d.submit(lambda: slot.copy_(source, non_blocking=True), after=[filled])
    fetched._settled.wait()
    doubled = compute.submit(lambda: slot.mul_(2), after=unless("fetched", fetched))
    doubled._settled.wait()
    landed = d2h.submit(lambda: landing.copy_(slot, non_blocking=True), after=unless("doubled", doubled))
    landed._settled.wait()
    host.submit(lambda: landing.clone(), after=unless("landed", landed), reads=[landing])
    with pytest.raises(RuntimeError, match="race"):
        lanes.close()
    torch_virtual.synchronize()
    assert torch_virtual.race_count() == 1
    torch_virtual.clear_races()


def test_a_host_lane_that_waited_does_not_speak_for_the_driver(virtual):
    """What a lane has waited for is not known to others until they wait for its mark: luck of timing has no say."""
    landing, slot = torch.zeros(8, pin_memory=True), torch.ones(8, device=virtual)
    with Lanes(virtual) as lanes:
        torch_virtual.synchronize()
        host, d2h = lanes.host("host"), lanes.device("d2h")
        landed = d2h.submit(lambda: landing.copy_(slot, non_blocking=True))
        used = host.submit(lambda: None, after=[landed], reads=[landing])
        used._settled.wait()  # as a thread would that looks at the clock instead of waiting
        with pytest.raises(RuntimeError, match="race"):
            torch_virtual.host_reads(landing)
        used.wait()
        torch_virtual.host_reads(landing)
    torch_virtual.clear_races()


def fail():
    raise KeyError("the cause")


@pytest.mark.parametrize("kind", ["host", "device"])
def test_an_exception_surfaces_once_at_the_next_wait(lanes, kind):
    lane, other = getattr(lanes, kind)("failing"), lanes.host("other")
    failed = lane.submit(fail, label="update unit 3")
    failed._settled.wait()
    unrelated = other.submit(lambda: None)
    with pytest.raises(KeyError, match="the cause") as caught:
        unrelated.wait()
    assert "in fail" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert "'update unit 3' in lane 'failing'" in caught.value.__notes__[0]
    unrelated.wait()
    lanes.wait()
    with pytest.raises(LaneError, match="'update unit 3' in lane 'failing' was not done"):
        failed.wait()


@pytest.mark.parametrize("kind", ["host", "device"])
def test_what_comes_after_a_failure_is_not_run(lanes, kind):
    ran, gate = [], threading.Event()
    lane, other = getattr(lanes, kind)("failing"), lanes.host("other")
    blocked = lanes.host("gate").submit(gate.wait)
    failed = lane.submit(fail, after=[blocked])
    behind = lane.submit(lambda: ran.append("behind"))
    waiting = other.submit(lambda: ran.append("waiting"), after=[failed])
    behind_waiting = other.submit(lambda: ran.append("behind waiting"))
    gate.set()
    with pytest.raises(KeyError):
        behind_waiting.wait()
    for mark in (failed, behind, waiting, behind_waiting):
        with pytest.raises(LaneError, match="was not done"):
            mark.wait()
        assert mark.passed()
    assert ran == []
    lane.submit(lambda: ran.append("new"), label="new").wait()
    other.submit(lambda: ran.append("new too")).wait()
    assert ran == ["new", "new too"]


def test_new_work_is_not_doomed_by_a_failure_that_was_seen(lanes):
    """Even when older work that must be cancelled is still queued in front of it."""
    gate, ran = threading.Event(), []
    first, second = lanes.host("first"), lanes.host("second")
    failed = first.submit(fail)
    slow = second.submit(gate.wait)
    doomed = second.submit(lambda: ran.append("doomed"), after=[failed])
    failed._settled.wait()
    with pytest.raises(KeyError):
        failed.wait()
    fresh = second.submit(lambda: ran.append("fresh"))
    gate.set()
    fresh.wait()
    slow.wait()
    assert ran == ["fresh"]
    with pytest.raises(LaneError):
        doomed.wait()


def test_each_failure_surfaces(lanes):
    for name in ("a", "b"):
        lanes.host(name).submit(fail, label=name)._settled.wait()
    notes = []
    for _ in range(2):
        with pytest.raises(KeyError) as caught:
            lanes.wait()
        notes += caught.value.__notes__
    assert sorted(note[-4:] for note in notes) == [" 'a'", " 'b'"]
    lanes.wait()


def test_a_failure_keeps_nothing_alive(lanes):
    import gc
    import weakref

    class Big:
        pass

    def work():
        big = Big()
        alive.append(weakref.ref(big))
        raise ValueError(str(big))

    alive = []
    lane = lanes.host("host")
    with pytest.raises(ValueError, match="Big"):
        lane.submit(work).wait()
    gc.collect()
    assert alive[0]() is None


def test_closing_finishes_the_work_and_refuses_more(device):
    done = []
    lanes = Lanes(device)
    host, h2d = lanes.host("host"), lanes.device("h2d")
    slow = host.submit(sleep(0.05))
    h2d.submit(lambda: done.append("h2d"), after=[slow])
    lanes.close()
    assert done == ["h2d"]
    with pytest.raises(LaneError, match="lane 'host' is closed"):
        host.submit(lambda: None)
    lanes.close()


def test_closing_raises_what_nobody_has_seen(device):
    lanes = Lanes(device)
    lanes.host("host").submit(fail)
    with pytest.raises(KeyError):
        lanes.close()
    lanes.close()


def test_leaving_with_an_exception_does_not_hide_it(device):
    def leave():
        with Lanes(device) as lanes:
            lanes.host("host").submit(fail)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leave()


def test_threads_are_gone_after_closing(device):
    before = {*threading.enumerate()}
    with Lanes(device) as lanes:
        lanes.host("host").submit(lambda: None)
        gate = lanes.host("gate").submit(sleep(0.01))
        lanes.device("h2d").submit(lambda: None, after=[gate])
    assert {*threading.enumerate()} <= before


def test_two_lanes_of_one_name_are_refused(lanes):
    lanes.host("host")
    with pytest.raises(ValueError, match="there is a lane 'host' already"):
        lanes.device("host")


def test_many_threads_may_submit(lanes):
    lane, d2h, counts = lanes.host("host"), lanes.device("d2h"), {"host": 0, "d2h": 0}

    def count(name):
        counts[name] += 1  # unguarded: only right if a lane runs one piece of work at a time

    def drive():
        for _ in range(200):
            mark = lane.submit(lambda: count("host"))
            d2h.submit(lambda: count("d2h"), after=[mark])

    threads = [threading.Thread(target=drive) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lanes.wait()
    assert counts == {"host": 800, "d2h": 800}


def test_a_lane_can_be_occupied_by_the_caller(virtual):
    """For work that is the user's own code: it waits for marks, others wait for its points, and it is traced."""
    torch_virtual.set_link(virtual, delay=DELAY)
    source, landing = torch.ones(8, pin_memory=True), torch.zeros(8, pin_memory=True)
    slot = torch.zeros(8, device=virtual)
    torch_virtual.synchronize()
    trace = Trace()
    with Lanes(virtual, trace=trace) as lanes:
        compute, h2d, d2h = lanes.device("compute"), lanes.device("h2d"), lanes.device("d2h")
        fetched = h2d.submit(lambda: slot.copy_(source, non_blocking=True))
        with compute.occupy("visit", after=[fetched]) as end, compute.current():
            slot.add_(1)
            half_way = compute.here()
            landed = d2h.submit(lambda: landing.copy_(slot, non_blocking=True), after=[half_way])
            queued = compute.submit(lambda: slot.mul_(10), after=[landed])
            assert not end.passed()
            assert not queued.passed()  # in order: the lane is taken
        queued.wait()
        landed.wait()
        assert landing.tolist() == [2.0] * 8
        queued.precede_caller()
        assert slot.tolist() == [20.0] * 8
        after = lanes.here()
        compute.follow(after)
    assert next(span.label for span in trace.spans() if span.lane == "compute") == "visit"


def test_work_of_an_occupant_that_fails_is_the_occupants(lanes):
    """It is raised where it happens, not a second time; what waits for it is cancelled, and the lane goes on."""

    def visit():
        with compute.occupy("visit") as end:
            marks.append(end)
            fail()

    compute, host, marks = lanes.device("compute"), lanes.host("host"), []
    with pytest.raises(KeyError, match="the cause") as caught:
        visit()
    assert "'visit' in lane 'compute'" in caught.value.__notes__[0]
    lanes.wait()
    with pytest.raises(LaneError, match="was not done"):
        host.submit(lambda: None, after=marks).wait()
    with pytest.raises(LaneError, match="was not done"):
        compute.follow(*marks)
    compute.submit(lambda: None).wait()


def test_what_is_not_a_mark_is_refused_and_leaves_nothing_to_wait_for(lanes):
    lane = lanes.device("h2d")
    with pytest.raises(ValueError, match="after=: a list of marks is required"):
        lane.submit(lambda: None, after=[None])
    lane.wait()
