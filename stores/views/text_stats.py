"""Columns made from the text of an answer, for filters: computed once, when a sample is written."""

import re

import numpy as np

NGRAM = 4  # words
HASHES_PER_BAND = 6
BANDS = 5
BAND = 16  # hex digits of a band
SKETCH = BANDS * BAND
FENCE = "```"
SYMBOLS = frozenset("{}[]()<>=;:#$&|^~\\/*+_%@`")
PIECE = re.compile(r"\w+|[^\w\s]")
KEYWORDS = frozenset(
    PIECE.findall(
        """
        async await bool char class console const def delete double elif else enum except false
        finally float for from function if import include insert int lambda let new null print
        printf println private public raise return select static string struct true update var void
        where while yield
        """
    )
)
SIGN = re.compile(
    r"""[{}\\^~@`]  # symbols that prose hardly has
    |\w[(\[]|</?\w  # a call, an index, a tag
    |^\s*[\w.]+\s*[-+*/]?=  # an assignment
    |[=!<>+*/&|:-]{2,}  # an operator of two symbols
    |;\s*$""",
    re.VERBOSE,
)
# Scripts without spaces: a Chinese or Japanese character is a word, and so are up to four of Thai, Lao,
# Burmese or Khmer.
CHARACTER = (
    r"\u2e80-\u2fdf\u3005-\u3007\u3040-\u312f\u3400-\u9fff"
    r"\uf900-\ufaff\uff66-\uff9d\U00020000-\U0003ffff"
)
LETTER = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
MARK = r"\u3000-\u303f\uff00-\uff65"  # punctuation of these scripts
WORD = re.compile(f"[{CHARACTER}]|[{LETTER}]{{1,4}}|[^\\s{CHARACTER}{LETTER}{MARK}]+")
MARKUP = re.compile(
    r"^\s*(?:[#>*+-]+|\d+[.)])\s+|\*+|-{3,}|(?<!\w)_+|_+(?!\w)|https?://\S+"
)  # markdown


def text_stats(text: str) -> dict[str, int | float | str]:
    """`words`, `code_ratio`, `repetition` and `sketch` of an answer, ready for `Sample.meta`."""
    return {
        "words": len(words_of(text)),
        "code_ratio": code_ratio(text),
        "repetition": repetition(text),
        "sketch": sketch(text),
    }


def words_of(text: str) -> list[str]:
    """The words of a text by its spaces, and of scripts without spaces by their characters."""
    return WORD.findall(text)


def code_ratio(text: str) -> float:
    """The share of programming symbols and keywords, in lines that look like code; 1 with a code fence.

    Brackets and asterisks are prose and markup too, as "for" and "if" are: they count only in lines that
    show two signs of code, or one and begin with a keyword.
    """
    if FENCE in text:
        return 1.0
    pieces = code = 0
    for line in text.splitlines():
        line = MARKUP.sub(" ", line)
        parts = PIECE.findall(line.lower())
        signs = len(SIGN.findall(line))
        starts_with_keyword = bool(parts) and parts[0] in KEYWORDS
        if signs > 1 or (signs and starts_with_keyword):
            code += sum(part in SYMBOLS or part in KEYWORDS for part in parts)
        else:
            code += signs
        pieces += len(parts)
    return round(code / pieces, 4) if pieces else 0.0


def repetition(text: str) -> float:
    """The share of word 4-grams that occurred before in the same answer: near 1 for a loop."""
    words = words_of(text.lower())
    starts = range(len(words) - NGRAM + 1)
    grams = [tuple(words[start : start + NGRAM]) for start in starts]
    return round(1 - len(set(grams)) / len(grams), 4) if grams else 0.0


def sketch(text: str) -> str:
    """A MinHash of the word triples, in bands: near-duplicates share a band, others hardly do.

    80 hex digits. With likeness s of two responses' triples, a band is shared with 1 - (1 - s^6)^5:
    0.98 at 0.9, 0.08 at 0.5.
    """
    import xxhash

    words = PIECE.findall(text.lower())
    starts = range(max(1, len(words) - 2))
    triples = {" ".join(words[start : start + 3]) for start in starts}
    hashes = [xxhash.xxh3_64_intdigest(triple.encode()) for triple in sorted(triples)]
    hash_T = np.array(hashes, np.uint64)
    # Each odd factor permutes the 64-bit numbers, as products wrap around: a hash function of its own.
    rng = np.random.default_rng(0)
    random_F = rng.integers(1, 1 << 63, BANDS * HASHES_PER_BAND, dtype=np.uint64)
    factor_F = random_F * np.uint64(2) + np.uint64(1)
    lowest_F = (hash_T[None] * factor_F[:, None]).min(axis=1)
    bands = lowest_F.reshape(BANDS, HASHES_PER_BAND)
    return "".join(xxhash.xxh3_64_hexdigest(band) for band in bands)
