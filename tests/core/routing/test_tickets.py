# SPDX-License-Identifier: Apache-2.0
import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_slo.core.routing.tickets import Ticket


@settings(max_examples=examples(50))
@given(st.from_regex(r"[a-z0-9]{0,16}", fullmatch=True), st.integers(1, 10**18 - 1))
def test_a_ticket_survives_its_text(front: str, number: int) -> None:
    assert Ticket.parse(str(Ticket(front, number))) == (front, number)


def test_a_front_without_a_name_writes_numbers() -> None:
    assert str(Ticket("", 7)) == "7"
    assert Ticket.parse(":7") == Ticket.parse("7") == ("", 7)
    assert str(Ticket("a1", 7)) == "a1:7"


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "1.5", "x", "a:", "a:0", "A:1", "a:b:1", "a-b:1", "a" * 17 + ":1",
             "9" * 30, "1 ", "1\n", "\u0661", "a:07"],
)  # fmt: skip
def test_nonsense_is_no_ticket(text: str) -> None:
    with pytest.raises(ValueError, match="not a ticket"):
        Ticket.parse(text)
