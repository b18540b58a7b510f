"""Tau without decoding: a walk over the tokens after which guesses are right takes the cycles of decoding."""

from research.trial import walk


def test_a_cycle_takes_the_right_guesses_and_the_token_of_the_target() -> None:
    plain, own = walk([2, 4, 0, 1, 0])  # of six tokens the first is from the prefill
    assert (plain.tokens, plain.calls, own.tokens) == (6, 5, 6)
    assert (own.calls, own.accepted) == (2, 3)


def test_a_response_that_ends_on_a_guess_has_no_token_of_the_target() -> None:
    _, own = walk([1, 0, 2, 1])
    assert (own.calls, own.accepted, own.tokens) == (2, 3, 5)
