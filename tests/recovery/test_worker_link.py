"""The worker's side of the pipes, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from jaxft.recovery.worker_link import MAX_BACKLOG_BYTES

HEAD = """
import fcntl, os, sys, threading, time
from jaxft.recovery.worker_link import SupervisorLink, MAX_BACKLOG_BYTES
event_fd, parent_fd = map(int, sys.argv[1:3])
link = SupervisorLink(event_fd, parent_fd)
"""


class Linked:
    """A process with a link to this one."""

    def __init__(self, script: str):
        self.read_fd, events_in = os.pipe()
        parent_out, self.parent_fd = os.pipe()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-c", HEAD + textwrap.dedent(script)),
                *(str(events_in), str(parent_out)),
            ],
            pass_fds=[events_in, parent_out],
            stdout=subprocess.PIPE,
            text=True,
        )
        os.close(events_in)
        os.close(parent_out)

    def __enter__(self) -> Linked:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.communicate()
        for fd in (self.read_fd, self.parent_fd):
            if fd >= 0:
                os.close(fd)

    def read_all(self) -> list[bytes]:
        data = b""
        while piece := os.read(self.read_fd, 1 << 20):
            data += piece
        assert data == b"" or data.endswith(b"\n")
        return data.split(b"\n")[:-1]

    def out(self) -> str:
        return self.process.communicate(timeout=20)[0].strip()


def test_lines_arrive_whole_and_in_order_from_many_threads():
    with Linked(
        """
        def send(number):
            for n in range(50):
                link.send(f"{number} {n} " + chr(97 + number) * 20_000)
        threads = [threading.Thread(target=send, args=(i,)) for i in range(4)]
        for t in threads: t.start()
        for t in threads: t.join()
        link.close(timeout_secs=10)
        """
    ) as linked:
        lines = linked.read_all()
        linked.out()
    assert len(lines) == 200
    for number in range(4):
        mine = [line for line in lines if line.startswith(b"%d " % number)]
        letter = bytes([97 + number])
        assert mine == [b"%d %d " % (number, n) + letter * 20_000 for n in range(50)]


def test_a_supervisor_that_does_not_read_stalls_nobody_and_loses_whole_lines():
    with Linked(
        """
        begun = time.monotonic()
        for n in range(300):
            link.send(f"{n} " + "x" * 50_000)
        print(time.monotonic() - begun, flush=True)
        link.close(timeout_secs=10)
        """
    ) as linked:
        secs = float(linked.process.stdout.readline())
        lines = linked.read_all()
    assert secs < 1.0
    numbers = [int(line.split()[0]) for line in lines]
    assert numbers == sorted(numbers)
    assert all(line.endswith(b"x" * 50_000) for line in lines)
    size = sum(map(len, lines))
    assert MAX_BACKLOG_BYTES - 60_000 < size < MAX_BACKLOG_BYTES + (1 << 20)


def test_closing_does_not_wait_for_ever():
    with Linked(
        """
        link.send("x" * 1_000_000)
        begun = time.monotonic()
        link.close(timeout_secs=0.2)
        link.send("after the end")
        link.close()
        print(time.monotonic() - begun)
        """
    ) as linked:
        assert 0.2 <= float(linked.out()) < 1.0


def test_a_reader_that_is_gone_is_no_error():
    with Linked(
        """
        sys.stdin = None
        time.sleep(0.2)
        for _ in range(3): link.send("x" * 100_000)
        link.close()
        print("alive")
        """
    ) as linked:
        os.close(linked.read_fd)
        linked.read_fd = -1
        assert linked.out() == "alive"
        assert linked.process.returncode == 0


@pytest.mark.parametrize("early", [False, True], ids=["later", "before the link"])
def test_the_end_of_the_parent_pipe_kills(early):
    with Linked("print('linked', flush=True); time.sleep(30)") as linked:
        if not early:
            linked.process.stdout.readline()
        os.close(linked.parent_fd)
        linked.parent_fd = -1
        linked.out()
        assert linked.process.returncode == -signal.SIGKILL


def test_the_kernel_kills_where_threads_cannot_run():
    # The one that starts it is a thread here: its end is the parent's death.
    made: list[Linked] = []

    def start() -> None:
        made.append(Linked("print('linked', flush=True); sum(range(10**11))"))
        made[0].process.stdout.readline()

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    with made[0] as linked:
        begun = time.monotonic()
        assert linked.process.wait(timeout=10) == -signal.SIGKILL
        assert time.monotonic() - begun < 1.0


def test_children_get_none_of_it():
    with Linked(
        """
        import subprocess
        if os.fork() == 0:
            link.send("from the child")
            link.close()
            for fd in (event_fd, parent_fd):
                try:
                    os.fstat(fd)
                    os._exit(1)
                except OSError:
                    pass
            os._exit(7)
        print(os.WEXITSTATUS(os.wait()[1]), flush=True)
        code = "import os, sys; print(*[fd for fd in os.listdir('/proc/self/fd')])"
        argv = [sys.executable, "-c", code]
        out = subprocess.check_output(argv, close_fds=False, text=True)
        print({str(event_fd), str(parent_fd)} & set(out.split()), flush=True)
        link.send("from the parent")
        link.close()
        """
    ) as linked:
        assert linked.read_all() == [b"from the parent"]
        assert linked.out() == "7\nset()"


def test_a_child_forked_by_a_thread_outlives_that_thread():
    with Linked(
        """
        pids = []
        def fork():
            pid = os.fork()
            if pid == 0:
                time.sleep(0.3)
                os._exit(5)
            pids.append(pid)
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
        print(os.waitpid(pids[0], 0)[1] >> 8)
        """
    ) as linked:
        assert linked.out() == "5"
