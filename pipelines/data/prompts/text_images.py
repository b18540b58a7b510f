"""Find images that a text shows by their files: in Markdown, in HTML, or in the tags of Qwen-VL."""

import re
from collections.abc import Iterator

from vlmdistill.pipelines.data.prompts.hidden_media import is_data_url, media_kind

# Possessive quantifiers (`++`), so that long texts are read once.
QWEN_IMAGE = re.compile(r"<img>[^<>\n]{1,1000}</img>")
HTML_IMAGE = re.compile(
    r"<img\s[^<>]{0,1000}?\bsrc\s*=\s*[\"']?(?P<file>[^\"'<>\s]++)[^<>]{0,1000}>(?:\s*</img>)?",
    re.IGNORECASE,
)
MARKDOWN_IMAGE = re.compile(
    r"!\[(?P<text>[^\[\]\n]{0,1000})\]"
    r"(?:\([ \t]*(?:<(?P<quoted>[^<>\n]{1,1000})>|(?P<file>(?:[^()\s]++|\([^()\s]*+\))++))"
    r"(?:[ \t][^()\n]{0,1000})?\)"
    r"|\[(?P<label>[^\]\n]{0,1000})\]|(?![(\[]))"
)
DEFINITION = re.compile(
    r"^[ ]{0,3}\[(?P<label>[^\]\n]{1,1000})\]:[ \t]*<?(?P<file>[^\s<>]++)>?[^\n]*$",
    re.MULTILINE,
)


def image_named_in(text: str) -> str:
    """The words of a text that show an image by its file; empty if there are none.

    In Markdown and HTML only where the text begins or ends, since others are quoted; and wherever the image
    itself is.
    """
    if named := QWEN_IMAGE.search(text):
        return named[0]
    files = {match["label"].lower(): match["file"] for match in _definitions(text)}
    body = DEFINITION.sub("", text) if files else text
    first = len(body) - len(body.lstrip())
    end = len(body.rstrip())
    for image, file in _images(body, files):
        is_at_an_end = image.start() == first or image.end() == end
        if (is_at_an_end or is_data_url(file)) and media_kind(file):
            return image[0]
    return ""


def _definitions(text: str) -> Iterator[re.Match[str]]:
    """The lines of a text that say which file a label in Markdown means."""
    if "![" in text:
        yield from DEFINITION.finditer(text)


def _images(text: str, files: dict[str, str]) -> Iterator[tuple[re.Match[str], str]]:
    """The images of a text, and their files. `files` are those of labels."""
    for image in MARKDOWN_IMAGE.finditer(text):
        label = image["label"] or image["text"]
        file = image["file"] or image["quoted"] or files.get(label.lower(), "")
        yield image, file
    for image in HTML_IMAGE.finditer(text):
        yield image, image["file"]
