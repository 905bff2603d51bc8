"""Nothing of a lease's GPU time is lost or made up, whoever used it."""

from hypothesis import given
from hypothesis import strategies as st

from accounting import attribution

TIMES = st.integers(0, 60)
KEYS = st.sampled_from([("red",), ("blue",), ("green",)])


@st.composite
def held(draw: st.DrawFn) -> attribution.Held:
    start = draw(TIMES)
    return attribution.Held(
        gpus=draw(st.integers(0, 8)),
        start_us=start,
        end_us=start + draw(TIMES),
        replica_id=draw(st.sampled_from(["a", "b"])),
        state=draw(st.sampled_from(["starting", "serving", "draining", "asleep"])),
    )


@st.composite
def work(draw: st.DrawFn) -> attribution.Work:
    start = draw(TIMES)
    return attribution.Work(
        key=draw(st.one_of(st.none(), KEYS)),
        replica_id=draw(st.sampled_from(["a", "b", "gone"])),
        start_us=start,
        end_us=start + draw(st.integers(-5, 60)),
        weight=draw(st.integers(0, 10**6)),
    )


@given(
    st.lists(held(), max_size=4),
    st.lists(held(), max_size=5),
    st.lists(work(), max_size=8),
    st.lists(st.integers(0, 130), min_size=2, max_size=5, unique=True).map(sorted),
)
def test_allocated_is_attributed_and_waste_and_idle_and_starting(
    leased: list[attribution.Held],
    replicas: list[attribution.Held],
    jobs: list[attribution.Work],
    cuts: list[int],
) -> None:
    shares = attribution.attribute(leased, replicas, jobs, cuts)
    assert len(shares) == len(cuts) - 1
    for share, start, end in zip(shares, cuts, cuts[1:], strict=False):
        parts = [share.idle, share.starting, share.waste, *share.attributed.values()]
        assert all(part >= 0 for part in parts)
        assert sum(parts) == share.allocated
        assert share.allocated == sum(
            each.gpus * max(0, min(end, each.end_us) - max(start, each.start_us)) for each in leased
        )


@given(
    st.integers(0, 10**18),
    st.dictionaries(st.one_of(st.none(), KEYS), st.integers(0, 10**15), min_size=1),
)
def test_a_split_adds_up_and_is_fair_to_one(
    amount: int, weights: dict[attribution.Key | None, int]
) -> None:
    parts = attribution.split(amount, weights)
    assert sum(parts.values()) == amount
    total = sum(weights.values())
    if total:
        for key, part in parts.items():
            assert abs(part * total - amount * weights[key]) < total
