"""Comma lists of names that hold commas and quotation marks themselves."""

import pytest

from accounting import lists


@pytest.mark.parametrize(
    "names",
    [(), ("red",), ("a, b", "c"), ('"q",r', "a|b"), (" a", "b "), ("x\ny",), ('"',)],
)
def test_what_was_written_is_read(names: tuple[str, ...]) -> None:
    assert lists.read(lists.write(names)) == names


def test_plain_lists_are_as_slurm_has_them() -> None:
    assert lists.read("red,blue,,") == ("red", "blue")
    assert lists.write(["red", "blue"]) == "red,blue"


def test_a_quotation_mark_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="write a name with a comma"):
        lists.read('"red,blue')
