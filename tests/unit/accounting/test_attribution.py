"""Who gets which part of a lease's GPU time."""

from accounting import attribution

RED, BLUE = ("red",), ("blue",)
LEASE = attribution.Held(4, 0, 1000)


def work(
    key: attribution.Key | None, start: int, end: int, weight: int = 1, replica: str = "r"
) -> attribution.Work:
    return attribution.Work(key, replica, start, end, weight)


def test_a_life_with_everything_in_it() -> None:
    held = [
        attribution.Held(4, 100, 200, "r", "starting"),
        attribution.Held(4, 200, 900, "r", "serving"),
    ]
    jobs = [
        work(RED, 300, 400, weight=30),
        work(BLUE, 300, 400, weight=10),
        work(None, 500, 550),
        work(RED, 880, 960),  # what runs past the replica's end is nobody's
    ]
    (share,) = attribution.attribute([LEASE], held, jobs, [0, 1000])
    assert share.attributed == {RED: 300 + 80, BLUE: 100}
    assert share.waste == 200
    assert share.starting == 400 + 400  # before the first replica, and while it started
    assert share.idle == 4000 - 480 - 200 - 800
    assert share.allocated == 4000


def test_a_requests_weight_is_spread_over_its_duration() -> None:
    held = [attribution.Held(1, 0, 100, "r", "serving")]
    long, short = work(RED, 0, 100, weight=100), work(BLUE, 0, 10, weight=100)
    (share,) = attribution.attribute([attribution.Held(1, 0, 100)], held, [long, short], [0, 100])
    assert share.attributed == {RED: 90 + 1, BLUE: 9}  # 10 µs at 1 : 10


def test_two_replicas_share_a_lease_and_one_gpu_is_free() -> None:
    held = [
        attribution.Held(2, 0, 1000, "a", "serving"),
        attribution.Held(1, 0, 1000, "b", "serving"),
    ]
    (share,) = attribution.attribute([LEASE], held, [work(RED, 0, 500, replica="b")], [0, 1000])
    assert (share.attributed, share.idle) == ({RED: 500}, 3500)


def test_without_replica_rows_the_lease_is_one_replica() -> None:
    (share,) = attribution.attribute([LEASE], [], [work(RED, 0, 250, replica="any")], [0, 1000])
    assert (share.attributed, share.idle, share.starting) == ({RED: 1000}, 3000, 0)


def test_periods_cut_and_keep_every_microsecond() -> None:
    shares = attribution.attribute([LEASE], [], [work(RED, 400, 600)], [0, 500, 700])
    assert [share.allocated for share in shares] == [2000, 800]
    assert [share.attributed[RED] for share in shares] == [400, 400]


def test_equal_remainders_go_to_the_smaller_key() -> None:
    assert attribution.split(10, {RED: 1, BLUE: 1, None: 1}) == {BLUE: 4, RED: 3, None: 3}
    assert attribution.split(3, {RED: 0, BLUE: 0}) == {BLUE: 2, RED: 1}
