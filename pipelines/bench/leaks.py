"""The evaluated prompts that a drafter has seen in training, or whose images or texts it has seen.

The samples of its training are found among the workspace's prompts. Media are the same if their files are,
and images also if they look alike: a copy may be in another format, scaled or trimmed. Pages, forms and
screens all look alike, so that there a copy must have the same details as well. Texts are the same if their
first questions are, but for case, blanks and punctuation.

Shapes: P images, C channels of the pixels of a thumbnail, D of a larger one.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from vlmdistill.pipelines.bench.records import Leak
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt
from vlmdistill.pipelines.data.prompts.same_text import folded
from vlmdistill.pipelines.media.images import large_images, open_image, upright
from vlmdistill.pipelines.media.urls import copy_of, is_url
from vlmdistill.pipelines.workspace.trained import Trained
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import DataError

SIDE: Final = 16  # pixels of a thumbnail
ALIKE: Final = 0.2
"""How far two thumbnails may differ, as a share of how far the pixels of one are from their mean.

Of the demo's images, which all show shapes on noise, two different ones differ by 0.28 at least. The same one
saved as JPEG at a quality of 75 differs by 0.08 at most, and one of a quarter of the size by 0.1.
"""
TRIMS: Final = (0.02, 0.04)
"""Shares of its sides without which an evaluated image is compared as well.

Of 38 photographs and noises, the copies without 2% of each side or 3% of one are found then; of 80% and 58%
of them the whole image differs by more than `ALIKE`. Different ones are as far from each other as before.
"""
REDUCED_SIDE: Final = 256  # pixels of a copy from which these are cut
CROWD: Final = 3  # images that look like one, from which on details decide
NEAREST: Final = (
    64  # of them, of the training and of the evaluation, whose details are compared
)
DETAIL_SIDE: Final = 64  # pixels of a thumbnail with details
COPIED: Final = 0.45
"""How far details of a copy may differ, as a share of the median over images that look alike.

Of 80 forms with other content, the nearest two differ by 0.52 of it at least; JPEGs at a quality of 75 by
0.24 at most, images of half the size by 0.32, those without their first column by 0.13.
"""
RECODED: Final = 1.5
"""How far details of a copy may differ, in times what saving the image as a JPEG at a quality of 75 changes.

Scaled copies differ by up to 1.5 of it; other scenes, forms, pages of text and screens by 2.7 at least.
"""

_SIDES: Final = (
    (1, 1, 1, 1),
    (1, 0, 0, 0),
    (0, 1, 0, 0),
    (0, 0, 1, 0),
    (0, 0, 0, 1),
)
"""Of a trim: all four, or one alone."""

Pixels = npt.NDArray[np.uint8]


def leaks(
    workspace: Workspace, drafters: Sequence[Trained], chosen: Sequence[Prompt]
) -> dict[str, Leak | None]:
    """What each drafter has seen of the chosen prompts; None for one that does not name its samples."""
    sample_keys = {key for drafter in drafters for key in drafter.samples or ()}
    seen = _Seen()
    for prompt in _all_prompts(workspace) if sample_keys else ():
        if prompt.key in sample_keys:
            seen.add(prompt)
    alike_keys = seen.alike(chosen)
    leak_of: dict[str, Leak | None] = {}
    for drafter in drafters:
        leak_of[drafter.name] = None
        if drafter.samples is not None:
            leak_of[drafter.name] = _leak(drafter.samples, chosen, seen, alike_keys)
    return leak_of


def _leak(
    samples: frozenset[str],
    chosen: Sequence[Prompt],
    seen: "_Seen",
    alike_keys: dict[str, set[str]],
) -> Leak:
    """`alike_keys` are the samples that each chosen prompt has something in common with."""
    trained_on = []
    alike = []
    for prompt in chosen:
        if prompt.key in samples:
            trained_on.append(prompt.key)
        elif alike_keys[prompt.key] & samples:
            alike.append(prompt.key)
    return Leak(
        samples=len(samples),
        prompts=tuple(trained_on),
        alike=tuple(alike),
        unknown=len(samples - seen.keys) + len(samples & seen.unread),
    )


@dataclass
class _Seen:
    """The prompts that some drafter was trained on."""

    keys: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)
    """Those with an image that could not be compared."""
    keys_of: dict[str, set[str]] = field(default_factory=dict)  # by digest or text
    image_keys: dict[Path, set[str]] = field(default_factory=dict)

    def add(self, prompt: Prompt) -> None:
        """Keep only what is compared: there may be a million prompts."""
        self.keys.add(prompt.key)
        for trait in _traits(prompt):
            self.keys_of.setdefault(trait, set()).add(prompt.key)
        for file in _images(prompt):
            self.image_keys.setdefault(file, set()).add(prompt.key)

    def alike(self, chosen: Sequence[Prompt]) -> dict[str, set[str]]:
        """By the key of a chosen prompt, the keys of the seen prompts that have its images, videos or text.

        Texts are compared only of prompts without images and videos.
        """
        seen_with: dict[str, set[str]] = {}
        for prompt in chosen:
            shared = (self.keys_of.get(trait, set()) for trait in _traits(prompt))
            seen_with[prompt.key] = set().union(*shared)
        shown = [(prompt.key, file) for prompt in chosen for file in _images(prompt)]
        shown_thumbnails = _thumbnails(dict.fromkeys(file for _, file in shown))
        if not shown_thumbnails:
            return seen_with
        trained_thumbnails = _thumbnails(self.image_keys)
        for file in self.image_keys.keys() - trained_thumbnails.keys():
            self.unread |= self.image_keys[file]
        shown_images = _Images(shown_thumbnails)
        trained_images = _Images(trained_thumbnails)
        copies_of = {
            file: _copies(file, shown_images, trained_images)
            for file in shown_thumbnails
        }
        for key, file in shown:
            for copy in copies_of.get(file, ()):
                seen_with[key] |= self.image_keys[copy]
        return seen_with


class _Images:
    """Images with their thumbnails."""

    def __init__(self, thumbnails: Mapping[Path, Pixels]) -> None:
        self.thumbnails = thumbnails
        self._files = [*thumbnails]
        self._pixels_PC = np.array([*thumbnails.values()], np.uint8)

    def alike(self, thumbnail_C: Pixels) -> list[Path]:
        """The images whose thumbnails are like this one, the nearest first."""
        if not self._files:
            return []
        places = np.flatnonzero(same_image(thumbnail_C, self._pixels_PC))
        files = [self._files[place] for place in places]
        files.sort(key=lambda file: _distance(thumbnail_C, self.thumbnails[file]))
        return files


def _copies(file: Path, shown: _Images, trained: _Images) -> list[Path]:
    """The images of the training that are the same as a shown one."""
    thumbnail_C = shown.thumbnails[file]
    copies = trained.alike(thumbnail_C) or _untrimmed(file, trained)
    relatives = [other for other in shown.alike(thumbnail_C) if other != file]
    if not copies or len({*copies, *relatives}) < CROWD:
        return copies
    crowd = dict.fromkeys([*copies[:NEAREST], *relatives[:NEAREST]])
    details = _thumbnails([file, *crowd], DETAIL_SIDE)
    distance_of = {
        other: _distance(details[file], details[other])
        for other in crowd
        if other in details
    }
    farthest = COPIED * float(np.median([*distance_of.values()]))
    # All of a crowd may be copies, unless evaluated images are as near.
    of_saving = RECODED * _loss_of_saving(file)
    if all(distance_of.get(other, math.inf) > of_saving for other in relatives):
        farthest = max(farthest, of_saving)
    return [other for other in copies if distance_of.get(other, math.inf) <= farthest]


def _untrimmed(file: Path, trained: _Images) -> list[Path]:
    """The images of the training that are like a shown one without some of its sides."""
    alike = dict[Path, None]()
    with large_images(), open_image(file) as image:
        reduced = upright(image)
        reduced.thumbnail((REDUCED_SIDE, REDUCED_SIDE))
        for trim in TRIMS:
            for sides in _SIDES:
                thumbnail_C = _small(reduced, SIDE, trim, sides)
                alike |= dict.fromkeys(trained.alike(thumbnail_C))
    return [*alike]


def _loss_of_saving(file: Path) -> float:
    """How far the details of an image differ from those of the same one as a JPEG at a quality of 75."""
    with large_images(), open_image(file) as image:
        original = upright(image)
    saved = BytesIO()
    original.save(saved, "JPEG", quality=75)
    with Image.open(saved) as recoded:
        return _distance(_small(original, DETAIL_SIDE), _small(recoded, DETAIL_SIDE))


def _distance(pixel_D: Pixels, other_D: Pixels) -> float:
    """The mean difference of two thumbnails."""
    return float(np.abs(pixel_D.astype(np.int16) - other_D).mean())


def same_image(thumbnail_C: Pixels, others_PC: Pixels) -> npt.NDArray[np.bool_]:
    """Which of the others are thumbnails of the same image, in whatever format [P]."""
    pixel_C = thumbnail_C.astype(np.int16)
    spread = np.abs(pixel_C - pixel_C.mean()).mean()
    distance_P = np.abs(others_PC - pixel_C).mean(axis=1)
    return np.asarray(distance_P <= ALIKE * spread)


def _thumbnails(files: Iterable[Path], side: int = SIDE) -> dict[Path, Pixels]:
    """The thumbnails of the images that can be read."""
    listed = list(files)
    with large_images(), ThreadPoolExecutor(_cpus()) as pool:
        thumbnails = pool.map(partial(_thumbnail, side=side), listed)
        pairs = zip(listed, thumbnails, strict=True)
        return {file: thumbnail for file, thumbnail in pairs if thumbnail is not None}


def _cpus() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _thumbnail(file: Path, side: int) -> Pixels | None:
    """The pixels of a small copy, None if the image cannot be read."""
    with suppress(OSError, Image.DecompressionBombError), open_image(file) as image:
        # A JPEG is decoded at a fraction of its size.
        image.draft("RGB", (4 * side, 4 * side))
        return _small(upright(image), side)
    return None


def _small(
    image: Image.Image, side: int, trim: float = 0.0, sides: Sequence[int] = (0,) * 4
) -> Pixels:
    """The pixels of a small copy; unlike those of a box filter, they hardly depend on the image's size.

    Without a share of some sides: 1 for left, top, right and bottom.
    """
    width, height = image.size
    left, top, right, bottom = (trim * is_trimmed for is_trimmed in sides)
    box = (left * width, top * height, (1 - right) * width, (1 - bottom) * height)
    small = image.resize((side, side), Image.Resampling.LANCZOS, box)
    return np.asarray(small, np.uint8).reshape(-1)


def _images(prompt: Prompt) -> list[Path]:
    """The files of its images, which need not be on this machine."""
    paths = [part["path"] for part in prompt.media if part["type"] == "image"]
    return [copy_of(path) if is_url(path) else Path(path) for path in paths]


def _all_prompts(workspace: Workspace) -> Sequence[Prompt]:
    try:
        return prompt_table.load(workspace.prompts, workspace.model, "all")
    except DataError:
        return ()


def _traits(prompt: Prompt) -> set[str]:
    """The digests of its images and videos; without any, its first question: later turns follow from that.

    An import puts prompts that share one into the same split, too.
    """
    digests = {part["digest"] for part in prompt.media}
    return digests or {_text(prompt)}


def _text(prompt: Prompt) -> str:
    """The first question, in the form in which `folded` compares texts."""
    first = next(message for message in prompt.messages if message["role"] == "user")
    texts = [part["text"] for part in first["content"] if part["type"] == "text"]
    return folded(" ".join(texts))
