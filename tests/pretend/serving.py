"""What feeds vLLM on the pretend GPU; `test_pretend.py` runs it in a process of its own."""

import numpy as np
import pytest
import torch

from tests.drafters import synthetic
from tests.drafters.synthetic import INFO
from tests.operators import Operators
from tests.pretend.device import GPU, waits
from tests.vllm_media import Image, Place
from vlmdistill.drafters.core.eagle_drafter import EagleDrafter
from vlmdistill.pipelines.vllm.plugin.feeder import Feed, Feeder, Reading
from vlmdistill.pipelines.vllm.plugin.layer_input import LayerInput

PROMPT, ROWS = 10, 5
SERVED = ("sparrow", "hivis", "vispec", "wren")


class Serving:
    """Requests of a drafter; every other one shows an image."""

    def __init__(self, name: str, requests: int) -> None:
        drafter = synthetic.build(name).eval()
        assert isinstance(drafter, EagleDrafter)
        self.block = LayerInput(drafter, PROMPT * requests, 64).to(GPU)
        self.feeder = Feeder(self.block.drafter, GPU)
        self.names = [str(number) for number in range(requests)]
        self.media = {
            name: [Image(name, Place(2, 4))] if number % 2 == 0 else []
            for number, name in enumerate(self.names)
        }
        self.embeds = {
            name: torch.randn(4, INFO.hidden_size, device=GPU) for name in self.names
        }

    def step(self, first: int, rows: int) -> tuple[Feed | None, int]:
        """A step of all requests, and the first pass of the drafter; the feed and how many waits it has."""
        count = rows * len(self.names)
        position_N = torch.arange(count, device=GPU)
        hidden_ND = torch.randn(count, INFO.hidden_size, device=GPU)
        read = Reading(
            names=self.names,
            media=self.media,
            prompt_B=np.full(len(self.names), PROMPT),
            first_B=np.full(len(self.names), first),
            starts=[rows * number for number in range(len(self.names) + 1)],
            alive=self.media,
        )
        with waits() as waited:
            feed = self.feeder.feed(
                read, position_N, hidden_ND, self.block, self.embeds
            )
            if feed is not None:
                self.block.shift(feed.shift_K)
                position_N, hidden_ND = feed.index_K, feed.hidden_KD
            self.block.entries(position_N, hidden_ND, hidden_ND)
        return feed, len(waited)


@torch.no_grad()
@pytest.mark.parametrize("name", SERVED)
def test_no_step_waits_for_the_gpu(name: str) -> None:
    serving = Serving(name, 4)
    for first, rows in ((0, 4), (4, 6), (PROMPT, ROWS), (PROMPT, ROWS)):
        feed, waited = serving.step(first, rows)
        assert feed is not None
        assert not waited


@torch.no_grad()
@pytest.mark.parametrize("name", SERVED)
def test_operators_of_a_decode_step_do_not_grow_with_its_requests(name: str) -> None:
    counts = set()
    for requests in (2, 32):
        serving = Serving(name, requests)
        serving.step(0, PROMPT)
        with Operators() as operators:  # type: ignore[no-untyped-call]
            feed, _ = serving.step(PROMPT, ROWS)
        assert feed is not None
        assert feed.kept is None
        counts.add(operators.count)
    assert len(counts) == 1
