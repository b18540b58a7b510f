"""The self-test of a target: whether what is known of its family, described or found, is true of the model.

Everything is compared with the stock model of the same weights, run the plain way: a fresh processor, one
prompt, no cache, its own positions and masks. A family that nobody described works if it passes, and is
refused if it does not.

Shapes: L positions, N tokens, D hidden width, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vlmdistill.pipelines.targets.checkpoints.folder import first_line
from vlmdistill.pipelines.targets.encode import EncodedPrompt
from vlmdistill.pipelines.targets.stock.decoder import watched
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget
from vlmdistill.stores.errors import TargetError
from vlmdistill.stores.schema import Feature, Sample

ALLOWED = {
    torch.float32: 1e-3
}  # difference of states or logits, relative to the largest
ALLOWED_HALF = 5e-2
RESPONSE = 12  # tokens
LONGEST = 9000  # tokens of a prompt that exceeds a window; a longer window is not tried
SIZES = ((224, 160), (120, 300))  # of the images


@dataclass(frozen=True)
class Comparison:
    """One thing that was compared; `failed` says what differs, empty if nothing does."""

    name: str
    what: str
    failed: str = ""


def prove(target: VisionLanguageTarget) -> None:
    """TargetError with the first line of the self-test that fails."""
    for line in lines(target):
        if line.failed:
            raise TargetError(
                f"{target.name}: a {target.family.name} is not supported as it is: {line.name}: {line.failed}"
            )


def lines(target: VisionLanguageTarget) -> Iterator[Comparison]:
    """The self-test, line by line; it ends with the first that fails, since later ones rest on it."""
    trial = _Trial(target)
    for name, what, run in (
        (
            "template",
            "the checkpoint's own chat template and processor give the same tokens",
            trial.template,
        ),
        ("ids", "as many placeholders as the vision tower gives tokens", trial.ids),
        (
            "spans",
            "images enter the text model at the spans, and each at its own",
            trial.spans,
        ),
        (
            "states",
            "the captured input of a layer is what the layers from there on turn into the last",
            trial.states,
        ),
        (
            "logits",
            "last states, through the LM head, are the model's logits",
            trial.logits,
        ),
        ("batch", "a batch of prompts gives the states of each alone", trial.batch),
        ("response", "a greedy response is that of the stock generate", trial.response),
        (
            "drafts",
            "tree, chain and one token at a time give the states of the plain forward pass",
            trial.drafts,
        ),
        (
            "window",
            "the same after a prompt that is longer than the window of a layer",
            trial.window,
        ),
    ):
        try:
            with torch.inference_mode():
                failed = run()
        except Exception as error:  # noqa: BLE001 - a model's code raises anything
            failed = f"{type(error).__name__}: {first_line(error)}"
        yield Comparison(name, what, failed)
        if failed:
            return


class _Stock:
    """The stock model, run the plain way."""

    def __init__(self, target: VisionLanguageTarget):
        self.model, self._device, self._dtype = (
            target.model,
            target.device,
            target.dtype,
        )
        self.processor = target.family.load_processor(target.folder)

    def inputs(self, messages: Any) -> dict[str, Tensor]:
        """What the processor makes of a conversation."""
        batch = self.processor.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        tensors = {
            name: value for name, value in batch.items() if torch.is_tensor(value)
        }
        return {
            name: value.to(
                self._device, self._dtype if value.is_floating_point() else None
            )
            for name, value in tensors.items()
        }

    def run(
        self, inputs: dict[str, Tensor], more: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Input of layer 0 and last states [L, D] and logits [L, V] of a prompt with more tokens after it."""
        length, extra = inputs["input_ids"].shape[1], {}
        for name, value in inputs.items():
            if value.shape == (1, length):  # kinds and masks of positions
                fill = torch.full((1, len(more)), int(name == "attention_mask"))
                new = (
                    torch.tensor([list(more)], dtype=value.dtype)
                    if name == "input_ids"
                    else fill
                )
                extra[name] = torch.cat([value, new.to(value)], 1)
        if hasattr(self.model.model, "rope_deltas"):  # of the prompt before
            self.model.model.rope_deltas = None
        last: list[Tensor] = []
        handle = self.model.get_decoder().register_forward_hook(
            lambda *io: last.append(io[-1].last_hidden_state)
        )
        try:
            with watched(self.model.get_decoder().layers, ("embed",)) as states:
                logits = self.model(**{**inputs, **extra}, use_cache=False).logits
        finally:
            handle.remove()
        return states["embed"][0], last[0][0], logits[0].float()

    @contextmanager
    def replaced(self, layer: int, state_LD: Tensor) -> Iterator[None]:
        """Give a layer another input."""

        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given_1LD = state_LD[None].to(self._device, self._dtype)
            return (
                ((given_1LD, *args[1:]), kwargs)
                if args
                else (args, {**kwargs, "hidden_states": given_1LD})
            )

        handle = (
            self.model.get_decoder()
            .layers[layer]
            .register_forward_pre_hook(hook, with_kwargs=True)
        )
        try:
            yield
        finally:
            handle.remove()


class _Trial:
    """The comparisons, in order; each returns what differs."""

    def __init__(self, target: VisionLanguageTarget):
        self.target = target
        self.messages = _messages("What is in these two pictures?", 0, 1)

    @property
    def prompt(self) -> EncodedPrompt:
        return self.target.encode(self.messages)

    def template(self) -> str:
        self.stock = _Stock(self.target)
        for messages in (_messages("Hello!"), _messages("One.", 1), self.messages):
            self.inputs = self.stock.inputs(messages)
            theirs, mine = (
                self.inputs["input_ids"][0].tolist(),
                self.target.encode(messages).ids_L.tolist(),
            )
            if theirs != mine:
                counts = f"{len(theirs)} tokens, and here {len(mine)}"
                at = next(
                    (
                        i
                        for i, (a, b) in enumerate(zip(theirs, mine, strict=False))
                        if a != b
                    ),
                    -1,
                )
                return f"the checkpoint's own gives {counts}; the first that differs is number {at}"
        return ""

    def ids(self) -> str:
        prompt = self.prompt
        if not prompt.inputs:
            return "the processor's output has no pixels"
        visual = self.target.family.encode_images(
            self.target.model, self.target._on_device(prompt.inputs)
        )
        placeholders = int(prompt.visual_L.sum())
        if placeholders != len(visual.embed_UD):
            return (
                f"{placeholders} placeholders, and {len(visual.embed_UD)} visual tokens"
            )
        return ""

    def spans(self) -> str:
        prompt, inside_L = (
            self.prompt,
            torch.zeros(self.prompt.length, dtype=torch.bool),
        )
        for span in prompt.spans:
            inside_L[span.start : span.start + span.length] = True
        embed_LD = self.stock.run(self.inputs)[0]
        table_LD = self.target.head.embed_VD[prompt.ids_L.to(embed_LD.device)]
        changed_L = (
            (embed_LD - table_LD).abs().amax(-1) > 1e-5 * table_LD.abs().max()
        ).cpu()
        if (wrong := torch.nonzero(changed_L != inside_L).flatten()).numel():
            kind = (
                "a visual token outside of all spans"
                if changed_L[wrong[0]]
                else "not a visual token"
            )
            return (
                f"{len(wrong)} positions are wrong: position {int(wrong[0])} is {kind}"
            )
        other = self.stock.inputs(_messages("What is in these two pictures?", 0, 2))
        moved_L = ((self.stock.run(other)[0] - embed_LD).abs().amax(-1) > 0).cpu()
        first = (
            int(torch.nonzero(moved_L).flatten()[0]) if moved_L.any() else prompt.length
        )
        if first not in {span.start for span in prompt.spans[1:]}:
            return f"the second image's tokens begin at position {first}, where no span does"
        return ""

    def states(self) -> str:
        last = self.target.info.num_layers - 1
        layers = sorted({0, 1, last // 2, last})
        sources = [f"layer{layer}" for layer in layers]
        features = [
            Feature(source, where) for source in sources for where in ("text", "visual")
        ]
        (sample,) = self.target.capture([self.prompt], [[]], features, "float32")
        _, theirs_LD, _ = self.stock.run(self.inputs)
        for layer, source in zip(layers, sources, strict=True):
            state_LD = self._whole(sample, source)
            with self.stock.replaced(layer, state_LD):
                mine_LD = self.stock.run(self.inputs)[1]
            with self.stock.replaced(layer, state_LD.flip(0)):
                other_LD = self.stock.run(self.inputs)[1]
            if torch.equal(other_LD, mine_LD):
                return f"the input of layer {layer} has no effect"
            if differs := self._differ(mine_LD, theirs_LD):
                return f"{source} is not the input of layer {layer}: {differs}"
        return ""

    def _whole(self, sample: Sample, source: str) -> Tensor:
        """A captured state at all positions."""
        text_TD, visual_UD = (
            torch.from_numpy(sample.features[Feature(source, where)])
            for where in ("text", "visual")
        )
        state_LD = text_TD.new_zeros(len(text_TD) + len(visual_UD), text_TD.shape[1])
        visual_L = self.prompt.visual_L
        state_LD[~visual_L], state_LD[visual_L] = text_TD, visual_UD
        return state_LD

    def logits(self) -> str:
        prompt, (_, _, theirs_LV) = self.prompt, self.stock.run(self.inputs)
        (sample,) = self.target.capture([prompt], [[]], ["hidden.text"], "float32")
        hidden_TD = torch.from_numpy(sample.features[Feature("hidden", "text")]).to(
            self.target.device, self.target.dtype
        )
        text_L = ~prompt.visual_L.to(theirs_LV.device)
        return self._differ(self.target.logits(hidden_TD), theirs_LV[text_L])

    def batch(self) -> str:
        prompts = [
            self.prompt,
            *(
                self.target.encode(_messages("A longer question, this time.", *some))
                for some in ((), (1,))
            ),
        ]
        tokens = [[7, 8], [9], []]
        together = self.target.capture(prompts, tokens, ["hidden.text"], "float32")
        for number, (sample, prompt, more) in enumerate(
            zip(together, prompts, tokens, strict=True)
        ):
            (alone,) = self.target.capture([prompt], [more], ["hidden.text"], "float32")
            mine_TD, theirs_TD = (
                torch.from_numpy(one.features[Feature("hidden", "text")])
                for one in (sample, alone)
            )
            if differs := self._differ(mine_TD, theirs_TD):
                return f"prompt {number + 1} of 3: {differs}"
        return ""

    def response(self) -> str:
        asked = (self.messages, _messages("A longer question, this time."))
        prompts = [self.target.encode(messages) for messages in asked]
        together = self.target.generate(prompts, max_new_tokens=RESPONSE, temperature=0)
        config = self.target._generation_config(
            max_new_tokens=RESPONSE, do_sample=False
        )
        for number, (messages, mine) in enumerate(zip(asked, together, strict=True), 1):
            inputs = self.stock.inputs(messages)
            out_L = self.stock.model.generate(**inputs, generation_config=config)[0]
            theirs = out_L[inputs["input_ids"].shape[1] :].tolist()
            if differs := self._tokens(inputs, list(mine.ids), theirs):
                return f"prompt {number} of 2: {differs}"
        return ""

    def _tokens(
        self, inputs: dict[str, Tensor], mine: list[int], theirs: list[int]
    ) -> str:
        """What differs; by rounding, either of two tokens that are as likely may be chosen."""
        at = next(
            (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b),
            None,
        )
        if at is None:
            return ""
        logits_V = self.stock.run(inputs, theirs[:at])[2][-1]
        if float(logits_V[theirs[at]] - logits_V[mine[at]]) <= self._allowed * float(
            logits_V.abs().max()
        ):
            return ""
        return f"token {at + 1} is {mine[at]}, and the stock model's {theirs[at]}"

    def drafts(self) -> str:
        return self._drafts(self.prompt, self.inputs)

    def window(self) -> str:
        config = self.target.model.get_decoder().config
        windows = [
            getattr(config, name, None)
            for name in ("sliding_window", "attention_chunk_size")
        ]
        window = min((int(one) for one in windows if one), default=LONGEST)
        if window >= min(LONGEST, self.target.info.max_position - 64):
            return ""
        messages = _messages("word " * (window + 8), 1)
        return self._drafts(self.target.encode(messages), self.stock.inputs(messages))

    def _drafts(self, prompt: EncodedPrompt, inputs: dict[str, Tensor]) -> str:
        """A tree of two branches of three, each as a chain and token by token; then what follows a branch."""
        target, device = self.target, self.target.device
        rows = [int(i) for i in torch.linspace(3, target.info.vocab_size - 1, 8)]
        rows = [
            i for i in rows if i not in (*target.info.visual_ids, *target.info.eos_ids)
        ][:6]
        left, right, after = rows[:3], rows[1:3] + rows[:1], rows[-1]
        tree = [
            left[0],
            right[0],
            left[1],
            right[1],
            left[2],
            right[2],
        ]  # level by level
        path = {"left": [0, 2, 4], "right": [1, 3, 5]}
        visible_NN = torch.eye(6, dtype=torch.bool, device=device)
        for mine in path.values():
            for depth, row in enumerate(mine):
                visible_NN[row, mine[: depth + 1]] = True
        depth_N = torch.tensor([1, 1, 2, 2, 3, 3], device=device)

        def extend(
            ids: list[int], depth_N: Tensor, visible_NN: Tensor | None = None
        ) -> Tensor:
            return target.extend(torch.tensor(ids, device=device), depth_N, visible_NN)[
                "hidden"
            ]

        expected = {
            name: self.stock.run(inputs, [tree[i] for i in rows])[1][prompt.length :]
            for name, rows in path.items()
        }
        target.prefill(prompt)
        hidden_ND = extend(tree, depth_N, visible_NN)
        for name, mine in path.items():
            if differs := self._differ(hidden_ND[mine], expected[name]):
                return f"the {name} branch of a tree: {differs}"
        one_to_three = torch.arange(1, 4, device=device)
        causal_33 = torch.ones(3, 3, dtype=torch.bool, device=device).tril()
        if differs := self._differ(
            extend(right, one_to_three, causal_33), expected["right"]
        ):
            return f"a chain: {differs}"
        target.extend(torch.tensor(tree, device=device), depth_N, visible_NN)
        target.commit(path["right"])
        theirs_LD = self.stock.run(inputs, [*right, after, left[0]])[1][
            prompt.length + 3 :
        ]
        if differs := self._differ(
            extend([after, left[0]], one_to_three[:2]), theirs_LD
        ):
            return f"after a branch that was accepted: {differs}"
        target.commit([0])
        if differs := self._differ(extend([left[0]], one_to_three[:1]), theirs_LD[1:]):
            return f"after a chain of which one token was accepted: {differs}"
        target.prefill(prompt)
        for number, token in enumerate(right):
            if differs := self._differ(
                extend([token], one_to_three[:1]),
                expected["right"][number : number + 1],
            ):
                return f"token {number + 1} of a response: {differs}"
            target.commit([0])
        return ""

    @property
    def _allowed(self) -> float:
        return ALLOWED.get(self.target.dtype, ALLOWED_HALF)

    def _differ(self, mine: Tensor, theirs: Tensor) -> str:
        """The largest difference, if it is not by rounding."""
        mine, theirs = mine.float().cpu(), theirs.float().cpu()
        if mine.shape != theirs.shape:
            return f"{tuple(mine.shape)} is not {tuple(theirs.shape)}"
        worst, scale = float((mine - theirs).abs().max()), float(theirs.abs().max())
        return (
            ""
            if worst <= self._allowed * scale
            else f"they differ by {worst:.2g} of {scale:.2g}"
        )


def _messages(text: str, *images: int) -> list[dict[str, Any]]:
    """One user turn with generated pictures; 2 is another picture of the size of 1."""
    shown = [{"type": "image", "image": _picture(number)} for number in images]
    return [{"role": "user", "content": [*shown, {"type": "text", "text": text}]}]


def _picture(number: int) -> Image.Image:
    width, height = SIZES[min(number, 1)]
    generator = torch.Generator().manual_seed(number)
    pixels = torch.randint(
        0, 256, (height, width, 3), generator=generator, dtype=torch.uint8
    )
    return Image.fromarray(pixels.numpy())
