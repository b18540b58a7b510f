"""Hashes of content."""

from vlmdistill.stores.schema import content_hash, content_hashes


class Large:
    """A value that counts how often it is read."""

    reads = 0

    def __str__(self) -> str:
        self.reads += 1
        return "large"


def test_hashes_of_many_values_read_what_they_share_once() -> None:
    shared = Large()
    hashes = content_hashes([1.5, shared], range(100))
    assert shared.reads == 1
    assert hashes == [content_hash([[1.5, shared], number]) for number in range(100)]
