"""A target too large for one device: its layers lie on several, and each is run where it lies.

What is not a layer of the text model (vision tower, projector, embeddings, norm, LM head) lies on the first
device, so that states enter and leave there.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

import torch
import transformers

from vlmdistill.pipelines.targets.base import UNREADABLE, VisionLanguageTarget
from vlmdistill.pipelines.targets.prompt import Prompt, Response
from vlmdistill.stores.errors import DataError, TargetError
from vlmdistill.stores.schema import Feature

LAYERS = "model.language_model.layers"
ROOM = 2 << 30  # bytes of each device that weights leave free: for states, keys and values
DeviceMap = Mapping[str, int | str]


class SpreadTarget(VisionLanguageTarget):
    """A target on several devices: it answers and gives up its hidden states, but does not decode."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> list[Response]:
        """As on one device, by the stock `generate`, which knows where each layer lies."""
        sampled = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
        config = transformers.GenerationConfig(
            max_new_tokens=max_new_tokens,
            eos_token_id=list(self.info.eos_ids),
            pad_token_id=self._pad_id,
            **(sampled if temperature > 0 else {"do_sample": False}),
        )

        def run(part: Sequence[Prompt]) -> list[Response]:
            inputs = self._stock_inputs(part)
            if inputs is None and len(part) == 1:
                raise DataError(UNREADABLE)
            if inputs is None:
                middle = len(part) // 2  # of what they show, the stock model takes one shape at a time
                return run(part[:middle]) + run(part[middle:])
            gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
            with torch.inference_mode(), torch.random.fork_rng(devices=gpus):
                torch.manual_seed(seed)
                out_BL = self.model.generate(**inputs, generation_config=config)
            return [self._answer(ids) for ids in out_BL[:, inputs["input_ids"].shape[1] :].tolist()]

        return self._answering(list(prompts), lambda prompt: prompt.length + max_new_tokens, run)

    def _answer(self, ids: list[int]) -> Response:
        stops = [place for place, token in enumerate(ids) if token in self.info.eos_ids]
        return self._response(ids[: stops[0] + 1] if stops else ids)

    def prefill(self, prompt: Prompt, features: Collection[Feature] = ()) -> NoReturn:
        """Refused: the decoder's fused layers read and write one cache on one device."""
        raise TargetError(
            f"{self.name} is spread over several devices: it answers and is captured so, but decoding needs "
            "it on one. Use a larger GPU, or a smaller target"
        )


def device_map(model: Any, number_bytes: int, free: Sequence[int]) -> dict[str, int | str]:
    """Which device each part of `model` lies on: layers in order, each device filled alike.

    `number_bytes` a parameter takes, `free` the bytes of each device. TargetError when they do not suffice.
    """
    layers = dict(model.get_submodule(LAYERS).named_children())
    sizes = [number_bytes * sum(w.numel() for w in layer.parameters()) for layer in layers.values()]
    rest = number_bytes * sum(w.numel() for w in model.parameters()) - sum(sizes)
    budgets = [max(0, one - ROOM) for one in free]
    whole = rest + sum(sizes)
    # Deepstack adds vision features to the states between the first layers.
    first = len(getattr(model.config.vision_config, "deepstack_visual_indexes", ()))
    used, device = [rest] + [0] * (len(free) - 1), 0
    places: dict[str, int | str] = dict.fromkeys(_outside(model), 0)
    for number, size in enumerate(sizes):
        share = whole * budgets[device] / max(1, sum(budgets))
        if number >= first and used[device] + size / 2 > share and device + 1 < len(free):
            device += 1
        used[device] += size
        places[f"{LAYERS}.{number}"] = device
    if any(mine > theirs for mine, theirs in zip(used, budgets, strict=True)):
        have = ", ".join(f"{one / 2**30:.1f}" for one in free)
        raise TargetError(
            f"the weights take {whole / 2**30:.1f} GiB and the GPUs have {have} GiB free, of which each "
            f"keeps {ROOM >> 30}: give more GPUs (to each worker: fewer --workers), or larger ones"
        )
    return places


def _outside(model: Any) -> list[str]:
    """The parts of a model beside the text layers, as coarse as can be named."""
    parts: list[str] = []
    names = [name for name, _ in model.named_parameters()] + [name for name, _ in model.named_buffers()]
    for name in names:
        if name.startswith(LAYERS + "."):
            continue
        words, common = name.split("."), LAYERS.split(".")
        depth = next(i for i, word in enumerate(words) if i >= len(common) or word != common[i])
        parts.append(".".join(words[: depth + 1]))
    return list(dict.fromkeys(parts))
