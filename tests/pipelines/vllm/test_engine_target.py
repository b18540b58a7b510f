"""What vLLM gives for logits that are not finite is refused; vLLM itself runs in `make test-engine`."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vlmdistill.pipelines.targets.encode import EncodedPrompt
from vlmdistill.pipelines.targets.loading import load_for_capture
from vlmdistill.pipelines.targets.target_model import TargetModel
from vlmdistill.pipelines.vllm.capture import engine_target
from vlmdistill.pipelines.vllm.capture.engine_target import EngineTarget
from vlmdistill.pipelines.vllm.capture.wire import Chosen, Submit
from vlmdistill.stores.errors import PromptError, TargetError


class Engine:
    """Greedy responses of the target itself; of the prompts in `broken`, token 0 with no log-probability."""

    version = "0.32"
    max_length = 1000

    def __init__(self, target: TargetModel, broken: set[str]) -> None:
        self.target, self.broken = target, broken
        self.submitted: list[Submit] = []

    def submit(self, sequence: Submit, visual: Any) -> None:
        self.submitted.append(sequence)

    def run(self) -> None:
        pass

    def chosen(self) -> dict[str, Chosen]:
        chosen = {one.key: self.choose(one) for one in self.submitted}
        self.submitted.clear()
        return chosen

    def choose(self, sequence: Submit) -> Chosen:
        count = sequence.draw.max_tokens
        if sequence.key in self.broken:
            return Chosen([0] * count, [math.nan] * count)
        ids, logprobs = list[int](), list[float]()
        for _ in range(count):
            tokens_1L = torch.tensor([[*sequence.ids, *ids]])
            with torch.inference_mode():
                logits_V = self.target.model(input_ids=tokens_1L).logits[0, -1]
            log_V = logits_V.float().log_softmax(-1)
            ids.append(int(log_V.argmax()))
            logprobs.append(float(log_V.max()))
        return Chosen(ids, logprobs)


@pytest.fixture
def target(checkpoint: Callable[..., Path]) -> TargetModel:
    return load_for_capture(str(checkpoint("qwen2_5_vl")), device="cpu")


def generate(
    target: TargetModel, broken: set[str], monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    engine = Engine(target, broken)
    monkeypatch.setattr(engine_target, "EngineProcess", lambda *_: engine)
    return EngineTarget(target, (), 512).generate(
        encoded(target), max_new_tokens=4, temperature=0.0
    )


def encoded(target: TargetModel) -> list[EncodedPrompt]:
    texts = ("Hi", "What is the colour of the large circle?", "Name three shapes.")
    return [
        target.encode([{"role": "user", "content": [{"type": "text", "text": text}]}])
        for text in texts
    ]


def test_a_prompt_with_logits_that_are_not_finite_is_refused(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is not the one whose log-probabilities are compared in any case."""
    assert len(generate(target, set(), monkeypatch)) == 3
    for broken in ("0", "1", "2"):
        with pytest.raises(TargetError, match="nan"):
            generate(target, {broken}, monkeypatch)


def test_states_that_are_not_finite_are_refused_as_by_the_target_itself(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.no_grad():
        target.model.get_input_embeddings().weight.fill_(math.nan)
    with pytest.raises(PromptError, match="not finite"):
        generate(target, {"0", "1", "2"}, monkeypatch)


def test_the_error_names_the_prompt_whose_states_are_not_finite(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller generates the other prompts without it."""
    ids = [set(prompt.ids_L.tolist()) for prompt in encoded(target)]
    token = min(ids[2] - ids[0] - ids[1])

    def spoil(module: Any, inputs: tuple[Any, ...], embed_BLD: Any) -> Any:
        return embed_BLD.masked_fill((inputs[0] == token)[..., None], math.nan)

    target.model.get_input_embeddings().register_forward_hook(spoil)
    with pytest.raises(PromptError, match="not finite") as raised:
        generate(target, {"2"}, monkeypatch)
    assert raised.value.at == 2
