"""Real sockets on one machine: who comes, who does not, and who is not wanted."""

import socket
import threading

import pytest

from jaxft.config import ConfigError
from jaxft.parallel import roll_call
from jaxft.records import FaultError, FaultKind, JobPlace


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def hold_all(places, *, timeout_secs=20.0):
    """Each in a thread; index of the list -> None or what was raised."""
    ends = {}

    def hold(number, place):
        try:
            ends[number] = roll_call.hold(place, timeout_secs=timeout_secs)
        except (ConfigError, FaultError) as error:
            ends[number] = error

    threads = [threading.Thread(target=hold, args=pair) for pair in enumerate(places)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


def places_of(*indices, num_processes, generation=0, port=None):
    coordinator = f"127.0.0.1:{port or free_port()}"
    return [
        JobPlace(
            process_index=index,
            num_processes=num_processes,
            coordinator=coordinator,
            generation=generation,
        )
        for index in indices
    ]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_all_of_them_go_on(order):
    assert hold_all(places_of(*order, num_processes=3)) == {0: None, 1: None, 2: None}


def test_the_absent_is_named_by_all():
    ends = hold_all(places_of(0, 1, num_processes=4), timeout_secs=0.5)
    assert ends[0].fault.kind is FaultKind.PEER_LOST
    assert "processes 2, 3 did not come" in str(ends[0])
    assert "did not come" in str(ends[1])


def test_without_process_0_that_one_is_named():
    told = []
    (place,) = places_of(1, num_processes=2)
    with pytest.raises(FaultError, match="process 0 did not come"):
        roll_call.hold(place, timeout_secs=1.3, told=told.append)
    assert told == [[0]]


def test_another_job_and_another_generation_are_refused():
    port = free_port()
    ours = places_of(0, 1, num_processes=2, port=port)
    (larger,) = places_of(2, num_processes=3, port=port)
    (earlier,) = places_of(1, num_processes=2, generation=7, port=port)
    ends = {}

    def refuse(place):
        with pytest.raises(ConfigError) as caught:
            roll_call.hold(place, timeout_secs=20.0)
        ends[place] = str(caught.value)

    primary = threading.Thread(
        target=roll_call.hold, args=(ours[0],), kwargs={"timeout_secs": 20.0}
    )
    primary.start()
    refuse(larger)
    refuse(earlier)
    roll_call.hold(ours[1], timeout_secs=20.0)
    primary.join()
    assert all("num_processes 2, generation 0" in text for text in ends.values())


def test_a_second_process_of_the_same_index_is_refused():
    port = free_port()
    primary, one, other = places_of(0, 1, 2, num_processes=3, port=port)
    answers = []

    def hold(place):
        try:
            roll_call.hold(place, timeout_secs=20.0)
        except ConfigError as error:
            answers.append(str(error))

    threads = [threading.Thread(target=hold, args=(p,)) for p in (primary, one, one)]
    for thread in threads:
        thread.start()
    # One of the two is refused and ends; the other one still waits.
    while not answers:
        threads[1].join(0.02)
        threads[2].join(0.02)
    roll_call.hold(other, timeout_secs=20.0)
    for thread in threads:
        thread.join()
    assert answers == ["process 1 of 3: process 1 is there already"]


def test_who_has_gone_again_is_absent():
    port = free_port()
    primary, _ = places_of(0, 1, num_processes=2, port=port)
    caught = []

    def hold():
        try:
            roll_call.hold(primary, timeout_secs=3.0, told=told)
        except FaultError as error:
            caught.append(str(error))

    three, _ = places_of(0, 1, num_processes=3, port=port)
    primary = three
    gone = threading.Event()
    absent = []

    def told(now):
        absent.append(list(now))
        gone.set()

    thread = threading.Thread(target=hold)
    thread.start()
    line = b'{"process_index": 1, "num_processes": 3, "generation": 0}\n'
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port), timeout=1)
            break
        except OSError:
            thread.join(0.01)
    with connection:
        connection.sendall(line)
        assert gone.wait(10)
    thread.join()
    assert [2] in absent
    assert "processes 1, 2 did not come" in caught[0]


def test_a_port_that_is_taken_is_one_clear_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (place,) = places_of(0, num_processes=2, port=port)
        with pytest.raises(ConfigError, match="somebody listens there already"):
            roll_call.hold(place, timeout_secs=1.0)


def test_whoever_else_listens_there_is_no_process_0():
    with socket.create_server(("127.0.0.1", 0)) as other:
        (place,) = places_of(1, num_processes=2, port=other.getsockname()[1])

        def answer():
            connection, _ = other.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(FaultError, match="process 0 did not come"):
            roll_call.hold(place, timeout_secs=0.5)
        thread.join()


@pytest.mark.parametrize("text", ["host", "host:", ":80", "host:0", "host:65536"])
def test_an_address_needs_host_and_port(text):
    with pytest.raises(ConfigError, match="HOST:PORT"):
        roll_call.address(text)


def test_an_address_in_two_parts():
    assert roll_call.address("10.0.0.1:61000") == ("10.0.0.1", 61000)
    assert roll_call.address("[::1]:80") == ("::1", 80)


def test_of_many_the_first_are_shown():
    assert roll_call.words([3]) == "process 3"
    assert roll_call.words([1, 2]) == "processes 1, 2"
    assert roll_call.words(list(range(30))).endswith("18, 19, ...")
